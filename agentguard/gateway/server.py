"""Everything that serves, wired together: engine, telemetry, guard and gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from agentguard.economics.ledger import Ledger, ledger_of, setup_of
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.vllm_process import VllmProcess, vllm_process
from agentguard.errors import ConfigError, EngineDiedError, EngineError
from agentguard.gateway.app import create_app
from agentguard.middleware import Guard
from agentguard.policy import Policy, parse
from agentguard.store import open_store
from agentguard.store.sync import synced
from agentguard.tasks import owned_task
from agentguard.telemetry.engine_source import engine_source
from agentguard.telemetry.hub import Hub
from agentguard.telemetry.metrics import Metrics


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
    hub: Hub | None = None,
) -> AsyncIterator[Stack]:  # fmt: skip
    """Start an engine for the policy and the gateway in front of it; stop both at the end.

    ``port`` 0 takes a free one. Raises ConfigError for a port in use before the engine is started.
    """
    hub = hub or Hub()
    with bind(host, port) as listener:
        async with vllm_process(policy) as engine:
            client = OpenAIEngine(engine.url, api_key=engine.api_key)
            try:
                async with engine_source(hub, engine.telemetry), economics(policy, hub) as ledger:
                    guard = await Guard.open(client, policy, hub, ledger=ledger)
                    with hub.sink(guard.observe):
                        async with gateway(guard, listener, api_key=api_key, operator_key=operator_key) as url:
                            yield Stack(engine, guard, hub, url)
            finally:
                await client.aclose()


@asynccontextmanager
async def serve_upstream(
    policy: Policy | Mapping[str, Any] | None, url: str, *, key: str | None = None, host: str = "127.0.0.1", port: int = 0,
    api_key: str | None = None, operator_key: str | None = None, hub: Hub | None = None,
) -> AsyncIterator[tuple[Guard, str]]:  # fmt: skip
    """The gateway in front of a server that runs already: any that speaks OpenAI's chat completions, with our plugin or without.

    policy: None takes the server's model with the defaults, and a mapping of a policy's keys without ``model`` gets it; its
    ``engine.max_model_len`` is the window of a server that does not state one. Yields the guard and the gateway's URL. Raises
    EngineDiedError when nobody answers at ``url``, ConfigError for a mapping that is no policy.
    """
    hub = hub or Hub()
    with bind(host, port) as listener:
        given = policy if isinstance(policy, Policy) else parse({"model": "of the server", **(policy or {})})
        client = OpenAIEngine(url, api_key=key, window=given.engine.max_model_len)
        try:
            if not isinstance(policy, Policy):
                policy = given if policy and "model" in policy else given.model_copy(update={"model": (await client.info()).model})
            async with economics(policy, hub) as ledger:
                guard = await Guard.open(client, policy, hub, ledger=ledger)
                async with gateway(guard, listener, api_key=api_key, operator_key=operator_key) as address:
                    yield guard, address
        finally:
            await client.aclose()


@asynccontextmanager
async def economics(policy: Policy, hub: Hub) -> AsyncIterator[Ledger]:
    """The policy's ledger, kept in its store while the block runs. Raises ConfigError, and StoreError when the store is not
    there."""
    ledger = await asyncio.to_thread(ledger_of, policy, on_event=hub.publish)
    if policy.economics.store is None:
        yield ledger
        return
    async with open_store(policy.economics.store) as store, synced(ledger, store, setup_of(policy)):
        yield ledger


@asynccontextmanager
async def gateway(
    guard: Guard, listener: socket.socket, *, api_key: str | None = None, operator_key: str | None = None
) -> AsyncIterator[str]:
    """The gateway as a server in this event loop, on a bound socket; yields its URL."""
    metrics = Metrics()
    with guard.hub.sink(metrics.observe):
        async with (
            traced(guard) as wrapped,
            _served(wrapped(create_app(guard, api_key=api_key, operator_key=operator_key, metrics=metrics)), listener) as url,
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
async def _served(app: Any, listener: socket.socket) -> AsyncIterator[str]:
    config = uvicorn.Config(
        app,
        log_config=None,  # its lines go the way of ours
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,  # agents think and run tools between two steps; uvicorn's 5 s would close under them
    )
    server = _Server(config)
    async with owned_task(server.serve(sockets=[listener]), "gateway") as task:
        while not server.started and not task.done():  # noqa: ASYNC110  # uvicorn sets a flag, no event
            await asyncio.sleep(0.02)
        if task.done():
            raise EngineError("the gateway ended while starting; its log says why")
        host, port = listener.getsockname()[:2]
        try:
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            server.should_exit = True
            await asyncio.wait([task], timeout=10)


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
