"""An attempt that the engine fails before its first chunk is no step: it uses up no limit, however many workers and stores."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentguard.errors import AgentGuardError, EngineDiedError, EngineError, EngineRequestError, SessionLimitError
from agentguard.events import SessionAlarm, StepFinished
from agentguard.identity import Identity
from tests.scripted import A, Script, chunk
from tests.test_faults import pooled, stored
from tests.test_guard import ASK, THINKS_AND_ANSWERS, rig, text


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429}, {"status": 400}, {"hang_up": True}])
async def test_an_agent_that_tries_again_through_an_outage_goes_on_after_it(
    fault: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    script, well = Script(chat=[], **fault), list(THINKS_AND_ANSWERS)
    limits = {"limits": {"steps": 2}}
    async with stored(script, f"sqlite:{tmp_path / 's.db'}", **limits) if kept else rig(script, **limits) as r:
        for _ in range(5):
            with pytest.raises(EngineError):
                await r.step()
            assert (r.finished().step, bool(r.finished().error)) == (1, True)  # what failed is told all the same
        script.status, script.hang_up, script.chat = 200, False, well
        for number in (1, 2):
            assert text(await r.step()) == "bb"
            assert (r.finished().step, r.finished().error) == (number, "")
        with pytest.raises(SessionLimitError, match="steps is 2 of 2"):
            await r.step()
        assert not [e for e in r.events if isinstance(e, SessionAlarm) and e.stopped and e.value != 2]


async def test_a_step_that_fails_behind_its_first_chunk_counts() -> None:
    script = Script(chat=[chunk([A], reasoning="a")], hang_up=True)
    async with rig(script, limits={"steps": 2}) as r:
        for number in (1, 2):
            with pytest.raises(EngineDiedError):
                await r.step()
            assert (r.finished().step, r.finished().tokens) == (number, 1)
        with pytest.raises(SessionLimitError):
            await r.step()


async def test_a_step_that_its_caller_gives_up_before_the_first_chunk_counts() -> None:
    """The engine had begun with it, and nobody knows what it has done."""
    script = Script(hold=asyncio.Event())
    async with rig(script, limits={"steps": 1}) as r:
        task = asyncio.create_task(r.step())
        while not script.streaming:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(SessionLimitError):
            await r.step()


async def test_a_step_that_moves_to_another_engine_is_one_step() -> None:
    broken, well = Script(hang_up=True), Script(chat=list(THINKS_AND_ANSWERS))
    async with pooled(broken, well, limits={"steps": 1}) as (r, _, pool):
        name = next(f"s{i}" for i in range(100) if pool.choose(f"s{i}").name == "engine-0")  # type: ignore[union-attr]
        assert text(await r.step(identity=Identity("", name))) == "bb"
        assert [e.step for e in r.events if isinstance(e, StepFinished)] == [1, 1]
        assert len(broken.seen) == len(well.seen) == 1
        with pytest.raises(SessionLimitError, match="steps is 1 of 1"):
            await r.step(identity=Identity("", name))


async def test_attempts_that_fail_side_by_side_let_nobody_pass_a_limit(tmp_path: Path) -> None:
    """Two workers on one store, 40 requests at once, of which every other one is refused by the engine after a while: never more
    than the limit are answered, and what is answered in the end is all that it allows."""
    asked = 0

    def chat(_: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        return [0.01, {"error": {"message": "busy", "code": 503}}] if asked % 2 else [0.02, *THINKS_AND_ANSWERS]

    script, url, limit = Script(chat=chat), f"sqlite:{tmp_path / 's.db'}", 7
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(stored(script, url, limits={"steps": limit})) for _ in range(2)]
        served = 0

        async def ask(number: int) -> None:
            nonlocal served
            with contextlib.suppress(EngineRequestError, SessionLimitError):
                await workers[number % 2].step({**ASK, "seed": number})
                served += 1

        await asyncio.gather(*(ask(n) for n in range(40)))
        assert 1 <= served <= limit
        while served < limit:  # what failed has left its place
            before = served
            await asyncio.gather(*(ask(100 + n) for n in range(8)))
            assert before <= served <= limit
        for r in workers:
            with pytest.raises(SessionLimitError, match="steps is 7 of 7"):
                await r.step()
        assert sum(isinstance(e, StepFinished) and not e.error for r in workers for e in r.events) == limit


async def test_asking_again_for_what_is_refused_is_no_progress_and_an_outage_is_none_of_the_agents() -> None:
    script = Script(status=503)
    async with rig(script, limits={"no_progress": 3, "stop_without_progress": True}) as r:
        for _ in range(9):
            with pytest.raises(EngineRequestError):
                await r.step()
        script.status = 400
        for _ in range(3):
            with pytest.raises(EngineRequestError):
                await r.step()
        before = len(script.seen)
        for _ in range(3):
            with pytest.raises(AgentGuardError, match="no_progress is 3 of 3"):
                await r.step()
        assert len(script.seen) == before
        (alarm,) = [e for e in r.events if isinstance(e, SessionAlarm)]
        assert (alarm.meter, alarm.value, alarm.stopped) == ("no_progress", 3, True)
        assert await r.guard.raise_limit("me", "no_progress", 1)
        script.status, script.chat = 200, list(THINKS_AND_ANSWERS)
        assert text(await r.step()) == "bb"
