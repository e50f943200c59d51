"""A real LiteLLM in its own environment, in front of the gateway and a scripted server; started once (10 s)."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import anthropic
import openai
import pytest
import pytest_asyncio

from agentguard.dirs import cache_dir
from agentguard.engines.facts import Facts
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.vllm_process import free_port
from agentguard.events import Event, SessionAlarm, StepFinished, StepStarted, TraceClosed
from agentguard.gateway.server import bind, gateway
from agentguard.middleware import Guard
from agentguard.policy import Policy
from agentguard.proxy.environment import prepare
from agentguard.proxy.process import Proxy, litellm_process
from agentguard.telemetry.hub import Hub
from tests.proxy.clients import BIN
from tests.scripted import Script, upstream

POLICY = Policy.model_validate({"model": "scripted", "cutoff": {"think_tokens": 200}})


@dataclass
class Behind:
    """``script`` is what the server says; set another one before a test's requests."""

    script: Script
    guard: Guard
    events: list[Event]
    gateway: str
    proxy: Proxy
    key: str
    marked: int = 0
    clients: list[openai.AsyncOpenAI | anthropic.AsyncAnthropic] = field(default_factory=list)

    def says(self, script: Script) -> Script:
        """A new script, and nothing remembered of the server before it."""
        for one in fields(Script):
            setattr(self.script, one.name, getattr(script, one.name))
        self.guard.engine.facts = Facts()
        self.guard.policy = POLICY
        self.marked = len(self.events)
        return self.script

    def limits(self, **limits: int) -> None:
        self.guard.policy = POLICY.model_copy(update={"limits": POLICY.limits.model_copy(update=limits)})

    def _since(self, kind: type[Event]) -> list[Event]:
        return [e for e in self.events[self.marked :] if isinstance(e, kind)]

    @property
    def started(self) -> list[StepStarted]:
        return self._since(StepStarted)  # type: ignore[return-value]

    @property
    def finished(self) -> list[StepFinished]:
        return self._since(StepFinished)  # type: ignore[return-value]

    @property
    def closes(self) -> list[TraceClosed]:
        return self._since(TraceClosed)  # type: ignore[return-value]

    @property
    def alarms(self) -> list[SessionAlarm]:
        return self._since(SessionAlarm)  # type: ignore[return-value]

    def openai(self) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=f"{self.proxy.url}/v1", api_key=self.key, max_retries=0, timeout=60)
        self.clients.append(client)
        return client

    def anthropic(self) -> anthropic.AsyncAnthropic:
        client = anthropic.AsyncAnthropic(base_url=self.proxy.url, api_key=self.key, max_retries=0, timeout=60)
        self.clients.append(client)
        return client


@asynccontextmanager
async def guarded(script: Script, policy: Policy = POLICY) -> AsyncIterator[tuple[Guard, list[Event], str]]:
    events: list[Event] = []
    hub = Hub()
    async with upstream(script) as url:
        engine = OpenAIEngine(url)
        with hub.sink(events.append):
            guard = await Guard.open(engine, policy, hub)
            async with gateway(guard, bind("127.0.0.1", 0)) as address:
                yield guard, events, address
        await engine.aclose()


@pytest.fixture(scope="session")
def litellm() -> Path:
    """By the product's own way: made on first use, 90 s, and found in the cache later."""
    return prepare()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def session_proxy(litellm: Path) -> AsyncIterator[Behind]:
    script = Script(window=8192)
    key = f"sk-{secrets.token_hex(32)}"
    async with (
        guarded(script) as (guard, events, url),
        litellm_process(litellm, model="scripted", gateway=url, master_key=key, port=free_port()) as proxy,
    ):
        yield Behind(script, guard, events, url, proxy, key)


@pytest_asyncio.fixture(loop_scope="session")
async def behind(session_proxy: Behind) -> AsyncIterator[Behind]:
    session_proxy.says(Script(window=8192))
    yield session_proxy
    while session_proxy.clients:
        await session_proxy.clients.pop().close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A user's home with settings of its own, which no run may touch."""
    for name in (".claude/settings.json", ".codex/config.toml", ".config/opencode/opencode.json", ".claude.json"):
        path = tmp_path / "home" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}" if name.endswith("json") else "")
    before = _contents(tmp_path / "home")
    yield tmp_path / "home"
    after = _contents(tmp_path / "home")
    assert {name: after.get(name) for name in before} == before


def _contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def agent_environment(home: Path, key: str) -> dict[str, str]:
    """A clean shell in ``home``, with the clients that 'make test-clients' installs."""
    kept = {k: v for k, v in os.environ.items() if k in ("LANG", "PYTHONPATH", "TERM")}
    return kept | {
        "HOME": str(home),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(cache_dir().parent),
        "AGENTGUARD_PROXY_KEY": key,
    }
