from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentguard.policy import Cutoff
from agentguard.trace.cutoff import Cap, Term, growth_pressure, percentile, think_cap


def cap(**overrides: Any) -> Cap:
    arguments: dict[str, Any] = {"window": 4096, "prompt": 88, "limit": None, "answers": (), "growth": 0.0}
    given = arguments | overrides
    cutoff = Cutoff(**{k: given.pop(k) for k in list(given) if k in Cutoff.model_fields})
    return think_cap(cutoff, **given)


def limits(result: Cap) -> tuple[int, int, int, str]:
    return result.budget, result.reserve, result.think_cap, result.bound_by


def test_without_pressure_a_trace_gets_85_percent_of_its_budget() -> None:
    assert limits(cap(limit=2000)) == (2000, 64, 1700, "fraction")


def test_under_pressure_it_gets_80_percent() -> None:
    assert cap(limit=2000, growth=1.0).think_cap == 1600
    assert cap(limit=2000, growth=7.0).think_cap == 1600
    assert cap(limit=2000).at(1.0) == cap(limit=2000, growth=1.0)


def test_without_a_limit_the_session_s_window_binds() -> None:
    """Context and trace together end at 85 % of the window: 0.85 * 4096 - 88, less than 0.85 * (4096 - 88 - 8)."""
    assert limits(cap()) == (4000, 64, 3393, "session")
    assert cap(prompt=3000).think_cap == int(0.85 * 4096) - 3000


def test_a_prompt_beyond_the_cutoff_leaves_a_little() -> None:
    assert limits(cap(prompt=3450))[2:] == (64, "session")
    assert limits(cap(prompt=3700))[2:] == (64, "session")
    assert limits(cap(prompt=4030))[2:] == (29, "reserve")


def test_a_long_answer_reserves_its_length() -> None:
    assert limits(cap(limit=1000, answers=[100] * 8 + [400] * 2)) == (1000, 400, 600, "reserve")


@pytest.mark.parametrize("limit", [1, 20, 200, 511])
def test_below_512_tokens_half_is_kept_for_the_answer(limit: int) -> None:
    result = cap(limit=limit)
    assert result.think_cap <= limit - limit // 2
    assert limits(result) == (limit, limit // 2, min(limit - limit // 2, int(0.85 * limit)), result.bound_by)


def test_512_tokens_keep_the_floor() -> None:
    assert limits(cap(limit=512)) == (512, 64, 435, "fraction")


@pytest.mark.parametrize(
    ("asked", "think_cap", "term"),
    [(None, 1700, "fraction"), (0, 0, "client"), (300, 300, "client"), (5000, 1700, "fraction"), (-1, 1700, "fraction")],
)
def test_the_client_s_own_budget_counts_where_it_is_smaller(asked: int | None, think_cap: int, term: str) -> None:
    result = cap(limit=2000, asked=asked)
    assert (result.think_cap, result.bound_by) == (think_cap, term)


def test_the_recipe_s_default_holds_where_the_client_names_none() -> None:
    assert limits(cap(limit=2000, think_tokens=256))[2:] == (256, "policy")
    assert limits(cap(limit=2000, think_tokens=256, asked=700))[2:] == (700, "client")
    assert limits(cap(limit=2000, think_tokens=256, asked=-1))[2:] == (1700, "fraction")


def test_fixed_ignores_pressure_and_off_closes_only_on_request() -> None:
    assert cap(limit=2000, growth=1.0, mode="fixed").think_cap == 1700
    assert limits(cap(limit=2000, mode="off"))[2:] == (2000, "off")
    assert limits(cap(limit=2000, mode="off", asked=9))[2:] == (9, "client")


def test_every_term_has_a_reason() -> None:
    assert {term: term.reason for term in Term} == {
        Term.FRACTION: "budget", Term.RESERVE: "reserve", Term.SESSION: "session", Term.CLIENT: "budget", Term.POLICY: "budget",
        Term.RETRY: "budget", Term.OFF: "budget",
    }  # fmt: skip


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
