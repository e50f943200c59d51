"""Everything that serves, wired together: engine, telemetry, guard and gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn

from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.vllm_process import VllmProcess, check_port, vllm_process
from agentguard.errors import EngineDiedError
from agentguard.gateway.app import create_app
from agentguard.middleware import Guard
from agentguard.policy import Policy
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
        return self.engine.died()


@asynccontextmanager
async def serve_stack(
    policy: Policy, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None, hub: Hub | None = None
) -> AsyncIterator[Stack]:
    """Start an engine for the policy and the gateway in front of it; stop both at the end.

    ``port`` 0 takes a free one. Raises ConfigError for a port in use before the engine is started.
    """
    if port:
        check_port("port", host, port)
    hub = hub or Hub()
    async with vllm_process(policy) as engine:
        client = OpenAIEngine(engine.url)
        try:
            async with engine_source(hub, engine.telemetry):
                guard = await Guard.open(client, policy, hub)
                async with gateway(guard, host=host, port=port, api_key=api_key) as url:
                    yield Stack(engine, guard, hub, url)
        finally:
            await client.aclose()


@asynccontextmanager
async def gateway(guard: Guard, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None) -> AsyncIterator[str]:
    """The gateway as a server in this event loop; yields its URL."""
    config = uvicorn.Config(
        create_app(guard, api_key=api_key), host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    server = _Server(config)
    async with owned_task(server.serve(), "gateway") as task:
        while not server.started:
            if task.done():
                task.result()
                raise EngineDiedError("the gateway ended while starting")
            await asyncio.sleep(0.02)
        bound = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://{host}:{bound}"
        finally:
            server.should_exit = True
            await asyncio.wait([task], timeout=10)


class _Server(uvicorn.Server):
    """Signals belong to the program, not to one of its servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
