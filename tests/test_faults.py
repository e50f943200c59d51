"""What happens when something breaks or lies: engines, clients, the store, the disk, the clock."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.pool import EnginePool
from agentguard.errors import BusyError, EngineDiedError, EngineError, SessionBusyError, SessionLimitError
from agentguard.events import Event, Note, StepFinished, StepStarted
from agentguard.gateway.admission import Admission
from agentguard.gateway.server import bind, end_silent, gateway, session_books
from agentguard.identity import Identity
from agentguard.middleware import Guard, Reply
from agentguard.policy import Policy, ServingLimits
from agentguard.store import StoreError, accounts
from agentguard.store.accounts import Ask, Grant, Key, Settlement
from agentguard.store.books import Books
from agentguard.store.sessions import SessionStore, open_sessions
from agentguard.telemetry.hub import Hub
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, text_chunk, thinking, upstream
from tests.test_guard import ASK, THINKS_AND_ANSWERS, Rig, rig, text

NO_REDIS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server here")
STREAM = ASK | {"stream": True, "stream_options": {"include_usage": True}}


# -- an upstream that lies ---------------------------------------------------------------------------------------------------------


def endless(first: list[dict[str, Any]], again: dict[str, Any]) -> Any:
    """A pause of no length between two, as nothing else would let the rest of this process run."""
    return lambda _: itertools.chain(first, itertools.cycle([again, 0.0]))


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ([chunk([A, END], reasoning="a")], chunk([B], content="b")),
        ([], chunk([B], content="b")),
        ([chunk([A], reasoning="a"), chunk([END, B], content="b")], chunk([], content="")),
        ([chunk([A, END, B], reasoning="a", content="b")], USAGE),
        ([chunk([A, END, B], reasoning="a", content="b"), chunk([STOP], finish="stop")], chunk([B], content="b")),
    ],
    ids=["an answer", "no ids of an end", "empty chunks", "usage", "behind its finish reason"],
)
async def test_a_stream_without_an_end_is_ended_and_the_engine_let_go(first: list[Any], again: dict[str, Any]) -> None:
    script = Script(chat=endless(first, again), complete=[text_chunk([B, STOP], "b", "stop"), USAGE])
    async with rig(script) as r, asyncio.timeout(60):
        chunks = await r.step()
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] in ("length", "stop")
        assert chunks[-1]["usage"]
        assert text(chunks)
        await script.aborted.wait()
        assert r.finished().tokens <= 100 + 256 + 8


async def test_an_endless_trace_is_cut_and_an_endless_continuation_too() -> None:
    script = Script(chat=lambda _: thinking(3_000), complete=endless([], text_chunk([B], "b")), window=4096)
    async with rig(script) as r, asyncio.timeout(60):
        chunks = await r.step(ASK | {"max_tokens": 600})
        assert text(chunks)
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
        assert r.finished().tokens <= 600 + 256 + 8


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": "many", "completion_tokens": None, "total_tokens": []},
        {"prompt_tokens": -5, "completion_tokens": 10**30, "completion_tokens_details": {"reasoning_tokens": "x"}},
        {"completion_tokens_details": 5}, [], "none", 7,
    ],
)  # fmt: skip
@pytest.mark.parametrize("metrics", [None, {"speculative_decoding": {"num_spec_steps": "x"}}, "bad", {"speculative_decoding": 3}])
async def test_a_wrong_usage_changes_no_account(usage: Any, metrics: Any) -> None:
    script = Script(chat=[*THINKS_AND_ANSWERS[:-1], USAGE | {"usage": usage, "metrics": metrics}])
    async with rig(script) as r:
        chunks = await r.step()
        assert (r.finished().tokens, r.finished().think_tokens, r.finished().error) == (7, 3, "")
        assert chunks[-1]["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    "bad",
    [
        {"choices": "x"}, {"choices": [5]}, {"choices": [{"delta": "x"}]}, {"choices": [{"delta": {"content": 5}}]},
        {"choices": [{"delta": {"reasoning": ["x"]}}]}, {"choices": [{"delta": {"tool_calls": "x"}}]},
        {"choices": [{"delta": {}, "token_ids": "12"}]}, {"choices": {"0": 1}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
async def test_a_chunk_of_wrong_types_ends_the_stream_with_a_word(bad: dict[str, Any], stream: bool) -> None:
    script = Script(chat=[*THINKS_AND_ANSWERS[:2], bad, *THINKS_AND_ANSWERS[2:]])
    async with rig(script) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.post("/v1/chat/completions", json=ASK | {"stream": stream})
        if stream:
            last = json.loads(reply.text.strip().rpartition("data: ")[2])
            assert (last["error"]["code"], "cannot be read" in last["error"]["message"]) == (502, True)
        else:
            assert reply.status_code == 502
        assert "cannot be read" in r.finished().error
        assert not r.guard.running


async def test_huge_deltas_pass_and_an_event_without_bounds_is_refused() -> None:
    big = "x" * 2_000_000
    chat = [chunk([A, END, B], reasoning="a", content=big), chunk([STOP], finish="stop"), USAGE]
    async with rig(Script(chat=chat)) as r:
        assert len(text(await r.step())) == len(big)
    too_big = "data: " + "x" * (9 << 20)
    async with rig(Script(chat=[*THINKS_AND_ANSWERS[:2], too_big, *THINKS_AND_ANSWERS[2:]])) as r:
        with pytest.raises(EngineError):
            await r.step()


async def test_markers_split_over_chunks_are_never_shown_as_an_answer() -> None:
    """A server without a reasoning parser, one character a chunk; /tokenize is not there, so text is all there is."""
    whole = "<think>deep thought</think>the answer"
    script = Script(chat=[*(chunk([], content=c) for c in whole), chunk([], finish="stop"), USAGE], tokenizes=False)
    async with rig(script) as r:
        await r.step()
        assert r.finished().think_tokens > 0
        assert not r.finished().empty_answer
        assert Note.EMPTY_ANSWER not in r.finished().notes


# -- clients ---------------------------------------------------------------------------------------------------------------------


def raw_request(url: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url[7:]}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload


async def test_a_client_that_takes_nothing_holds_the_engine_back_and_is_given_up() -> None:
    """Backpressure instead of memory: what is not read is not asked of the engine; then the kernel ends the connection."""
    produced = 0

    def chat(_: dict[str, Any]) -> Iterator[dict[str, Any] | float]:
        nonlocal produced
        yield chunk([A, END], reasoning="a")
        for _ in range(10_000):
            produced += 1
            yield chunk([B], content="b" * 20_000)
            yield 0.0

    async with rig(Script(chat=chat, window=100_000), serving={"send_s": 1.0}) as r, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*r.url[7:].split(":"), limit=4096)
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(raw_request(r.url, STREAM | {"max_tokens": 50_000}))
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not any(isinstance(e, StepFinished) for e in r.events):
            await asyncio.sleep(0.1)
        assert produced < 5_000  # 200 MB were offered
        assert r.finished().error == "cancelled"
        writer.close()


async def test_a_connection_that_sends_half_a_request_is_ended() -> None:
    async with rig(Script(chat=THINKS_AND_ANSWERS)) as r:
        loop = asyncio.get_running_loop()
        server = next(
            o for task in asyncio.all_tasks() if task.get_name() == "silent connections"
            for o in [task.get_coro().cr_await.cr_frame.f_locals["connections"]]  # type: ignore[union-attr]
        )  # fmt: skip
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*r.url[7:].split(":"))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            watch = loop.create_task(end_silent(server, every_s=0.1, silent_s=0.3))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            watch.cancel()
            writer.close()
        async with httpx2.AsyncClient(base_url=r.url) as client:
            assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200


async def test_a_reader_of_events_that_stops_reading_costs_a_bounded_queue() -> None:
    async with rig(Script(chat=THINKS_AND_ANSWERS), serving={"drain_s": 0.5}) as r, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*r.url[7:].split(":"), limit=1024)
        writer.write(f"GET /agentguard/events HTTP/1.1\r\nhost: {r.url[7:]}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await r.step()
        event, before = r.finished(), psutil.Process().memory_info().rss
        with contextlib.suppress(ValueError):
            for _ in range(200):
                for _ in range(500):
                    r.guard.hub.publish(event)
                r.events.clear()
                await asyncio.sleep(0)
        assert psutil.Process().memory_info().rss - before < 32 << 20  # 100,000 events of 600 bytes
        await r.step()  # nobody else notices
        writer.transport.abort()


# -- too much at once --------------------------------------------------------------------------------------------------------------


async def test_callers_take_turns_and_the_greedy_one_is_refused_alone() -> None:
    admission = Admission(ServingLimits(running=2, queue=6, per_caller=4, queue_s=5))
    order: list[str] = []

    async def step(caller: str) -> None:
        await admission.enter(caller)
        order.append(caller)
        await asyncio.sleep(0.02)
        admission.leave(caller)

    greedy = [asyncio.create_task(step("greedy")) for _ in range(6)]
    await asyncio.sleep(0)
    modest = [asyncio.create_task(step("modest")) for _ in range(2)]
    results = await asyncio.gather(*greedy, *modest, return_exceptions=True)
    refused = [x for x in results if isinstance(x, BusyError)]
    assert [(x.status, x.code) for x in refused] == [(429, "caller_busy")] * 2
    assert results[6:] == [None, None]
    assert "modest" in order[2:4]  # it came last, and was not last
    assert (admission.running, admission.waiting, dict(admission._of), dict(admission._queues)) == (0, 0, {}, {})


async def test_a_full_queue_and_a_turn_that_does_not_come_say_why() -> None:
    admission = Admission(ServingLimits(running=1, queue=1, queue_s=0.05))
    await admission.enter("a")
    waiting = asyncio.create_task(admission.enter("b"))
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="1 steps run and 1 wait") as full:
        await admission.enter("c")
    assert (full.value.status, full.value.code) == (503, "gateway_busy")
    with pytest.raises(BusyError, match=r"no turn within 0\.05 s"):
        await waiting
    cancelled = asyncio.create_task(admission.enter("b"))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    admission.leave("a")
    assert (admission.running, admission.waiting, dict(admission._of)) == (0, 0, {})


async def test_over_http_a_refusal_names_its_reason_and_when_to_come_again() -> None:
    script = Script(chat=THINKS_AND_ANSWERS, hold=asyncio.Event())
    async with rig(script, serving={"running": 4, "per_caller": 1}) as r, httpx2.AsyncClient(base_url=r.url) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
        while not script.seen:
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/chat/completions", json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "caller_busy")
        assert refused.headers["retry-after"] == "5"
        ready = (await client.get("/health/ready")).json()
        assert (ready["ready"], ready["running"], ready["engines"]) == (True, 1, {"engine-0": "ok"})
        script.hold.set()  # type: ignore[union-attr]
        assert (await first).status_code == 200
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200


# -- the end ---------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def ending(script: Script, drain_s: float) -> AsyncIterator[tuple[Rig, AsyncExitStack]]:
    events: list[Event] = []
    hub = Hub()
    async with AsyncExitStack() as outer:
        url = await outer.enter_async_context(upstream(script))
        engine = OpenAIEngine(url, read_timeout_s=10)
        outer.push_async_callback(engine.aclose)
        outer.enter_context(hub.sink(events.append))
        guard = await Guard.open(engine, Policy(model="scripted", serving=ServingLimits(drain_s=drain_s)), hub)
        async with AsyncExitStack() as inner:
            address = await inner.enter_async_context(gateway(guard, bind("127.0.0.1", 0)))
            yield Rig(guard, events, address), inner


@pytest.mark.parametrize("stream", [True, False])
async def test_a_gateway_that_ends_lets_running_steps_finish(stream: bool) -> None:
    script = Script(chat=[*THINKS_AND_ANSWERS[:2], 0.5, *THINKS_AND_ANSWERS[2:]])
    async with ending(script, 20) as (r, inner), httpx2.AsyncClient(base_url=r.url) as client, asyncio.timeout(15):
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=ASK | {"stream": stream}))
        while not r.guard.running:
            await asyncio.sleep(0.01)
        await inner.aclose()
        reply = await asked
        assert reply.status_code == 200
        assert reply.text.rstrip().endswith("[DONE]") if stream else reply.json()["choices"][0]["message"]["content"] == "bb"


@pytest.mark.parametrize("stream", [True, False])
async def test_what_has_no_time_left_is_told_so_and_accounted(stream: bool) -> None:
    script = Script(chat=THINKS_AND_ANSWERS[:2], hold=asyncio.Event())
    async with ending(script, 0.2) as (r, inner), httpx2.AsyncClient(base_url=r.url) as client, asyncio.timeout(15):
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=ASK | {"stream": stream}))
        while not r.guard.running or not next(iter(r.guard.running.values()))[1].reading.tally.total:
            await asyncio.sleep(0.01)
        await inner.aclose()
        reply = await asked
        error = json.loads(reply.text.strip().rpartition("data: ")[2])["error"]
        assert (error["code"], "told to end" in error["message"]) == ("gateway_ends", True)
        assert stream or (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert (r.finished().error, r.finished().tokens) == ("cancelled", 2)
        script.hold.set()  # type: ignore[union-attr]


async def test_those_that_watch_are_let_go_at_once() -> None:
    watched = ("/agentguard/events", "/guard/v1/watch")
    async with ending(Script(chat=THINKS_AND_ANSWERS), 20) as (r, inner), httpx2.AsyncClient(base_url=r.url) as client:
        watching = [asyncio.create_task(client.get(path)) for path in watched]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(10):
            await inner.aclose()
            for reply in await asyncio.gather(*watching):
                assert ": the gateway ends" in reply.text


# -- several engines ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def pooled(*scripts: Script, **policy: Any) -> AsyncIterator[tuple[Rig, list[AsyncExitStack], EnginePool]]:
    events: list[Event] = []
    hub = Hub()
    async with AsyncExitStack() as stack:
        stacks = [await stack.enter_async_context(AsyncExitStack()) for _ in scripts]
        urls = [await one.enter_async_context(upstream(script)) for one, script in zip(stacks, scripts, strict=True)]
        pool = EnginePool([OpenAIEngine(url, name=f"engine-{i}", read_timeout_s=10) for i, url in enumerate(urls)])
        stack.push_async_callback(pool.aclose)
        stack.enter_context(hub.sink(events.append))
        guard = await Guard.open(pool, Policy(model="scripted", **policy), hub)
        address = await stack.enter_async_context(gateway(guard, bind("127.0.0.1", 0)))
        yield Rig(guard, events, address), stacks, pool


def seen(script: Script) -> int:
    return sum("completions" in path for path, _, _ in script.seen)


async def test_whoever_asked_is_told_of_the_attempt_that_stands() -> None:
    gone, well = Script(chat=[], hang_up=True), Script(chat=THINKS_AND_ANSWERS)
    async with pooled(gone, well) as (r, _, _):
        for i in range(8):
            reply = Reply()
            assert text([c async for c in r.guard.stream(ASK, Identity("", f"s{i}"), reply=reply)]) == "bb"
            assert [type(e) for e in reply.events] == [StepStarted, StepFinished]
            assert not r.finished().error
        assert seen(gone) == 1


async def test_sessions_are_spread_stay_and_move_between_steps_when_their_engine_is_away() -> None:
    one, two = Script(chat=THINKS_AND_ANSWERS), Script(chat=THINKS_AND_ANSWERS)
    async with pooled(one, two) as (r, stacks, pool):
        for _ in range(2):
            for i in range(12):
                await r.step(identity=Identity("", f"s{i}"))
        assert seen(one) + seen(two) == 24
        assert seen(one) % 2 == seen(two) % 2 == 0  # a session stays where it is
        assert min(seen(one), seen(two)) > 0
        await stacks[0].aclose()
        for i in range(12):
            await r.step(identity=Identity("", f"s{i}"))
        assert seen(one) + seen(two) == 36
        assert set(pool.away) == {"engine-0"}
        async with httpx2.AsyncClient(base_url=r.url) as client:
            ready = await client.get("/health/ready")
            assert (ready.status_code, ready.json()["engines"]) == (200, {"engine-0": "away", "engine-1": "ok"})
            await stacks[1].aclose()
            with pytest.raises(EngineDiedError):
                await r.step()
            gone = await client.get("/health/ready")
            assert (gone.status_code, gone.json()["reasons"]) == (503, ["no engine answers"])


async def test_in_the_middle_of_a_stream_nobody_takes_over_silently() -> None:
    broken = Script(chat=THINKS_AND_ANSWERS[:2], hang_up=True)
    well = Script(chat=THINKS_AND_ANSWERS)
    async with pooled(broken, well) as (r, _, pool):
        name = next(f"s{i}" for i in range(100) if pool.choose(f"s{i}").name == "engine-0")  # type: ignore[union-attr]
        with pytest.raises(EngineDiedError):
            await r.step(identity=Identity("", name))
        assert seen(well) == 0
        await r.step(identity=Identity("", name))  # asked again, it goes elsewhere
        assert seen(well) == 1


async def test_an_engine_comes_back_by_itself() -> None:
    async with pooled(Script(chat=THINKS_AND_ANSWERS), Script(chat=THINKS_AND_ANSWERS)) as (_, _, pool), asyncio.timeout(10):
        pool.failed(pool.engines[0], EngineDiedError("gone"))
        async with pool.watched(0.1):
            while pool.away:
                await asyncio.sleep(0.05)


# -- the store ---------------------------------------------------------------------------------------------------------------------


class Redis:
    """A real Redis that can be killed and comes back with what it had."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.directory = directory
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = ("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes")
        command += ("--appendfsync", "no")  # "everysec" may hold a write back while the disk is busy
        self.process = await asyncio.create_subprocess_exec(
            *command, "--dir", str(self.directory), stdout=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(StoreError):
                    async with open_sessions(self.url):
                        return
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Redis]:
    server = Redis(tmp_path)
    await server.start()
    yield server
    await server.kill()


