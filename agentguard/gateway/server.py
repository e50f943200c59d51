"""Everything that serves, wired together: engine, telemetry, guard and gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.pool import EnginePool
from agentguard.engines.vllm_process import VllmProcess, vllm_process
from agentguard.errors import ConfigError, EngineDiedError, EngineError
from agentguard.gateway.access import Access
from agentguard.gateway.admission import Drain
from agentguard.gateway.app import create_app
from agentguard.gateway.auth import check_address
from agentguard.gateway.protocol import BoundedHttp
from agentguard.middleware import Guard
from agentguard.policy import Policy, ServingLimits, parse
from agentguard.store.kept import economics, session_books
from agentguard.tasks import owned_loop, owned_task
from agentguard.telemetry.engine_source import engine_source
from agentguard.telemetry.hub import Hub
from agentguard.telemetry.metrics import Metrics

KEEP_ALIVE_S = 75
SILENT_S = 30.0
LAST_WORD_S = 2.0
"""For the last events of streams that had no time left."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A running engine behind a guard and its gateway at ``url``."""

    engine: VllmProcess
    guard: Guard
    hub: Hub
    url: str

    async def until_engine_ends(self) -> EngineDiedError:
        """Wait for the engine's process to end; returns the error that says how."""
        await self.engine.process.wait()
        return await asyncio.to_thread(self.engine.died)


@asynccontextmanager
async def serve_stack(
    policy: Policy, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None, operator_key: str | None = None,
    access: Access | None = None, hub: Hub | None = None,
) -> AsyncIterator[Stack]:  # fmt: skip
    """Start an engine for the policy and the gateway in front of it; stop both at the end.

    ``port`` 0 takes a free one; ``access`` goes before the two keys. Raises ConfigError for a port in use, and for an address
    others can reach without a key, before the engine is started.
    """
    hub, access = hub or Hub(), Access.of(access, api_key, operator_key)
    with bind(host, port) as listener:
        check_address(listener.getsockname()[0], access.keys)
        async with vllm_process(policy) as engine:
            client = OpenAIEngine(engine.url, api_key=engine.api_key)
            try:
                async with (
                    engine_source(hub, engine.telemetry), economics(policy, hub.publish) as ledger, session_books(policy) as books
                ):  # fmt: skip
                    guard = await Guard.open(client, policy, hub, ledger=ledger, books=books)
                    with hub.sink(guard.observe):
                        async with gateway(guard, listener, access=access) as url:
                            yield Stack(engine, guard, hub, url)
            finally:
                await client.aclose()


@asynccontextmanager
async def serve_upstream(
    policy: Policy | Mapping[str, Any] | None, url: str | Sequence[str], *, key: str | None = None, host: str = "127.0.0.1",
    port: int = 0, api_key: str | None = None, operator_key: str | None = None, access: Access | None = None,
    hub: Hub | None = None, store: str | None = None,
) -> AsyncIterator[tuple[Guard, str]]:  # fmt: skip
    """The gateway in front of a server that runs already: any that speaks OpenAI's chat completions, with our plugin or without.
    Several URLs of servers of one model make a pool: sessions are spread over them, and go on elsewhere when one is away.

    policy: None takes the server's model with the defaults, and a mapping of a policy's keys without ``model`` gets it; its
    ``engine.max_model_len`` is the window of a server that does not state one; ``store``: of its sessions, where the policy names
    none. Yields the guard and the gateway's URL.

    Raises EngineDiedError when nobody answers at any ``url``, ConfigError for a mapping that is no policy.
    """
    access = Access.of(access, api_key, operator_key)
    with bind(host, port) as listener:
        check_address(listener.getsockname()[0], access.keys)
        async with (
            guarded(policy, [url] if isinstance(url, str) else url, key=key, hub=hub, store=store) as guard,
            gateway(guard, listener, access=access) as address,
        ):
            yield guard, address


@asynccontextmanager
async def guarded(
    policy: Policy | Mapping[str, Any] | None,
    urls: Sequence[str],
    *,
    key: str | None = None,
    hub: Hub | None = None,
    store: str | None = None,
) -> AsyncIterator[Guard]:
    """A guard in front of servers that run already; see `serve_upstream`."""
    hub = hub or Hub()
    given = policy if isinstance(policy, Policy) else parse({"model": "of the server", **(policy or {})})
    window = given.engine.max_model_len
    pool = EnginePool([OpenAIEngine(url, name=f"engine-{i}", api_key=key, window=window) for i, url in enumerate(urls)])
    try:
        if not isinstance(policy, Policy):
            policy = given if policy and "model" in policy else given.model_copy(update={"model": (await pool.info()).model})
        if store is not None and policy.store.url is None:
            policy = policy.model_copy(update={"store": policy.store.model_copy(update={"url": store})})
        async with economics(policy, hub.publish) as ledger, session_books(policy) as books:
            guard = await Guard.open(pool, policy, hub, ledger=ledger, books=books)
            async with pool.watched():
                yield guard
    finally:
        await pool.aclose()


