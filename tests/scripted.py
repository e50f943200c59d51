"""A scripted upstream on a real socket, for faults a healthy engine does not show. The main paths run against real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

START, END, STOP, A, B = 1, 2, 3, 10, 11
NAMES = {START: "<think>", END: "</think>"}


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


@dataclass
class Script:
    """What the upstream answers. A str in `chat` is sent as raw bytes; `hang_up` breaks the connection after the chunks."""

    chat: list[dict[str, Any] | str] = field(default_factory=list)
    complete: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    hang_up: bool = False
    hold: asyncio.Event | None = None
    prompt: list[int] = field(default_factory=lambda: [5, 6, START])
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def upstream(script: Script) -> AsyncIterator[str]:
    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted", "max_model_len": 1000}]})

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        if "prompt" in body:
            return JSONResponse({"tokens": [k for k, v in NAMES.items() if v == body["prompt"]]})
        return JSONResponse({"tokens": script.prompt})

    async def stream(items: list[Any]) -> AsyncIterator[str]:
        finished = False
        try:
            for item in items:
                yield item if isinstance(item, str) else f"data: {json.dumps(item)}\n\n"
            if script.hold is not None:
                await script.hold.wait()
            if script.hang_up:
                raise ConnectionResetError("scripted")
            yield "data: [DONE]\n\n"
            finished = True
        finally:
            if not finished:
                script.aborted.set()

    async def answer(request: Request) -> Response:
        body = await request.json()
        script.seen.append((request.url.path, body, dict(request.headers)))
        if script.status != 200:
            return JSONResponse({"error": {"message": "scripted refusal", "code": script.status}}, script.status)
        items: list[Any] = script.complete if request.url.path.endswith("/v1/completions") else script.chat
        return StreamingResponse(stream(items), media_type="text/event-stream")

    routes = [
        Route("/v1/models", models),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/chat/completions", answer, methods=["POST"]),
        Route("/v1/completions", answer, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="critical", lifespan="off")
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
        await task


def _no_signals() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
