"""What has been learned about a server. Found out once, by asking or from a refusal, and remembered until it comes back anew."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Literal

ADDED = ("thinking_token_budget", "return_token_ids", "include_reasoning", "stream_options", "vllm_xargs")
"""Fields the guard adds to a request by itself. A client's own are its own affair: their refusal is passed on."""
_REFUSED = re.compile(
    r"unknown|unsupported|not supported|unrecogni[sz]ed|unexpected|extra|not permitted|not allowed|not configured", re.I
)
MOST_TAILS = 64
Carrier = Literal["reasoning", "content"]
MISSING_S = 60.0
"""A route that was missing is asked for again after so long: a proxy in front of a server, or one that starts, says 404 too."""


class Facts:
    """plugin: our plugin is in the engine, so budgets are exact and can change while a request runs. tokenize: /tokenize is there.
    budget: what `thinking_token_budget` does. dropped: fields of ours the server refused. carrier: the message field through which
    its chat template shows a partial trace; "" when none does. inline: it streams a trace that the prompt opened as content.
    chars_per_token: of its text, for counting without ids. metrics: /metrics is there. tails: what its template writes behind the
    start marker it opens a block with, by the request's switches (`trace.opening`); None where it opens none.

    ``tokenize`` and ``metrics`` given as False: the engine has no such route, and never will.
    """

    def __init__(self, *, tokenize: bool = True, metrics: bool = True) -> None:
        self._has = {"tokenize": tokenize, "metrics": metrics}
        self._missing: dict[str, float] = {}
        self.plugin = False
        self.budget: Literal["unknown", "works", "rejected", "ignored"] = "unknown"
        self.dropped: set[str] = set()
        self.carrier: Carrier | Literal["", "unknown"] = "unknown"
        self.inline = False
        self.chars_per_token = 4.0
        self.tails: dict[str, tuple[int, ...] | None] = {}

    def anew(self) -> Facts:
        """Of another process at the same address: all that is left is what its text is like, which is the model's."""
        facts = Facts(**self._has)
        facts.chars_per_token = self.chars_per_token
        return facts

    @property
    def tokenize(self) -> bool:
        """/tokenize is there, as far as is known; one that was missing is tried again after `MISSING_S`."""
        return self._there("tokenize")

    @tokenize.setter
    def tokenize(self, there: bool) -> None:
        """What asking /tokenize has just shown."""
        self._learn("tokenize", there)

    @property
    def metrics(self) -> bool:
        """/metrics is there, as far as is known; one that was missing is tried again after `MISSING_S`."""
        return self._there("metrics")

    @metrics.setter
    def metrics(self, there: bool) -> None:
        """What asking /metrics has just shown."""
        self._learn("metrics", there)

    def _there(self, route: str) -> bool:
        return self._has[route] and time.monotonic() >= self._missing.get(route, 0.0)

    def _learn(self, route: str, there: bool) -> None:
        if there:
            self._missing.pop(route, None)
        else:
            self._missing[route] = time.monotonic() + MISSING_S

    def learn_tail(self, switches: str, tail: tuple[int, ...] | None) -> None:
        """Clients may send any switches, so few are kept."""
        if len(self.tails) >= MOST_TAILS:
            self.tails.clear()
        self.tails[switches] = tail

    def learn_rate(self, chars_per_token: float | None) -> None:
        """A moving mean over finished steps; what is outside of any language's range is not believed."""
        if chars_per_token is not None and 0.5 <= chars_per_token <= 12:
            self.chars_per_token += 0.2 * (chars_per_token - self.chars_per_token)

    def refused(self, body: Mapping[str, object], message: str) -> list[str]:
        """The fields of ours in ``body`` that a 400 refuses; nothing is learned yet, as a message may merely quote a name."""
        if not _REFUSED.search(message):
            return []
        return [name for name in ADDED if name in body and name in message and not (name == "vllm_xargs" and self.plugin)]

    def learn_refused(self, names: Iterable[str]) -> None:
        """The request went through without these fields, so they are left out from now on."""
        self.dropped.update(names)
        if "thinking_token_budget" in self.dropped:
            self.budget = "rejected"
