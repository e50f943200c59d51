"""What has been learned about a server. Found out once, by asking or from a refusal, and remembered while the client lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# fields of ours or of vLLM's that another server may refuse; each can be left out without changing what the client asked for
OPTIONAL = (
    "thinking_token_budget", "return_token_ids", "vllm_xargs", "include_reasoning", "stream_options", "min_tokens",
    "chat_template_kwargs", "reasoning_effort", "priority",
)  # fmt: skip
Carrier = Literal["reasoning", "content"]


@dataclass(slots=True)
class Facts:
    """plugin: our plugin is in the engine, so budgets are exact and can change while a request runs. tokenize: /tokenize is there.
    budget: what `thinking_token_budget` does. dropped: optional fields the server refused. carrier: the message field through
    which its chat template shows a partial trace; "" when none does. chars_per_token: of its text, for counting without ids."""

    plugin: bool = False
    tokenize: bool = True
    budget: Literal["unknown", "works", "rejected", "ignored"] = "unknown"
    dropped: set[str] = field(default_factory=set)
    carrier: Carrier | Literal["", "unknown"] = "unknown"
    chars_per_token: float = 4.0

    def learn_rate(self, chars_per_token: float | None) -> None:
        """A moving mean over finished steps; what is outside of any language's range is not believed."""
        if chars_per_token is not None and 0.5 <= chars_per_token <= 12:
            self.chars_per_token += 0.2 * (chars_per_token - self.chars_per_token)

    def refused(self, body: dict[str, object], message: str) -> list[str]:
        """The optional fields of ``body`` that a 400's message names; they are left out from now on."""
        named = [name for name in OPTIONAL if name in body and name in message]
        self.dropped.update(named)
        if "thinking_token_budget" in named:
            self.budget = "rejected"
        return named
