"""A gateway on a real socket in front of a scripted upstream, reachable in the way a test says."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from agentguard.engines.openai_http import OpenAIEngine
from agentguard.events import Event
from agentguard.gateway import auth
from agentguard.gateway.access import Access
from agentguard.gateway.server import bind, gateway
from agentguard.middleware import Guard
from agentguard.policy import Policy
from agentguard.telemetry.hub import Hub
from tests.scripted import END, STOP, USAGE, A, Script, chunk, upstream

ANSWERS = (chunk([A], reasoning="a"), chunk([END]), chunk([A], content="b"), chunk([STOP], finish="stop"), USAGE)
QUESTION = "what is the canary's own colour?"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 100}
JSON = {"content-type": "application/json"}


def script(**options: Any) -> Script:
    return Script(chat=list(ANSWERS), **options)


@dataclass
class Gate:
    """``seen``: what the upstream got; ``tokens``: keys by name."""

    guard: Guard
    script: Script
    url: str
    hub: Hub
    events: list[Event] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(urlsplit(self.url).port or 0)

    def client(self, key: str | None = None, **options: Any) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self.tokens.get(key, key)}"} if key is not None else {}
        options.setdefault("verify", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # reading the CA bundle takes 0.2 s
        return httpx2.AsyncClient(base_url=self.url, headers=headers | options.pop("headers", {}), timeout=20, **options)

    async def ask(self, key: str | None = None, **options: Any) -> httpx2.Response:
        async with self.client(key) as client:
            return await client.post("/v1/chat/completions", json=ASK, **options)

    @property
    def forwarded(self) -> list[dict[str, Any]]:
        return [body for path, body, _ in self.script.seen if path == "/v1/chat/completions"]


@asynccontextmanager
async def gate(
    upstream_script: Script | None = None, *, keys: dict[str, tuple[auth.Scope, ...]] | None = None, file: Path | None = None,
    access: Access | None = None, **policy: Any,
) -> AsyncIterator[Gate]:  # fmt: skip
    """``keys``: names and scopes of keys that are made and kept in ``file``."""
    tokens: dict[str, str] = {}
    if keys is not None:
        assert file is not None
        made = {name: auth.new_key(name, scopes) for name, scopes in keys.items()}
        await asyncio.to_thread(auth.write_keys, file, [key for _, key in made.values()])
        tokens = {name: text for name, (text, _) in made.items()}
        access = Access(await asyncio.to_thread(auth.Keyring.of, None, None, file))
    acts = upstream_script or script()
    hub, events = Hub(), list[Event]()
    async with upstream(acts) as url:
        engine = OpenAIEngine(url, read_timeout_s=10)
        try:
            with hub.sink(events.append):
                guard = await Guard.open(engine, Policy(model="scripted", **policy), hub)
                async with gateway(guard, bind("127.0.0.1", 0), access=access) as address:
                    yield Gate(guard, acts, address, hub, events, tokens)
        finally:
            await engine.aclose()


async def raw(port: int, data: bytes, *, wait_s: float = 5.0, more: bytes = b"", times: int = 0) -> bytes | None:
    """Send bytes as they are, then ``more`` up to ``times`` while nothing comes back. The answer's beginning; b"" where the server
    only hung up, None where it waits for more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        answer = asyncio.ensure_future(reader.read(1 << 16))
        for _ in range(times):
            with contextlib.suppress(ConnectionError):
                writer.write(more)
                await writer.drain()
            await asyncio.sleep(0)
            if answer.done():
                break
        done, _ = await asyncio.wait((answer,), timeout=wait_s)
        if not done:
            answer.cancel()
            return None
        try:
            return answer.result()
        except ConnectionError:
            return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
