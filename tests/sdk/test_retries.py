"""When a step is tried again: what the server asks for, two bounds, and errors that carry it through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

import agentguard
from agentguard.errors import AgentGuardError, ConfigError, EngineDiedError, EngineRequestError, SessionBusyError
from agentguard.gateway.app import RESTART_S, STORE_S
from agentguard.sdk import remote, retries
from agentguard.sdk.request import StepRequest
from agentguard.sdk.retries import LONGEST_S, RETRIES, RetryBusy, asked_wait, own_wait
from agentguard.store import StoreError
from tests.scripted import Script
from tests.sdk.conftest import ASK, THINKS_AND_ANSWERS, rig, until

REQUEST = StepRequest(messages=ASK, session="s")


class World:
    """Time that passes only where somebody waits, and an engine that is away until ``back_at``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: AgentGuardError, back_at: float, took: float = 0.0) -> None:
        self.now, self.waits, self.tries = 0.0, list[float](), 0
        self._error, self._back_at, self._took = error, back_at, took
        clock = SimpleNamespace(get_running_loop=lambda: SimpleNamespace(time=lambda: self.now), sleep=self._sleep)
        monkeypatch.setattr(retries, "asyncio", clock)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    async def call_next(self, _: StepRequest) -> AsyncGenerator[Any, None]:
        self.tries += 1
        self.now += self._took
        if self.now < self._back_at:
            raise self._error
        yield "answered"

    async def run(self, **options: Any) -> list[Any]:
        return [event async for event in RetryBusy(**options).handle(REQUEST, self.call_next)]


def asking(error: AgentGuardError, retry_after: str | None) -> AgentGuardError:
    error.retry_after = retry_after
    return error


@pytest.mark.parametrize("retry_after", [None, "30"])
@pytest.mark.parametrize("back_at", [0.4, 15.0, 30.0])
async def test_an_engine_that_restarts_within_thirty_seconds_is_waited_for_by_default(
    monkeypatch: pytest.MonkeyPatch, retry_after: str | None, back_at: float
) -> None:
    monkeypatch.setattr(retries.random, "uniform", lambda low, _: low)  # the shortest waits there can be
    world = World(monkeypatch, asking(EngineDiedError("gone"), retry_after), back_at)
    assert await world.run() == ["answered"]
    if retry_after:
        assert world.waits == [30.0]


async def test_tries_are_bounded_by_number_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, EngineDiedError("gone"), 1e9)
    with pytest.raises(EngineDiedError):
        await world.run()
    assert world.tries == RETRIES + 1
    assert 32 < world.now < 66
    assert max(world.waits) <= LONGEST_S
    slow = World(monkeypatch, EngineDiedError("gone"), 1e9, took=30.0)  # each try takes time as well
    with pytest.raises(EngineDiedError):
        await slow.run()
    assert slow.tries == 3
    busy = World(monkeypatch, asking(SessionBusyError("s", 1, 2), "2"), 5.0)
    assert await busy.run() == ["answered"]
    assert busy.waits == [2.0, 2.0, 2.0]
    none = World(monkeypatch, asking(SessionBusyError("s", 1, 2), "2"), 5.0)
    with pytest.raises(SessionBusyError):
        await none.run(attempts=0)
    assert none.tries == 1


async def test_a_server_that_asks_for_more_than_is_left_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, EngineRequestError(503, "maintenance", "3600"), 1e9)
    with pytest.raises(EngineRequestError) as raised:
        await world.run()
    assert (world.tries, world.waits, raised.value.retry_after) == (1, [], "3600")
    world = World(monkeypatch, asking(StoreError("away"), "2"), 3.0)
    assert await world.run() == ["answered"]
    world = World(monkeypatch, StoreError("no disk"), 3.0)  # a store of our own
    with pytest.raises(StoreError):
        await world.run()
    assert world.tries == 1


def test_a_wait_is_seconds_or_a_date() -> None:
    assert [asked_wait(text, 0.0) for text in ("7", " 0.5 ", "0", None, "", "soon", "-3", "1.2.3")] == [
        7.0, 0.5, 0.0, None, None, None, None, None,
    ]  # fmt: skip
    assert asked_wait("Thu, 01 Jan 1970 00:02:00 GMT", 100.0) == 20.0
    assert asked_wait("Thu, 01 Jan 1970 00:02:00 GMT", 500.0) == 0.0
    assert [own_wait(n, 0.5) for n in (0, 1, 2, 4, 5, 10_000)] == [0.5, 1.0, 2.0, 8.0, 10.0, 10.0]
    with pytest.raises(ConfigError, match="retry_s"):
        RetryBusy(within_s=float("inf"))


@pytest.mark.parametrize("name", [*(kind.__name__ for kind in remote._AS_THEY_ARE), "BusyError", "StoreRefusedError", "Unknown"])
def test_every_error_of_a_gateway_says_here_when_to_come_again(name: str) -> None:
    body = json.dumps({"error": {"message": "no", "agentguard": name}})
    error = remote.refusal(503, body, "7")
    assert (error.retry_after, str(error)) == ("7", "no")
    assert remote.refusal(503, body).retry_after is None


async def test_a_gateways_busy_session_and_dead_engine_say_when_to_come_again() -> None:
    script = Script(chat=[0.05, *THINKS_AND_ANSWERS], hold=asyncio.Event())
    async with rig("gateway", script, retries=0, policy={"limits": {"tokens": 120}}) as r, r.guard.session("s") as s:
        running = asyncio.create_task(s.complete(ASK))
        await until(lambda: script.streaming == 1)
        with pytest.raises(agentguard.SessionBusyError) as busy:
            await s.complete(ASK)
        assert busy.value.retry_after == str(STORE_S)
        script.hold.set()  # type: ignore[union-attr]
        await running
    script = Script(hang_up=True)
    async with rig("gateway", script, retries=0) as r, r.guard.session("s") as s:
        with pytest.raises(agentguard.EngineDiedError) as gone:
            await s.complete(ASK)
        assert gone.value.retry_after == str(RESTART_S)
