"""Any OpenAI-compatible server over HTTP; vLLM's extra routes and fields are used where the server has them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import msgspec

from agentguard.engines.base import Chunk, EngineInfo, Standing, Stream
from agentguard.engines.chunks import Chunks, sendable
from agentguard.engines.facts import Facts
from agentguard.engines.forgiving import forgiving
from agentguard.engines.http import http_client
from agentguard.errors import EngineDiedError, EngineError, EngineRequestError
from agentguard.limits import MAX_EVENT, MAX_REPLY

_JSON = msgspec.json.Decoder()
logger = logging.getLogger(__name__)
MESSAGE = 2000
"""Characters of an upstream's error that are passed on."""
_WAIT = re.compile(r"[A-Za-z0-9 ,:+-]{1,64}")
TTS_S, METRICS_S = 150.0, 5.0


class OpenAIEngine:
    """A client of one server. ``url`` is its root, without /v1; connections are pooled and reused."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "engine-0",
        api_key: str | None = None,
        connect_timeout_s: float = 30.0,
        read_timeout_s: float = 300.0,
        window: int | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """``window``: the context window in tokens, for a server that does not state it; ``transport``: another way to it than the
        network (agentguard.engines.asgi)."""
        self.name = name
        self.facts = Facts()
        self._window = window
        self._model = ""
        self.url = url.rstrip("/")
        self._client = http_client(
            self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx2.Timeout(connect=connect_timeout_s, read=read_timeout_s, write=30.0, pool=None),
            transport=transport,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def info(self) -> EngineInfo:
        reply = await self._json("GET", "/v1/models")
        models = reply.get("data") or []
        if not models:
            raise EngineError(f"{self.url}/v1/models lists no model; is this an OpenAI-compatible server?")
        # a server of several models may list them in another order the next time
        model = next((model for model in models if model.get("id") == self._model), models[0])
        window = model.get("max_model_len") or self._window
        if not isinstance(window, int):
            raise EngineError(
                f"{self.url}/v1/models does not state max_model_len; give the context window as engine.max_model_len in the recipe"
            )
        await self._probe()
        self._model = self._model or model["id"]
        return EngineInfo(model=model["id"], max_model_len=window)

    async def _probe(self) -> None:
        """Is our plugin in there? A server without it answers 404 or something of its own; one that is busy does not tell."""
        try:
            reply = await self._json("GET", "/v1/agentguard/plugin")
        except EngineDiedError:
            raise
        except EngineRequestError as error:
            if error.status == 429 or (error.status >= 500 and error.status != 501):
                return
            reply = {}
        except EngineError as error:
            if isinstance(error.__cause__, httpx2.RequestError):
                return
            reply = {}
        self.facts.plugin = "budget" in (reply.get("features") or ())

    async def tokenize_chat(self, body: Mapping[str, Any]) -> list[int] | None:
        keys = ("model", "messages", "tools", "chat_template", "chat_template_kwargs", "continue_final_message")
        request = {k: body[k] for k in keys if body.get(k) is not None} | {"add_generation_prompt": True}
        if "add_generation_prompt" in body:
            request["add_generation_prompt"] = body["add_generation_prompt"]
        return await self._tokens(request)

    async def tokenize_text(self, text: str) -> list[int] | None:
        return await self._tokens({"prompt": text, "add_special_tokens": False})

    async def _tokens(self, request: Mapping[str, Any]) -> list[int] | None:
        """None from a server without vLLM's tokenize route, which is then left alone for a while (`facts.MISSING_S`), and for what
        it cannot tokenize: another server's route of that name may take other fields."""
        if not self.facts.tokenize:
            return None
        try:
            tokens = (await self._json("POST", "/tokenize", request)).get("tokens")
        except EngineRequestError as error:
            if error.status >= 500 and error.status != 501:
                raise
            self.facts.tokenize = error.status not in (404, 405, 501)
            return None
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
            return None
        return tokens

    async def set_think_tokens(self, request_id: str, tokens: int) -> Standing | None:
        if not self.facts.plugin:
            return None
        try:
            reply = await self._json("POST", "/v1/agentguard/budget", {"request": request_id, "tokens": tokens})
        except EngineRequestError as error:
            if error.status == 404:
                return None
            raise
        return Standing(int(reply["think"]), bool(reply["inside"]))

    async def tts(self, enabled: bool | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if enabled is None and settings is None:
            return await self._json("GET", "/v1/agentguard/tts")
        # the trainer may have to start, which takes 5 to 10 s here
        return await self._json("POST", "/v1/agentguard/tts", {"enabled": enabled, "settings": settings}, timeout=TTS_S)

    async def metrics(self) -> str | None:
        if not self.facts.metrics:
            return None
        try:
            response = await self._whole("GET", "/metrics", timeout=METRICS_S)
        except httpx2.RequestError as error:
            raise self._failure(error) from error
        # left alone for a while where the server does not have it; one that is busy or starting is asked again
        self.facts.metrics = response.status_code not in (401, 403, 404, 405, 501)
        return response.text if response.status_code == 200 else None

    def chat(self, body: Mapping[str, Any], request_id: str, session: str) -> Stream:
        return self._stream("/v1/chat/completions", body, {"X-Request-Id": request_id, "X-Session-ID": session})

    def complete(self, prompt: Sequence[int], body: Mapping[str, Any], request_id: str) -> Stream:
        return self._stream("/v1/completions", {**body, "prompt": list(prompt)}, {"X-Request-Id": request_id})

    def _stream(self, path: str, body: Mapping[str, Any], headers: dict[str, str]) -> Stream:
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return forgiving(self.facts, self.name, lambda sent: self._events(path, sent, headers), request)

    async def _events(self, path: str, request: Mapping[str, Any], headers: dict[str, str]) -> Stream:
        try:
            async with self._client.stream("POST", path, json=request, headers=headers) as response:
                if response.status_code != 200:
                    text = (await self._read(response, path)).decode(errors="replace")
                    raise _refusal(response.status_code, text, response.headers.get("retry-after"))
                ended, shape = False, Chunks()
                async for event in httpx2.EventSource(response, MAX_EVENT):
                    if event.data == "[DONE]":
                        ended = True  # read on to the end of the body, so that the connection can be used again
                    elif not ended:
                        yield _chunk(event.data, shape)
                if not ended:
                    raise EngineDiedError(
                        f"engine {self.name} ended the stream of request {headers['X-Request-Id']} before its end"
                    )
        except httpx2.RequestError as error:
            raise self._failure(error) from error

    async def _whole(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """A reply that is no stream, of at most `MAX_REPLY` bytes. Redirects are replies like others: nobody is followed."""
        async with self._client.stream(method, path, **options) as response:
            body = await self._read(response, path)
        headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in ("content-encoding", "transfer-encoding")]
        return httpx2.Response(response.status_code, headers=headers, content=body, request=response.request)

    async def _read(self, response: httpx2.Response, path: str) -> bytes:
        body = bytearray()
        async for piece in response.aiter_bytes(64 << 10):
            body += piece
            if len(body) > MAX_REPLY:
                raise EngineError(
                    f"{self.url}{path} answered with more than {MAX_REPLY} bytes; is this an OpenAI-compatible server?"
                )
        return bytes(body)

    async def _json(self, method: str, path: str, body: object = None, **options: Any) -> dict[str, Any]:
        try:
            response = await self._whole(method, path, json=body, **options)
        except httpx2.RequestError as error:
            raise self._failure(error) from error
        if response.status_code != 200:
            raise _refusal(response.status_code, response.text)
        try:
            reply = response.json()
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise EngineError(f"{self.url}{path} did not answer with a JSON object: {response.text[:80]!r}")
        return reply

    def _failure(self, error: httpx2.RequestError) -> EngineError:
        """Gone, or only slow or garbled? A read timeout and a broken event say nothing about the process behind them."""
        what = f"engine {self.name} at {self.url}"
        if isinstance(error, httpx2.ConnectError | httpx2.ReadError | httpx2.WriteError | httpx2.RemoteProtocolError):
            return EngineDiedError(f"{what} is gone ({type(error).__name__}: {error}); see its log")
        if isinstance(error, httpx2.TimeoutException):
            return EngineError(
                f"{what} did not answer in time ({type(error).__name__}); it is overloaded, or the timeout too short"
            )
        return EngineError(f"{what} cannot be understood ({type(error).__name__}: {error})")


def _chunk(data: str, shape: Chunks | None = None) -> Chunk:
    """One event of a stream, in the shape its stream has. Raises EngineRequestError for an error event and EngineError for what is
    no chunk."""
    strict = True
    try:
        try:  # three times as fast as json, which takes what only Python writes: NaN, half of a surrogate pair
            chunk = _JSON.decode(data)
        except msgspec.DecodeError:
            chunk, strict = json.loads(data), False
    except (ValueError, RecursionError):
        # without the data: they may be the model's words, which belong into no event and no log
        raise EngineError(
            f"the engine streamed {len(data)} characters that are not JSON; is something between it and us?"
        ) from None
    if not isinstance(chunk, dict):
        raise EngineError(f"the engine streamed {type(chunk).__name__}, expected a chunk; is something between it and us?")
    if chunk.get("error") is not None:
        code = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
        # some servers number their errors in their own way
        raise _refusal(code if isinstance(code, int) and 400 <= code < 600 else 500, data)
    chunk = (shape or Chunks()).take(chunk)
    return chunk if strict else sendable(chunk)


def _refusal(status: int, text: str, retry_after: str | None = None) -> EngineRequestError:
    """The upstream's own message, with its status."""
    field: Any = None
    try:
        message = json.loads(text)
        message = message.get("error", message)
        if isinstance(message, dict):
            message, field = message.get("message", text), message.get("param")
    except (ValueError, RecursionError, AttributeError):
        message = text
    # it goes into our answer's header, so it has to be what the header may hold: seconds or a date
    wait = retry_after if retry_after is not None and _WAIT.fullmatch(retry_after) else None
    return EngineRequestError(status, str(message)[:MESSAGE], wait, field[:80] if isinstance(field, str) and field else "engine")
