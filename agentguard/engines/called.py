"""Somebody else's client as an engine: an `openai.AsyncOpenAI`, or a function such as `litellm.acompletion`.

Neither library is imported: what is needed is called by name, and their errors are told by the names of their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agentguard.engines.base import EngineInfo, Standing, Stream
from agentguard.engines.chunks import Chunks
from agentguard.engines.facts import ADDED, Facts
from agentguard.engines.forgiving import forgiving
from agentguard.errors import ConfigError, EngineDiedError, EngineError, EngineRequestError, nearest

OPTIONS = ("extra_headers", "extra_query", "timeout")
"""Arguments of a call that are no fields of the request."""
BESIDE = (
    *ADDED, "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "min_tokens",
)  # fmt: skip
"""Fields the guard may set that OpenAI's own API does not have."""
OWNER = "agentguard"


@dataclass(slots=True)
class Kind:
    """What one call is answered with: the class of its chat chunks, None before the first."""

    chunk: type | None = None


CALL: ContextVar[Kind | None] = ContextVar("agentguard_call", default=None)
"""Of the call that runs, set by whoever has to give its caller the same classes. It is the call's and not the engine's: calls run
side by side, and a function may answer each with another class."""


class FunctionEngine:
    """A function ``await create(model=…, messages=…, stream=True, …)`` that gives chunks in OpenAI's shape, such as
    `litellm.acompletion`. It cannot tokenize, so counts are estimates until the server tells its usage.

    ``model`` is what it is called with, ``window`` the context window in tokens. `CALL` is told the class of a call's chunks.
    """

    def __init__(self, create: Callable[..., Awaitable[Any]], model: str, window: int | None) -> None:
        self.name = getattr(create, "__name__", type(create).__name__)
        self.facts = Facts(tokenize=False, metrics=False)
        self._create = create
        self._model = model
        self._window = window
        self._known = _named(create)

    async def info(self) -> EngineInfo:
        if self._window is None:
            raise ConfigError("window", None, f"a function cannot tell {self._model!r}'s context window; give it in tokens")
        return EngineInfo(self._model, self._window)

    async def tokenize_chat(self, body: Mapping[str, Any]) -> list[int] | None:
        return None

    async def tokenize_text(self, text: str) -> list[int] | None:
        return None

    def chat(self, body: Mapping[str, Any], request_id: str, session: str) -> Stream:
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"X-Request-Id": request_id, "X-Session-ID": session}
        # asked for here, in the caller's own context: what follows may be read in another task
        return self._stream(self._create, self._known, request, headers, CALL.get())

    async def complete(self, prompt: Sequence[int], body: Mapping[str, Any], request_id: str) -> Stream:
        raise EngineRequestError(404, f"{self.name} continues no token ids")
        yield {}  # makes this the generator the protocol asks for

    async def set_think_tokens(self, request_id: str, tokens: int) -> Standing | None:
        return None

    async def tts(self, enabled: bool | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        raise EngineRequestError(404, f"{self.name} has no tts")

    async def metrics(self) -> str | None:
        return None

    async def aclose(self) -> None:
        """Nothing: the client is its owner's."""

    def _stream(
        self, create: Callable[..., Awaitable[Any]], known: set[str] | None, request: dict[str, Any], headers: dict[str, str],
        kind: Kind | None = None,
    ) -> Stream:  # fmt: skip
        """Chunks, their class told to ``kind``."""
        return forgiving(self.facts, self.name, lambda sent: self._chunks(create, _arguments(sent, known, headers), kind), request)

    async def _chunks(self, create: Callable[..., Awaitable[Any]], arguments: dict[str, Any], kind: Kind | None) -> Stream:
        with_errors = _named_errors(self.name)
        async with with_errors:
            stream = await create(**arguments)
        if not hasattr(stream, "__aiter__"):
            raise EngineError(f"{self.name} answered a streamed request with {type(stream).__name__}; it has to give chunks")
        try:
            shape = Chunks()
            async with _named_errors(self.name):
                async for chunk in stream:
                    if kind is not None:
                        kind.chunk = type(chunk)
                    yield shape.take(dict(chunk) if isinstance(chunk, Mapping) else chunk.model_dump(exclude_unset=True))
        finally:
            await _close(stream)


class ClientEngine(FunctionEngine):
    """A client such as `openai.AsyncOpenAI`. Behind ``…/v1`` vLLM's own routes are used where the server has them: it tokenizes,
    and with our plugin closes exactly.

    ``window``: the context window in tokens, for a server that does not state it.
    """

    def __init__(self, client: Any, model: str, window: int | None) -> None:
        super().__init__(client.chat.completions.create, model, window)
        self.name = f"{type(client).__name__} at {client.base_url}"
        self.facts = Facts(metrics=False)
        self._client = client
        base = str(client.base_url).rstrip("/")
        self._v1 = base
        self._root = base.removesuffix("/v1") if base.endswith("/v1") else ""
        self._known_text = _named(client.completions.create)

    async def info(self) -> EngineInfo:
        async with _named_errors(self.name):
            models = (await self._client.models.list()).data
        found = next((model for model in models if model.id == self._model), None)
        if found is None:
            raise ConfigError("model", self._model, nearest(self._model, [model.id for model in models]))
        if getattr(found, "owned_by", "") == OWNER:
            raise ConfigError(
                "client", self.name, "is at a gateway, which guards already; use the client as it is, or agentguard.connect"
            )
        window = getattr(found, "max_model_len", None) or self._window
        if not isinstance(window, int):
            raise ConfigError(
                "window", window, f"{self.name} does not state the context window of {self._model!r}; give it in tokens"
            )
        features = await self._ask("get", f"{self._v1}/agentguard/plugin")
        self.facts.plugin = "budget" in ((features or {}).get("features") or ())
        return EngineInfo(self._model, window)

    async def tokenize_chat(self, body: Mapping[str, Any]) -> list[int] | None:
        keys = ("model", "messages", "tools", "chat_template", "chat_template_kwargs", "continue_final_message")
        asked = {k: body[k] for k in keys if body.get(k) is not None}
        return await self._tokens(asked | {"add_generation_prompt": body.get("add_generation_prompt", True)})

    async def tokenize_text(self, text: str) -> list[int] | None:
        return await self._tokens({"model": self._model, "prompt": text, "add_special_tokens": False})

    async def _tokens(self, asked: dict[str, Any]) -> list[int] | None:
        if not self._root or not self.facts.tokenize:
            return None
        reply = await self._ask("post", f"{self._root}/tokenize", asked)
        self.facts.tokenize = reply is not None
        tokens = (reply or {}).get("tokens")
        return tokens if isinstance(tokens, list) and tokens and all(isinstance(t, int) for t in tokens) else None

    def complete(self, prompt: Sequence[int], body: Mapping[str, Any], request_id: str) -> Stream:
        request = {**body, "prompt": list(prompt), "stream": True, "stream_options": {"include_usage": True}}
        headers = {"X-Request-Id": request_id}
        return self._stream(self._client.completions.create, self._known_text, request, headers)

    async def set_think_tokens(self, request_id: str, tokens: int) -> Standing | None:
        if not self.facts.plugin:
            return None
        reply = await self._ask("post", f"{self._v1}/agentguard/budget", {"request": request_id, "tokens": tokens})
        return None if reply is None else Standing(int(reply["think"]), bool(reply["inside"]))

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """A route of vLLM's or of our plugin's; None from a server that refuses it, as those without it do."""
        try:
            async with _named_errors(self.name):
                call = getattr(self._client, method)
                reply = await (call(url, cast_to=object, body=body) if body is not None else call(url, cast_to=object))
        except EngineRequestError as error:
            if error.status >= 500 and error.status != 501:
                raise
            return None
        return reply if isinstance(reply, dict) else None


def _named(create: Callable[..., Awaitable[Any]]) -> set[str] | None:
    """The arguments a function takes by name; None for one that takes any."""
    parameters = inspect.signature(create).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return None if anything else set(parameters)


def _arguments(request: Mapping[str, Any], known: set[str] | None, headers: Mapping[str, str]) -> dict[str, Any]:
    """A request's fields as arguments. What a function does not know by name goes into extra_body, as both libraries want it; of
    one that takes any argument, what came in extra_body and what the guard has set beside OpenAI's own fields."""
    came = request.get("extra_body") or {}
    fields = {k: v for k, v in request.items() if k not in ("extra_body", *OPTIONS)}
    beside = {k for k in fields if (k in came or (k in BESIDE and k != "stream_options") if known is None else k not in known)}
    arguments = {k: v for k, v in request.items() if k in OPTIONS} | {k: v for k, v in fields.items() if k not in beside}
    ours = {name.lower() for name in headers}  # a name given twice in different case would be sent twice
    theirs = {name: value for name, value in (arguments.get("extra_headers") or {}).items() if name.lower() not in ours}
    arguments["extra_headers"] = theirs | dict(headers)
    if beside:
        arguments["extra_body"] = {k: fields[k] for k in fields if k in beside}
    return arguments


@asynccontextmanager
async def _named_errors(who: str) -> AsyncIterator[None]:
    """The libraries' errors as ours, told by the names of their classes; the original is the cause."""
    try:
        yield
    except (ConfigError, EngineError):
        raise
    except Exception as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        said = f"{type(error).__name__}: {error}"
        if names & {"APITimeoutError", "Timeout", "TimeoutException"}:
            raise EngineError(f"{who} did not answer in time ({said}); it is overloaded, or the timeout too short") from error
        if names & {"APIConnectionError", "TransportError"}:
            raise EngineDiedError(f"{who} is gone ({said}); see the server's log") from error
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            response = getattr(error, "response", None)
            retry_after = response.headers.get("retry-after") if response is not None else None
            raise EngineRequestError(status, str(error), retry_after) from error
        if "APIError" in names:  # an error in the middle of a stream
            raise EngineRequestError(500, str(error)) from error
        raise


async def _close(stream: Any) -> None:
    """End a stream of a library's: openai's have `close`, litellm's and generators `aclose`."""
    for name in ("close", "aclose"):
        close = getattr(stream, name, None)
        if close is not None:
            done = close()
            if inspect.isawaitable(done):
                await done
            return
