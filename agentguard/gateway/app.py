"""The ASGI app: chat completions behind the guard, the event stream, sessions and health."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Self, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentguard import logs
from agentguard.economics.classes import SIDE_HEADER
from agentguard.economics.report import report
from agentguard.engines.base import Chunk, Stream
from agentguard.errors import (
    AgentGuardError,
    BusyError,
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    EngineError,
    EngineRequestError,
    SessionBusyError,
    SessionLimitError,
    TooLargeError,
    TooSlowError,
    loggable,
    shown,
)
from agentguard.events import OperatorActed, OperatorAction, encode_json
from agentguard.gateway.admission import CLIENT_GONE, Admission, Admit, Drain
from agentguard.gateway.auth import Keyring, RequireKey
from agentguard.gateway.fetches import check_fetches
from agentguard.gateway.guesses import SharedGuesses
from agentguard.gateway.pages import RefusePages
from agentguard.gateway.step_events import EVENTS_HEADER, StepEvents
from agentguard.gateway.watch import WATCHERS, Watch, interval_of
from agentguard.identity import SESSION, identify
from agentguard.limits import BODY_S, MAX_BODY, MAX_DEPTH, MAX_ID_CHARACTERS
from agentguard.middleware import Guard, Reply
from agentguard.replies import collect
from agentguard.requests import ChatRequest
from agentguard.store import StoreError
from agentguard.telemetry import prometheus
from agentguard.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)
STORE_S = 2
"""Seconds after which a store that was away may be back."""
TAILS, TAIL_CHARACTERS = 128, 600
"""Running traces whose latest words are shown at once, and how many of them."""
PAUSED_S = 60
"""Seconds a client of a stopped session should wait; it goes on once an operator has raised the limit."""
BUSY_S = 5
"""Of an engine that is there and says 503 without a word on when."""
RESTART_S = 30
"""Seconds an engine takes to come back, or so."""
MAX_SESSION = 2 * MAX_ID_CHARACTERS
"""Of a session's full name, which holds its caller's."""
INLINE_BODY = 1 << 20
"""Bytes of a body that are parsed on the loop: 5 ms here."""
T = TypeVar("T")
_JSON = msgspec.json.Encoder()


def create_app(
    guard: Guard, *, keys: Keyring | None = None, allowed_hosts: Collection[str] = (), drain: Drain | None = None,
    metrics: Metrics | None = None,
) -> Starlette:  # fmt: skip
    """The gateway's app. ``keys``: who may do what (gateway.auth), None for everybody everything; ``allowed_hosts``: names under
    which a gateway without keys is answered, besides addresses and localhost (gateway.pages); ``drain`` ends it; ``metrics`` is
    what `/metrics` shows beside the economics."""
    keys = keys or Keyring()
    guesses = SharedGuesses(guard.books, guard.policy.max_sessions)
    drain = drain or Drain()
    admission = Admission(guard.policy.serving)

    async def chat(request: Request) -> Response:
        body = await _body(request)
        asked = ChatRequest.read(body)
        check_fetches(body, guard.policy.media_hosts)
        side = request.headers.get(SIDE_HEADER, "") not in ("", "0", "false")
        told = Reply()
        who = identify(request.headers, body)
        me = await guesses.place(who, body)
        logs.bind(session=str(me))
        chunks = guard.stream(body, me, side=side, reply=told)
        try:
            if asked.stream:
                # the first chunk is awaited here, so that a refused request gets an HTTP status instead of a broken stream
                first = await _unless_gone(request, chunks, anext(chunks, None), drain)
                if first is None:
                    return CLIENT_GONE
                include_usage = bool((asked.stream_options or {}).get("include_usage"))
                asks = request.headers.get(EVENTS_HEADER, "") not in ("", "0", "false")
                events = _sse(first, chunks, include_usage, told, drain, StepEvents(guard, me, told) if asks else None)
                return StreamingResponse(events, media_type="text/event-stream", headers=_headers(told))
            reply = await _unless_gone(request, chunks, collect(chunks), drain)
        except AgentGuardError:
            await guesses.refused(who)
            raise
        return CLIENT_GONE if reply is None else JSONResponse(reply, headers=_headers(told))

    async def close(request: Request) -> Response:
        asked = CloseTrace.read(await _body(request))
        told = guard.close(request=asked.request, session=asked.session, why=asked.why)
        if told:
            acted("close", asked.request or asked.session, f"closed {told} trace{'s' * (told != 1)}: {asked.why}")
        if not told:
            field, value = ("request", asked.request) if asked.request else ("session", asked.session)
            return JSONResponse({"told": 0} | _refusal(404, field, f"{field}={shown(value)!r}: no such trace runs"), 404)
        return JSONResponse({"told": told})

    async def raise_limit(request: Request) -> Response:
        asked = RaiseLimit.read(await _body(request))
        known = await guard.raise_limit(asked.session, asked.meter, asked.limit)
        if known:
            acted("limit", asked.session, f"limit of {asked.meter} is {asked.limit} now")
        if not known:
            return JSONResponse({"known": False} | _refusal(404, "session", f"session={shown(asked.session)!r}: is not known"), 404)
        return JSONResponse({"known": True})

    async def tts(request: Request) -> Response:
        asked = SetTts.read(await _body(request)) if request.method == "POST" else SetTts()
        told = await guard.engine.tts(asked.enabled, asked.settings)
        if asked != SetTts():
            words = {True: "learning goes on", False: "learning paused", None: "settings changed"}[asked.enabled]
            acted("tts", guard.engine.name, words)
        return JSONResponse(told)

    async def pin(request: Request) -> Response:
        asked = PinArm.read(await _body(request))
        guard.ledger.pin(asked.workload, asked.arm, asked.rule)
        what = f"pinned to {asked.rule}" if asked.rule else "left to the guard again"
        acted("pin", asked.arm, f"{what} in {asked.workload or 'all classes'}")
        return JSONResponse({"workload": asked.workload, "arm": asked.arm, "rule": asked.rule})

    async def tails(_: Request) -> Response:
        if not guard.policy.content:
            return JSONResponse(_refusal(403, "content", "this gateway gives no content; set 'content: true' in its recipe"), 403)
        latest = list(guard.running.items())[-TAILS:]
        return JSONResponse({"tails": {request: step.reading.tail(TAIL_CHARACTERS) for request, (_, step) in latest}})

    def acted(action: OperatorAction, target: str, detail: str) -> None:
        guard.hub.publish(OperatorActed(t=time.time(), action=action, target=target, detail=detail))

    watch_state = Watch(guard)

    async def watch(request: Request) -> Response:
        interval = interval_of(request.query_params.get("interval"))
        if watch_state.full():
            message = f"{WATCHERS} monitors watch already; end one, or read /agentguard/events"
            return JSONResponse({"error": {"message": message, "type": "server_error", "code": 503}}, 503)
        return StreamingResponse(_while_open(watch_state.frames(interval), drain), media_type="text/event-stream")

    async def models(_: Request) -> Response:
        model = {"id": guard.info.model, "object": "model", "owned_by": "agentguard", "max_model_len": guard.info.max_model_len}
        return JSONResponse({"object": "list", "data": [model]})

    async def sessions(request: Request) -> Response:
        """Of all workers, the latest first, as the store has them; with ``session`` that one of the caller's own with its limits,
        which need not have begun."""
        asked = request.query_params.get("session")
        if asked is not None:
            state = await guard.account(identify({**request.headers, SESSION: asked}, {}))
            return JSONResponse({"sessions": [msgspec.to_builtins(state)]})
        rows = [
            {"session": str(key), "steps": m.steps, "tokens": m.tokens, "think_tokens": m.think, "closes": m.closes, "lost": m.lost}
            for key, m in await guard.books.store.sessions()
        ]
        return JSONResponse({"sessions": rows})

    async def events(_: Request) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            yield b": agentguard events\n\n"
            dropped = 0
            with guard.hub.subscribe() as subscription:
                async for event in subscription:
                    if subscription.dropped > dropped:
                        yield f": {subscription.dropped - dropped} events dropped, this reader is too slow\n\n".encode()
                        dropped = subscription.dropped
                    yield b"data: " + encode_json(event) + b"\n\n"

        return StreamingResponse(_while_open(lines(), drain), media_type="text/event-stream")

    async def economics(_: Request) -> Response:
        return JSONResponse(report(guard.ledger))

    async def exposition(_: Request) -> Response:
        counted = metrics.render() if metrics is not None else b""
        return Response(prometheus.render(guard.ledger) + counted, media_type=prometheus.CONTENT_TYPE)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        engines = guard.standings()
        limits, store_away = guard.policy.limits, bool(guard.books.away)
        reasons = ["the gateway was told to end"] * drain.begun
        # one that is only unwell is busy, or says what cannot be read: it still gets steps when no other is well
        reasons += ["no engine answers"] * (set(engines.values()) == {"away"})
        if store_away and (limits.steps is not None or limits.tokens is not None):
            reasons.append("the session store is away, and sessions have limits")
        state = {"ready": not reasons, "reasons": reasons, "engines": engines, "store": "away" if store_away else "ok"}
        state["away"] = guard.away()
        numbers = {"running": admission.running, "waiting": admission.waiting, "unsettled": guard.books.waiting}
        return JSONResponse(state | numbers, 503 if reasons else 200)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/agentguard/events", events),
            Route("/agentguard/sessions", sessions),
            Route("/agentguard/sessions/limit", raise_limit, methods=["POST"]),
            Route("/agentguard/close", close, methods=["POST"]),
            Route("/agentguard/tts", tts, methods=["GET", "POST"]),
            Route("/agentguard/pin", pin, methods=["POST"]),
            Route("/agentguard/tails", tails),
            Route("/guard/v1/economics", economics),
            Route("/guard/v1/watch", watch),
            Route("/metrics", exposition),
            Route("/health", health),
            Route("/health/live", health),
            Route("/health/ready", ready),
        ],
        exception_handlers={
            AgentGuardError: _on_error,
            ClientDisconnect: _on_client_gone,
            HTTPException: _on_no_route,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # a redirect's address is made from the Host header, which is the client's to choose
    # innermost: whoever has no key takes no turn
    app.add_middleware(Admit, admission=admission, drain=drain, paths=("/v1/chat/completions",))
    if keys.asks:
        app.add_middleware(RequireKey, keys=keys)
    app.add_middleware(RefusePages, keyed=keys.keyed, allowed_hosts=frozenset(allowed_hosts))
    app.add_middleware(EndQuietly)
    app.add_middleware(logs.RequestLog)
    return app


class _Ask(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(".".join(map(str, first["loc"])) or "body", first.get("input"), first["msg"]) from None


class CloseTrace(_Ask):
    """Close the trace of a running request, or of all running requests of a session."""

    request: str = Field("", max_length=MAX_ID_CHARACTERS)
    session: str = Field("", max_length=MAX_SESSION)
    why: str = Field("operator", max_length=200)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.request) == bool(self.session):
            raise ValueError("give 'request' or 'session'")
        return self


class RaiseLimit(_Ask):
    """A session's new limit: "steps" or "tokens" in all, or anything for "no_progress", which starts counting again."""

    session: str = Field(max_length=MAX_SESSION)
    meter: str = Field(max_length=MAX_ID_CHARACTERS)
    limit: int = Field(1, ge=1, le=1 << 53)


