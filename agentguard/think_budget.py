"""The think budget a client asks for, wherever it writes it. Standard library only, as the hook in LiteLLM reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentguard.errors import ConfigError

BUDGET_NAMES = ("thinking_token_budget", "thinking_budget", "reasoning_budget", "budget_tokens")
"""What clients call a think budget inside `chat_template_kwargs` (vllm-project/vllm#50166), where no server reads it."""


def find_budget(body: Mapping[str, Any]) -> tuple[str, Any]:
    """The field that holds the budget and its value as it was written; ("", None) without one."""
    if body.get("thinking_token_budget") is not None:
        return "thinking_token_budget", body["thinking_token_budget"]
    thinking = body.get("thinking")
    if isinstance(thinking, dict):
        if thinking.get("type") == "disabled":
            return "thinking.type", 0
        if thinking.get("budget_tokens") is not None:
            return "thinking.budget_tokens", thinking["budget_tokens"]
    kwargs = body.get("chat_template_kwargs")
    if isinstance(kwargs, dict):
        for name in BUDGET_NAMES:
            if kwargs.get(name) is not None:
                return f"chat_template_kwargs.{name}", kwargs[name]
    return "", None


def asked_budget(body: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Tokens (None: none asked for, 0: no thinking, -1: no limit), and whether it had to be looked for. Raises ConfigError."""
    name, value = find_budget(body)
    if not name:
        return None, False
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise ConfigError(name, value, "a whole number of tokens; 0 thinks not at all, -1 without a limit")
    return value, name != "thinking_token_budget"


def asked_effort(body: Mapping[str, Any]) -> Any:
    """The effort as it was written: `reasoning_effort`, `reasoning.effort` (responses) or `output_config.effort` (messages)."""
    if body.get("reasoning_effort") is not None:
        return body["reasoning_effort"]
    for key in ("reasoning", "output_config"):
        options = body.get(key)
        if isinstance(options, dict) and options.get("effort") is not None:
            return options["effort"]
    return None
