"""Sums over sessions, from which a mean per step and its variance follow. Constant memory, one update a step.

Steps of a session are correlated, so the session is the unit. For a session i with n_i steps and the sum Y_i of a quantity, the
mean a step is sum Y / sum n, and by linearisation its variance is sum (Y_i - mean n_i)^2 / (sum n)^2 (the ratio estimator of
cluster sampling, Cochran 1977, section 6.3). Both need only sum n, sum n^2, sum Y, sum Y^2, sum Y n, which grow by what a step
adds to its session's own sums. All sums are additive, so several gateways' sums make one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

QUANTITIES = ("tokens", "think", "answer", "rounds", "ttlt")


@dataclass(slots=True)
class SessionSums:
    """One session's own sums under one arm: steps and the sum of each quantity."""

    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean per step with the variance of its estimate; n sessions."""

    value: float
    variance: float
    n: int


class Clusters:
    """The sums of one arm in one class.

    Keys: ``sessions``, ``steps``, ``steps2`` (sum n^2), and for each quantity q of `QUANTITIES` ``q`` (sum Y), ``q2`` (sum Y^2)
    and ``qn`` (sum Y n).
    """

    __slots__ = ("sums",)

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums: dict[str, float] = dict(sums or {})

    def add(self, session: SessionSums, step: Mapping[str, float]) -> dict[str, float]:
        """Count one step of a session, whose sums go on by it. Returns what was added."""
        n = session.steps
        added = {"sessions": float(n == 0), "steps": 1.0, "steps2": 2 * n + 1.0}
        for name, y in step.items():
            before = session.sums.get(name, 0.0)
            added[name] = y
            added[name + "2"] = 2 * before * y + y * y
            added[name + "n"] = (before + y) * (n + 1) - before * n
            session.sums[name] = before + y
        session.steps = n + 1
        self.merge(added)
        return added

    def merge(self, added: Mapping[str, float]) -> None:
        sums = self.sums
        for key, value in added.items():
            sums[key] = sums.get(key, 0.0) + value

    def minus(self, other: Mapping[str, float]) -> Clusters:
        """What came after ``other`` was taken; a session that was running then counts as one of both."""
        return Clusters({key: value - other.get(key, 0.0) for key, value in self.sums.items()})

    @property
    def sessions(self) -> int:
        return round(self.sums.get("sessions", 0.0))

    @property
    def steps(self) -> int:
        return round(self.sums.get("steps", 0.0))

    def mean(self, name: str) -> Mean | None:
        """None without two sessions, or without a positive total."""
        sums, n = self.sums, self.sums.get("steps", 0.0)
        groups, total = self.sessions, self.sums.get(name, 0.0)
        if groups < 2 or total <= 0:
            return None
        value = total / n
        spread = sums[name + "2"] - 2 * value * sums[name + "n"] + value * value * sums["steps2"]
        return Mean(value, max(0.0, spread) / n**2 * groups / (groups - 1), groups)


def pooled(parts: Iterable[Clusters]) -> Clusters:
    whole = Clusters()
    for part in parts:
        whole.merge(part.sums)
    return whole


def log_ratio(over: Mean, under: Mean) -> tuple[float, float]:
    """ln(over/under) and its variance, by the delta method; the arms' sessions are different ones, so the variances add."""
    return math.log(over.value / under.value), over.variance / over.value**2 + under.variance / under.value**2
