"""Watches one step's trace while it grows and says when to close it, and why. Decides only; enforcing is the step's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentguard.trace.cutoff import Cap, CloseReason, percentile
from agentguard.trace.loops import Loop, LoopDetector


@dataclass(frozen=True, slots=True)
class Close:
    """A verdict. ``detail`` is a line for people, without the trace's text; ``loop`` what was found, for reason `loop`."""

    reason: CloseReason
    detail: str
    loop: Loop | None = None


class Controller:
    """One step.

    traces: the session's think tokens a step so far; deadline_s: seconds a step may think from its first token on, None for no
    limit; loops: None switches loop detection off; ready: the probability of the end marker from which on a trace is
    closed, None for never.
    """

    def __init__(
        self, cap: Cap, *, traces: Sequence[int], deadline_s: float | None = None,
        loops: LoopDetector | None = None, ready: float | None = None,
    ) -> None:  # fmt: skip
        self.cap = cap
        self._base = cap.growth
        # the session's own median; two steps before this one make a trend
        self._median = max(1, percentile(traces, 0.5)) if len(traces) >= 2 else None
        self._started: float | None = None
        self._deadline_s = deadline_s
        self._loops = loops
        self._ready = ready
        self._end = 0.0
        self._operator = ""

    def ask_to_close(self, why: str) -> None:
        """An operator's wish; it takes effect with the next tokens of the trace."""
        self._operator = why or "asked for"

    @property
    def wanted(self) -> bool:
        """An operator has asked for the close."""
        return bool(self._operator)

    def time_left(self, now: float) -> float | None:
        """Seconds until the deadline, None without one or before the first token."""
        if self._deadline_s is None or self._started is None:
            return None
        return self._started + self._deadline_s - now

    def overdue(self, now: float) -> bool:
        left = self.time_left(now)
        return left is not None and left <= 0

    def deadline(self) -> Close:
        return Close(CloseReason.DEADLINE, f"thought for {self._deadline_s:g} s")

    def hear(self, end: float) -> None:
        """The engine's tap: the probability the target gave its end marker in a round (`events.Verified.end`)."""
        self._end = end

    def new_block(self) -> None:
        self._end = 0.0
        if self._loops is not None:
            self._loops.reset()

    def watch(self, ids: Sequence[int], text: str, *, think: int, now: float) -> Close | None:
        """Take what the trace grew by, ``think`` tokens in all now. `cap` is then the cap under the pressure of this moment."""
        if self._started is None and (ids or text):
            self._started = now
        if self._operator:
            return Close(CloseReason.OPERATOR, self._operator)
        if self._loops is not None:
            loop = self._loops.feed(ids, text)
            if loop is not None:
                return Close(CloseReason.LOOP, loop.detail, loop)
        if self.overdue(now):
            return self.deadline()
        if self._ready is not None and self._end >= self._ready:
            return Close(CloseReason.READY, f"the end marker had a probability of {self._end:.2f}, asked for {self._ready:g}")
        growth = max(self._base, self._loops.score if self._loops is not None else 0.0)
        if self._median is not None:
            growth = max(growth, min(1.0, think / self._median - 1.0))
        if growth != self.cap.growth:
            self.cap = self.cap.at(growth)
        return self.at_cap(think)

    def at_cap(self, think: int) -> Close | None:
        """The verdict of the cap alone."""
        if think < self.cap.think_cap:
            return None
        return Close(self.cap.bound_by.reason, f"{think} think tokens, cap {self.cap.think_cap} ({self.cap.bound_by})")
