"""Per-request knobs: validated in vLLM's front end, read by the worker.

A client sends ``"vllm_xargs": {"ag_rule": "cactus:delta=0.25,p_min=0.1,top_k=10", "ag_phase": "think"}``. vLLM merges it into
`SamplingParams.extra_args`; a bad value is an HTTP 400 with our message and nothing reaches the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from agentguard.errors import ConfigError, nearest
from agentguard.rulespec import RuleSpec

Phase = Literal["think", "answer", "both"]
KEYS = ("ag_rule", "ag_phase", "ag_think_tokens")


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What one request asked for: its rule, the phase in which the rule may relax, and the most think tokens it may generate in
    all its blocks together (None: no limit of ours)."""

    rule: RuleSpec
    phase: Phase
    think_tokens: int | None = None

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None, default: RuleSpec) -> RequestParams:
        """Parse `extra_args`; keys that are not ours are left to others. Raises ConfigError."""
        args = extra_args or {}
        for key in args:
            if key.startswith("ag_") and key not in KEYS:
                raise ConfigError(key, args[key], f"unknown key in vllm_xargs; {nearest(key, KEYS)}")
        text, phase = args.get("ag_rule"), args.get("ag_phase", "think")
        if text is not None and not isinstance(text, str):
            raise ConfigError("ag_rule", text, "write the rule as a string, for example 'cactus:delta=0.25'")
        if phase not in get_args(Phase):
            raise ConfigError("ag_phase", phase, "one of " + ", ".join(get_args(Phase)))
        think = args.get("ag_think_tokens")
        if think is not None and (not isinstance(think, int) or isinstance(think, bool) or think < 0):
            raise ConfigError("ag_think_tokens", think, "a whole number of tokens, 0 or more")
        return cls((default if text is None else RuleSpec.parse(text)).for_request(), phase, think)
