"""A scripted upstream on a real socket, for faults a healthy engine does not show. The main paths run against real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

START, END, STOP, A, B = 1, 2, 3, 10, 11
NAMES = {START: "<think>", END: "</think>", A: "a", B: "b"}


def ids_of(text: str) -> list[int]:
    """One token a marker, one a character for the rest."""
    back = {v: k for k, v in NAMES.items()}
    return [back.get(piece, 100 + ord(piece[0]) % 900) for piece in re.findall(r"<think>|</think>|(?s:.)", text)]


def thinking(n: int, *, a: Any = None, size: int = 1, ids: bool = True) -> list[dict[str, Any]]:
    """``n`` think tokens, ``size`` a delta, each a letter that no other position near it has."""
    letters = "abcdefghijklmnopqrstuvwxyz "
    text = a or "".join(letters[(i * 7 + i // 27 * 5 + i // 11 + i // 143) % 27] for i in range(n))
    return [chunk(ids_of(text[i : i + size]) if ids else [], reasoning=text[i : i + size]) for i in range(0, len(text), size)]


def text_chunk(ids: list[int], text: str, finish: str | None = None) -> dict[str, Any]:
    """A chunk of the completions route."""
    one = chunk(ids, finish=finish)
    one["choices"][0] |= {"text": text}
    return one


def chunk(ids: list[int], *, reasoning: str = "", content: str = "", finish: str | None = None, **delta: Any) -> dict[str, Any]:
    delta |= {k: v for k, v in {"reasoning": reasoning, "content": content}.items() if v}
    return {
        "id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "scripted",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids}],
    }  # fmt: skip


USAGE = {
    "id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": [],
    "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    "metrics": {"speculative_decoding": {"num_spec_steps": 4, "num_draft_tokens": 24, "num_accepted_draft_tokens": 9}},
}  # fmt: skip


Items = Sequence[dict[str, Any] | str | float]
"""What a stream sends: chunks, raw bytes as a str, pauses in seconds as a float."""


@dataclass
class Script:
    """What the upstream answers; `hang_up` breaks the connection after the chunks.

    chat, complete: the items, or a function of the request's body. again: the chat calls after the first. plugin: our routes are
    there; a budget that is set ends the trace of a function's stream, which sees it in `budget`. refuses: fields that are answered
    with 400. tokenizes: /tokenize is there. carrier: the message field through which the template shows a partial trace. renders:
    the prompt of a chat request, in place of ``prompt`` for all.
    """

    chat: Items | Callable[[dict[str, Any]], Iterable[Any]] = field(default_factory=list)
    complete: Items | Callable[[dict[str, Any]], Iterable[Any]] = field(default_factory=list)
    again: Items | Callable[[dict[str, Any]], Iterable[Any]] | None = None
    plugin: bool = False
    refuses: tuple[str, ...] = ()
    tokenizes: bool = True
    carrier: str = ""
    model: str = "scripted"
    renders: Callable[[dict[str, Any]], list[int]] | None = None
    window: int | None = 1000
    budget: int | None = None
    status: int = 200
    message: str = "scripted refusal"
    retry_after: str = ""
    hang_up: bool = False
    hold: asyncio.Event | None = None
    prompt: list[int] = field(default_factory=lambda: [5, 6, START])
    refused: list[str] = field(default_factory=list)
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    streaming: int = 0
    """Streams that run now."""


def application(script: Script) -> Starlette:
    """The upstream's app."""

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": script.model, **({"max_model_len": script.window} if script.window else {})}]})

    async def tokenize(request: Request) -> Response:
        if not script.tokenizes:
            return JSONResponse({"detail": "Not Found"}, 404)
        body = await request.json()
        if "prompt" in body:
            return JSONResponse({"tokens": ids_of(body["prompt"])})
        if script.renders is not None:
            return JSONResponse({"tokens": script.renders(body)})
        if not body.get("continue_final_message"):
            return JSONResponse({"tokens": script.prompt})
        last, shown = body["messages"][-1], script.prompt[: -1 if script.prompt[-1] == START else None]
        if script.carrier == "reasoning" and last.get("reasoning"):
            shown = [*shown, START, *ids_of(last["reasoning"]), END]
        elif script.carrier == "content":
            shown = [*shown, *ids_of(last["content"])]
        return JSONResponse({"tokens": shown})

    async def plugin(request: Request) -> Response:
        if not script.plugin:
            return JSONResponse({"detail": "Not Found"}, 404)
        if request.method == "GET":
            return JSONResponse({"version": "0", "features": ["rules", "budget"]})
        asked = await request.json()
        script.seen.append((request.url.path, asked, dict(request.headers)))
        script.budget = asked["tokens"]
        return JSONResponse({"found": True, "think": 0, "inside": True, "total": asked["tokens"]})

    async def stream(items: Iterable[Any]) -> AsyncIterator[str]:
        finished = False
        script.streaming += 1
        try:
            for item in items:
                if isinstance(item, float):
                    await asyncio.sleep(item)
                    continue
                yield item if isinstance(item, str) else f"data: {json.dumps(item)}\n\n"
            if script.hold is not None:
                await script.hold.wait()
            if script.hang_up:
                raise ConnectionResetError("scripted")
            yield "data: [DONE]\n\n"
            finished = True
        finally:
            script.streaming -= 1
            if not finished:
                script.aborted.set()

    async def answer(request: Request) -> Response:
        body = await request.json()
        script.seen.append((request.url.path, body, dict(request.headers)))
        if script.status != 200:
            headers = {"retry-after": script.retry_after} if script.retry_after else None
            return JSONResponse({"error": {"message": script.message, "code": script.status}}, script.status, headers)
        refused = [name for name in script.refuses if name in body]
        if refused:
            script.seen.pop()
            script.refused.append(refused[0])
            return JSONResponse({"error": {"message": f"{refused[0]} is not supported here", "code": 400}}, 400)
        first = sum(path.endswith("chat/completions") for path, _, _ in script.seen) == 1
        items = script.complete if request.url.path.endswith("/v1/completions") else script.chat
        if items is script.chat and not first and script.again is not None:
            items = script.again
        if callable(items):
            items = items(body)  # type: ignore[assignment]
        return StreamingResponse(stream(items), media_type="text/event-stream")

    routes = [
        Route("/v1/models", models),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/agentguard/plugin", plugin),
        Route("/v1/agentguard/budget", plugin, methods=["POST"]),
        Route("/v1/chat/completions", answer, methods=["POST"]),
        Route("/v1/completions", answer, methods=["POST"]),
    ]
    return Starlette(routes=routes)


@asynccontextmanager
async def upstream(script: Script, port: int = 0) -> AsyncIterator[str]:
    config = uvicorn.Config(application(script), host="127.0.0.1", port=port, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    server.capture_signals = _no_signals  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        for connection in list(server.server_state.connections):  # uvicorn leaves those of cut streams open
            connection.transport.abort()  # type: ignore[union-attr]
        await task


def _no_signals() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
