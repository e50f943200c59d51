"""Numbers over a span: counters that a restart sets back, percentiles of histogram buckets, and sums of the last seconds.

All of it is bounded: `KEPT` samples and `SLOTS` slots a window, whatever the rate.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

KEPT = 120
"""Samples kept of a window; closer ones than window / KEPT replace each other."""
SLOTS = 60
"""Parts of a window that expire one by one, so a sum over it is off by at most 1/60 of its span."""
T = TypeVar("T")
Buckets = dict[float | None, float]
"""Counts up to and with an upper bound; None: no bound."""


class Growth:
    """Counters as sums that only grow. One that falls says that its server began anew; then all of them count from 0 again."""

    __slots__ = ("_last", "grown", "resets")

    def __init__(self) -> None:
        self._last: dict[str, float] | None = None
        self.grown: dict[str, float] = {}
        self.resets = 0

    def take(self, values: Mapping[str, float]) -> bool:
        """Returns whether the server began anew. Growth starts at the first sample; a counter that comes later grew from 0."""
        last, self._last = self._last, dict(values)
        if last is None:
            self.grown = dict.fromkeys(values, 0.0)
            return False
        reset = any(values[name] < before for name, before in last.items() if name in values)
        self.resets += reset
        for name, value in values.items():
            self.grown[name] = self.grown.get(name, 0.0) + (value if reset else value - last.get(name, 0.0))
        return reset


class History:
    """Samples of grown counters over a window, newest last. ``delta`` is between the two ends that lie within it."""

    __slots__ = ("_samples", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, t: float, grown: Mapping[str, float]) -> None:
        samples = self._samples
        if samples and t < samples[-1][0]:
            samples.clear()  # its clock was set back, so what lies between is not known
        if len(samples) >= 2 and t - samples[-2][0] < self._window_s / KEPT:
            samples.pop()
        samples.append((t, dict(grown)))
        while samples[0][0] < t - self._window_s:
            samples.popleft()

    def span_s(self) -> float | None:
        """None before the second sample."""
        if len(self._samples) < 2:
            return None
        span = self._samples[-1][0] - self._samples[0][0]
        return span if span > 0 else None

    def delta(self, name: str) -> float | None:
        """None before the second sample, and for a counter the server does not have."""
        if self.span_s() is None:
            return None
        newest = self._samples[-1][1].get(name)
        return None if newest is None else newest - self._samples[0][1].get(name, 0.0)

    def rate(self, name: str) -> float | None:
        delta, span = self.delta(name), self.span_s()
        return None if delta is None or span is None else delta / span

    def names(self, prefix: str) -> Iterator[str]:
        return (name for name in self._samples[-1][1] if name.startswith(prefix)) if self._samples else iter(())


def merged(parts: Iterable[Mapping[float | None, float]]) -> Buckets:
    """Cumulative buckets of several engines as one. Bounds that only some have would count wrongly, so they are left out."""
    known = list(parts)
    if not known:
        return {}
    common = set(known[0]).intersection(*known[1:])
    return {bound: sum(part[bound] for part in known) for bound in common}


def quantile(buckets: Mapping[float | None, float], share: float) -> float | None:
    """A percentile of cumulative buckets, straight within a bucket, as Prometheus' histogram_quantile.

    None without any count. Behind the last bound nothing is known, so that bound is the answer, which is at most the truth.
    """
    bounds = sorted(bound for bound in buckets if bound is not None)
    total = buckets.get(None, buckets[bounds[-1]] if bounds else 0.0)
    if total <= 0 or not bounds:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= wanted:
            return bound if count == below else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return bounds[-1]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of single values: the smallest that at least ``share`` of them do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


class Ring(Generic[T]):
    """Sums of the last ``window_s`` seconds in at most `SLOTS` + 1 slots."""

    __slots__ = ("_make", "_slots", "_width", "window_s")

    def __init__(self, window_s: float, make: Callable[[], T]) -> None:
        self.window_s = window_s
        self._make = make
        self._width = window_s / SLOTS
        self._slots: deque[tuple[int, T]] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[T]:
        return (slot for _, slot in self._slots)

    def at(self, t: float) -> T:
        """The slot to add to at time ``t``; a time before the newest slot's is taken as that one's."""
        number = int(t // self._width)
        if not self._slots or number > self._slots[-1][0]:
            self._slots.append((number, self._make()))
            self._expire(t)
        return self._slots[-1][1]

    def slots(self, now: float) -> list[T]:
        self._expire(now)
        return [slot for _, slot in self._slots]

    def _expire(self, now: float) -> None:
        oldest = int(now // self._width) - SLOTS
        while self._slots and self._slots[0][0] < oldest:
            self._slots.popleft()


def add_lists(into: list[float], more: Sequence[float]) -> None:
    """``into`` grows to the longer one's length."""
    if len(more) > len(into):
        into.extend(itertools.repeat(0, len(more) - len(into)))
    for i, value in enumerate(more):
        into[i] += value
