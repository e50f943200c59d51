"""What a study comes to: an arm's numbers beside strict's, and the whole as JSON. comparison.py computes it, verdict.py judges."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from agentguard import __version__
from agentguard.economics.cells import Mean
from agentguard.study.inference import Estimate
from agentguard.study.records import Header

Word = Literal["baseline", "win", "loss", "undecided"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sessions that are right under one arm and wrong under the other, and McNemar's exact p. ``difference``: of the shares."""

    gained: int
    lost: int
    p: float
    difference: Estimate


@dataclass(frozen=True, slots=True)
class Extra:
    """Where the tokens are that an arm writes beyond strict, in tokens a session, over pairs in which both traces state the right
    answer: before its first statement, or after. ``after_share``: None unless the arm is significantly longer there. ``proved``:
    sessions of the arm that state it at all, ``proved_strict`` of strict; ``place``: median tokens up to it, where it is stated."""

    pairs: int
    before: Estimate
    after: Estimate
    after_share: Estimate | None
    proved: int
    proved_strict: int
    place: Estimate | None
    place_strict: Estimate | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Accepted draft tokens of one kind: how many, the mean of the target's probability, and the median of its rank (1 is best)."""

    n: int
    p: Estimate | None
    rank: Estimate | None


@dataclass(frozen=True, slots=True)
class Against:
    """An arm against another one than strict."""

    arm: str
    inflation: Estimate | None
    rounds_ratio: Estimate | None
    accuracy: Pairs | None


@dataclass(frozen=True, slots=True)
class Closing:
    """A closed arm against its rule's free runs cut at the budget, over all sessions: no run is selected by its length, so what
    chance alone rescues it also regresses. ``bound``: free runs whose trace passes 85 % of the budget, and what became of them."""

    budget: int
    right_off: int
    right: int
    rescued: int
    regressed: int
    p: float
    difference: Estimate
    bound: int
    bound_right_off: int
    bound_right: int
    bound_rescued: int
    bound_regressed: int
    empty: int
    closed: dict[str, int]
    minus_fixed: Estimate | None = None
    """Of the budget-bound runs: share of right ones minus that under the fixed close."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm's numbers; None is unknown. Lengths are tokens a session. ``accepted_length`` (ℓ) never counts the bonus token."""

    rule: str
    filter: bool
    close: str
    sessions: int
    steps: int
    right: int | None
    accuracy: Estimate | None
    against_strict: Pairs | None
    tokens: int
    think_tokens: int
    rounds: int
    length: Estimate
    think_length: Estimate
    answer_length: Estimate
    accepted_length: Estimate | None
    gain: Estimate | None
    inflation: Estimate | None
    """λ."""
    rounds_ratio: Estimate | None
    ttlt_ratio: Estimate | None
    ttlt_s: float
    tokens_per_s: Estimate | None
    think_share_of_extra: Estimate | None
    """None unless the arm is significantly longer than strict."""
    truncated: int
    """Steps that ended at the client's limit."""
    closes: int
    empty_answers: int
    extra: Extra | None
    strict_tokens: Tokens
    """Accepted, and strict would have accepted them on the same coin."""
    relaxed_tokens: Tokens
    """Accepted only because the rule relaxes."""
    relaxed_places: list[float]
    """Quantiles of their places in the output (`QUANTILES`)."""
    hesitations: dict[str, int]
    """Hesitation words among ``relaxed_tokens``."""
    hesitation_share: Estimate | None
    """Of ``relaxed_tokens``."""
    hesitation_share_strict: Estimate | None
    """Of ``strict_tokens``."""
    by_position: list[float]
    """Share of the rounds that drafted position i which accepted it."""
    by_output: list[tuple[int, int, float]]
    """(output position, rounds, ℓ) for each bin."""
    lengths: list[float]
    """Quantiles of the tokens a session (`QUANTILES`)."""
    fates: dict[str, int]
    telemetry: float | None
    """Rounds the telemetry told of, over those the engine counted."""
    a_step: dict[str, Mean | None]
    without_filter: Against | None = None
    strict_same_filter: Against | None = None
    closing: Closing | None = None
    verdict: Word = "undecided"
    reason: str = ""
    p_rounds: float | None = None
    """Of the rounds ratio, adjusted after Holm over the arms of the same close."""
    p_accuracy: float | None = None
    """McNemar's, adjusted in the same way."""

    @property
    def name(self) -> str:
        return self.rule if self.close == "off" else f"{self.rule}, close {self.close}"

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = flat(self)
        for suffix in ("", "_ci", "_p"):
            if "inflation" + suffix in row:
                row["lambda" + suffix] = row.pop("inflation" + suffix)
        return row


def flat(part: Any) -> dict[str, Any]:
    """A dataclass as JSON: an estimate x becomes x, x_ci and, if it was tested, x_p."""
    row: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Estimate):
            row[field.name] = value.value
            row[field.name + "_ci"] = [value.low, value.high]
            if value.p is not None:
                row[field.name + "_p"] = value.p
        elif isinstance(value, dict):
            row[field.name] = {k: flat(v) if is_dataclass(v) else v for k, v in value.items()}
        else:
            row[field.name] = flat(value) if is_dataclass(value) else value
    return row


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole study. ``planned``: sessions of its plan, of which ``found`` were recorded."""

    header: Header
    arms: list[Arm]
    budget: int
    planned: int
    found: int

    def arm(self, rule: str, close: str = "off") -> Arm | None:
        return next((arm for arm in self.arms if (arm.rule, arm.close) == (rule, close)), None)

    def as_json(self) -> dict[str, Any]:
        plan = self.header.plan
        document = {
            "agentguard": __version__,
            "suite": plan["suite"],
            "seed": plan["seed"],
            "temperature": plan["temperature"],
            "engine": self.header.provenance.get("engine"),
            "budget": self.budget or None,
            "sessions": {"planned": self.planned, "recorded": self.found},
            "arms": [arm.as_json() for arm in self.arms],
            "provenance": self.header.provenance,
        }
        closed = [arm for arm in self.arms if arm.rule == "strict" and arm.closing is not None]
        if closed:
            document["close"] = _close(closed)
        rounded: dict[str, Any] = finite(document)
        return rounded

    def to_json(self) -> str:
        return json.dumps(self.as_json(), indent=1) + "\n"


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null. Floats keep six digits, more than any interval here warrants."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def _close(arms: list[Arm]) -> dict[str, Any]:
    """What closing does under strict, over the budget-bound runs; the last way of closing, and with what it was compared."""
    rows = []
    for arm in sorted(arms, key=lambda arm: arm.close == "adaptive"):
        closing = arm.closing
        assert closing is not None
        compared: dict[str, Any] = {}
        if closing.minus_fixed is not None:
            found = closing.minus_fixed
            compared = {"right_minus_fixed": found.value, "right_minus_fixed_ci": [found.low, found.high]}
        rows.append(
            {
                "mode": arm.close, "budget": closing.budget, "n": closing.bound, "rescued": closing.bound_rescued,
                "regressed": closing.bound_regressed, "empty": closing.empty, "right": closing.bound_right,
                "right_off": closing.bound_right_off, "closed": closing.closed,
                **compared,
            }
        )  # fmt: skip
    return rows[-1] | {"compared": rows[:-1]}
