"""When something is said to be wrong, and when that is over: an on and an off threshold each, so that nothing flickers.

All values are in the unit of the name: shares 0 to 1, never percent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Threshold:
    """On from ``on`` upwards, off below ``off``; it has to hold for ``hold_s`` before it is on."""

    on: float
    off: float
    hold_s: float = 0.0

    def __post_init__(self) -> None:
        if self.off > self.on:
            raise ValueError(f"off {self.off} is above on {self.on}; the alarm would flicker")


KV_USE_SHARE = Threshold(on=0.95, off=0.90)
WAITING_PER_RUNNING = Threshold(on=1.0, off=0.5, hold_s=5.0)
"""Requests that wait for each that runs."""
STALLED_S = Threshold(on=10.0, off=1.0)
"""Seconds without a token while requests run."""
CONTEXT_SHARE = Threshold(on=0.80, off=0.75)
"""Of a session's context window; the cutoff's band begins at 0.80."""
GROWTH_SHARE = Threshold(on=1.0, off=0.5)
"""Growth pressure of a session (trace.cutoff.growth_pressure): 1 at twice its own median."""


class Alarm:
    """One threshold's state. An unknown value changes nothing."""

    __slots__ = ("_above_t", "on", "since_t", "threshold")

    def __init__(self, threshold: Threshold) -> None:
        self.threshold = threshold
        self.on = False
        self.since_t: float | None = None
        self._above_t: float | None = None

    def update(self, value: float | None, now: float) -> bool:
        if value is None:
            return self.on
        if self.on:
            if value < self.threshold.off:
                self.on, self.since_t, self._above_t = False, None, None
        elif value < self.threshold.on:
            self._above_t = None
        else:
            self._above_t = now if self._above_t is None else self._above_t
            if now - self._above_t >= self.threshold.hold_s:
                self.on, self.since_t = True, self._above_t
        return self.on
