"""Whose request is it? vLLM dresses the id a client gives (X-Request-Id) in one of its own."""

from __future__ import annotations

import re

# chat: chatcmpl-<id>-<8 hex digits>; completions: cmpl-<id>-<prompt>-<8 hex digits>; one of n > 1 has its number before that
# (vllm/v1/engine/input_processor.py, assign_request_id)
_ENGINE_ID = re.compile(r"(?:\d+_)?(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<text>.+?)(?:-\d+)?)-[0-9a-f]{8}")


def client_id(engine_id: str) -> str:
    """The id the client gave; an id in no such dress is its own."""
    match = _ENGINE_ID.fullmatch(engine_id)
    return (match["chat"] or match["text"]) if match else engine_id
