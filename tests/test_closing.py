"""What a study of closing counts, from events made by hand; the study itself runs real models (docs/closing-study.json)."""

from __future__ import annotations

import math

import pytest

from agentguard.errors import AgentGuardError
from agentguard.events import Event, Graded, StepFinished, StudyStarted
from agentguard.study.closing import summarise_closing
from agentguard.study.probe import Probed, summarise_probe

MODES = ("off", "fixed", "adaptive")


def run(mode: str, number: int, think: int, right: bool, *, closed: str = "", empty: bool = False) -> list[Event]:
    name = f"close/x/{mode}/{number}"
    step = StepFinished(
        t=0.0, session=name, step=1, request="r", model="m", rule="strict", prompt_tokens=1, tokens=think + 2, think_tokens=think,
        answer_tokens=2, marker_tokens=0, closed=closed, empty_answer=empty,
    )  # fmt: skip
    return [step, Graded(t=0.0, session=name, step=1, arm=mode, right=right)]


def started(modes: tuple[str, ...] = MODES) -> StudyStarted:
    return StudyStarted(t=0.0, suite="chain", seed=0, sessions=4, temperature=1.0, arms=list(modes), budget=100)


def test_only_budget_bound_runs_are_counted_and_paired_by_number() -> None:
    events: list[Event] = [started()]
    #        off: think, right   fixed  adaptive
    table = [(85, False, True, True), (99, True, False, True), (100, False, False, False), (84, False, True, True)]
    for number, (think, off, fixed, adaptive) in enumerate(table):
        events += run("off", number, think, off)
        events += run("fixed", number, 85, fixed, closed="budget", empty=number == 2)
        events += run("adaptive", number, 82, adaptive, closed="budget")
    rows = {row.mode: row for row in summarise_closing(events)}
    assert [row.n for row in rows.values()] == [3, 3, 3]
    assert (rows["fixed"].rescued, rows["fixed"].regressed, rows["fixed"].empty) == (1, 1, 1)
    assert (rows["adaptive"].rescued, rows["adaptive"].regressed, rows["adaptive"].right_off) == (1, 0, 1)
    mean, low, high = rows["adaptive"].difference or (0.0, 0.0, 0.0)
    assert mean == pytest.approx(1 / 3)
    assert high - mean == pytest.approx(1.959964 * math.sqrt(2 / 9) / math.sqrt(3))
    assert mean - low == pytest.approx(high - mean)
    assert rows["adaptive"].as_json()["right_minus_fixed_ci"] == [low, high]


def test_a_recording_without_its_pairs_or_without_a_study_is_refused() -> None:
    with pytest.raises(AgentGuardError, match="did not run the same problems"):
        summarise_closing([started(("off", "fixed")), *run("off", 0, 99, False), *run("fixed", 1, 85, True)])
    with pytest.raises(AgentGuardError, match="holds no study of closing"):
        summarise_closing(run("off", 0, 99, False))


def test_a_probe_says_from_where_on_every_branch_is_right() -> None:
    late = Probed(50, (False,) * 5 + (True,) * 5, (0.1,) * 5 + (0.9,) * 5, (2.0,) * 5 + (0.5,) * 5)
    never = Probed(50, (True,) * 9 + (False,), (0.5,) * 10, (1.0,) * 10)
    assert (late.ready, never.ready) == (0.6, None)
    result = summarise_probe([late, never])
    assert (result.traces, result.ready_median) == (2, 0.6)
    assert (result.right_at["0.1"].value, result.right_at["1"].value) == (0.5, 0.5)
    assert summarise_probe([late]).auc_end == summarise_probe([late]).auc_entropy == 1.0
    assert summarise_probe([never]).auc_end is None
