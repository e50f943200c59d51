"""Ratios between two arms, and shares, with their uncertainty.

Steps of one session are correlated, so the session is the unit: ratios are of sums over sessions, and intervals come from a
bootstrap over sessions (Efron and Tibshirani 1993, percentile interval). Sessions that ran the same plan under both arms are
resampled together, which removes the variance of the plans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 2000
Z_95 = 1.959964


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
    _check(relaxed, strict)

    def ratio(picked: Sequence[int]) -> float | None:
        below = sum(strict[i] for i in picked)
        return sum(relaxed[i] for i in picked) / below if below > 0 else None

    return _bootstrap(len(relaxed), ratio, seed)


def paired_gain(relaxed: Sequence[tuple[int, int]], strict: Sequence[tuple[int, int]], *, seed: int = 0) -> Ratio:
    """(ℓ + 1) / (ℓ_strict + 1); element i of both is a plan's (accepted draft tokens, rounds) under each arm.

    Raises ValueError for lengths that differ, for none, and for an arm without rounds.
    """
    _check(relaxed, strict)

    def tokens_a_round(arm: Sequence[tuple[int, int]], picked: Sequence[int]) -> float:
        rounds = sum(arm[i][1] for i in picked)
        return (sum(arm[i][0] for i in picked) + rounds) / rounds if rounds else math.nan

    def gain(picked: Sequence[int]) -> float | None:
        value = tokens_a_round(relaxed, picked) / tokens_a_round(strict, picked)
        return None if math.isnan(value) else value

    return _bootstrap(len(relaxed), gain, seed)


def share(hits: float, n: int) -> Ratio:
    """Wilson's 95 % interval of a share (Wilson 1927). ``hits`` of ``n`` independent trials; raises ValueError for n = 0."""
    if n == 0:
        raise ValueError("a share of 0 trials")
    p, z2 = hits / n, Z_95**2
    middle, spread = p + z2 / (2 * n), Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = (middle - spread) / (1 + z2 / n), (middle + spread) / (1 + z2 / n)
    # at 0 and at n of n the limits are exact, up to the last bit
    return Ratio(p, min(p, max(0.0, low)), max(p, min(1.0, high)), n)


def _check(relaxed: Sequence[object], strict: Sequence[object]) -> None:
    if len(relaxed) != len(strict) or not relaxed:
        raise ValueError(
            f"{len(relaxed)} relaxed and {len(strict)} strict sessions; a paired ratio needs the same plans in both arms"
        )


def _bootstrap(n: int, statistic: Callable[[Sequence[int]], float | None], seed: int) -> Ratio:
    """``statistic`` of the sessions given by number; None where a resample has no value."""
    value = statistic(range(n))
    if value is None:
        raise ValueError("the strict arm's total is 0, so there is no ratio to it")
    rng = random.Random(seed)  # noqa: S311  # nosec B311  # seeds and jitter, no secret
    draws = sorted(v for v in (statistic(rng.choices(range(n), k=n)) for _ in range(RESAMPLES)) if v is not None)
    return Ratio(value, draws[int(0.025 * len(draws))], draws[min(len(draws) - 1, int(0.975 * len(draws)))], n)
