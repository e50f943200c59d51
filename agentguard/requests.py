"""What the guard reads of a chat request; everything else is passed on as it came."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from agentguard.errors import ConfigError
from agentguard.think_budget import BUDGET_NAMES, asked_budget

_NOT_THE_QUESTION = ("stream", "stream_options", "metadata", "user", "extra_headers", "request_id")

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning", "summary_text")


class ChatRequest(BaseModel):
    """A request as it came; fields the guard does not know are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    include_reasoning: bool | None = None
    tools: list[Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    temperature: Annotated[float, Field(allow_inf_nan=False)] | None = None
    seed: int | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ChatRequest:
        """Raises ConfigError naming the field."""
        try:
            return cls.model_validate(body)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(".".join(map(str, first["loc"])), first.get("input"), first["msg"]) from None

    @property
    def limit(self) -> int | None:
        """The client's limit M; of two given, the smaller."""
        given = [m for m in (self.max_tokens, self.max_completion_tokens) if m is not None]
        return min(given) if given else None

    @property
    def budget(self) -> tuple[int | None, bool]:
        """The client's think budget (None: none given, 0: no thinking, -1: no limit), and whether it had to be looked for."""
        return asked_budget({k: getattr(self, k) for k in ("thinking_token_budget", "thinking", "chat_template_kwargs")})

    def forwarded(self) -> dict[str, Any]:
        """The body for the engine without what the guard sets itself, and without budgets no server reads."""
        body = self.model_dump(exclude_unset=True)
        for key in ("stream", "stream_options", "max_completion_tokens", "thinking_token_budget", "thinking"):
            body.pop(key, None)
        if self.chat_template_kwargs is not None:
            body["chat_template_kwargs"] = {k: v for k, v in self.chat_template_kwargs.items() if k not in BUDGET_NAMES}
        return body

    def fingerprint(self) -> str:
        """Equal for requests that ask the same and would get the same reply; how it is delivered does not count. "" for a request
        that is sampled without a seed or that brings its own think budget: to repeat that one is a client's good right."""
        if (self.temperature != 0 and self.seed is None) or self.budget[0] is not None:
            return ""
        body = {k: v for k, v in self.model_dump(exclude_unset=True).items() if k not in _NOT_THE_QUESTION}
        return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def thinking_off(self) -> bool:
        """The client asks for no thinking, in one of the usual ways."""
        extra = self.model_extra or {}
        return (self.chat_template_kwargs or {}).get("enable_thinking") is False or extra.get("reasoning_effort") == "none"

    @property
    def text_only(self) -> bool:
        """The messages hold nothing but text: no picture, sound, video or file."""
        for message in self.messages:
            content = message.get("content")
            if message.get("audio") or message.get("images"):
                return False
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS:
                    return False
        return True

    @property
    def stop_tokens(self) -> list[Any]:
        """The token ids at which the client wants an end."""
        tokens = (self.model_extra or {}).get("stop_token_ids")
        return tokens if isinstance(tokens, list) else []

    def tool_names(self) -> list[str]:
        functions = [t.get("function") for t in self.tools or () if isinstance(t, dict)]
        return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]
