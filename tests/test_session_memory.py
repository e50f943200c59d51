"""What a worker holds of a session does not grow with its steps, and what other workers' records bring counts once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import agentguard
from agentguard.identity import Identity
from agentguard.lengths import KEPT, Lengths
from agentguard.session import AGENTS, DIGESTS, LATEST, PROMPTS, Session
from benchmarks.session_memory import bytes_a_session, step_of
from tests.scripted import Script
from tests.sdk.conftest import ASK as MESSAGES
from tests.sdk.conftest import rig as sdk_rig
from tests.sdk.conftest import until
from tests.test_faults import stored
from tests.test_guard import ASK, THINKS_AND_ANSWERS, rig


def test_a_long_session_takes_no_more_than_a_shorter_one_and_little() -> None:
    """docs/reliability.md states these bounds; the command there measures them."""
    usual = bytes_a_session(8, 200, most=False)
    assert usual < 24 * 1024
    assert bytes_a_session(8, 600, most=False) < 1.1 * usual
    assert bytes_a_session(4, 500, most=True) < 128 * 1024


def test_everything_a_session_remembers_is_bounded() -> None:
    session = Session(Identity("", "s"))
    for number in range(1, 3 * AGENTS * PROMPTS // 16):
        step = step_of(session, number, most=True)
        session.add(step, f"{number}", agent=step.agent if number % 2 else "main")
        session.record(step, "", side=False)
        session.remember_overflow(f"{number}", 32_768)
    assert len(session.latest) == LATEST
    assert len(session.lengths.traces) <= KEPT
    assert (len(session.cut), len(session.overflowed), len(session.own)) == (DIGESTS, DIGESTS, KEPT)
    assert len(session.prompts) <= AGENTS
    assert max(map(len, session.prompts.values())) == PROMPTS


def test_numbers_no_model_has_are_kept_as_the_largest() -> None:
    session = Session(Identity("", "s"))
    step = step_of(session, 1, most=False)
    huge = 10**30
    for name in ("prompt_tokens", "think_tokens", "answer_tokens"):
        step = type(step)(**{f: getattr(step, f) for f in step.__struct_fields__} | {name: huge})
    session.add(step)
    assert session.lengths.traces == session.lengths.answers == [2**31 - 1]
    assert session.expected_prompt(5) == 5
    assert (Lengths().traces, Lengths().usual_answer) == ([], 0)


async def test_in_one_worker_no_request_is_remembered_once_it_is_booked() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS))) as r:
        for _ in range(5):
            await r.step()
        (session,) = r.guard.sessions
        assert (len(session.own), session.seq, len(session.latest)) == (0, 5, 5)


async def test_what_other_workers_recorded_counts_once_for_steps_that_run_side_by_side(tmp_path: Path) -> None:
    """Both steps are told of the same records, as both asked before either had them."""
    script, url = Script(chat=[0.02, *THINKS_AND_ANSWERS]), f"sqlite:{tmp_path / 's.db'}"
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(stored(script, url)) for _ in range(2)]
        await two.step()
        for n in range(6):
            await one.step({**ASK, "seed": n})
        await asyncio.gather(*(two.step({**ASK, "seed": 10 + n}) for n in range(4)))
        await two.step()
        (session,) = two.guard.sessions
        assert session.steps_started == 12
        assert len(session.lengths.traces) == 12
        assert len({step.request for step in session.latest}) == 12


async def test_a_stream_that_nobody_begins_is_nobodys() -> None:
    async with sdk_rig("app", Script(chat=list(THINKS_AND_ANSWERS))) as r:
        async with r.guard.session("s") as s:
            for _ in range(50):
                s.stream(MESSAGES)
            assert not s._streams
            late = s.stream(MESSAGES)
            early = s.stream(MESSAGES)
            assert [e async for e in early]
            await until(lambda: not s._streams)
        for _ in range(2):
            with pytest.raises(agentguard.StreamClosedError, match="is over"):
                await late.until_done()
        assert len(r.script.seen) == 1
