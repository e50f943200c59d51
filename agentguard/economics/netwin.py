"""Does a rule pay? The verdict on an arm in a class, and the switch that acts on it.

A rule pays when it needs fewer rounds than strict, that is when gain > λ; on a server it must not lose in time to the last
token either. The guard switches a losing rule to strict for new requests of its class, lets a trickle of sessions go on to
explore, and switches back when these win by themselves, on evidence gathered since the switch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from agentguard.economics import sequences
from agentguard.economics.cells import Cell, Mean, log_ratio
from agentguard.economics.ratios import Ratio

Word = Literal["win", "loss", "undecided"]
MIN_SESSIONS = 30
"""Sessions an arm before any verdict, because the sequence is asymptotic (wrong switch-offs: 4 % with 20, 30 or 50)."""
ALPHA_ROUNDS, ALPHA_TTLT = 0.04, 0.01
"""Chance, ever, of calling a rule without effect a loss: 5 % in all, most of it spent on rounds, which no other load disturbs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word with its reason. ``quantity`` is what decided ("" while undecided); the ratios are to strict, None while unknown."""

    word: Word
    reason: str
    quantity: str = ""
    rounds: Ratio | None = None
    ttlt: Ratio | None = None


def compare(arm: Cell, control: Cell | dict[str, Mean], quantity: str, alpha: float = sequences.ALPHA) -> Ratio | None:
    """The arm's mean a step over the control's, with its confidence sequence; None while one is unknown.

    ``control``: live sums, or fixed means from a study or a recipe.
    """
    over = arm.mean(quantity)
    under = control.get(quantity) if isinstance(control, dict) else control.mean(quantity)
    if over is None or under is None:
        return None
    return sequences.ratio(*log_ratio(over, under), n=min(over.n, under.n), alpha=alpha)


def judge(arm: Cell, control: Cell | dict[str, Mean], *, min_sessions: int = MIN_SESSIONS) -> Verdict:
    """The verdict of one moment. Each side of an interval has its own alpha, hence twice of it for the two-sided sequence."""
    known = min(arm.sessions, control.sessions if isinstance(control, Cell) else arm.sessions)
    if known < min_sessions:
        return Verdict("undecided", f"{known} of {min_sessions} sessions an arm")
    rounds, ttlt = compare(arm, control, "rounds", 2 * ALPHA_ROUNDS), compare(arm, control, "ttlt", 2 * ALPHA_TTLT)
    for quantity, ratio in (("rounds", rounds), ("ttlt", ttlt)):
        if ratio is not None and ratio.low > 1:
            return Verdict("loss", f"{quantity} ratio {_text(ratio)} is above 1", quantity, rounds, ttlt)
    if rounds is None:
        return Verdict("undecided", "no rounds are reported; is there a draft model?", "", rounds, ttlt)
    if rounds.high < 1:
        return Verdict("win", f"rounds ratio {_text(rounds)} is below 1", "rounds", rounds, ttlt)
    return Verdict("undecided", f"rounds ratio {_text(rounds)} holds 1", "", rounds, ttlt)


def _text(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if math.isfinite(ratio.high) else f"{ratio.value:.2f}"


@dataclass(slots=True)
class Switch:
    """The state of one arm in one class.

    ``on``: new requests run the rule. ``verdict``: while on the latest one, while off the one that switched it off. ``fresh``:
    while off, what the sessions since then say. ``arm`` and ``control``: the sums at the last move, so that a return is judged
    on later sessions only.
    """

    on: bool = True
    at: float = 0.0
    verdict: Verdict = Verdict("undecided", "nothing measured yet")
    fresh: Verdict | None = None
    arm: dict[str, float] | None = None
    control: dict[str, float] | None = None

    def step(self, arm: Cell, control: Cell | dict[str, Mean], now: float, *, min_sessions: int = MIN_SESSIONS) -> bool:
        """Judge again; True when the switch moved, in which case ``verdict`` is why."""
        if self.on:
            self.verdict = judge(arm, control, min_sessions=min_sessions)
            if self.verdict.word != "loss":
                return False
            self.fresh = None
        else:
            beside = control.since(self.control or {}) if isinstance(control, Cell) else control
            self.fresh = judge(arm.since(self.arm or {}), beside, min_sessions=min_sessions)
            if self.fresh.word != "win":
                return False
            self.verdict, self.fresh = self.fresh, None
        self.on, self.at = not self.on, now
        self.arm = dict(arm.sums)
        self.control = dict(control.sums) if isinstance(control, Cell) else None
        return True

    @property
    def reason(self) -> str:
        if self.on:
            return self.verdict.reason
        return f"{self.verdict.reason}; since then {self.fresh.reason if self.fresh else 'no session'}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Switch:
        fresh = _verdict_of(raw["fresh"]) if raw["fresh"] else None
        return cls(raw["on"], raw["at"], _verdict_of(raw["verdict"]), fresh, raw["arm"], raw["control"])


def _verdict_of(raw: dict[str, Any]) -> Verdict:
    return Verdict(**(raw | {k: Ratio(**raw[k]) if raw[k] else None for k in ("rounds", "ttlt")}))
