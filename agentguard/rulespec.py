"""The grammar of a verification rule, the same in recipes, `ag_rule`, `--arms`, events and JSON files.

    strict
    cactus:delta=0.25
    cactus:0.25                          # a rule's only knob needs no name
    typical:eps=0.09,delta=0.3
    cactus:delta=0.25,p_min=0.1,top_k=10

`p_min` and `top_k` are the support filter and may follow any rule; 0 means no filter. A relaxed *request* that leaves one out
gets its default (`for_request`); `rules.get` and the arms of a study take the text as it stands. `h_max` (nats) keeps a rule
from relaxing where the target's entropy is above it. `inf` and `-inf` are values. Parsing needs neither torch nor vLLM, so that
the command line and the gateway refuse a bad rule before an engine has started. The maths of each rule is in
`engine_plugins.rules`; a test holds the two lists together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agentguard.errors import ConfigError, nearest

DEFAULT_P_MIN = 0.10  # arXiv 2610.23818, recommendation 3
DEFAULT_TOP_K = 10  # same


@dataclass(frozen=True, slots=True)
class Knob:
    """A rule's parameter: its closed range, a usual value, and for which values the rule is strict (None: for none)."""

    name: str
    low: float
    high: float
    usual: float
    strict: Callable[[float], bool] | None = None
    whole: bool = False


def _alpha(usual: float, strict: Callable[[float], bool]) -> tuple[Knob, ...]:
    return (Knob("alpha", -math.inf, math.inf, usual, strict),)


KNOBS: dict[str, tuple[Knob, ...]] = {
    "strict": (),
    "lenience": (Knob("l", 0.0, 1.0, 0.63, lambda v: v == 1),),
    "mentored": (Knob("D", 0.0, math.inf, 0.2, lambda v: v == 0),),
    "mentored-dec": (Knob("alpha", 0.0, 1.0, 0.37, lambda v: v == 0),),
    "cactus": (Knob("delta", 0.0, math.inf, 0.25, lambda v: v == 0),),
    "cactus-exact": (Knob("delta", 0.0, math.inf, 0.25, lambda v: v == 0),),
    "fuzzy": (Knob("T", -math.inf, math.inf, 0.3),),
    "r-fuzzy": (Knob("T", -math.inf, math.inf, 0.3, lambda v: v <= 0),),
    "casc-chow": _alpha(0.3, lambda v: v < 0),
    "casc-diff": _alpha(0.05, lambda v: v <= -1),
    "casc-opt": _alpha(0.05, lambda v: v == -math.inf),
    "casc-tok-v1": _alpha(0.3, lambda v: v < -1),
    "casc-tok-v2": _alpha(0.3, lambda v: v < 0),
    "casc-tok-v3": _alpha(0.3, lambda v: v < 0),
    "typical": (Knob("eps", 0.0, math.inf, 0.09), Knob("delta", 0.0, math.inf, 0.3)),
    "top-k": (Knob("k", 1, 2**31, 3, whole=True),),
    "interp": (Knob("w", 0.0, 1.0, 0.3, lambda v: v == 0),),
}
_P_MIN = Knob("p_min", 0.0, 1.0, DEFAULT_P_MIN)
_TOP_K = Knob("top_k", 0, 2**31, DEFAULT_TOP_K, whole=True)
_H_MAX = Knob("h_max", 0.0, math.inf, 2.0)


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """A parsed rule: its name, its knobs, the support filter (0 = off, None = not given) and the entropy limit."""

    name: str
    knobs: dict[str, float] = field(default_factory=dict)
    p_min: float | None = None
    top_k: int | None = None
    h_max: float = math.inf

    @classmethod
    def parse(cls, text: str, *, what: str = "ag_rule") -> RuleSpec:
        """Read a rule's text. Raises ConfigError naming ``what``, the value and the remedy."""
        name, _, rest = text.strip().partition(":")
        if name not in KNOBS:
            raise ConfigError(what, text, f"unknown rule {name!r}; {nearest(name, KNOBS)}")
        allowed = {k.name: k for k in (*KNOBS[name], _P_MIN, _TOP_K, _H_MAX)}
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
        missing = [k for k in KNOBS[name] if k.name not in given]
        if missing:
            example = ",".join(f"{k.name}={_written(k.usual)}" for k in KNOBS[name])
            raise ConfigError(what, text, f"{name} needs {missing[0].name}, for example {name}:{example}")
        p_min, top_k, h_max = given.pop("p_min", None), given.pop("top_k", None), given.pop("h_max", math.inf)
        return cls(name, {k.name: given[k.name] for k in KNOBS[name]}, p_min, None if top_k is None else int(top_k), h_max)

    @property
    def relaxed(self) -> bool:
        """False for strict, and for a relaxed rule whose knobs are at their strict limit."""
        return any(k.strict is None or not k.strict(self.knobs[k.name]) for k in KNOBS[self.name])

    @property
    def filtered(self) -> bool:
        """Is there a support filter?"""
        return bool(self.p_min or self.top_k)

    def filtered_by(self, p_min: float | None, top_k: int | None) -> RuleSpec:
        """The same rule with this filter; None: not given. Raises ConfigError."""
        for knob, value in ((_P_MIN, p_min), (_TOP_K, top_k)):
            if value is not None:
                _number(knob.name, str(self), knob, str(value))
        return replace(self, p_min=p_min, top_k=None if top_k is None else int(top_k))

    def for_request(self) -> RuleSpec:
        """What a request with this text runs under: a relaxed rule gets the default filter where the text says nothing."""
        if not self.relaxed:
            return self
        return self.filtered_by(
            DEFAULT_P_MIN if self.p_min is None else self.p_min, DEFAULT_TOP_K if self.top_k is None else self.top_k
        )

    def as_it_stands(self) -> RuleSpec:
        """The same rule with a filter that is not given written out as off, so that a request with its text gets no default."""
        return self.filtered_by(self.p_min or 0, self.top_k or 0) if self.relaxed else self

    def __str__(self) -> str:
        parts = [f"{k}={_written(v)}" for k, v in self.knobs.items()]
        parts += [f"p_min={_written(self.p_min)}"] if self.p_min is not None else []
        parts += [f"top_k={self.top_k}"] if self.top_k is not None else []
        parts += [f"h_max={_written(self.h_max)}"] if self.h_max < math.inf else []
        return self.name + (":" + ",".join(parts) if parts else "")


def _written(value: float) -> str:
    """The shortest text that reads back as the same number."""
    value = float(value)
    return str(int(value)) if value.is_integer() else repr(value)


def _number(what: str, text: str, knob: Knob, raw: str) -> float:
    limits = f"{knob.name} is a {'whole ' if knob.whole else ''}number from {knob.low:g} to {knob.high:g}"
    try:
        value = float(raw)
    except ValueError:
        raise ConfigError(what, text, f"{limits}, not {raw!r}") from None
    if math.isnan(value) or not knob.low <= value <= knob.high or (knob.whole and not value.is_integer()):
        raise ConfigError(what, text, f"{limits}, not {raw}")
    return value
