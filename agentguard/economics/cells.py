"""What is remembered of one arm in one workload class: a fixed number of sums, one small update a step.

**Sessions are the unit.** Steps of a session are correlated. For a session i with n_i steps and the sum Y_i of a quantity, the
mean a step is sum Y / sum n, and by linearisation its variance is sum (Y_i - mean n_i)^2 / (sum n)^2, the ratio estimator of
cluster sampling (Cochran 1977, section 6.3). Both follow from sum n, sum n^2, sum Y, sum Y^2 and sum Y n, which grow by what a
step adds to its session's own sums. All sums are additive: those of two gateways make one.

**A closed trace is censored, not short.** Its length is only known to be at least what was seen, so it counts with the mean
length of the arm's traces that got further (Efron's redistribution to the right, 1967, on a histogram of think tokens), or with
its own where none did; rounds and time grow with its tokens. With one think cap for all, as under the guard's cutoff, that is
the mean restricted at the cap, which also bounds the heavy tail. The uncertainty of what is imputed is left out: with a third
of the traces censored at random the error is 15 to 25 % larger than stated, which the confidence sequences' slack covers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentguard.events import StepFinished

QUANTITIES = ("tokens", "think", "answer", "rounds", "ttlt")
BINS = 64
"""Of the histogram of think tokens a step: four bins to an octave, up to 2^16."""
POSITIONS = 32
"""Draft positions told apart."""


@dataclass(slots=True)
class SessionSums:
    """One session's own sums under one arm: steps, and the sum of each quantity."""

    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    moves: int = 0
    """Of the arm's switch when these sums began."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean per step with the variance of its estimate, from ``n`` sessions."""

    value: float
    variance: float
    n: int


class Cell:
    """The sums of one arm in one class, by name.

    ``sessions``, ``steps``, ``steps2`` (sum n^2), ``censored``; for each quantity q ``q``, ``q2`` (sum Y^2) and ``qn`` (sum Y
    n); ``h3`` and ``t3``: traces in the histogram's bin 3 and their tokens; ``spec_rounds``, ``strict`` (accepted length strict
    would have had) and ``a2`` (rounds in which draft position 2 was accepted) from the engine's telemetry.
    """

    __slots__ = ("sums",)

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums: dict[str, float] = dict(sums or {})

    def add_step(self, session: SessionSums, step: Mapping[str, float], *, censored: bool) -> dict[str, float]:
        """Count one step; its session's sums go on by it. ``step``: a value for each of `QUANTITIES`. Returns what was added."""
        added: dict[str, float] = {}
        think, more, scale = step["think"], 0.0, 1.0
        if censored:
            added["censored"] = 1.0
            more = self._further(think) - think
            scale = 1 + more / step["tokens"] if step["tokens"] else 1.0
        else:
            place = bin_of(think)
            added[f"h{place}"], added[f"t{place}"] = 1.0, think
        n = session.steps
        if n == 0:
            added["sessions"] = 1.0
        added["steps"] = 1.0
        added["steps2"] = 2.0 * n + 1.0
        known = session.sums
        for name, y in step.items():
            if name in ("rounds", "ttlt"):
                y *= scale
            elif name != "answer":
                y += more
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

    def _further(self, think: float) -> float:
        """Mean think tokens of the arm's finished traces in the bins above this one; ``think`` itself where there is none."""
        traces = total = 0.0
        for place in range(bin_of(think) + 1, BINS):
            traces += self.get(f"h{place}")
            total += self.get(f"t{place}")
        return total / traces if traces else think


def bin_of(tokens: float) -> int:
    return min(BINS - 1, max(0, int(4 * math.log2(tokens)))) if tokens >= 1 else 0


def measured(step: StepFinished) -> dict[str, float]:
    """A step's value of each quantity."""
    return {
        "tokens": float(step.tokens), "think": float(step.think_tokens), "answer": float(step.answer_tokens),
        "rounds": float(step.rounds or 0), "ttlt": step.ttlt_s,
    }  # fmt: skip


CANCELLED = "cancelled"


def is_censored(step: StepFinished) -> bool:
    """Did something else than the model end the trace: a close, the client that hung up, a limit inside the trace?"""
    return bool(step.closed) or step.error == CANCELLED or (step.finish_reason == "length" and step.answer_tokens == 0)


def strict_expectation(strict: list[float]) -> float:
    """The accepted length strict verification expects on a round's drafts: sum over positions of the product up to them.

    ``strict``: min(1, p/q) of each drafted token, all of which the target has judged whatever was accepted.
    """
    expected, through = 0.0, 1.0
    for probability in strict:
        through *= probability
        expected += through
    return expected
