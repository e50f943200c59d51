"""Any OpenAI-compatible server over HTTP; vLLM's extra routes and fields are used where the server has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from agentguard.engines.base import EngineInfo, Stream
from agentguard.engines.http import http_client
from agentguard.errors import EngineDiedError, EngineError, EngineRequestError

MAX_EVENT_BYTES = 8 << 20
"""The largest server-sent event accepted from upstream; a first chunk may carry a whole prompt's ids."""


class OpenAIEngine:
    """A client of one server. ``url`` is its root, without /v1; connections are pooled and reused."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "engine-0",
        api_key: str | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 300.0,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._client = http_client(
            self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx2.Timeout(connect=connect_timeout_s, read=read_timeout_s, write=30.0, pool=None),
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def info(self) -> EngineInfo:
        reply = await self._json("GET", "/v1/models")
        models = reply.get("data") or []
        if not models:
            raise EngineError(f"{self.url}/v1/models lists no model; is this an OpenAI-compatible server?")
        window = models[0].get("max_model_len")
        if not isinstance(window, int):
            raise EngineError(f"{self.url}/v1/models does not state max_model_len; the guard needs the context window")
        return EngineInfo(model=models[0]["id"], max_model_len=window)

    async def tokenize_chat(self, body: Mapping[str, Any]) -> list[int]:
        keys = ("model", "messages", "tools", "chat_template", "chat_template_kwargs")
        request = {k: body[k] for k in keys if body.get(k) is not None} | {"add_generation_prompt": True}
        return list((await self._json("POST", "/tokenize", request))["tokens"])

    async def tokenize_text(self, text: str) -> list[int]:
        return list((await self._json("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"])

    def chat(self, body: Mapping[str, Any], request_id: str, session: str) -> Stream:
        return self._stream("/v1/chat/completions", body, {"X-Request-Id": request_id, "X-Session-ID": session})

    def complete(self, prompt: Sequence[int], body: Mapping[str, Any], request_id: str) -> Stream:
        return self._stream("/v1/completions", {**body, "prompt": list(prompt)}, {"X-Request-Id": request_id})

    async def _stream(self, path: str, body: Mapping[str, Any], headers: dict[str, str]) -> Stream:
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._client.stream("POST", path, json=request, headers=headers) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, (await response.aread()).decode(errors="replace"))
                ended = False
                async for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
                    if event.data == "[DONE]":
                        ended = True
                        break
                    chunk = json.loads(event.data)
                    if "error" in chunk:
                        raise _refusal(int(chunk["error"].get("code") or 500), event.data)
                    yield chunk
                if not ended:
                    raise EngineDiedError(
                        f"engine {self.name} ended the stream of request {headers['X-Request-Id']} before its end"
                    )
        except (httpx2.TransportError, json.JSONDecodeError) as error:
            raise self._gone(error) from error

    async def _json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, json=body)
        except httpx2.TransportError as error:
            raise self._gone(error) from error
        if response.status_code != 200:
            raise _refusal(response.status_code, response.text)
        reply = response.json()
        if not isinstance(reply, dict):
            raise EngineError(f"{self.url}{path} answered {type(reply).__name__}, expected an object")
        return reply

    def _gone(self, error: Exception) -> EngineDiedError:
        return EngineDiedError(f"engine {self.name} at {self.url} does not answer ({type(error).__name__}: {error}); see its log")


def _refusal(status: int, text: str) -> EngineRequestError:
    """The upstream's own message, with its status."""
    try:
        message = json.loads(text)
        message = message.get("error", message)
        message = message.get("message", text) if isinstance(message, dict) else str(message)
    except (json.JSONDecodeError, AttributeError):
        message = text[:500]
    return EngineRequestError(status, message)
