"""The grammar of a verification rule, the same in recipes, `ag_rule`, `--arms`, events and JSON files.

    strict
    cactus:delta=0.25
    cactus:0.25                          # a rule's only knob needs no name
    cactus:delta=0.25,p_min=0.1,top_k=10

`p_min` and `top_k` are the support filter and may follow any relaxed rule; 0 means no filter. `inf` and `-inf` are values. Parsing
needs neither torch nor vLLM, so that the command line and the gateway refuse a bad rule before an engine has started. The maths of
each rule is in `engine_plugins.rules`; a test holds the two lists together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agentguard.errors import ConfigError, nearest

DEFAULT_P_MIN = 0.10  # arXiv 2610.23818, recommendation 3
DEFAULT_TOP_K = 10  # same


@dataclass(frozen=True, slots=True)
class Knob:
    """A rule's parameter, its closed range, and the value at which the rule is strict (None: it never is)."""

    name: str
    low: float
    high: float
    strict: float | None = None


KNOBS: dict[str, tuple[Knob, ...]] = {
    "strict": (),
    "cactus": (Knob("delta", 0.0, math.inf, strict=0.0),),
    "interp": (Knob("w", 0.0, 1.0, strict=0.0),),
}
_FILTER = (Knob("p_min", 0.0, 1.0), Knob("top_k", 0.0, math.inf))


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """A parsed rule: its name, its knobs, and the support filter (0 = off)."""

    name: str
    knobs: dict[str, float] = field(default_factory=dict)
    p_min: float = 0.0
    top_k: int = 0

    @classmethod
    def parse(cls, text: str, *, what: str = "ag_rule") -> RuleSpec:
        """Read a rule's text. Raises ConfigError naming ``what``, the value and the remedy."""
        name, _, rest = text.strip().partition(":")
        if name not in KNOBS:
            raise ConfigError(what, text, f"unknown rule {name!r}; {nearest(name, KNOBS)}")
        allowed = {k.name: k for k in (*KNOBS[name], *_FILTER)}
        given: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            key, equals, raw = part.partition("=")
            if not equals:
                key, raw = (KNOBS[name][0].name, part) if len(KNOBS[name]) == 1 and not given else (part, "")
            key = key.strip()
            if key not in allowed:
                raise ConfigError(what, text, f"unknown knob {key!r} of {name}; {nearest(key, allowed)}")
            if key in given:
                raise ConfigError(what, text, f"knob {key!r} is given twice; keep one")
            given[key] = _number(what, text, allowed[key], raw)
        missing = [k.name for k in KNOBS[name] if k.name not in given]
        if missing:
            raise ConfigError(what, text, f"{name} needs {missing[0]}, for example {name}:{missing[0]}=0.25")
        p_min, top_k = given.pop("p_min", 0.0), given.pop("top_k", 0.0)
        if not top_k.is_integer():
            raise ConfigError(what, text, "top_k is a rank: write a whole number, 0 for no limit")
        return cls(name, given, p_min, int(top_k))

    @property
    def relaxed(self) -> bool:
        """False for strict, and for a relaxed rule whose knobs are at their strict limit."""
        return any(self.knobs[k.name] != k.strict for k in KNOBS[self.name])

    @property
    def filtered(self) -> bool:
        return self.p_min > 0 or self.top_k > 0

    def with_filter(self, p_min: float = DEFAULT_P_MIN, top_k: int = DEFAULT_TOP_K) -> RuleSpec:
        return RuleSpec(self.name, self.knobs, p_min, top_k)

    def __str__(self) -> str:
        parts = [f"{k}={_written(v)}" for k, v in self.knobs.items()]
        parts += [f"p_min={_written(self.p_min)}"] if self.p_min else []
        parts += [f"top_k={self.top_k}"] if self.top_k else []
        return self.name + (":" + ",".join(parts) if parts else "")


def _written(value: float) -> str:
    """The shortest text that reads back as the same number."""
    value = float(value)
    return str(int(value)) if value.is_integer() else repr(value)


def _number(what: str, text: str, knob: Knob, raw: str) -> float:
    limits = f"{knob.name} is a number from {knob.low:g} to {knob.high:g}"
    try:
        value = float(raw)
    except ValueError:
        raise ConfigError(what, text, f"{limits}, not {raw!r}") from None
    if math.isnan(value) or not knob.low <= value <= knob.high:
        raise ConfigError(what, text, f"{limits}, not {raw}")
    return value
