"""When to close a trace: the adaptive 80-85 % cutoff as a pure function.

At 85 % of the budget the model usually knows its answer (arXiv 2610.23818: of 1,132 budget-bound runs closed there, right
answers rose from 126 to 439, with 22 regressions). What remains must hold the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agentguard.policy import Cutoff


class CloseReason(StrEnum):
    """Why a trace was closed before the model closed it."""

    BUDGET = "budget"  # the fraction of the step's budget, or a smaller budget the client or the recipe gave
    RESERVE = "reserve"  # what is left is needed for the answer
    SESSION = "session"  # the session's context window is filled to 80-85 %
    LOOP = "loop"
    DEADLINE = "deadline"
    OPERATOR = "operator"
    READY = "ready"  # the target would close it itself (off unless a recipe asks for it)


class Term(StrEnum):
    """Which limit set the cap."""

    FRACTION = "fraction"  # f * budget
    RESERVE = "reserve"  # budget - answer reserve
    SESSION = "session"  # f * window - prompt
    CLIENT = "client"  # the request's own think budget
    POLICY = "policy"  # the recipe's default think budget
    RETRY = "retry"  # the same request was cut before
    OFF = "off"  # closing is switched off

    @property
    def reason(self) -> CloseReason:
        if self is Term.RESERVE:
            return CloseReason.RESERVE
        return CloseReason.SESSION if self is Term.SESSION else CloseReason.BUDGET


@dataclass(frozen=True, slots=True)
class Cap:
    """A step's limits in tokens, and which term bound.

    budget: what the step may generate; think_cap: where its traces are closed, all of its blocks together; reserve: kept for the
    answer; growth: the pressure g in [0, 1] that was applied. The others are what the cap is computed from.
    """

    budget: int
    reserve: int
    growth: float
    think_cap: int
    bound_by: Term
    window: int
    prompt: int
    margin: int
    least: int
    f_min: float
    f_max: float
    asked: tuple[tuple[int, Term], ...] = ()
    off: bool = False
    """Closing is switched off: only what the client asked for counts."""

    def at(self, growth: float) -> Cap:
        """The same step under another growth pressure."""
        if self.off:
            return self
        growth = min(1.0, max(0.0, growth))
        f = self.f_max - (self.f_max - self.f_min) * growth
        room = max(0, self.window - self.prompt - self.margin)
        terms = [
            (int(f * self.budget), Term.FRACTION),
            (self.budget - self.reserve, Term.RESERVE),
            # a prompt at or beyond the cutoff leaves a little: no step is without any thinking because of its history
            (max(int(f * self.window) - self.prompt, min(room // 2, self.least)), Term.SESSION),
            *self.asked,
        ]
        cap, term = min(terms, key=lambda t: t[0])
        return replace(self, growth=growth, think_cap=max(0, cap), bound_by=term)

    def limited(self, cap: int, term: Term) -> Cap:
        """With one more limit."""
        if self.off:
            return self
        return replace(self, asked=(*self.asked, (cap, term))).at(self.growth)


def step_budget(cutoff: Cutoff, *, window: int, prompt: int, limit: int | None) -> int:
    """B = min(M, C - P - margin): what a step may generate, whatever its session has done before."""
    room = max(0, window - prompt - cutoff.margin)
    return room if limit is None else min(limit, room)


def think_cap(
    cutoff: Cutoff, *, window: int, prompt: int, limit: int | None, answers: Sequence[int], growth: float, asked: int | None = None
) -> Cap:
    """The cap of one step (architecture.md, "The adaptive cutoff").

    window: context window C; prompt: P; limit: the client's M, None for no limit; answers: this session's answer lengths so far;
    growth: g in [0, 1]; asked: the client's own think budget, None for none, -1 for no limit but the answer's room.

    B = min(M, C - P - margin); A = max(floor, p90 of answers), at most half of B, and exactly half of a B below ``half_below``;
    cap = min(f B, B - A, f C - P, asked) with f = f_max - (f_max - f_min) g. A prompt that fills the window gives budget 0.
    """
    budget = step_budget(cutoff, window=window, prompt=prompt, limit=limit)
    reserve = budget // 2
    if budget >= cutoff.half_below:
        reserve = min(max(cutoff.answer_floor, percentile(answers, 0.9)), reserve)
    f_min, f_max = (cutoff.f_max, cutoff.f_max) if cutoff.mode == "fixed" else (cutoff.f_min, cutoff.f_max)
    cap = Cap(budget, reserve, growth, budget, Term.OFF, window, prompt, cutoff.margin, cutoff.answer_floor, f_min, f_max)
    if cutoff.mode == "off":
        cap = replace(cap, off=True)
        return cap if asked is None or asked < 0 else replace(cap, think_cap=min(asked, budget), bound_by=Term.CLIENT)
    limits: list[tuple[int, Term]] = []
    if asked is None and cutoff.think_tokens is not None:
        limits.append((cutoff.think_tokens, Term.POLICY))
    if asked is not None and asked >= 0:
        limits.append((asked, Term.CLIENT))
    return replace(cap, bound_by=Term.FRACTION, asked=tuple(limits)).at(growth)


def growth_pressure(think_tokens: Sequence[int]) -> float:
    """g in [0, 1] from a session's think tokens per step: how far the latest step is above the session's own median.

    0 up to the median, 1 from twice the median on. Fewer than three steps say nothing about a trend.
    """
    if len(think_tokens) < 3:
        return 0.0
    median = percentile(think_tokens[:-1], 0.5)
    return min(1.0, max(0.0, think_tokens[-1] / max(1, median) - 1.0))


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least ``share`` of the values do not exceed; 0 for none."""
    if not values:
        return 0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
