"""The study's intervals and tests.

Sessions are the unit. Arms that ran the same problems are resampled together (paired bootstrap over sessions, percentile interval;
Efron and Tibshirani 1993), every statistic being a function of sums over sessions. Right and wrong answers of pairs are compared
with McNemar's exact test (1947), a family of tests is adjusted after Holm (1979). Nothing here knows what the numbers are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import Any, TypeVar

RESAMPLES = 2000
MEDIAN_RESAMPLES = 400
K = TypeVar("K")
Column = Sequence[float]
Statistic = Callable[[Sequence[float]], float | None]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval over ``n`` sessions; ``p``: two-sided, of the value being ``null``, where there is one."""

    value: float
    low: float
    high: float
    n: int
    p: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@lru_cache(maxsize=64)
def _weights(n: int, resamples: int, seed: int) -> tuple[bytes, ...]:
    """How often each of ``n`` sessions is drawn, for each resample; bytes, since no session comes up 256 times."""
    rng = random.Random(seed)  # noqa: S311  # nosec B311  # seeds and jitter, no secret
    drawn = []
    for _ in range(resamples):
        counts = bytearray(n)
        for i in rng.choices(range(n), k=n):
            counts[i] += 1
        drawn.append(bytes(counts))
    return tuple(drawn)


def bootstrap(columns: Sequence[Column], statistic: Statistic, *, null: float | None = None, seed: int = 0) -> Estimate | None:
    """``statistic`` of the columns' sums over sessions; element i of every column is session i.

    None where it has no value (a total of 0 below a ratio), or where a quarter of the resamples has none. Raises ValueError for
    columns of different lengths, or without sessions. ``p`` is twice the smaller tail of resamples beyond ``null``, each tail
    counting one more than was seen, so it is never 0.
    """
    n = len(columns[0])
    if not n or any(len(column) != n for column in columns):
        raise ValueError(f"columns of {[len(c) for c in columns]} sessions; a paired statistic needs the same sessions in all")
    value = statistic([math.fsum(column) for column in columns])
    if value is None:
        return None
    draws = []
    for weights in _weights(n, RESAMPLES, seed):
        drawn = statistic([sum(map(mul, weights, column)) for column in columns])
        if drawn is not None:
            draws.append(drawn)
    return _estimate(value, draws, RESAMPLES, n, null)


def median(values: Sequence[Mapping[Any, int]], *, seed: int = 0) -> Estimate | None:
    """The median of all values pooled; ``values``: for each session how often it has each, sessions are resampled whole.

    None without a value. Values are walked from the lowest one up, and of ranks most are 1: the cost is that of a few columns.
    """
    n = len(values)
    totals = [sum(session.values()) for session in values]
    if not sum(totals):
        return None
    where: dict[float, list[tuple[int, int]]] = {}
    for i, session in enumerate(values):
        for value, count in session.items():
            where.setdefault(value, []).append((i, count))
    ordered = sorted(where.items())
    whole = _weighted_median(ordered, [1] * n, sum(totals))
    assert whole is not None
    drawn = (_weighted_median(ordered, weights, sum(map(mul, weights, totals))) for weights in _weights(n, MEDIAN_RESAMPLES, seed))
    return _estimate(whole, [one for one in drawn if one is not None], MEDIAN_RESAMPLES, n, None)


def _weighted_median(
    ordered: Sequence[tuple[float, Sequence[tuple[int, int]]]], weights: Sequence[int], total: int
) -> float | None:
    """The median where session i counts ``weights[i]`` times; between two values their mean. ``ordered``: ascending values, each
    with its (session, count)s; total: of all counts, weighted."""
    seen, below = 0, None
    for value, counts in ordered:
        here = sum(weights[i] * count for i, count in counts)
        if not here:
            continue
        if below is not None:
            return (below + value) / 2
        seen += here
        if 2 * seen > total:
            return value
        if 2 * seen == total:
            below = value
    return None


def _estimate(value: float, draws: list[float], resamples: int, n: int, null: float | None) -> Estimate | None:
    if len(draws) < 0.75 * resamples:
        return None
    draws.sort()
    low, high = draws[int(0.025 * len(draws))], draws[min(len(draws) - 1, int(0.975 * len(draws)))]
    p = None
    if null is not None:
        below, above = sum(d <= null for d in draws) + 1, sum(d >= null for d in draws) + 1
        p = min(1.0, 2 * min(below, above) / (len(draws) + 1))
    return Estimate(value, low, high, n, p)


def ratio(over: Column, under: Column, *, seed: int = 0) -> Estimate | None:
    """Sum over sum, with p of the ratio being 1."""
    return bootstrap((over, under), lambda s: s[0] / s[1] if s[1] > 0 else None, null=1.0, seed=seed)


def difference(one: Column, other: Column, *, seed: int = 0) -> Estimate:
    """Mean minus mean, with p of its being 0."""
    n = len(one)
    found = bootstrap((one, other), lambda s: (s[0] - s[1]) / n, null=0.0, seed=seed)
    assert found is not None
    return found


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p that pairs change in either way alike: ``gained`` became right, ``lost`` wrong. 1 without a change."""
    n, k = gained + lost, min(gained, lost)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / (1 << n))


def holm(ps: Mapping[K, float]) -> dict[K, float]:
    """Adjusted p-values: the i-th smallest of m times m - i + 1, never falling, at most 1."""
    adjusted: dict[K, float] = {}
    running = 0.0
    for rank, key in enumerate(sorted(ps, key=lambda k: ps[k])):
        running = max(running, min(1.0, (len(ps) - rank) * ps[key]))
        adjusted[key] = running
    return adjusted


def quantiles(values: Iterable[float], at: Sequence[float]) -> list[float]:
    """Quantiles by linear interpolation between order statistics; of no values, none."""
    ordered = sorted(values)
    if not ordered:
        return []
    found = []
    for q in at:
        place = q * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
    return found
