"""docs/tutorial.md against the running engine: its requests, its agent, its looks at the gateway."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

import agentguard
from tests.conftest import RunningStack

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def bodies() -> list[dict[str, Any]]:
    """What the page's curl commands send."""
    return [json.loads(text) for text in re.findall(r"--json '(.*?)'$", PAGE, re.MULTILINE | re.DOTALL)]


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_requests_get_a_trace_and_an_answer(running: RunningStack) -> None:
    free, limited = bodies()
    headers = {"X-Session-Id": "tutorial"}
    async with httpx2.AsyncClient(base_url=running.stack.url, timeout=120, headers=headers) as client:
        first = await client.post("/v1/chat/completions", json=free)
        message = first.json()["choices"][0]["message"]
        assert message["reasoning"]
        assert message["content"]
        assert 0 < float(first.headers["x-agentguard-context-fill"]) < 1
        second = await client.post("/v1/chat/completions", json=limited)
        assert second.json()["choices"][0]["message"]["content"]
        assert second.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] <= limited["thinking_token_budget"]
        assert second.headers["x-agentguard-closed"] == "budget"


async def test_the_readmes_program_runs(running: RunningStack, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    code = compile(text.replace("http://127.0.0.1:8484", running.stack.url), "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {"agentguard": agentguard, "messages": [{"role": "user", "content": "a=47;b=a+8;c=a-3;?c"}]}
    await eval(code, names)
    assert "StepSummary" in capsys.readouterr().out


async def test_the_agent_and_the_looks_at_the_gateway_work(running: RunningStack) -> None:
    assert "examples/agent_session.py" in PAGE
    code, out, err = await run("examples/agent_session.py", running.stack.url)
    assert code == 0, err
    assert len(re.findall(r"  ->  \S.*\(\d+ of \d+ tokens thought\)", out)) == 2
    code, out, err = await run("-m", "agentguard", "tui", "--gateway", running.stack.url, "--once", "--json")
    assert code in (0, 1), err
    assert {"tutorial", "example-1"} <= {session["id"] for session in json.loads(out)["sessions"]}
    code, out, err = await run("-m", "agentguard", "status", "--url", running.stack.url)
    assert code == 0, err
