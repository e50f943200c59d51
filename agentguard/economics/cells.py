"""What is remembered of one arm in one workload class: a fixed number of sums, one small update a step.

**Sessions are the unit.** Steps of a session are correlated. For a session i with n_i steps and the sum Y_i of a quantity, the
mean a step is sum Y / sum n, and by linearisation its variance is sum (Y_i - mean n_i)^2 / (sum n)^2, the ratio estimator of
cluster sampling (Cochran 1977, section 6.3). Both follow from sum n, sum n^2, sum Y, sum Y^2 and sum Y n, which grow by what a
step adds to its session's own sums. All sums are additive: those of two gateways make one.

**A closed run is censored, not short.** Its length is only known to be at least what was seen, so it counts with the mean
length of the arm's runs that got further (Efron's redistribution to the right, 1967, on a histogram), or with its own where
none did. With one cap for all, as under the guard's cutoff, that is the mean restricted at the cap. The restriction also bounds
the heavy tail of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentguard.events import StepFinished

QUANTITIES = ("tokens", "think", "answer", "rounds", "ttlt")
BINS = 64
"""Of the histogram of tokens a step: four bins to an octave, up to 2^16."""
POSITIONS = 32
"""Draft positions told apart."""


@dataclass(slots=True)
class SessionSums:
    """One session's own sums under one arm: steps, and the sum of each quantity."""

    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean per step with the variance of its estimate, from ``n`` sessions."""

    value: float
    variance: float
    n: int


class Cell:
    """The sums of one arm in one class, by name.

    ``sessions``, ``steps``, ``steps2`` (sum n^2), ``censored``; for each quantity q ``q``, ``q2`` (sum Y^2) and ``qn`` (sum Y
    n); ``h3`` and ``t3``: runs in the histogram's bin 3 and their tokens; ``spec_rounds``, ``strict`` (accepted length strict
    would have had) and ``a2`` (rounds in which draft position 2 was accepted) from the engine's telemetry.
    """

    __slots__ = ("sums",)

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums: dict[str, float] = dict(sums or {})

    def add_step(self, session: SessionSums, step: Mapping[str, float], *, censored: bool) -> dict[str, float]:
        """Count one step; its session's sums go on by it. ``step``: a value for each of `QUANTITIES`. Returns what was added."""
        added: dict[str, float] = {}
        tokens = step["tokens"]
        scale = 1.0
        if censored:
            added["censored"] = 1.0
            scale = self._further(tokens) / tokens if tokens else 1.0
        else:
            place = bin_of(tokens)
            added[f"h{place}"], added[f"t{place}"] = 1.0, tokens
        n = session.steps
        if n == 0:
            added["sessions"] = 1.0
        added["steps"] = 1.0
        added["steps2"] = 2.0 * n + 1.0
        known = session.sums
        for name, y in step.items():
            if name != "answer":  # an answer is never cut short by a close
                y *= scale
            before = known.get(name, 0.0)
            added[name] = y
            added[name + "2"] = (2 * before + y) * y
            added[name + "n"] = before + y * (n + 1)
            known[name] = before + y
        session.steps = n + 1
        self.merge(added)
        return added

    def add_round(self, accepted: int, strict: float) -> dict[str, float]:
        """Count one verification round: draft tokens accepted, and the expectation of what strict would have accepted."""
        added = {"spec_rounds": 1.0, "strict": strict}
        for position in range(min(accepted, POSITIONS)):
            added[f"a{position}"] = 1.0
        self.merge(added)
        return added

    def merge(self, added: Mapping[str, float]) -> None:
        sums = self.sums
        for key, value in added.items():
            sums[key] = sums.get(key, 0.0) + value

    def since(self, earlier: Mapping[str, float]) -> Cell:
        """What came after ``earlier`` was taken. A session that was running then is counted with its later steps only in the
        totals."""
        return Cell({key: value - earlier.get(key, 0.0) for key, value in self.sums.items()})

    def get(self, name: str) -> float:
        return self.sums.get(name, 0.0)

    @property
    def sessions(self) -> int:
        return round(self.get("sessions"))

    @property
    def steps(self) -> int:
        return round(self.get("steps"))

    def mean(self, name: str) -> Mean | None:
        """None with fewer than two sessions, or without a positive total."""
        n, total, groups = self.get("steps"), self.get(name), self.sessions
        if groups < 2 or total <= 0:
            return None
        value = total / n
        spread = self.get(name + "2") - 2 * value * self.get(name + "n") + value * value * self.get("steps2")
        return Mean(value, max(0.0, spread) / n**2 * groups / (groups - 1), groups)

    @property
    def accepted_length(self) -> float | None:
        """ℓ: from the engine's rounds, None without any."""
        rounds = self.get("spec_rounds")
        return sum(self.get(f"a{i}") for i in range(POSITIONS)) / rounds if rounds else None

    @property
    def strict_accepted_length(self) -> float | None:
        """ℓ strict verification would have had on this arm's drafts, without a control group."""
        rounds = self.get("spec_rounds")
        return self.get("strict") / rounds if rounds else None

    @property
    def by_position(self) -> list[float]:
        """Share of rounds in which each draft position was accepted."""
        rounds = self.get("spec_rounds")
        shares = [self.get(f"a{i}") / rounds for i in range(POSITIONS)] if rounds else []
        while shares and shares[-1] == 0:
            shares.pop()
        return shares

    def _further(self, tokens: float) -> float:
        """Mean tokens of the arm's finished runs in the bins above this one; ``tokens`` itself where there is none."""
        runs = total = 0.0
        for place in range(bin_of(tokens) + 1, BINS):
            runs += self.get(f"h{place}")
            total += self.get(f"t{place}")
        return total / runs if runs else tokens


def bin_of(tokens: float) -> int:
    return min(BINS - 1, max(0, int(4 * math.log2(tokens)))) if tokens >= 1 else 0


def measured(step: StepFinished) -> dict[str, float]:
    """A step's value of each quantity."""
    return {
        "tokens": float(step.tokens), "think": float(step.think_tokens), "answer": float(step.answer_tokens),
        "rounds": float(step.rounds or 0), "ttlt": step.ttlt_s,
    }  # fmt: skip


def is_censored(step: StepFinished) -> bool:
    """Did something else than the model end the trace or the answer?"""
    return bool(step.closed) or step.finish_reason == "length"


def log_ratio(over: Mean, under: Mean) -> tuple[float, float]:
    """ln(over/under) and its variance, by the delta method; the arms' sessions are different ones, so the variances add."""
    return math.log(over.value / under.value), over.variance / over.value**2 + under.variance / under.value**2


def strict_expectation(strict: list[float]) -> float:
    """The accepted length strict verification expects on a round's drafts: sum over positions of the product up to them.

    ``strict``: min(1, p/q) of each drafted token, all of which the target has judged whatever was accepted.
    """
    expected, through = 0.0, 1.0
    for probability in strict:
        through *= probability
        expected += through
    return expected
