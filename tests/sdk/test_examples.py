"""The example programs as a user runs them: against a real engine's gateway, one of them with an engine of its own."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentguard.engines.openai_http import OpenAIEngine
from agentguard.events import VerificationStep
from agentguard.gateway.server import bind, gateway
from agentguard.middleware import Guard
from agentguard.policy import Economics
from agentguard.telemetry.hub import Hub
from tests.conftest import RunningStack
from tests.scripted import STOP, USAGE, B, Script, chunk, upstream

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "sdk"
session_loop = pytest.mark.asyncio(loop_scope="session")


async def run(name: str, *arguments: str, warnings: str = "error") -> str:
    """An example's output; it has to end well."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", warnings, str(EXAMPLES / name), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
    )  # fmt: skip
    out, said = await process.communicate()
    assert process.returncode == 0, said.decode()[-3000:]
    return out.decode()


@pytest.mark.engine
@session_loop
async def test_the_agent_loop(running: RunningStack) -> None:
    out = await run("agent_loop.py", running.stack.url)
    assert re.search(r"^a=47;b=a\+8;c=a-3;\?c -> '\d*' is (right|wrong) \(\d+ of \d+ tokens thought\)$", out, re.MULTILINE), out
    steps = len(re.findall(" is (right|wrong)", out))
    assert 3 <= steps <= 9
    assert f"{steps} steps, " in out


@pytest.mark.engine
@session_loop
async def test_live_budget(running: RunningStack) -> None:
    for _ in range(3):  # on a machine that is busy elsewhere the trace may be over before the close arrives
        out = await run("live_budget.py", running.stack.url)
        if "this is enough" in out:
            break
    assert re.search(r"step [1-3] under strict: 600 tokens, ", out)
    thought = [int(n) for n in re.findall(r"thought +(\d+)", out)]
    assert thought == sorted(thought)
    assert re.search(r"closed at \d+ tokens by the (engine|tokens): this is enough", out)
    assert re.search(r"the session has used \d+ tokens in [1-3] step\(s\)", out)


@pytest.mark.engine
@session_loop
async def test_middleware_of_ones_own(running: RunningStack) -> None:
    out = await run("own_middleware.py", running.stack.url)
    assert "a=0" in out  # the model's trace begins with the question, as it saw it
    assert "sk-" not in out
    assert re.search(r"waited 0\.[56] s", out), out  # 0.2 and 0.4 s for the second and the third step


@pytest_asyncio.fixture(loop_scope="session")
async def two_arms(running: RunningStack) -> AsyncIterator[str]:
    """A gateway of its own in front of the engine, with a relaxed arm for half of the sessions."""
    economics = Economics(arms={"cactus:delta=1,p_min=0.1,top_k=10": 1.0}, control=0.5, min_sessions=4, guard=False)
    policy = running.stack.guard.policy.model_copy(update={"economics": economics})
    hub = Hub()
    with running.stack.hub.sink(lambda e: hub.publish(e) if isinstance(e, VerificationStep) else None):
        engine = OpenAIEngine(running.stack.engine.url, api_key=running.stack.engine.api_key)
        guard = await Guard.open(engine, policy, hub)
        with hub.sink(guard.observe):
            async with gateway(guard, bind("127.0.0.1", 0)) as url:
                yield url
        await engine.aclose()


@pytest.mark.engine
@session_loop
async def test_lambda_watch(two_arms: str) -> None:
    out = await run("lambda_watch.py", two_arms, "60", "--traffic", "40")
    last = out.strip().splitlines()[-1]
    assert re.fullmatch(r"cactus:delta=1,p_min=0\.1,top_k=10  λ \d\.\d\d \[.*\]  gain \d\.\d\d  \w+  \(\d+ sessions, on\)", last), (
        out
    )


@pytest.mark.engine
@pytest.mark.timeout(400)
async def test_an_engine_in_the_programs_own_process() -> None:
    """The example, and cancellations at every event with its engine (in_process_program.py): one start for both."""
    out = await run(
        str(ROOT / "tests" / "sdk" / "in_process_program.py"), warnings="default"
    )  # torch and vLLM warn about themselves
    assert "target with a window of 4096 tokens" in out
    counted = re.findall(r"^(\S+): '\d*', \d+ tokens in (\d+) rounds, (\d+) of (\d+) draft tokens accepted$", out, re.MULTILINE)
    assert [rule.split(":")[0] for rule, *_ in counted] in (["strict", "cactus"], ["strict", "strict"])
    assert all(0 < int(accepted) <= int(drafted) for _, _, accepted, drafted in counted)
    assert "closed at its budget of 6: 6 think tokens, answer '" in out
    assert "nothing is left behind\n" in out


async def test_the_agent_loop_with_calls() -> None:
    """The reference pair calls no tools, so the model is scripted; the program and its sockets are real."""
    call = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "solve", "arguments": '{"chain": "a=47;b=a+8;?b"}'}}]
    wrong = [{"index": 0, "id": "c2", "type": "function", "function": {"name": "solve", "arguments": "{"}}]
    turns = iter([call, wrong])

    def model(body: dict[str, object]) -> list[object]:
        tool = next(turns, None)
        if tool is not None:
            return [chunk([B], tool_calls=tool), chunk([STOP], finish="tool_calls"), USAGE]
        return [chunk([B], content="55"), chunk([STOP], content="", finish="stop"), USAGE]

    script = Script(chat=model, prompt=[5, 6])
    async with upstream(script) as url:
        out = await run("agent_loop.py", url, "--calls")
    assert "-> 55\n" in out
    assert "are not JSON" in out
    assert out.splitlines()[-2:] == ["55", "3 steps, 6 tokens, 0 traces closed"]
    told = [m for m in script.seen[-1][1]["messages"] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in told] == ["c1", "c2"]
