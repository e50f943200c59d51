"""A stream is cancelled at every await point there is; nothing is left behind, and the accounts are right.

Points of two kinds: where the consumer itself is suspended, and where the task that reads the step for it is (there the consumer is
cancelled, wherever it waits). One connection serves all points, so what one leaves behind is seen at the next.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

import agentguard
from agentguard.economics.cells import CANCELLED
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.events import Event, StepFinished, StepStarted
from agentguard.telemetry.hub import Hub
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, text_chunk, upstream
from tests.sdk.conftest import ASK, WAYS, Rig, rig, until
from tests.sdk.suspensions import cancelled_at, cancelled_at_others

pytestmark = pytest.mark.timeout(120)
PAUSE = 0.003
"""Between two chunks, so that each is waited for."""
BRIEF = [
    chunk([], role="assistant"),
    PAUSE,
    chunk([A, A], reasoning="aa"),
    PAUSE,
    chunk([A, END, B], reasoning="a", content="b"),
    PAUSE,
    chunk([B, STOP], content="b", finish="stop"),
    PAUSE,
    USAGE,
    PAUSE,
]
CONTINUED = [chunk([A, A], reasoning="aa"), PAUSE, chunk([STOP], finish="stop"), USAGE, PAUSE]
"""The model leaves its trace without an answer, so the guard goes on behind it with a request of its own."""
SCRIPTS: dict[str, Callable[[], Script]] = {
    "plain": lambda: Script(chat=list(BRIEF)),
    "continued": lambda: Script(chat=list(CONTINUED), complete=[PAUSE, text_chunk([B, STOP], "b", "stop"), USAGE, PAUSE]),
}
Consume = Callable[[agentguard.Session], Coroutine[Any, Any, None]]


async def loop_to_its_end(s: agentguard.Session) -> None:
    async for _ in s.stream(ASK):
        pass


async def loop_that_is_left(s: agentguard.Session) -> None:
    async with s.stream(ASK) as stream:
        async for event in stream:
            if isinstance(event, agentguard.ThinkDelta):
                break


async def whole(s: agentguard.Session) -> None:
    await s.complete(ASK)


CONSUMERS: dict[str, Consume] = {"loop": loop_to_its_end, "left": loop_that_is_left, "complete": whole}


class Watch:
    """What must be as before after each cancellation."""

    def __init__(self, r: Rig) -> None:
        self._r = r
        self._tasks = {task for task in asyncio.all_tasks() if self._ours(task)}

    @staticmethod
    def _ours(task: asyncio.Task[Any]) -> bool:
        return "step" in task.get_name() or "consumer" in task.get_name() or "agentguard app" in task.get_name()

    def left(self) -> list[str]:
        """What is still there; empty when all is as before."""
        tasks = [repr(t) for t in asyncio.all_tasks() if self._ours(t) and t not in self._tasks and not t.done()]
        r = self._r
        engine = r.inside.engine
        found = [*tasks, *(f"guard runs {name}" for name in r.inside.running)]
        found += [f"{r.script.streaming} streams in the engine"] * bool(r.script.streaming)
        found += [f"{n} busy connections to the {what}" for what, n in self._busy(engine) if n]
        started, finished = (sum(isinstance(e, kind) for e in r.events) for kind in (StepStarted, StepFinished))
        found += [f"{started} steps begun, {finished} ended"] * (started != finished)
        return found

    def _busy(self, engine: Any) -> list[tuple[str, int]]:
        assert isinstance(engine, OpenAIEngine)
        clients = [("engine", engine._client)]
        backend = self._r.guard._backend
        if hasattr(backend, "_client"):
            clients.append(("gateway", backend._client))
        return [(what, busy(client)) for what, client in clients]


def busy(client: Any) -> int:
    """Connections of a client that are at work, or that nobody gave back."""
    transport = client._transport
    if hasattr(transport, "running"):
        return int(transport.running)
    return sum(not (c.is_idle() or c.is_closed()) for c in transport._pool.connections) + len(transport._pool._requests)


@asynccontextmanager
async def watched(way: str, script: Script) -> AsyncIterator[tuple[Rig, Watch]]:
    async with rig(way, script, retries=0, buffer=2) as r:
        async with r.guard.session("warm") as s:
            await s.complete(ASK)
        yield r, Watch(r)


async def check(r: Rig, watch: Watch, s: agentguard.Session, tokens_of_whole: int) -> None:
    """After one cancellation."""
    await until(lambda: not watch.left())
    assert not s._streams
    assert s.budget.running == ()
    state = (await s.refresh()).state
    mine = [e for e in r.finished if e.session.endswith(s.id)]
    assert state.steps == len(mine)
    assert state.tokens == sum(e.tokens for e in mine)
    assert state.think_tokens == sum(e.think_tokens for e in mine)
    for step in mine:
        assert step.error in ("", CANCELLED), step
        assert step.tokens <= tokens_of_whole if step.error else step.tokens == tokens_of_whole


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("way", WAYS)
async def test_cancel_where_the_consumer_waits(way: str, script: str, consumer: str) -> None:
    async with watched(way, SCRIPTS[script]()) as (r, watch):
        tokens = r.finished[0].tokens
        for n in range(1, 200):

            async def work(n: int = n) -> None:
                async with r.guard.session(f"s{n}") as s:
                    await CONSUMERS[consumer](s)

            cancelled = await cancelled_at(work(), n)
            async with r.guard.session(f"s{n}") as s:
                await check(r, watch, s, tokens)
            if not cancelled:
                break
        assert not cancelled, "there was an end to the points"
        assert n >= 3, "it was driven: what is read ahead takes most of the waiting from it"
        gc.collect()
        assert watch.left() == []


READER = ("StepStream._read",)
SERVER = ("RequestResponseCycle.run_asgi", "TaskHandle._run_coro")
APP = ("_Exchange._run", "TaskHandle._run_coro")
"""Coroutines whose points are counted: the SDK's reader; the gateway's and the upstream's handlers of requests and their
streams; the
same of an app without sockets."""


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("way", "where", "twice"),
    [
        *((way, READER, twice) for way in WAYS for twice in (False, True)),
        ("sockets", SERVER, False),
        ("app", APP, False),
        ("gateway", SERVER, False),
    ],
)
async def test_cancel_where_the_step_is_read_or_served(way: str, where: tuple[str, ...], twice: bool, script: str) -> None:
    async with watched(way, SCRIPTS[script]()) as (r, watch):
        tokens = r.finished[0].tokens
        for n in range(1, 300):
            async with r.guard.session(f"s{n}") as s:
                cancelled = await cancelled_at_others(CONSUMERS["loop"](s), where, n, twice=twice)
                await check(r, watch, s, tokens)
            if not cancelled:
                break
        assert not cancelled
        assert n > 6, "it was driven"
        gc.collect()
        assert watch.left() == []


@pytest.mark.parametrize("way", WAYS)
async def test_cancel_where_a_session_ends_its_streams(way: str) -> None:
    """Two streams are left open, and the end of their session is cancelled at each of its turns."""
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with rig(way, script, retries=0) as r:
        for n in range(1, 20):  # a task that is cancelled before its first turn does nothing at all
            s = r.guard.session(f"s{n}")
            await s.__aenter__()
            held = [aiter(s.stream(ASK)) for _ in range(2)]
            for events in held:
                await anext(events)
            ending = asyncio.create_task(s.aclose(), name="consumer")
            for _ in range(n):
                await asyncio.sleep(0)
            done = ending.done()
            ending.cancel()
            await asyncio.wait([ending])
            await until(lambda: not r.inside.running and not script.streaming)
            assert [e.error for e in r.finished[-2:]] == [CANCELLED] * 2
            if done:
                break
        assert n > 1


@pytest.mark.parametrize("way", WAYS)
async def test_the_end_of_the_connection_is_the_end_of_everything(way: str) -> None:
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with rig(way, script) as r:
        s = await r.guard.session("s").__aenter__()  # and never left
        events = aiter(s.stream(ASK))
        await anext(events)
        assert script.streaming == 1
    await until(lambda: script.streaming == 0)
    assert [t for t in asyncio.all_tasks() if "agentguard" in t.get_name()] == []
    assert r.finished[0].error == CANCELLED
    with pytest.raises(agentguard.StreamClosedError):
        await anext(events)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
async def test_cancel_a_wrapped_client_at_every_point(script: str, stream: bool) -> None:
    """Here the consumer reads the engine itself, so its points are those of the guard and of openai's client."""
    events: list[Event] = []
    hub, scripted = Hub(), SCRIPTS[script]()
    async with upstream(scripted) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        guarded = agentguard.wrap(client, hub=hub)

        async def call(n: int = 0) -> None:
            headers = {"x-session-id": f"s{n}"}
            reply = await guarded.chat.completions.create(model="scripted", messages=ASK, stream=stream, extra_headers=headers)
            if stream:
                async for _ in reply:
                    pass

        await call()
        with hub.sink(events.append):
            for n in range(1, 100):
                cancelled = await cancelled_at(call(n), n)
                await until(lambda: scripted.streaming == 0 and busy(client._client) == 0)
                started, finished = ([e for e in events if isinstance(e, kind)] for kind in (StepStarted, StepFinished))
                assert len(started) == len(finished)
                assert {e.error for e in finished if cancelled} <= {"", CANCELLED}
                events.clear()
                if not cancelled:
                    break
        assert not cancelled
        assert n > 8
        await client.close()
    assert [t for t in asyncio.all_tasks() if "consumer" in t.get_name()] == []
