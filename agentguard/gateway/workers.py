"""Several gateway processes on one port, with one store of sessions between them.

They accept from one listening socket, which the supervisor holds: a worker that dies takes its own streams with it and no
connection that still waits. The supervisor starts another in its place. Each worker also listens on a loopback port of its own, for
what is said to one worker alone: its event stream, its monitor's frames, closing a trace that runs there.

What a worker needs, keys included, comes in one line on its stdin, where no process list shows it; the pipe's end is the
supervisor's, so a worker without a supervisor notices and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from agentguard.engines.vllm_process import die_with_parent
from agentguard.errors import ConfigError, EngineStartError
from agentguard.gateway.access import Access, rebuilt
from agentguard.gateway.auth import check_address
from agentguard.gateway.server import bind, gateway, guarded, url_of
from agentguard.policy import Policy, parse
from agentguard.tasks import AGAIN_S, LIVED_S, owned_loop
from agentguard.telemetry.engine_source import engine_source
from agentguard.telemetry.hub import Hub

logger = logging.getLogger(__name__)
START_S = 60.0
STOP_S = 10.0
"""On top of the drain time, before a worker that does not end is killed."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told. ``fd``: the shared listener; ``access``: for `gateway.access.rebuilt`; ``telemetry``: the engine's
    tap, "" where there is none."""

    policy: dict[str, Any]
    urls: list[str]
    fd: int
    number: int
    key: str | None = None
    access: dict[str, Any]
    telemetry: str = ""


@dataclass(slots=True)
class Worker:
    """``url``: its own port; ``starts``: how often it was started."""

    number: int
    process: asyncio.subprocess.Process | None = None
    url: str = ""
    starts: int = 0


@dataclass(slots=True)
class Workers:
    url: str
    workers: list[Worker] = field(default_factory=list)


@asynccontextmanager
async def serve_workers(
    policy: Policy, urls: Sequence[str], listener: socket.socket, count: int, *, key: str | None = None, api_key: str | None = None,
    operator_key: str | None = None, access: Access | None = None, telemetry: str = "",
) -> AsyncIterator[Workers]:  # fmt: skip
    """``count`` gateways in front of the servers at ``urls`` while the block runs; yields when all are ready.

    Raises ConfigError without a store that they can share, EngineStartError with a worker's own words when it does not come up.
    """
    if policy.store.url is None:
        raise ConfigError("store.url", None, "several workers share their sessions; give sqlite:PATH or redis://HOST:PORT/DB")
    access = Access.of(access, api_key, operator_key)
    check_address(listener.getsockname()[0], access.keys)
    told = policy.model_dump(mode="json", exclude_unset=True)
    listener.set_inheritable(True)
    running = Workers(url_of(listener, tls=access.tls is not None), [Worker(number) for number in range(count)])

    def orders(worker: Worker) -> bytes:
        one = Orders(
            policy=told, urls=list(urls), fd=listener.fileno(), number=worker.number, key=key, access=access.told or {},
            telemetry=telemetry,
        )  # fmt: skip
        return msgspec.json.encode(one) + b"\n"

    async def keep(worker: Worker) -> None:
        wait = AGAIN_S[0]
        while True:
            started = time.monotonic()
            assert worker.process is not None
            code = await worker.process.wait()
            logger.warning("worker_ended", extra={"worker": worker.number, "status": code})
            wait = AGAIN_S[0] if time.monotonic() - started > LIVED_S else min(2 * wait, AGAIN_S[1])
            await asyncio.sleep(wait)
            while True:
                try:
                    await _start(worker, orders(worker), listener.fileno())
                    break
                except EngineStartError as error:
                    wait = min(2 * wait, AGAIN_S[1])
                    told = {"worker": worker.number, "error": str(error), "again_s": wait}
                    logger.error("worker_not_started", extra=told)
                    await asyncio.sleep(wait)

    try:
        starting = [asyncio.ensure_future(_start(worker, orders(worker), listener.fileno())) for worker in running.workers]
        try:
            await asyncio.gather(*starting)
        finally:  # of several, one may fail while the others are on their way
            for one in starting:
                one.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        async with AsyncExitStack() as stack:
            for worker in running.workers:
                await stack.enter_async_context(owned_loop(partial(keep, worker), f"worker {worker.number}"))
            yield running
    finally:
        await asyncio.gather(*(_stop(worker, policy.serving.drain_s + STOP_S) for worker in running.workers))


async def _start(worker: Worker, orders: bytes, fd: int) -> None:
    """Raises EngineStartError."""
    worker.starts += 1
    try:
        worker.process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentguard.cli.worker", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            pass_fds=(fd,), start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineStartError(
            f"worker {worker.number} cannot be started ({error}); this machine has no process, memory or file left for it"
        ) from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(orders)
        await process.stdin.drain()
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        worker.url = str(json.loads(line)["url"])
    except (TimeoutError, ConnectionError, ValueError, LookupError, TypeError) as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise EngineStartError(
            f"worker {worker.number} did not become ready ({type(error).__name__}); its message stands above"
        ) from None


async def _stop(worker: Worker, patience_s: float) -> None:
    process = worker.process
    if process is None or process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        logger.error("worker_killed", extra={"worker": worker.number, "after_s": patience_s})
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# -- in the worker -----------------------------------------------------------------------------------------------------------------


async def work(orders: Orders) -> None:
    """Serve until the supervisor is gone or sends SIGTERM."""
    hub, access = Hub(), await asyncio.to_thread(rebuilt, orders.access)
    with socket.socket(fileno=orders.fd) as shared, bind("127.0.0.1", 0) as own:
        async with AsyncExitStack() as stack:
            if orders.telemetry:
                await stack.enter_async_context(engine_source(hub, orders.telemetry))
            guard = await stack.enter_async_context(guarded(parse(orders.policy), orders.urls, key=orders.key, hub=hub))
            stack.enter_context(hub.sink(guard.observe))
            await stack.enter_async_context(gateway(guard, shared, own, access=access))
            print(json.dumps({"url": url_of(own, tls=access.tls is not None)}), flush=True)
            await _orphaned()


async def _orphaned() -> None:
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            gone.set()

    loop.add_reader(sys.stdin.fileno(), read)
    await gone.wait()
    logger.warning("supervisor_gone")
