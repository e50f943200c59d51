"""Numbers, ages and rules in words, as the verdict and the event log say them; and making words of others harmless."""

from __future__ import annotations

from agentguard.errors import ConfigError
from agentguard.rulespec import DEFAULT_P_MIN, DEFAULT_TOP_K, RuleSpec

_GREEK = {"delta": "δ", "alpha": "α", "eps": "ε"}


def age(seconds: float) -> str:
    """One unit, rounded down: "40 s", "4 min", "3 h", "2 d"."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def rule(text: str) -> str:
    """A rule for people: "cactus δ=0.25"; the default support filter goes without saying, as it is always there."""
    try:
        spec = RuleSpec.parse(text)
    except ConfigError:
        return text
    parts = [f"{_GREEK.get(name, name)}={value:g}" for name, value in spec.knobs.items()]
    if spec.relaxed and (spec.p_min, spec.top_k) != (DEFAULT_P_MIN, DEFAULT_TOP_K):
        if not spec.filtered:
            parts.append("unfiltered")
        else:
            parts += [f"p_min={spec.p_min:g}"] if spec.p_min else []
            parts += [f"top_k={spec.top_k}"] if spec.top_k else []
    return " ".join([spec.name, *parts])


def support(text: str | None) -> tuple[float | None, int | None]:
    """The support filter of a rule that ran: smallest probability and largest rank, None for none."""
    if not text:
        return None, None
    try:
        spec = RuleSpec.parse(text)
    except ConfigError:
        return None, None
    return (spec.p_min or None, spec.top_k or None) if spec.relaxed else (None, None)


def model(name: str | None) -> str:
    """A model's name without its path."""
    return (name or "").rstrip("/").rsplit("/", 1)[-1] or "unknown model"


def clean(text: str) -> str:
    """Names that clients chose must not reach a terminal raw: control characters act there, and bidirectional ones turn lines."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def plural(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