@asynccontextmanager
async def gateway(
    guard: Guard, listener: socket.socket, *others: socket.socket, api_key: str | None = None, operator_key: str | None = None,
    access: Access | None = None,
) -> AsyncIterator[str]:  # fmt: skip
    """The gateway as a server in this event loop, on bound sockets; yields the first one's URL. ``access`` goes before the keys.

    At the end of the block nothing new is taken on, running steps may go on for the policy's ``drain_s``, and those that are left
    end with an error that says so. Raises ConfigError for an address others can reach without a key.
    """
    access = Access.of(access, api_key, operator_key)
    for one in (listener, *others):
        check_address(one.getsockname()[0], access.keys)
    drain, metrics = Drain(), Metrics()
    with guard.hub.sink(metrics.observe):
        app = create_app(guard, keys=access.keys, allowed_hosts=access.allowed_hosts, drain=drain, metrics=metrics)
        async with (
            traced(guard) as wrapped,
            _served(wrapped(app), access.tls, drain, guard.policy.serving, listener, *others) as url,
        ):
            yield url


@asynccontextmanager
async def traced(guard: Guard) -> AsyncIterator[Callable[[Any], Any]]:
    """OpenTelemetry while the block runs, where the environment asks for it; yields what the app is wrapped in."""
    from agentguard.telemetry import otel

    if not otel.configured():
        yield lambda app: app
        return
    exporting = otel.exporting("vllm" if guard.engine.facts.plugin else "openai")
    sink = await asyncio.to_thread(exporting.__enter__)  # it imports, and its end sends what is left: both block
    try:
        if sink is None:
            yield lambda app: app
        else:
            with guard.hub.sink(sink.observe):
                yield otel.TraceContext
    finally:
        await asyncio.to_thread(exporting.__exit__, None, None, None)


@asynccontextmanager
async def _served(
    app: Any, tls: ssl.SSLContext | None, drain: Drain, serving: ServingLimits, listener: socket.socket, *others: socket.socket
) -> AsyncIterator[str]:
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        proxy_headers=False,  # nobody's word on where a request came from
        server_header=False,
        ssl_context_factory=None if tls is None else lambda *_: tls,
        log_config=None,  # its lines go the way of ours
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,  # agents think and run tools between two steps; uvicorn's 5 s would close under them
    )
    server = _Server(config)
    for one in (listener, *others):
        give_up_after(one, serving.send_s)
    async with (
        owned_task(server.serve(sockets=[listener, *others]), "gateway") as task,
        owned_loop(lambda: end_silent(server.server_state.connections), "silent connections"),
    ):
        while not server.started and not task.done():  # noqa: ASYNC110  # uvicorn sets a flag, no event
            await asyncio.sleep(0.02)
        if task.done():
            raise EngineError("the gateway ended while starting; its log says why")
        try:
            yield url_of(listener, tls=tls is not None)
        finally:
            drain.begin()
            server.should_exit = True
            await asyncio.wait([task], timeout=serving.drain_s)
            drain.expire()
            await asyncio.wait([task], timeout=LAST_WORD_S)
            for connection in list(server.server_state.connections):  # of clients that take not even that
                connection.transport.abort()
            server.force_exit = True
            await asyncio.wait([task], timeout=LAST_WORD_S)


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """The address of a bound socket as a URL."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def end_silent(connections: set[Any], every_s: float = 5.0, silent_s: float = SILENT_S) -> None:
    """End connections that have not sent a whole request for so long. uvicorn waits for its head without an end."""
    since: dict[Any, float] = {}
    while True:
        await asyncio.sleep(every_s)
        now = time.monotonic()
        waiting = [c for c in connections if c.cycle is None or c.cycle.response_complete]
        since = {c: since.get(c, now) for c in waiting}
        for connection, began in since.items():
            if (
                now - began > (silent_s if connection.cycle is None else silent_s + KEEP_ALIVE_S)
                and connection.transport is not None
            ):
                connection.transport.abort()


def give_up_after(listener: socket.socket, seconds: float) -> None:
    """Connections on which a peer takes nothing for so long, or from which it has vanished, are ended by the kernel: a slow client
    costs one connection and its buffers, not for ever, and no timer a chunk. Other systems than Linux have keep-alive alone."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_USER_TIMEOUT", seconds * 1000), ("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # accepted sockets inherit them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, int(value)))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, held from before the engine starts, so that nobody takes the port meanwhile. Port 0 takes a free one.

    Raises ConfigError for an address that cannot be listened on.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError("host", host, f"is no address of this machine ({error.strerror}); use 127.0.0.1") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError("port", port, f"cannot listen on {host}:{port} ({error.strerror}); choose another port") from None
    return listener


class _Server(uvicorn.Server):
    """Signals belong to the program, not to one of its servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
