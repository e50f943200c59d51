"""`connect`: a guard to run sessions at, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentguard.engines.base import Engine
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.errors import ConfigError
from agentguard.events import ArmReport, Event
from agentguard.policy import Policy, load
from agentguard.sdk.backend import Backend, Served
from agentguard.sdk.local import LocalBackend
from agentguard.sdk.middleware import Handle, Middleware, validated
from agentguard.sdk.remote import RemoteBackend, client_of
from agentguard.sdk.request import StepRequest
from agentguard.sdk.retries import RETRIES, RETRY_S, RetryBusy
from agentguard.sdk.session import Session

if TYPE_CHECKING:
    from agentguard.telemetry.hub import Hub

OWNER = "agentguard"
"""What a gateway says in /v1/models that it is owned by."""


class Connection:
    """A guard and its engine. Made by `connect`."""

    def __init__(self, backend: Backend, handles: Sequence[Handle], *, buffer: int, timeout_s: float | None) -> None:
        self._backend = backend
        self._handles = handles
        self._buffer = buffer
        self._timeout_s = timeout_s
        self._sessions: set[Session] = set()

    @property
    def model(self) -> str:
        """The model that is served."""
        return self._backend.served.model

    @property
    def window(self) -> int | None:
        """Its context window in tokens; None where a gateway does not tell it."""
        return self._backend.served.window

    def session(
        self, name: str, *, agent: str = "", middleware: Sequence[Middleware | Handle] = (), max_tokens: int | None = None,
        think_tokens: int | None = None, temperature: float | None = None, rule: str | None = None, timeout_s: float | None = None,
        **extra: Any,
    ) -> Session:  # fmt: skip
        """A session of this name, to be used with ``async with``. The same name later goes on with the same account.

        ``name`` is 1 to 256 printable ASCII characters without spaces. ``agent``: which of the session's agents asks, "" for
        its main one; they share the account and have context windows of their own. ``middleware`` goes inside the connection's.
        The others are defaults for its steps (`Session.stream`). Raises ConfigError.
        """
        defaults = StepRequest(
            (), max_tokens=max_tokens, think_tokens=think_tokens, temperature=temperature, rule=rule,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s, extra=extra, session=name,
        )  # fmt: skip
        # the retries of a busy engine stay innermost, so that what goes around a step goes around all of its attempts
        handles = (*self._handles[:-1], *validated(middleware), self._handles[-1])
        account = self._backend.account(name, agent)
        return Session(
            name, account, self._backend.served, handles, buffer=self._buffer, defaults=defaults,
            on_begin=self._sessions.add, on_end=self._sessions.discard,
        )  # fmt: skip

    async def economics(self) -> list[ArmReport]:
        """Every arm of every class of work, the strict control first: λ, gain and verdict (docs/economics.md)."""
        return await self._backend.economics()

    def events(self) -> AsyncGenerator[Event, None]:
        """What the guard publishes of all sessions, from now on, one `agentguard.events.Event` after the other. A slow reader loses
        the oldest."""
        return self._backend.events()

    async def aclose(self) -> None:
        """End the sessions that are still open."""
        sessions = list(self._sessions)
        for session in sessions:
            session.stop()
        await asyncio.gather(*(session.aclose() for session in sessions))


@asynccontextmanager
async def connect(
    target: str | Path | Policy | Mapping[str, Any] | Engine, *, policy: Policy | Mapping[str, Any] | None = None,
    in_process: bool = False, api_key: str | None = None, operator_key: str | None = None,
    middleware: Sequence[Middleware | Handle] = (), retries: int = RETRIES, retry_s: float = RETRY_S,
    timeout_s: float | None = None, buffer: int = 64,
    connect_timeout_s: float = 30.0, read_timeout_s: float = 300.0, hub: Hub | None = None,
) -> AsyncIterator[Connection]:  # fmt: skip
    """Connect to a guard: ``async with connect(target) as guard``.

    ``target`` is one of

    - the URL of a gateway (`agentguard serve`), which keeps the sessions and their limits;
    - the URL of any OpenAI-compatible server, guarded in this process under ``policy`` (None: the defaults);
    - a `Policy`, a mapping of its fields or a recipe's path: a vLLM engine is started for it and guarded in this process, until
      the block ends. With ``in_process`` vLLM's `AsyncLLM` runs in this process too (agentguard.engines.vllm_inprocess);
    - an object that is an `agentguard.engines.base.Engine`, which stays the caller's to close.

    ``middleware``: the chain around each step, outermost first (agentguard.sdk.middleware). ``retries``: how often a step is tried
    again that found the engine gone or busy, within ``retry_s`` seconds (agentguard.sdk.retries.RetryBusy). ``timeout_s``: seconds
    a step may take, None for no limit. ``buffer``: events a stream reads ahead of its consumer. ``connect_timeout_s``,
    ``read_timeout_s``: seconds to connect, and of silence in a stream.
    ``api_key``: what the gateway or server asks for; ``operator_key``: for `close_now` and `raise_limit` at a gateway that has one.
    ``hub`` (agentguard.telemetry.hub.Hub) gets the events of a guard in this process.

    Raises ConfigError for a target or an option of a wrong form, EngineDiedError where nobody answers, EngineStartError for an
    engine that does not come up.
    """
    if buffer < 1:
        raise ConfigError("buffer", buffer, "at least 1 event")
    handles = (*validated(middleware), RetryBusy(retries, within_s=retry_s).handle)
    async with AsyncExitStack() as stack:
        url = _url(target)
        if url:
            timeouts = connect_timeout_s, read_timeout_s
            backend = await _at_url(stack, url, _policy(policy), api_key, operator_key, timeouts, hub)
        elif isinstance(target, str | Path | Policy | Mapping):
            if policy is not None:
                raise ConfigError("policy", policy, "goes with the URL of a server; here the target is the policy already")
            backend = await _started(stack, await _recipe(target), in_process, hub)
        elif hasattr(target, "chat") and hasattr(target, "tokenize_chat"):
            backend = await _guarded(stack, target, _policy(policy), hub)
        else:
            raise ConfigError("target", target, "give a URL, a Policy, a recipe's path or an Engine")
        connection = Connection(backend, handles, buffer=buffer, timeout_s=timeout_s)
        stack.push_async_callback(connection.aclose)
        yield connection


def _url(target: object) -> str:
    """The root of a server that the target names; "" where it is no URL."""
    return target.rstrip("/").removesuffix("/v1") if isinstance(target, str) and target.startswith(("http://", "https://")) else ""


def _policy(policy: Policy | Mapping[str, Any] | None) -> Policy | None:
    if policy is None or isinstance(policy, Policy):
        return policy
    from agentguard.policy import parse

    return parse(dict(policy))


async def _recipe(target: str | Path | Policy | Mapping[str, Any]) -> Policy:
    if isinstance(target, str | Path):
        return await asyncio.to_thread(load, Path(target))
    policy = _policy(target)
    assert policy is not None
    return policy


async def _at_url(
    stack: AsyncExitStack, url: str, policy: Policy | None, api_key: str | None, operator_key: str | None,
    timeouts: tuple[float, float], hub: Hub | None,
) -> Backend:  # fmt: skip
    client = client_of(url, api_key, connect_s=timeouts[0], read_s=timeouts[1])
    async with AsyncExitStack() as mine:
        await mine.enter_async_context(client)
        gateway = RemoteBackend(client, Served("", None), api_key, operator_key)
        models = (await gateway.ask("GET", "/v1/models")).get("data") or [{}]
        if models[0].get("owned_by") == OWNER:
            if policy is not None:
                raise ConfigError("policy", policy, f"{url} is a gateway, which has its own; leave it out")
            gateway.served = Served(models[0]["id"], models[0].get("max_model_len"))
            stack.push_async_exit(mine.pop_all())
            return gateway
    window = policy.engine.max_model_len if policy is not None else None
    engine = OpenAIEngine(url, api_key=api_key, connect_timeout_s=timeouts[0], read_timeout_s=timeouts[1], window=window)
    stack.push_async_callback(engine.aclose)
    return await _guarded(stack, engine, policy, hub)


async def _started(stack: AsyncExitStack, policy: Policy, in_process: bool, hub: Hub | None) -> Backend:
    """An engine of our own."""
    from agentguard.telemetry.hub import Hub

    hub = hub or Hub()
    engine: Engine
    if in_process:
        from agentguard.engines.vllm_inprocess import vllm_inprocess

        inside = await stack.enter_async_context(vllm_inprocess(policy))
        engine, telemetry = inside, inside.telemetry
    else:
        from agentguard.engines.vllm_process import vllm_process

        process = await stack.enter_async_context(vllm_process(policy))
        engine, telemetry = OpenAIEngine(process.url, api_key=process.api_key), process.telemetry
        stack.push_async_callback(engine.aclose)
    source = await asyncio.to_thread(_engine_source)
    await stack.enter_async_context(source(hub, telemetry))
    return await _guarded(stack, engine, policy, hub)


def _engine_source() -> Any:
    from agentguard.telemetry.engine_source import engine_source  # needs pyzmq, which comes with the engine

    return engine_source


async def _guarded(stack: AsyncExitStack, engine: Engine, policy: Policy | None, hub: Hub | None) -> LocalBackend:
    """A guard in this process around an engine."""
    from agentguard.middleware import Guard
    from agentguard.store.kept import economics, session_books
    from agentguard.telemetry.hub import Hub

    hub = hub or Hub()
    policy = policy or Policy(model=(await engine.info()).model)
    ledger = await stack.enter_async_context(economics(policy, hub.publish))
    books = await stack.enter_async_context(session_books(policy))
    guard = await Guard.open(engine, policy, hub, ledger=ledger, books=books)
    stack.enter_context(hub.sink(guard.observe))
    return LocalBackend(guard)
