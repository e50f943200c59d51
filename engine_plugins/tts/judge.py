"""Does learning help this request, and does it pay? Decided from rounds the draft has not learned from yet.

Only row 0 of a round is compared: it is reached whatever the draft does, so its overlap with the target is an unselected sample
under the live draft and under the frozen one. The rows of a round are judged before they are learned from."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from engine_plugins.tts.loss import expected_length

MEMORY = 128  # rounds that were looked at, one of three: some 10 s of a reference request
LEAST = 24  # before any verdict
PAY_LEAST = 80  # before "does not pay": gains come late; this is about 250 rounds
Z = 4.0  # neighbouring rounds are correlated: at 3 an unchanged draft was rolled back in 31 of 200 simulated requests, at 4 in 7
ROLLBACKS = 3


class Action(StrEnum):
    GO_ON = "go_on"
    ROLL_BACK = "roll_back"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Standing:
    """live, frozen: mean overlap of row 0. gain: (ℓ_live + 1) / (ℓ_frozen + 1) with all K rows accepted alike, and its upper bound.
    break_even: the gain that updates must bring."""

    rounds: int
    live: float
    frozen: float
    gain: float
    gain_high: float
    break_even: float


@dataclass(slots=True)
class Judge:
    k: int
    rollbacks: int = 0
    pairs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEMORY))
    seen: int = 0

    def add(self, live: float, frozen: float) -> None:
        self.pairs.append((live, frozen))
        self.seen += 1

    def standing(self, overhead: float) -> Standing:
        """``overhead``: cost of updates a round, in rounds."""
        n = max(1, len(self.pairs))
        live, frozen = (sum(column) / n for column in zip(*self.pairs, strict=True)) if self.pairs else (0.0, 0.0)
        high = min(1.0, live + Z * self._error(live - frozen))
        base = 1 + expected_length(frozen, self.k)
        return Standing(
            len(self.pairs), live, frozen, (1 + expected_length(live, self.k)) / base, (1 + expected_length(high, self.k)) / base,
            1 + overhead,
        )  # fmt: skip

    def decide(self, overhead: float, *, auto_off: bool) -> tuple[Action, str]:
        """What to do now, and why ("" to go on)."""
        at = self.standing(overhead)
        if at.rounds < LEAST:
            return Action.GO_ON, ""
        if at.live + Z * self._error(at.live - at.frozen) < at.frozen:
            why = (
                f"over {at.rounds} rounds the learned draft overlaps the target by {at.live:.3f}, the frozen one by {at.frozen:.3f}"
            )
            self.rollbacks += 1
            self.pairs.clear()
            if self.rollbacks >= ROLLBACKS:
                return Action.STOP, f"{why}, for the {self.rollbacks}rd time; lower tts.rate"
            return Action.ROLL_BACK, why
        if auto_off and self.seen >= PAY_LEAST and at.gain_high < at.break_even:
            return Action.STOP, f"gain {at.gain:.3f} (at most {at.gain_high:.3f}) is below the break-even of {at.break_even:.3f}"
        return Action.GO_ON, ""

    def _error(self, mean: float) -> float:
        n = len(self.pairs)
        return math.sqrt(sum((a - b - mean) ** 2 for a, b in self.pairs) / max(1, n - 1) / max(1, n))


def overhead(publish_ms: float, stride: int, round_ms: float) -> float:
    """(d + U/S) / C0 of tts.md, section 5, with the trainer beside the engine (d = 0): what a publish takes from the step it stands
    before, over ``stride`` rounds of ``round_ms``."""
    return publish_ms / stride / round_ms if round_ms > 0 else 0.0
