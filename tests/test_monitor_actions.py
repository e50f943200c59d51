"""What an operator's actions do beyond the row they were asked on."""

from __future__ import annotations

import asyncio

import pytest

from agentguard.errors import ActionRefusedError
from agentguard.monitor.live import PlayedMonitor
from agentguard.monitor.options import Options
from agentguard.session import Identity
from tests.scripted import STOP, B, Script, text_chunk, thinking
from tests.test_guard import ASK, THINKS_AND_ANSWERS, rig
from tests.test_monitor_simulator import after, player
from tests.test_monitor_sources import until, watched


async def test_one_running_request_of_a_session_is_closed_and_not_its_others() -> None:
    slow = [item for one in thinking(200) for item in (one, 0.05)]
    script = Script(chat=list(THINKS_AND_ANSWERS), again=slow, complete=[text_chunk([B, STOP], "b", "stop")])
    async with rig(script, cutoff={"loops": False}) as r, watched(r.url) as monitor:
        key = f"{r.url}|agent"
        await r.step(ASK, Identity("", "agent"))
        steps = [asyncio.create_task(r.step(ASK, Identity("", "agent"))) for _ in range(2)]
        shown = await until(monitor, lambda s: any(sum(not b.done for b in row.bars) == 2 for row in s.sessions))
        row = next(row for row in shown.sessions if row.key == key)
        assert row.running_request is not None
        with pytest.raises(ActionRefusedError, match="it has ended"):
            await monitor.close_trace(key, "chatcmpl-ended")
        assert await monitor.close_trace(key, row.running_request) == "closed 1 trace(s) of agent"
        done, others = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(others)) == (1, 1)
        assert r.finished().closed == "operator"
        for step in others:
            step.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_a_trace_of_the_demo_that_has_ended_is_not_closed() -> None:
    play, clock = player("healthy")
    monitor = PlayedMonitor(Options(demo="healthy"), play)
    thinking_row = next(session for session in after(play, clock, 20).sessions if session.phase == "thinking")
    with pytest.raises(ActionRefusedError, match="that trace has ended"):
        await monitor.close_trace(thinking_row.key, "chatcmpl-of-the-step-before")
    assert "closed 1 trace" in await monitor.close_trace(thinking_row.key, thinking_row.running_request)
