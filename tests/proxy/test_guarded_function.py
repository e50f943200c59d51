"""The real `litellm.acompletion`, guarded by `agentguard.wrap`, in LiteLLM's own environment."""

from __future__ import annotations

import asyncio
import json
import os
import sysconfig
from pathlib import Path

import pytest

from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, thinking, upstream

pytestmark = [pytest.mark.proxy, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "guarded_litellm.py"


async def test_a_guarded_acompletion(litellm: Path) -> None:
    answer = [chunk([A, END], reasoning="a"), chunk([B], content="bb"), chunk([STOP], finish="stop"), USAGE]

    script = Script(chat=[chunk([], role="assistant"), *thinking(900, ids=False)], again=answer, tokenizes=False)
    async with upstream(script) as url:

        async def refuse_later() -> None:
            while len(script.seen) < 3:
                await asyncio.sleep(0.01)
            script.status = 429

        refusing = asyncio.create_task(refuse_later())
        process = await asyncio.create_subprocess_exec(
            str(litellm.parent / "python"), str(PROGRAM), url, sysconfig.get_path("purelib"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
        )  # fmt: skip
        out, said = await process.communicate()
        refusing.cancel()
    assert process.returncode == 0, said.decode()[-3000:]
    told = json.loads(out.decode().splitlines()[-1])
    assert told["classes"] == ["ModelResponse", "ModelResponseStream"]
    assert (told["content"], told["finish"], told["streamed"], told["refused"]) == ("bb", "stop", "bb", "RateLimitError")
    assert told["thought"] >= 50  # the runaway trace was closed by the guard, and the answer is of a second request
    first, again, second = (body for _, body, _ in script.seen[:3])
    assert (first["top_k"], first["model"], first["max_tokens"]) == (3, "scripted", 100)
    assert first["vllm_xargs"]["ag_rule"] == "strict"
    assert again["messages"][-1]["role"] == "assistant"
    assert "max_tokens" not in second
    assert script.seen[2][2]["x-session-id"] == "two"
