"""Kinds of work that are compared with each other: model × route × kind of step, a bounded number of them.

A class with few sessions is judged by its model's classes together. Side calls (titles, summaries) share an agent's session and
are no class: they are short whatever the rule, and there are many of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Kind = Literal["first", "follow_up", "tool_result"]
LIMIT = 64
"""Classes told apart; a class beyond it is its model's "other"."""
SIDE_LIMIT = 512
"""An agent's call without tools and with at most so many tokens is a side call."""
SIDE_HEADER = "x-agentguard-side-call"
_LOW_EFFORT = ("none", "minimal", "low")


def kind_of(messages: Sequence[Mapping[str, Any]], step: int) -> Kind:
    """``step`` counts from 1. A tool's result is a message of role tool, or a user message that holds a `tool_result` part."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    parts = content if isinstance(content, list) else []
    if last.get("role") == "tool" or any(isinstance(p, dict) and p.get("type") == "tool_result" for p in parts):
        return "tool_result"
    return "first" if step <= 1 else "follow_up"


def is_side_call(
    body: Mapping[str, Any], limit: int | None, *, session_used_tools: bool, first: bool = False, marked: bool = False
) -> bool:
    """Is this a call beside the agent's own work? Marked by the client, or without tools and either told to think little or short.

    Low effort only counts in a session that has used tools or begins with it (opencode's title comes first), short only in one
    that has used tools: a chat without any is somebody's own work (litellm.md, section 6).
    """
    if marked:
        return True
    if body.get("tools"):
        return False
    reasoning = body.get("reasoning")
    effort = body.get("reasoning_effort") or (reasoning.get("effort") if isinstance(reasoning, dict) else None)
    if effort in _LOW_EFFORT and (session_used_tools or first):
        return True
    return session_used_tools and limit is not None and limit <= SIDE_LIMIT


class Classes:
    """Names of classes, at most `LIMIT` of them."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def name(self, model: str, route: str, kind: Kind) -> str:
        name = f"{model}/{route}/{kind}"
        if name not in self._known:
            if len(self._known) >= LIMIT:
                return f"{model}/other"
            self._known.add(name)
        return name


def model_of(name: str) -> str:
    """The class a small class is pooled into; a model's name may hold slashes itself."""
    return name.rsplit("/", 2)[0] if not name.endswith("/other") else name.removesuffix("/other")