@asynccontextmanager
async def stored(script: Script, url: str, **policy: Any) -> AsyncIterator[Rig]:
    events: list[Event] = []
    hub, whole = Hub(), Policy.model_validate({"model": "scripted", "store": {"url": url, "lease_s": 1}, **policy})
    async with upstream(script) as engine_url, session_books(whole) as books:
        engine = OpenAIEngine(engine_url, read_timeout_s=10)
        with hub.sink(events.append):
            guard = await Guard.open(engine, whole, hub, books=books)
            async with gateway(guard, bind("127.0.0.1", 0)) as address:
                yield Rig(guard, events, address)
        await engine.aclose()


@NO_REDIS
async def test_while_redis_is_away_limited_sessions_wait_others_are_served_and_nothing_is_lost(redis: Redis) -> None:
    script = Script(chat=THINKS_AND_ANSWERS)
    async with stored(script, redis.url, limits={"tokens": 1000}) as r, httpx2.AsyncClient(base_url=r.url) as client:
        named = {"x-session-id": "me"}
        assert (await client.post("/v1/chat/completions", json=ASK, headers=named)).status_code == 200
        await redis.kill()
        refused = await client.post("/v1/chat/completions", json=ASK, headers=named)
        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (503, "store_away", "2")
        assert (await client.get("/health/ready")).status_code == 503
        # a session that is only guessed has no hard limit
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
        assert r.guard.books.waiting
        await redis.start()
        async with asyncio.timeout(20):
            while (await client.post("/v1/chat/completions", json=ASK, headers=named)).status_code != 200:
                await asyncio.sleep(0.1)
            while r.guard.books.waiting:
                await asyncio.sleep(0.05)
        kept = {key.session: m for key, m in await r.guard.books.store.sessions()}
        assert (kept["me"].steps, kept["me"].tokens, kept["me"].lost) == (2, 14, 0)
        (guessed,) = [m for name, m in kept.items() if name.startswith("h-")]
        assert (guessed.steps, guessed.tokens) == (1, 7)


