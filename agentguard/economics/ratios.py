"""Ratios of means between two arms, with their uncertainty.

Steps of one session are correlated, so the session is the unit: ratios are of sums over sessions, and intervals come from a
bootstrap over sessions (Efron and Tibshirani 1993, percentile interval). Sessions that ran the same plan under both arms are
resampled together, which removes the variance of the plans.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A point estimate and its 95 % interval; n sessions an arm."""

    value: float
    low: float
    high: float
    n: int


def paired_ratio(relaxed: Sequence[float], strict: Sequence[float], *, seed: int = 0) -> Ratio:
    """Mean of ``relaxed`` over mean of ``strict``; element i of both is the same plan's session sum.

    Raises ValueError for lengths that differ, for none, and for a strict total of 0.
    """
    n = len(relaxed)
    if n != len(strict) or n == 0:
        raise ValueError(f"{n} relaxed and {len(strict)} strict sessions; a paired ratio needs the same plans in both arms")
    if sum(strict) == 0:
        raise ValueError("the strict arm's total is 0, so there is no ratio to it")
    rng = random.Random(seed)
    draws = []
    for _ in range(RESAMPLES):
        picked = rng.choices(range(n), k=n)
        below = sum(strict[i] for i in picked)
        if below > 0:
            draws.append(sum(relaxed[i] for i in picked) / below)
    draws.sort()
    low, high = draws[int(0.025 * len(draws))], draws[min(len(draws) - 1, int(0.975 * len(draws)))]
    return Ratio(sum(relaxed) / sum(strict), low, high, n)
