"""A stream of chunks as one `chat.completion` object."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from agentguard.engines.base import Stream


async def collect(chunks: Stream) -> dict[str, Any]:
    """A stream of chunks as one `chat.completion` object."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    tools: dict[int, dict[str, Any]] = {}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": None, "logprobs": None}
    reply: dict[str, Any] = {}
    async with aclosing(chunks):
        async for chunk in chunks:
            reply = {k: chunk[k] for k in ("id", "created", "model") if k in chunk} | reply
            reply |= {k: chunk[k] for k in ("usage", "metrics") if chunk.get(k)}
            for part in chunk.get("choices") or ():
                delta = part.get("delta") or {}
                for key in ("content", "reasoning", "reasoning_content"):
                    if delta.get(key):
                        message[key] = (message.get(key) or "") + delta[key]
                for call in delta.get("tool_calls") or ():
                    _merge_tool_call(tools.setdefault(call.get("index", 0), {}), call)
                if part.get("token_ids"):
                    choice["token_ids"] = choice.get("token_ids", []) + part["token_ids"]
                if part.get("logprobs"):
                    known = choice["logprobs"] or {"content": []}
                    choice["logprobs"] = {"content": known["content"] + (part["logprobs"].get("content") or [])}
                choice |= {k: part[k] for k in ("finish_reason", "stop_reason") if part.get(k) is not None}
    if tools:
        message["tool_calls"] = [tools[i] for i in sorted(tools)]
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