@NO_REDIS
async def test_a_step_that_runs_while_redis_dies_is_settled_when_it_is_back(redis: Redis) -> None:
    script = Script(chat=[*THINKS_AND_ANSWERS[:2], 0.3, *THINKS_AND_ANSWERS[2:]])
    async with stored(script, redis.url, limits={"tokens": 1000}) as r:
        step = asyncio.create_task(r.step())
        while not r.guard.running:
            await asyncio.sleep(0.01)
        await redis.kill()
        assert text(await step) == "bb"  # the store costs no stream
        await redis.start()
        async with asyncio.timeout(20):
            while r.guard.books.waiting:
                await asyncio.sleep(0.05)
        ((_, meters),) = await r.guard.books.store.sessions()
        assert (meters.steps, meters.tokens, meters.lost) == (1, 7, 0)


class Late:
    """A store that answers while the loop is busy with something else, or late."""

    def __init__(self, store: SessionStore, busy_s: float, late_s: float) -> None:
        self.store, self.busy_s, self.late_s = store, busy_s, late_s

    async def reserve(self, key: Key, ask: Ask) -> Any:
        answer = asyncio.ensure_future(self.store.reserve(key, ask))
        await asyncio.sleep(self.late_s)
        end = time.monotonic() + self.busy_s
        while time.monotonic() < end:
            pass
        return await answer

    async def settle(self, batch: Any) -> list[int]:
        return await self.store.settle(batch)


