"""Work beside a gateway that must live as long as it: what fails says so at once, and what watches goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from agentguard.economics.ledger import Ledger, ledger_of
from agentguard.engines.vllm_process import free_port
from agentguard.errors import ConfigError, EngineStartError
from agentguard.events import EngineDied, Event, encode_msgpack
from agentguard.gateway import workers
from agentguard.gateway.server import bind
from agentguard.policy import Policy
from agentguard.store import sync
from agentguard.store.accounts import Key, Settlement
from agentguard.store.books import Books
from agentguard.tasks import owned_loop, owned_task
from agentguard.telemetry.engine_source import engine_source
from agentguard.telemetry.hub import Hub
from agentguard.telemetry.recorder import record
from tests.scripted import Script, upstream
from tests.test_guard import THINKS_AND_ANSWERS


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tasks", "gateway.workers"):
        monkeypatch.setattr(f"agentguard.{module}.AGAIN_S", (0.01, 0.05))


def said(caplog: pytest.LogCaptureFixture, message: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.message == message]


async def fails() -> None:
    raise OSError(errno.EAGAIN, "SECRET words of a request")


async def test_a_task_that_fails_says_so_before_its_block_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def block() -> None:
        async with owned_task(fails(), "watch"):
            await asyncio.sleep(0.01)
            (line,) = said(caplog, "task_failed")
            assert (line.task, line.levelname) == ("watch", "ERROR")  # type: ignore[attr-defined]
            assert "BlockingIOError at" in line.error  # type: ignore[attr-defined]
            assert "SECRET" not in str(line.__dict__)

    with pytest.raises(OSError, match="SECRET"):
        await block()


async def test_a_loop_that_fails_begins_anew_and_ends_with_its_block(caplog: pytest.LogCaptureFixture) -> None:
    began = 0

    async def work() -> None:
        nonlocal began
        began += 1
        await asyncio.sleep(0)
        raise KeyError(began)

    async with owned_loop(work, "loop") as task, asyncio.timeout(10):
        while began < 6:
            await asyncio.sleep(0.01)
        assert not task.done()
    assert task.cancelled()
    assert [line.again_s for line in said(caplog, "task_failed")][:4] == [0.01, 0.02, 0.04, 0.05]  # type: ignore[attr-defined]


async def test_a_worker_whose_fork_fails_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.model_validate({"model": "scripted", "store": {"url": f"sqlite:{tmp_path / 's.db'}"}})
    start = asyncio.create_subprocess_exec
    failures = [OSError(errno.EAGAIN, "no process"), MemoryError(), OSError(errno.ENOMEM, "no memory")]

    async def scarce(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return await start(*arguments, **options)

    async with upstream(Script(chat=THINKS_AND_ANSWERS)) as url, asyncio.timeout(60):
        with bind("127.0.0.1", 0) as listener:
            taken, failures = failures, []
            async with workers.serve_workers(policy, [url], listener, 1) as running:
                monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
                (worker,) = running.workers
                dead = worker.process
                assert dead is not None
                failures[:] = taken
                dead.kill()
                while worker.process is dead or not worker.url:
                    await asyncio.sleep(0.05)
                assert not failures
                assert worker.starts == 5


async def test_a_first_worker_that_cannot_be_forked_is_told_and_takes_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.model_validate({"model": "scripted", "store": {"url": f"sqlite:{tmp_path / 's.db'}"}})
    start, count, processes = asyncio.create_subprocess_exec, 0, []

    async def scarce(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(errno.EAGAIN, "no process")
        processes.append(process := await start(*arguments, **options))
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
    with bind("127.0.0.1", 0) as listener, pytest.raises(EngineStartError, match="worker 1 cannot be started"):
        async with asyncio.timeout(60), workers.serve_workers(policy, ["http://127.0.0.1:1"], listener, 2):
            pass
    assert all(process.returncode is not None for process in processes)


async def test_the_exchange_of_economics_survives_a_store_with_odd_words(monkeypatch: pytest.MonkeyPatch) -> None:
    done = 0

    async def exchange(ledger: Ledger, store: Any, setup: str = "") -> None:
        nonlocal done
        done += 1
        if done in (2, 3):
            raise ValueError("a sum that is none")

    monkeypatch.setattr(sync, "exchange", exchange)
    ledger = await asyncio.to_thread(ledger_of, Policy(model="m"), on_event=lambda _: None)
    async with sync.synced(ledger, None, every_s=0.01), asyncio.timeout(10):  # type: ignore[arg-type]
        while done < 6:
            await asyncio.sleep(0.01)


async def test_frames_go_on_behind_one_that_a_sink_cannot_take() -> None:
    hub, got = Hub(), []

    def sink(event: Event) -> None:
        got.append(event)
        if len(got) == 1:
            raise RuntimeError("a sink of ours")

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUB)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    socket.bind(endpoint)
    try:
        with hub.sink(sink):
            async with engine_source(hub, endpoint), asyncio.timeout(10):
                while len(got) < 3:
                    await socket.send(encode_msgpack(EngineDied(t=0.0, engine="e", reason="x")))
                    await asyncio.sleep(0.02)
    finally:
        socket.close(linger=0)
        context.term()


async def test_a_recording_that_cannot_go_on_says_so_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub, path = Hub(), tmp_path / "events.jsonl"

    async def block() -> None:
        async with record(hub, path) as recorder, asyncio.timeout(10):
            recorder._write = lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))  # type: ignore[method-assign]
            hub.publish(EngineDied(t=0.0, engine="e", reason="x"))
            while not said(caplog, "recording_failed"):
                await asyncio.sleep(0.01)
            hub.publish(EngineDied(t=0.0, engine="e", reason="x"))
            assert recorder._lines == []  # nothing is kept for a disk that takes nothing

    with pytest.raises(ConfigError, match="cannot be written"):
        await block()


class Settling:
    """A store that takes every settlement."""

    def __init__(self) -> None:
        self.settled: list[str] = []

    async def settle(self, batch: list[tuple[Key, Settlement]]) -> list[int]:
        self.settled += [settlement.step for _, settlement in batch]
        return [1] * len(batch)


async def test_settlements_go_on_behind_one_whose_listener_fails() -> None:
    store = Settling()
    books = Books(store)  # type: ignore[arg-type]

    def told(_: int) -> None:
        raise msgspec.ValidationError("a mistake of ours")

    async with books.open(), asyncio.timeout(10):
        first = books.post(Key("", "a"), Settlement("one"), told)
        second = books.post(Key("", "a"), Settlement("two"))
        await first.wait()
        await second.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(books.post(Key("", "a"), Settlement("three")).wait(), 5)
    assert store.settled[0] == "one"
    assert {"two", "three"} <= set(store.settled)
    assert books.waiting == 0
