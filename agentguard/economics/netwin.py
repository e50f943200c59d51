"""Does a rule pay? The verdict on an arm in a class, and the switch that acts on it.

A rule pays when it needs fewer rounds than strict, that is when gain > λ; on a server it must not lose in time to the last
token either. The guard switches a losing rule to strict for new requests of its class, lets a trickle of sessions go on to
explore, and switches back when these win by themselves, on evidence gathered since the switch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from agentguard.economics import sequences
from agentguard.economics.cells import Cell, Mean
from agentguard.economics.ratios import Ratio

Word = Literal["win", "loss", "undecided"]
Control = Cell | dict[str, Mean]
"""What an arm is held against: the live control's sums, or fixed means."""
MIN_SESSIONS = 50
"""Sessions an arm before any verdict, because the sequence is asymptotic."""
ALPHA_ROUNDS, ALPHA_TTLT = 0.04, 0.01
"""Chance, ever, of calling a rule without effect a loss, per class and arm: 5 %, most of it on rounds, which no load disturbs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word with its reason. ``quantity`` is what decided ("" while undecided); the ratios are to strict, None while unknown."""

    word: Word
    reason: str
    quantity: str = ""
    rounds: Ratio | None = None
    ttlt: Ratio | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """ln of a ratio of two means a step, the variance of that, and the sessions of the smaller arm."""

    log: float
    variance: float
    n: int

    def interval(self, alpha: float = sequences.ALPHA) -> Ratio:
        return sequences.ratio(self.log, self.variance, self.n, alpha)


def difference(arm: Cell, control: Control, quantity: str) -> Difference | None:
    """An arm's mean over the control's, None while one is unknown.

    By the delta method, but with the relative variance a session of each arm at least the pooled one: a small control that has
    drawn no long run yet has a low mean *and* a low variance, and looks like a loss (at 95 : 5 and one step a session 8 % of
    rules without effect were called a loss with each arm's own variance, 3 % with this; benchmarks/economics_simulation.py).
    """
    over = arm.mean(quantity)
    under = control.get(quantity) if isinstance(control, dict) else control.mean(quantity)
    if over is None or under is None:
        return None
    log = math.log(over.value / under.value)
    if isinstance(control, dict):
        return Difference(log, over.variance / over.value**2 + under.variance / under.value**2, over.n)
    each = [(mean.variance * mean.n / mean.value**2, mean.n) for mean in (over, under)]
    pooled = sum(relative * n for relative, n in each) / (over.n + under.n)
    return Difference(log, sum(max(relative, pooled) / n for relative, n in each), min(over.n, under.n))


def combined(parts: Iterable[Difference]) -> Difference | None:
    """Several classes' differences as one, weighted by their precision, as a class too small for itself is judged.

    A ratio of pooled sums would mix classes in different shares (Simpson). The same sessions stand in several classes, so their
    errors are taken as fully correlated, which errs on the safe side.
    """
    known = [part for part in parts if part.variance > 0]
    if not known:
        return None
    weights = [1 / part.variance for part in known]
    total = sum(weights)
    log = sum(w * part.log for w, part in zip(weights, known, strict=True)) / total
    error = sum(w * math.sqrt(part.variance) for w, part in zip(weights, known, strict=True)) / total
    return Difference(log, error**2, sum(part.n for part in known))


def judge(rounds: Difference | None, ttlt: Difference | None, sessions: int, min_sessions: int = MIN_SESSIONS) -> Verdict:
    """The verdict of one moment on ``sessions`` of the smaller arm. One-sided, hence twice each alpha for the two-sided
    sequence."""
    if sessions < min_sessions:
        return Verdict("undecided", f"{max(0, sessions)} of {min_sessions} sessions an arm")
    by_rounds = None if rounds is None else rounds.interval(2 * ALPHA_ROUNDS)
    by_ttlt = None if ttlt is None else ttlt.interval(2 * ALPHA_TTLT)
    for quantity, ratio in (("rounds", by_rounds), ("ttlt", by_ttlt)):
        if ratio is not None and ratio.low > 1:
            return Verdict("loss", f"{quantity} ratio {_text(ratio)} is above 1", quantity, by_rounds, by_ttlt)
    if by_rounds is None:
        reason = "no rounds to compare; is there a draft model, and rounds in the baseline?"
        return Verdict("undecided", reason, "", by_rounds, by_ttlt)
    if by_rounds.high < 1:
        return Verdict("win", f"rounds ratio {_text(by_rounds)} is below 1", "rounds", by_rounds, by_ttlt)
    return Verdict("undecided", f"rounds ratio {_text(by_rounds)} holds 1", "", by_rounds, by_ttlt)


def _text(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if math.isfinite(ratio.high) else f"{ratio.value:.2f}"


@dataclass(slots=True)
class Switch:
    """The state of one arm in one class.

    ``on``: new requests run the rule. ``verdict``: while on the latest one, while off the one that switched it off. ``fresh``:
    while off, what the sessions since then say. ``moves`` counts the moves; ``arm`` and ``control`` are the class's sums at the
    last one, so that only later sessions count for the next.
    """

    on: bool = True
    moves: int = 0
    at: float = 0.0
    verdict: Verdict = Verdict("undecided", "nothing measured yet")
    fresh: Verdict | None = None
    arm: dict[str, float] | None = None
    control: dict[str, float] | None = None

    def since(self, arm: Cell, control: Control) -> tuple[Cell, Control]:
        """The part of the sums that came after the last move."""
        if self.arm is None:
            return arm, control
        return arm.since(self.arm), control.since(self.control or {}) if isinstance(control, Cell) else control

    def judged(self, verdict: Verdict) -> None:
        """Take a verdict note of which nothing follows."""
        if self.on:
            self.verdict = verdict
        else:
            self.fresh = verdict

    def move(self, verdict: Verdict, arm: Cell, control: Control, now: float) -> None:
        self.on, self.verdict, self.fresh = not self.on, verdict, None
        self.moves, self.at = self.moves + 1, now
        self.arm = dict(arm.sums)
        self.control = dict(control.sums) if isinstance(control, Cell) else None

    @property
    def reason(self) -> str:
        if self.on:
            return self.verdict.reason
        return f"{self.verdict.reason}; since then {self.fresh.reason if self.fresh else 'no session'}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Switch:
        """Raises KeyError, TypeError or ValueError for what `as_json` did not write."""
        known = dict(raw)
        known["verdict"] = _verdict_of(known["verdict"])
        known["fresh"] = _verdict_of(known["fresh"]) if known["fresh"] else None
        return cls(**known)


def _verdict_of(raw: dict[str, Any]) -> Verdict:
    return Verdict(**(raw | {k: Ratio(**raw[k]) if raw[k] else None for k in ("rounds", "ttlt")}))