async def test_a_busy_loop_is_no_store_that_is_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("agentguard.store.books.PATIENCE_S", 0.1)
    async with open_sessions(f"sqlite:{tmp_path / 's.db'}") as store:
        books = Books(Late(store, busy_s=1.0, late_s=0.0))  # type: ignore[arg-type]
        assert isinstance(await books.reserve(Key("", "me"), Ask("a", 10)), Grant)
        books = Books(Late(store, busy_s=0.0, late_s=5.0))  # type: ignore[arg-type]
        async with books.open():
            with pytest.raises(StoreError, match="did not answer"):
                await books.reserve(Key("", "me"), Ask("b", 10))
            with pytest.raises(StoreError):  # and at once, while it is known to be away
                await books.reserve(Key("", "me"), Ask("c", 10))
        ((_, meters),) = await store.sessions()
        assert meters.steps == 1  # what was given up left nothing behind


async def test_a_queue_of_settlements_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("agentguard.store.books.QUEUE", 10)
    async with open_sessions(f"sqlite:{tmp_path / 's.db'}") as store:
        books = Books(store)
        for i in range(25):
            books.post(Key("", "me"), Settlement(f"{i}", tokens=1, record="r"))
        assert (books.waiting, books.given_up) == (10, 15)


async def test_parallel_steps_cannot_overshoot_a_hard_limit_of_tokens() -> None:
    """Each may use 100; what the limit leaves is reserved first, so the engine is never asked for more than that."""
    script = Script(chat=[0.05, *THINKS_AND_ANSWERS])
    async with rig(script, limits={"tokens": 250}) as r:
        results = await asyncio.gather(*(r.step(ASK | {"seed": i}) for i in range(10)), return_exceptions=True)
        assert sum(isinstance(x, SessionBusyError) for x in results) == 7
        assert sorted(body["max_tokens"] for path, body, _ in script.seen if "chat" in path) == [50, 100, 100]
        for i in range(40):
            with contextlib.suppress(SessionLimitError):
                await r.step(ASK | {"seed": 100 + i})
        (session,) = r.guard.sessions
        assert session.tokens <= 250


