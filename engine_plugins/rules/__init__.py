"""Verification rules, by name: ``rules.get("cactus:delta=0.25,p_min=0.1,top_k=10")``.

Pure torch, batched over rows, no engine import. A rule's definition and source stand in its class; the grammar is
`agentguard.rulespec`, the page with all of them docs/rules.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentguard.rulespec import RuleSpec
from engine_plugins.rules.base import Pair, Rows, Rule
from engine_plugins.rules.cactus import Cactus, CactusExact
from engine_plugins.rules.cascades import Chow, Diff, Opt, TokenV1, TokenV2, TokenV3
from engine_plugins.rules.exact import law_of
from engine_plugins.rules.filtered import FilteredRule, Rewritten
from engine_plugins.rules.fuzzy import Fuzzy, RFuzzy
from engine_plugins.rules.interp import Interp
from engine_plugins.rules.lenience import Lenience, MentoredDec
from engine_plugins.rules.mentored import Mentored
from engine_plugins.rules.strict import Strict
from engine_plugins.rules.topk import TopK
from engine_plugins.rules.typical import Typical

__all__ = ["FilteredRule", "Pair", "Rewritten", "Rows", "Rule", "exact_law", "get", "names"]

_RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Strict, Lenience, Mentored, MentoredDec, Cactus, CactusExact, Fuzzy, RFuzzy, Chow, Diff, Opt, TokenV1, TokenV2, TokenV3,
        Typical, TopK, Interp,
    )
}  # fmt: skip


def get(spec: str | RuleSpec, *, p_min: float | None = None, top_k: int | None = None) -> FilteredRule:
    """The rule a specification names. No filter, unless the text has one, or ``p_min`` and ``top_k``, which win; 0 is none.

    Raises ConfigError for an unknown rule or a knob out of range.
    """
    parsed = spec if isinstance(spec, RuleSpec) else RuleSpec.parse(spec, what="rule")
    parsed = parsed.filtered_by(parsed.p_min if p_min is None else p_min, parsed.top_k if top_k is None else top_k)
    return FilteredRule(parsed, _RULES[parsed.name](**parsed.knobs))


def names() -> tuple[str, ...]:
    """All rules, in the order of the documentation."""
    return tuple(_RULES)


def exact_law(rule: str | RuleSpec | FilteredRule, p: Tensor, q: Tensor) -> tuple[Tensor, float]:
    """The law of the token emitted at one position, [V], and the probability that the drafted one is accepted.

    Enumerates every draft x on the pair the shipped code makes, in float64. p, q: [V] distributions of any small V; the support
    filter of the rule is honoured. Raises ConfigError for an unknown rule.
    """
    filtered = rule if isinstance(rule, FilteredRule) else get(rule)
    p, q = (torch.as_tensor(t, dtype=torch.float64) for t in (p, q))
    x = torch.arange(len(p))
    size = (len(p), len(p))
    return law_of(filtered.pair(p.expand(size), q.expand(size), x), q, x)
