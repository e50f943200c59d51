"""Verification rules, by name: ``rules.get("cactus:delta=0.25,p_min=0.1,top_k=10")``.

Pure torch, batched over rows, no engine import. A rule's definition and source stand in its class; the grammar is
`agentguard.rulespec`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentguard.rulespec import RuleSpec
from engine_plugins.rules.base import Pair, Rule
from engine_plugins.rules.cactus import Cactus
from engine_plugins.rules.interp import Interp
from engine_plugins.rules.strict import Strict
from engine_plugins.rules.support import outside_support, reject

_RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Strict, Cactus, Interp)}


@dataclass(frozen=True, slots=True)
class FilteredRule:
    """A rule with its support filter: what a request's `ag_rule` becomes."""

    spec: RuleSpec
    rule: Rule

    def pair(self, p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> tuple[Pair, torch.Tensor]:
        """The pair to verify with, and which rows the support filter rejected ([rows] bool).

        p, q: [rows, V]; x: [rows] int64. A token with p(x) = 0 is never accepted, filter or not.
        """
        outside = outside_support(p, x, self.spec.p_min, self.spec.top_k)
        pair = self.rule.pair(p, q, x)
        return (reject(pair, p, x, outside) if bool(outside.any()) else pair), outside


def get(spec: str | RuleSpec, *, p_min: float | None = None, top_k: int | None = None) -> FilteredRule:
    """The rule a specification names. ``p_min`` and ``top_k`` override the filter of the text.

    Raises ConfigError for an unknown rule or a knob out of range.
    """
    parsed = spec if isinstance(spec, RuleSpec) else RuleSpec.parse(spec, what="rule")
    if p_min is not None or top_k is not None:
        parsed = parsed.with_filter(parsed.p_min if p_min is None else p_min, parsed.top_k if top_k is None else top_k)
    return FilteredRule(parsed, _RULES[parsed.name](**parsed.knobs))


def names() -> tuple[str, ...]:
    """All rules, in the order of the documentation."""
    return tuple(_RULES)