async def test_a_session_goes_on_in_another_worker_where_it_was(tmp_path: Path) -> None:
    """What the first one learned is there: numbers, answers, what was cut and what did not fit."""
    script, url = Script(chat=THINKS_AND_ANSWERS), f"sqlite:{tmp_path / 's.db'}"
    async with stored(script, url, limits={"steps": 6}) as one, stored(script, url, limits={"steps": 6}) as two:
        for r in (one, two, one, two, two):
            await r.step()
        assert [two.started().step, two.finished().step] == [5, 5]
        (first,), (second,) = one.guard.sessions, two.guard.sessions
        assert (second.lengths.traces, second.lengths.answers) == ([3] * 5, [2] * 5)
        assert second.sums.keys() == {("scripted/chat/first", "strict"), ("scripted/chat/follow_up", "strict")}
        await one.step()
        assert first.lengths.traces == [3] * 6
        for r in (one, two):
            with pytest.raises(SessionLimitError, match="steps is 6 of 6"):
                await r.step()
        assert await one.guard.raise_limit("me", "steps", 7)
        await two.step()  # raised there, it holds here
        with pytest.raises(SessionLimitError, match="steps is 7 of 7"):
            await one.step()
    async with stored(script, url, limits={"steps": 6}) as third:
        with pytest.raises(SessionLimitError, match="steps is 7 of 7"):
            await third.step()


