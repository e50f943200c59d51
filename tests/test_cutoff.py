from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentguard.trace.cutoff import Cap, growth_pressure, percentile, think_cap


def cap(**overrides: Any) -> Cap:
    arguments: dict[str, Any] = {
        "window": 4096, "prompt": 88, "limit": None, "answers": (), "growth": 0.0, "f_min": 0.8, "f_max": 0.85, "answer_floor": 64,
        "margin": 8,
    }  # fmt: skip
    return think_cap(**(arguments | overrides))


def test_without_pressure_a_trace_gets_85_percent_of_the_window() -> None:
    assert cap() == Cap(budget=4000, think_cap=3400, reserve=64, growth=0.0, bound_by="fraction")


def test_under_pressure_it_gets_80_percent() -> None:
    assert cap(growth=1.0).think_cap == 3200
    assert cap(growth=7.0).think_cap == 3200


def test_a_long_answer_reserves_its_length() -> None:
    result = cap(limit=1000, answers=[100] * 8 + [400] * 2)
    assert (result.reserve, result.think_cap, result.bound_by) == (400, 600, "reserve")


def test_a_small_limit_still_leaves_room_to_think() -> None:
    result = cap(limit=20)
    assert (result.budget, result.reserve, result.think_cap) == (20, 10, 10)


@pytest.mark.parametrize("prompt", [4088, 4096, 9999])
def test_a_full_window_has_no_budget(prompt: int) -> None:
    assert cap(prompt=prompt).budget == 0


@given(
    window=st.integers(16, 200_000), prompt=st.integers(0, 200_000), limit=st.none() | st.integers(1, 100_000),
    answers=st.lists(st.integers(0, 20_000), max_size=20), growth=st.floats(0, 1),
)  # fmt: skip
def test_an_answer_always_fits(window: int, prompt: int, limit: int | None, answers: list[int], growth: float) -> None:
    result = cap(window=window, prompt=prompt, limit=limit, answers=answers, growth=growth)
    assert 0 <= result.think_cap <= result.budget
    assert result.budget <= max(0, window - prompt - 8)
    assert result.budget == 0 or result.think_cap <= 0.85 * result.budget
    assert result.budget - result.think_cap >= result.reserve


def test_pressure_rises_with_growth_above_the_sessions_own_median() -> None:
    assert growth_pressure([]) == growth_pressure([100, 900]) == 0
    assert growth_pressure([100, 100, 100]) == 0
    assert growth_pressure([100, 100, 150]) == 0.5
    assert growth_pressure([100, 100, 900]) == 1
    assert growth_pressure([100, 100, 50]) == 0


def test_percentile_is_a_value_of_the_list() -> None:
    assert percentile([], 0.9) == 0
    assert percentile([5], 0.9) == 5
    assert percentile(list(range(1, 11)), 0.9) == 9
    assert percentile(list(range(1, 11)), 0.5) == 5
