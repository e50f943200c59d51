"""`wrap`: a client that exists already, guarded in this process.

The guard stands between the caller and the client, which stays what it is: its keys, headers, retries and errors. Sessions are told
apart as a gateway does it, by ``extra_headers={"x-session-id": …}``, ``metadata`` or the first prompt (agentguard.identity).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentguard.economics.ledger import ledger_of
from agentguard.engines.called import CALL, ClientEngine, FunctionEngine, Kind
from agentguard.errors import ConfigError, EngineError
from agentguard.identity import Guesses, identify
from agentguard.middleware import Guard
from agentguard.policy import Policy, parse
from agentguard.replies import collect
from agentguard.telemetry.hub import Hub

if TYPE_CHECKING:
    from agentguard.engines.base import Chunk, Stream

MODELS = 64
"""Models one wrapped client is asked for; a guard is kept for each."""
UNGUARDED = ("responses", "completions", "beta", "with_options", "copy", "with_raw_response", "with_streaming_response")
"""What of a client would go round the guard."""


def wrap(
    client: Any, *, policy: Policy | Mapping[str, Any] | None = None, window: int | None = None, hub: Hub | None = None
) -> Any:
    """``guarded = agentguard.wrap(client)``: the same calls, each a guarded step.

    ``client`` is an `openai.AsyncOpenAI` (or what is used like one), of which ``chat.completions.create`` is guarded and the rest
    passed on, or a function such as `litellm.acompletion`. Whole replies and streams are objects of the library's own classes; a
    mapping where it is another function's. ``policy``: None takes the defaults; its model gives way to the call's. ``window``: the
    context window in tokens, where the server does not state it (a function cannot). ``hub`` gets the guard's events.

    The client's errors are raised as they are. The guard's own are ConfigError (a bad request), ContextLengthError (no room for an
    answer) and SessionLimitError. Raises ConfigError for something that cannot be wrapped.
    """
    settings = dict(policy) if isinstance(policy, Mapping) else policy
    if hasattr(client, "chat") and hasattr(client, "base_url"):
        if not hasattr(client, "post") or not _is_async(client.chat.completions.create):
            raise ConfigError("client", type(client).__name__, "is not asynchronous; wrap an AsyncOpenAI")
        return WrappedClient(client, _Guards(lambda model: ClientEngine(client, model, window), settings, hub))
    if callable(client):
        if not _is_async(client):
            name = getattr(client, "__name__", type(client).__name__)
            raise ConfigError("client", name, "is not asynchronous; wrap the one that is awaited, such as litellm.acompletion")
        return WrappedFunction(_Guards(lambda model: FunctionEngine(client, model, window), settings, hub))
    raise ConfigError("client", client, "give an openai.AsyncOpenAI, or a function such as litellm.acompletion")


def _is_async(function: Any) -> bool:
    import inspect

    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class _Guards:
    """A guard for each model, opened with its first call."""

    def __init__(self, engine: Callable[[str], FunctionEngine], policy: Policy | dict[str, Any] | None, hub: Hub | None) -> None:
        if isinstance(policy, dict):
            policy = parse({"model": "", **policy})
        store = None if policy is None else policy.economics.store or policy.store.url
        if store is not None:
            raise ConfigError("store", store, "is not kept by wrap; use connect, or leave it out")
        self._engine = engine
        self._policy = policy
        self._hub = hub or Hub()
        self._guards: dict[str, Guard] = {}
        self._opening = asyncio.Lock()
        self._guesses = Guesses()

    async def of(self, model: Any) -> Guard:
        if not isinstance(model, str) or not model:
            raise ConfigError("model", model, "name the model to be called")
        async with self._opening:
            if model not in self._guards:
                if len(self._guards) >= MODELS:
                    raise ConfigError("model", model, f"is the one after {MODELS} models; wrap another client for it")
                engine = self._engine(model)
                policy = Policy(model=model) if self._policy is None else self._policy.model_copy(update={"model": model})
                ledger = await asyncio.to_thread(ledger_of, policy, on_event=self._hub.publish)
                self._guards[model] = await Guard.open(engine, policy, self._hub, ledger=ledger)
        return self._guards[model]

    async def call(self, arguments: dict[str, Any]) -> Any:
        """A call of the client's, guarded: a stream where it asks for one, else the whole reply."""
        given = {k: _plain(v) for k, v in arguments.items() if type(v).__name__ not in ("NotGiven", "Omit")}
        # the guard reads what came in extra_body like the rest; the engine puts it back there
        body = given | dict(given.get("extra_body") or {})
        kind = Kind()
        calling = CALL.set(kind)
        try:
            guard = await self.of(body.get("model"))
            who = identify({k.lower(): v for k, v in (given.get("extra_headers") or {}).items()}, body)
            chunks = guard.stream(body, self._guesses.place(who, body))
            if body.get("stream"):
                usage = bool((body.get("stream_options") or {}).get("include_usage"))
                # the first chunk is awaited here, so that a refused call raises here, as the client's would
                first = await anext(chunks)
                return WrappedStream(first, chunks, kind, usage)
            return _whole(await collect(chunks), kind.chunk)
        except EngineError as error:
            raise _original(error) from None
        finally:
            CALL.reset(calling)