async def test_a_full_disk_is_an_error_of_that_step_and_passes(tmp_path: Path) -> None:
    """In a process of its own, as its files may not grow any more."""
    program = f"""
    import asyncio, resource
    from agentguard.store import StoreError
    from agentguard.store.accounts import Ask, Grant, Key, Settlement
    from agentguard.store.sessions import SessionStore, open_sessions

    async def main():
        async with open_sessions("sqlite:{tmp_path / "s.db"}") as store:
            key = Key("", "me")
            await store.reserve(key, Ask("a", 10, tokens=100))
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            failed = 0
            for i in range(20):
                try:
                    await store.settle([(key, Settlement(f"x{{i}}", tokens=1, record="r" * 5000))])
                except StoreError as error:
                    failed += "is the disk full" in str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            for i in range(20):
                await store.settle([(key, Settlement(f"x{{i}}", tokens=1, record="r"))])
            await store.settle([(key, Settlement("a", tokens=5, record="r"))])
            ((_, meters),) = await store.sessions()
            print(failed, meters.steps, meters.tokens)

    asyncio.run(main())
    """
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    failed, steps, tokens = map(int, ran.stdout.split() or pytest.fail(ran.stderr))
    assert failed > 10
    assert (steps, tokens) == (21, 25)


async def test_a_clock_that_jumps_ends_no_lease_and_sweeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_sessions(f"sqlite:{tmp_path / 's.db'}") as store:
        await store.reserve(Key("", "running"), Ask("a", 60, tokens=100))
        await store.settle([(Key("", "idle"), Settlement("b", tokens=1, record="r"))])
        monkeypatch.setattr("agentguard.store.books.SWEEP_S", 0.2)
        books = Books(store, lease_s=0.2, retention_s=86_400)
        async with books.open():
            await asyncio.sleep(0.1)
            real = time.time
            monkeypatch.setattr("time.time", lambda: real() + 400 * 86_400)
            await asyncio.sleep(0.3)
        granted = await store.reserve(Key("", "running"), Ask("c", 60, tokens=100))
        assert isinstance(granted, Grant)
        assert (granted.tokens, granted.meters.lost) == (40, 0)
        assert {key.session for key, _ in await store.sessions()} == {"running", "idle"}


def test_the_clock_of_leases_is_the_machines_own() -> None:
    boot, clock = accounts.boot_clock()
    assert boot
    assert clock() <= clock()
    assert resource.getpagesize()
