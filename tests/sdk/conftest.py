"""The SDK in front of a scripted upstream, in each of its ways: a guard in this process over sockets, a guard in this process
around an
app without a socket, and a gateway over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import agentguard
from agentguard.engines.asgi import AsgiTransport
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.events import Event, StepFinished
from agentguard.gateway.server import bind, gateway
from agentguard.middleware import Guard
from agentguard.policy import Policy
from agentguard.telemetry.hub import Hub
from tests.scripted import END, STOP, USAGE, A, B, Script, application, chunk, upstream

WAYS = ("sockets", "app", "gateway")
ASK = [{"role": "user", "content": "hi"}]
THINKS_AND_ANSWERS = [
    chunk([], role="assistant"),
    chunk([A, A], reasoning="aa"),
    chunk([A, END, B], reasoning="a", content="b"),
    chunk([B, STOP], content="b", finish="stop"),
    USAGE,
]


@dataclass
class Rig:
    """``guard`` is the connection, ``inside`` the guard behind it, wherever that is."""

    guard: agentguard.Connection
    inside: Guard
    events: list[Event]
    script: Script

    @property
    def finished(self) -> list[StepFinished]:
        return [e for e in self.events if isinstance(e, StepFinished)]


@asynccontextmanager
async def rig(way: str, script: Script, *, policy: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Rig]:
    events: list[Event] = []
    hub = Hub()
    settings = Policy.model_validate({"model": "scripted", **(policy or {})})
    async with AsyncExitStack() as stack:
        stack.enter_context(hub.sink(events.append))
        if way == "app":
            transport = AsgiTransport(application(script))
            engine = OpenAIEngine("http://app", read_timeout_s=10, transport=transport)
            stack.push_async_callback(engine.aclose)
            guard = await stack.enter_async_context(agentguard.connect(engine, policy=settings, hub=hub, **options))
            inside = guard._backend.guard
        elif way == "sockets":
            url = await stack.enter_async_context(upstream(script))
            guard = await stack.enter_async_context(agentguard.connect(url, policy=settings, hub=hub, read_timeout_s=10, **options))
            inside = guard._backend.guard
        else:
            url = await stack.enter_async_context(upstream(script))
            engine = OpenAIEngine(url, read_timeout_s=10)
            stack.push_async_callback(engine.aclose)
            inside = await Guard.open(engine, settings, hub)
            address = await stack.enter_async_context(gateway(inside, bind("127.0.0.1", 0)))
            guard = await stack.enter_async_context(agentguard.connect(address, read_timeout_s=10, **options))
        yield Rig(guard, inside, events, script)


async def until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
