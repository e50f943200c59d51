"""When to close a trace: the adaptive 80-85 % cutoff as a pure function.

At 85 % of the budget the model usually knows its answer (arXiv 2610.23818: of 1,132 budget-bound runs closed there, right
answers rose from 126 to 439, with 22 regressions). What remains must hold the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cap:
    """A step's limits in tokens, and which term bound.

    budget: what the step may generate; think_cap: where its trace is closed; bound_by: "fraction" (f * budget) or "reserve"
    (budget - answer reserve); growth: the pressure g in [0, 1] that was applied.
    """

    budget: int
    think_cap: int
    reserve: int
    growth: float
    bound_by: str


def think_cap(
    *,
    window: int,
    prompt: int,
    limit: int | None,
    answers: Sequence[int],
    growth: float,
    f_min: float,
    f_max: float,
    answer_floor: int,
    margin: int,
) -> Cap:
    """The cap of one step.

    window: context window C; prompt: P; limit: the client's M, None for no limit; answers: this session's answer lengths so far;
    growth: g in [0, 1]. B = min(M, C - P - margin); A = max(floor, p90 of answers) but at most half of B, so that a small limit
    still leaves room to think; cap = min(f B, B - A) with f = f_max - (f_max - f_min) g. A prompt that fills the window gives
    budget 0.
    """
    room = max(0, window - prompt - margin)
    budget = room if limit is None else min(limit, room)
    reserve = min(max(answer_floor, percentile(answers, 0.9)), budget // 2)
    growth = min(1.0, max(0.0, growth))
    by_fraction = int((f_max - (f_max - f_min) * growth) * budget)
    by_reserve = budget - reserve
    return Cap(
        budget=budget,
        think_cap=min(by_fraction, by_reserve),
        reserve=reserve,
        growth=growth,
        bound_by="fraction" if by_fraction <= by_reserve else "reserve",
    )


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
