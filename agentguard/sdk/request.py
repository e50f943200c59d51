"""What a step asks for: immutable, so that a middleware passes on a changed copy and never alters what others hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from agentguard.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One model call.

    ``messages`` and ``tools`` are in the form of OpenAI's chat completions. Tokens: ``max_tokens`` limits all that is
    generated, ``think_tokens`` the traces (0: no thinking, -1: no limit but the answer's room, None: the policy's).
    ``temperature`` and ``seed`` are the sampler's, None for the server's. ``rule`` is a verification rule such as "strict"
    (None: the session's arm). ``timeout_s``: seconds the whole step may take, None for no limit. ``side``: a call beside the
    agent's own work, such as a title, which is not counted to the economics. ``extra``: further fields of the request, passed
    on as they are. ``session`` is the session's id, for a middleware to read.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    think_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    rule: str | None = None
    timeout_s: float | None = None
    side: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    session: str = ""

    def copy(self, **changes: Any) -> StepRequest:
        """The same request with other values. Raises ConfigError for a field that is not there or may not change."""
        known = {f.name for f in fields(self)} - {"session"}
        for name, value in changes.items():
            if name not in known:
                raise ConfigError(f"request.{name}", value, f"no such field to change; {nearest(name, known)}")
        for name in ("messages", "tools"):
            if name in changes:
                changes[name] = sequence(name, changes[name])
        return replace(self, **changes)

    def changed(self, other: StepRequest) -> list[str]:
        """Names of the fields in which two requests differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]

    def body(self) -> dict[str, Any]:
        """The chat completion request."""
        given = {
            "messages": list(self.messages),
            "tools": list(self.tools) or None,
            "max_tokens": self.max_tokens,
            "thinking_token_budget": self.think_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        body = dict(self.extra) | {name: value for name, value in given.items() if value is not None}
        if self.rule is not None:
            body["vllm_xargs"] = dict(body.get("vllm_xargs") or {}) | {"ag_rule": self.rule}
        return body


def sequence(name: str, value: str | Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Messages or tools as a tuple of mappings; a text is one message of the user. Raises ConfigError."""
    if isinstance(value, str) and name == "messages":
        return ({"role": "user", "content": value},)
    if isinstance(value, str | bytes | Mapping) or not all(isinstance(item, Mapping) for item in value):
        raise ConfigError(name, value, "give a list of mappings in the form of OpenAI's chat completions")
    return tuple(value)