class WrappedStream:
    """A guarded stream: ``async for chunk in stream``; `close` ends the step."""

    def __init__(self, first: Chunk, rest: Stream, kind: Kind, usage: bool) -> None:
        self._chunks = rest
        self._events = self._read(first, kind, usage)

    async def _read(self, first: Chunk, kind: Kind, usage: bool) -> AsyncGenerator[Any, None]:
        async with aclosing(self._chunks) as chunks:
            try:
                yield _piece(first, kind.chunk)
                async for chunk in chunks:
                    if chunk.get("choices") or usage:
                        yield _piece(chunk, kind.chunk)
            except EngineError as error:
                raise _original(error) from None

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._events

    async def __anext__(self) -> Any:
        return await anext(self._events)

    async def close(self) -> None:
        """End the step, in the engine too."""
        await self._events.aclose()
        await self._chunks.aclose()  # a stream nobody has read from yet

    aclose = close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()


class WrappedFunction:
    """A guarded `acompletion`: ``await guarded(model=…, messages=…)``."""

    def __init__(self, guards: _Guards) -> None:
        self._guards = guards

    async def __call__(self, model: str, messages: list[Any], **arguments: Any) -> Any:
        """The function's own arguments and replies; raises what it raises, and the guard's errors."""
        return await self._guards.call({"model": model, "messages": messages, **arguments})


class WrappedClient:
    """A guarded client: ``await guarded.chat.completions.create(…)``; the rest is the client's own."""

    def __init__(self, client: Any, guards: _Guards) -> None:
        self.unguarded = client
        """The client itself."""
        self.chat = _Chat(_Completions(guards))

    def __getattr__(self, name: str) -> Any:
        if name in UNGUARDED:
            raise AttributeError(f"{name!r} goes round the guard; use chat.completions.create, or .unguarded.{name} on purpose")
        return getattr(self.unguarded, name)

    async def __aenter__(self) -> Self:
        await self.unguarded.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.unguarded.__aexit__(kind, error, tb)


class _Chat:
    def __init__(self, completions: _Completions) -> None:
        self.completions = completions


class _Completions:
    def __init__(self, guards: _Guards) -> None:
        self._guards = guards

    async def create(self, **arguments: Any) -> Any:
        """As the client's; raises what it raises, and the guard's errors."""
        return await self._guards.call(arguments)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"chat.completions.{name} is not guarded; use create, or .unguarded.chat.completions.{name} on purpose"
        )


def _plain(value: Any) -> Any:
    """Messages may hold the library's own objects, such as a former reply's message."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


def _original(error: EngineError) -> BaseException:
    """The client's own error, where one is behind ours: callers have their clauses for it."""
    cause = error.__cause__
    return cause if cause is not None and not isinstance(cause, EngineError) else error


def _piece(chunk: Chunk, kind: type | None) -> Any:
    """A chunk of the class the client's are of."""
    if kind is None or issubclass(kind, Mapping):
        return chunk
    build = kind.construct if kind.__module__.startswith("openai.") else kind  # type: ignore[attr-defined]  # openai's builds nested
    return build(**chunk)


def _whole(reply: dict[str, Any], chunk_type: type | None) -> Any:
    """A whole reply of the class that belongs to the chunks'."""
    module = chunk_type.__module__ if chunk_type is not None else ""
    if module.startswith("openai."):
        return sys.modules["openai.types.chat"].ChatCompletion.construct(**reply)
    kind = getattr(sys.modules.get(module), "ModelResponse", None)
    return reply if kind is None else kind(**reply)
