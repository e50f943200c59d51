"""A stream of chunks as one `chat.completion` object."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from agentguard.engines.base import Stream
from agentguard.engines.chunks import ANSWERS, BESIDE, BLOCKS, REASONING, joined


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
                for key in ("content", *REASONING, *BLOCKS, *ANSWERS, *BESIDE):
                    if delta.get(key) and key != "tool_calls":
                        before = message.get(key)
                        message[key] = joined(before or [], delta[key]) if key in BLOCKS else _longer(before, delta[key])
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


def _longer(known: Any, more: Any) -> Any:
    """What a field holds once another piece has come: texts and lists grow, of an object each field by itself."""
    if isinstance(known, str) and isinstance(more, str):
        return known + more
    if isinstance(known, list) and isinstance(more, list):
        return known + more
    if isinstance(known, dict) and isinstance(more, dict):
        return {**known, **{k: v if k == "id" else _longer(known.get(k), v) for k, v in more.items() if v is not None}}
    return more


def _merge_tool_call(call: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Tool calls stream as an id and name first and their arguments in pieces."""
    for key, value in delta.items():
        if key not in ("index", "function") and value:
            call[key] = value
    function = call.setdefault("function", {"name": "", "arguments": ""})
    part = delta.get("function") or {}
    function["name"] += part.get("name") or ""
    function["arguments"] += part.get("arguments") or ""
