"""Everything that serves, wired together: engine, telemetry, guard and gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn

from agentguard.economics.ledger import Ledger, ledger_of, setup_of
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.vllm_process import VllmProcess, vllm_process
from agentguard.errors import ConfigError, EngineDiedError, EngineError
from agentguard.gateway.access import Access
from agentguard.gateway.app import create_app
from agentguard.gateway.auth import check_address
from agentguard.gateway.protocol import BoundedHttp
from agentguard.middleware import Guard
from agentguard.policy import Policy
from agentguard.store import open_store
from agentguard.store.sync import synced
from agentguard.tasks import owned_task
from agentguard.telemetry.engine_source import engine_source
from agentguard.telemetry.hub import Hub


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
                async with engine_source(hub, engine.telemetry), economics(policy, hub) as ledger:
                    guard = await Guard.open(client, policy, hub, ledger=ledger)
                    with hub.sink(guard.observe):
                        async with gateway(guard, listener, access=access) as url:
                            yield Stack(engine, guard, hub, url)
            finally:
                await client.aclose()


@asynccontextmanager
async def serve_upstream(
    policy: Policy | None, url: str, *, key: str | None = None, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None,
    operator_key: str | None = None, access: Access | None = None, hub: Hub | None = None,
) -> AsyncIterator[tuple[Guard, str]]:  # fmt: skip
    """The gateway in front of a server that runs already: any that speaks OpenAI's chat completions, with our plugin or without.

    policy: None takes the server's model with the defaults; its ``engine.max_model_len`` is the window of a server that does not
    state one. Yields the guard and the gateway's URL. Raises EngineDiedError when nobody answers at ``url``.
    """
    hub, access = hub or Hub(), Access.of(access, api_key, operator_key)
    with bind(host, port) as listener:
        check_address(listener.getsockname()[0], access.keys)
        client = OpenAIEngine(url, api_key=key, window=policy.engine.max_model_len if policy else None)
        try:
            policy = policy or Policy(model=(await client.info()).model)
            async with economics(policy, hub) as ledger:
                guard = await Guard.open(client, policy, hub, ledger=ledger)
                async with gateway(guard, listener, access=access) as address:
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
    guard: Guard, listener: socket.socket, *, api_key: str | None = None, operator_key: str | None = None,
    access: Access | None = None,
) -> AsyncIterator[str]:  # fmt: skip
    """The gateway as a server in this event loop, on a bound socket; yields its URL. Raises ConfigError for an address others can
    reach without a key."""
    access = Access.of(access, api_key, operator_key)
    check_address(listener.getsockname()[0], access.keys)
    tls = access.tls
    config = uvicorn.Config(
        create_app(guard, keys=access.keys, allowed_hosts=access.allowed_hosts),
        http=BoundedHttp,
        ws="none",
        proxy_headers=False,  # nobody's word on where a request came from
        server_header=False,
        ssl_context_factory=None if tls is None else lambda *_: tls,
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
            scheme = "http" if tls is None else "https"
            yield f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
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
