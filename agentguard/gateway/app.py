"""The ASGI app: chat completions behind the guard, the event stream, sessions and health."""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentguard.engines.base import Chunk, Stream
from agentguard.errors import AgentGuardError, ConfigError, EngineDiedError, EngineRequestError
from agentguard.events import encode_json
from agentguard.gateway.identity import identify
from agentguard.middleware import Guard

logger = structlog.get_logger(__name__)
MAX_BODY_BYTES = 16 << 20


def create_app(guard: Guard, *, api_key: str | None = None) -> Starlette:
    """The gateway's app. With ``api_key`` every route but /health needs it as a bearer token."""

    async def chat(request: Request) -> Response:
        body = await _body(request)
        identity = identify(request.headers, body)
        chunks = guard.stream(body, identity)
        # the first chunk is awaited here, so that a refused request gets an HTTP status instead of a broken stream
        try:
            first = await anext(chunks)
        except StopAsyncIteration:
            raise EngineDiedError("the engine answered with an empty stream") from None
        if body.get("stream"):
            include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(_sse(first, chunks, include_usage), media_type="text/event-stream")
        async with aclosing(chunks):
            return JSONResponse(await collect(first, chunks))

    async def models(_: Request) -> Response:
        model = {"id": guard.info.model, "object": "model", "owned_by": "agentguard", "max_model_len": guard.info.max_model_len}
        return JSONResponse({"object": "list", "data": [model]})

    async def sessions(_: Request) -> Response:
        rows = [
            {
                "session": str(s.identity),
                "steps": s.steps_started,
                "tokens": s.tokens,
                "think_tokens": s.think_tokens,
                "closes": s.closes,
            }
            for s in guard.sessions
        ]
        return JSONResponse({"sessions": rows})

    async def events(_: Request) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            yield b": agentguard events\n\n"
            with guard.hub.subscribe() as subscription:
                async for event in subscription:
                    yield b"data: " + encode_json(event) + b"\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/agentguard/events", events),
            Route("/agentguard/sessions", sessions),
            Route("/health", health),
        ],
        exception_handlers={AgentGuardError: _on_error},
    )
    if api_key is not None:
        app.add_middleware(RequireKey, api_key=api_key)
    return app


class RequireKey:
    """Pure-ASGI middleware: 401 without the right bearer token, compared in constant time; /health stays open."""

    def __init__(self, app: Any, api_key: str) -> None:
        self.app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                response = JSONResponse(_error_body("missing or wrong API key; send it as 'Authorization: Bearer …'", 401), 401)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def collect(first: Chunk, chunks: AsyncIterator[Chunk]) -> dict[str, Any]:
    """A stream of chunks as one `chat.completion` object."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    tools: dict[int, dict[str, Any]] = {}
    reply: dict[str, Any] = {k: first[k] for k in ("id", "created", "model") if k in first}
    finish: str | None = None
    token_ids: list[int] | None = None

    async def all_chunks() -> AsyncIterator[Chunk]:
        yield first
        async for chunk in chunks:
            yield chunk

    async for chunk in all_chunks():
        if chunk.get("usage"):
            reply["usage"] = chunk["usage"]
        if chunk.get("metrics"):
            reply["metrics"] = chunk["metrics"]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            for key in ("content", "reasoning", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls") or ():
                _merge_tool_call(tools.setdefault(call["index"], {}), call)
            if choice.get("token_ids"):
                token_ids = (token_ids or []) + choice["token_ids"]
            finish = choice.get("finish_reason") or finish
    if tools:
        message["tool_calls"] = [tools[i] for i in sorted(tools)]
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return {"object": "chat.completion", "choices": [choice], **reply}


def _merge_tool_call(call: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Tool calls stream as an id and name first and their arguments in pieces."""
    for key in ("id", "type"):
        if delta.get(key):
            call[key] = delta[key]
    function = call.setdefault("function", {"name": "", "arguments": ""})
    part = delta.get("function") or {}
    function["name"] += part.get("name") or ""
    function["arguments"] += part.get("arguments") or ""


async def _sse(first: Chunk, chunks: Stream, include_usage: bool) -> AsyncIterator[bytes]:
    """Chunks as server-sent events; a failure in the middle ends the stream with an error event, never without a word."""
    async with aclosing(chunks):
        try:
            yield _data(first)
            async for chunk in chunks:
                if chunk.get("choices") or include_usage:
                    yield _data(chunk)
        except AgentGuardError as error:
            logger.warning("stream_failed", error=str(error))
            yield _data(_error_body(str(error), _status(error)))
            return
    yield b"data: [DONE]\n\n"


def _data(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


async def _body(request: Request) -> dict[str, Any]:
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise ConfigError("body", f"more than {MAX_BODY_BYTES} bytes", "send less")
    try:
        body = json.loads(bytes(raw))
    except ValueError as error:
        raise ConfigError("body", bytes(raw[:40]), f"is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ConfigError("body", type(body).__name__, "send a JSON object")
    return body


def _status(error: AgentGuardError) -> int:
    if isinstance(error, ConfigError):
        return 400
    if isinstance(error, EngineRequestError):
        return error.status
    return 503 if isinstance(error, EngineDiedError) else 500


def _error_body(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AgentGuardError)
    return JSONResponse(_error_body(str(error), _status(error)), _status(error))