class PinArm(_Ask):
    """Hold an arm of a class ("" for all) at ``rule``, itself or "strict"; null lets the guard decide again."""

    arm: str = Field(max_length=MAX_ID_CHARACTERS)
    workload: str = Field("", max_length=MAX_ID_CHARACTERS)
    rule: str | None = Field(max_length=MAX_ID_CHARACTERS)


class SetTts(_Ask):
    """Pause the draft's learning (``enabled`` false), let it go on, or change its settings (agentguard.tts_settings)."""

    enabled: bool | None = None
    settings: dict[str, Any] | None = None


def _headers(told: Reply) -> dict[str, str]:
    """What a client may act on. Of a stream the headers leave before its end, so closes and notes stand in the last event's
    comment instead."""
    headers = {"x-agentguard-request": told.request, "x-agentguard-context-fill": f"{told.fill:.3f}"}
    headers["x-agentguard-context-window"] = str(told.window)
    if told.warnings:
        headers["x-agentguard-warning"] = "; ".join(told.warnings)
    if told.compact:
        headers["x-agentguard-advice"] = "compact"
    if told.closed:
        headers["x-agentguard-closed"] = told.closed
    if told.notes:
        headers["x-agentguard-notes"] = ",".join(told.notes)
    return headers


class EndQuietly:
    """Pure-ASGI middleware: a request cancelled when the server ends is no error, though uvicorn would log it with a traceback."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:
            logger.info("request_cancelled", extra={"path": scope.get("path")})


async def _unless_gone(request: Request, chunks: Stream, work: Coroutine[Any, Any, T] | Awaitable[T], drain: Drain) -> T | None:
    """Await ``work``, or stop it and the step behind it when the client hangs up first (then None).

    Raises BusyError when the gateway ends before it.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.create_task(gone(), name="disconnect watch")
    ending = asyncio.create_task(drain.expired.wait(), name="drain watch")
    try:
        await asyncio.wait((working, watching, ending), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if ending.done():
            raise Drain.error()
        return None
    finally:
        unfinished = not working.done() or working.cancelled() or working.exception() is not None
        for task in (working, watching, ending):
            task.cancel()
        await asyncio.gather(working, watching, ending, return_exceptions=True)
        if unfinished:
            await chunks.aclose()


async def _while_open(frames: AsyncIterator[bytes], drain: Drain) -> AsyncIterator[bytes]:
    """A stream without an end, until the gateway ends."""
    task = asyncio.current_task()
    assert task is not None
    drain.watchers.add(task)
    try:
        async for frame in frames:
            yield frame
    except asyncio.CancelledError:
        if not drain.begun:
            raise
        task.uncancel()
        yield b": the gateway ends\n\n"
    finally:
        drain.watchers.discard(task)
        if isinstance(frames, AsyncGenerator):
            await frames.aclose()


async def _sse(
    first: Chunk, chunks: Stream, include_usage: bool, told: Reply, drain: Drain, tell: StepEvents | None = None
) -> AsyncIterator[bytes]:
    """Chunks as server-sent events; a failure in the middle ends the stream with an error event, never without a word, and so does
    the gateway's end.

    A close and notes are told in a comment, which every client skips that does not look for it; a client that asked for them gets
    the step's events among its chunks (`StepEvents`).
    """
    task = asyncio.current_task()
    assert task is not None
    drain.streams.add(task)
    async with aclosing(chunks):
        try:
            for part in tell.begin() if tell else ():
                yield part
            yield _data(tell.standing(first) if tell else first)
            async for chunk in chunks:
                for part in tell.news() if tell else ():
                    yield part
                if chunk.get("choices") or include_usage:
                    yield _data(tell.standing(chunk) if tell else chunk)
            for part in tell.end() if tell else ():
                yield part
        except asyncio.CancelledError:
            if not drain.expired.is_set():
                raise
            task.uncancel()
            yield _data(_error_body(Drain.error()))
            return
        except AgentGuardError as error:
            logger.warning("stream_failed", extra={"request": told.request, "error": loggable(error)})
            for part in tell.failed() if tell else ():
                yield part
            yield _data(_error_body(error))
            return
        except Exception as error:
            logger.error("stream_failed", extra={"request": told.request, "error": loggable(error)})
            yield _data(_BUG)
            return
        finally:
            drain.streams.discard(task)
    if told.closed or told.notes:
        yield f": agentguard closed={told.closed or 'no'} notes={','.join(told.notes)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def _data(value: object) -> bytes:
    return b"data: " + _JSON.encode(value) + b"\n\n"


async def _body(request: Request) -> dict[str, Any]:
    """The body as a JSON object within the limits. Raises ConfigError, TooLargeError and TooSlowError."""
    too_large = TooLargeError("body", f"more than {MAX_BODY} bytes", "send less")
    told = request.headers.get("content-length", "0")
    if len(told) > 12 or int(told) > MAX_BODY:  # digits: the parser refuses others
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                raw += piece
                if len(raw) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        raise TooSlowError("body", f"{len(raw)} bytes", f"not whole within {BODY_S:g} s; send it faster") from None
    # a large one off the loop, where it would hold up everybody's streams
    return await asyncio.to_thread(parse_body, bytes(raw)) if len(raw) > INLINE_BODY else parse_body(bytes(raw))


def parse_body(raw: bytes) -> dict[str, Any]:
    """Raises ConfigError for what is no JSON object that can be sent on: other encodings than UTF-8, NaN and numbers too large for
    a double, half a surrogate pair, nesting deeper than `MAX_DEPTH`."""
    try:
        # as text: json takes bytes for UTF-16 and UTF-32 too, and lets halves of surrogate pairs through
        body = json.loads(raw.decode(), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ConfigError("body", raw[:40], f"is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ConfigError("body", type(body).__name__, "send a JSON object")
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            break
    else:
        raise _too_deep()
    if _SURROGATE.search(raw):
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError("body", "\\ud800…", "holds half a surrogate pair, which is no character; send whole ones") from None
    return body


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _too_deep() -> ConfigError:
    """Made anew: an exception that is raised twice keeps the frames of both, and with them the bodies."""
    return ConfigError("body", "nested", f"deeper than {MAX_DEPTH} objects and lists")


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _status(error: AgentGuardError) -> int:
    if isinstance(error, ConfigError):
        return error.status
    if isinstance(error, SessionLimitError | SessionBusyError):
        return 429
    if isinstance(error, BusyError):
        return error.status
    if isinstance(error, StoreError):
        return 503
    if isinstance(error, EngineRequestError):
        # an upstream that redirects is not followed, nor are clients sent there
        return error.status if error.status >= 400 else 502
    if isinstance(error, EngineDiedError):
        return 503
    return 502 if isinstance(error, EngineError) else 500


def _error_body(error: AgentGuardError) -> dict[str, Any]:
    """OpenAI's error object; ``code`` is a name where clients act on one, else the status."""
    status = _status(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    told = {"message": str(error), "type": kind, "code": getattr(error, "code", status), "agentguard": type(error).__name__}
    field = getattr(error, "field", "") if status < 500 else ""
    return {"error": told | ({"param": field} if field else {})}


def _refusal(status: int, field: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": status, "param": field}}


async def _on_client_gone(_: Request, __: Exception) -> Response:
    """The client hung up while its request was still being read."""
    return CLIENT_GONE


_BUG = {"error": {"message": "internal error of the gateway; its log says more", "type": "server_error", "code": 500}}


async def _on_bug(_: Request, __: Exception) -> Response:
    """A mistake of ours; the server logs it."""
    return JSONResponse(_BUG, 500)


async def _on_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    field, value = ("method", request.method) if error.status_code == 405 else ("path", request.url.path)
    message = f"{field}={shown(value)!r}: {error.detail.lower()}; see the README for the gateway's routes"
    return JSONResponse(_refusal(error.status_code, field, message), error.status_code, error.headers)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AgentGuardError)
    return JSONResponse(_error_body(error), _status(error), headers=_retry(error))


def _retry(error: AgentGuardError) -> dict[str, str]:
    """When to come again. A stopped session waits for a person and a prompt that is too long never fits, so the SDKs are told not
    to try again by themselves."""
    if isinstance(error, SessionLimitError):
        return {"retry-after": str(PAUSED_S), "x-should-retry": "false"}
    if isinstance(error, ContextLengthError):
        return {"x-should-retry": "false"}
    if isinstance(error, SessionBusyError | StoreError):
        return {"retry-after": str(STORE_S)}
    if isinstance(error, BusyError):
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, EngineDiedError):
        return {"retry-after": str(RESTART_S)}
    if isinstance(error, EngineRequestError) and (error.retry_after or error.status == 503):
        return {"retry-after": error.retry_after or str(BUSY_S)}
    return {}
