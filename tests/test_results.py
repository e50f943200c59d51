"""A study's rows are a function of its events, whatever order side-by-side sessions finished in."""

from __future__ import annotations

import random

import pytest

from agentguard.errors import AgentGuardError
from agentguard.events import Event, Graded, StepFinished, StudyStarted
from agentguard.study.results import summarise

ARMS = ["cactus:delta=1", "strict", "cactus:delta=1,p_min=0.1,top_k=10"]


def step(arm: str, number: int, tokens: int) -> list[Event]:
    session = f"study/x/{arm}/{number}"
    return [
        StepFinished(
            t=0.0, session=session, step=1, request=session, model="m", rule=arm, prompt_tokens=1, tokens=tokens,
            think_tokens=tokens - 2, answer_tokens=1, marker_tokens=1, rounds=tokens // 2, accepted=tokens // 2,
        ),
        Graded(t=0.0, session=session, step=1, arm=arm, right=True),
    ]  # fmt: skip


def recording(seed: int) -> list[Event]:
    pairs = [step(arm, number, 10 * (1 + ARMS.index(arm)) + number) for arm in ARMS for number in range(4)]
    random.Random(seed).shuffle(pairs)
    start = StudyStarted(t=0.0, suite="chain", seed=0, sessions=4, temperature=1.0, arms=ARMS)
    return [start, *(event for pair in pairs for event in pair)]


@pytest.mark.parametrize("seed", range(10))
def test_rows_come_in_the_order_of_the_plan_whichever_session_ran_first(seed: int) -> None:
    rows = summarise(recording(seed))
    assert [row.rule for row in rows] == ["strict", ARMS[0], ARMS[2]]
    assert [row.filter for row in rows] == [False, False, True]
    assert rows == summarise(recording(seed + 100))


def test_an_arm_that_did_not_run_every_plan_is_refused() -> None:
    events = [e for e in recording(0) if not (isinstance(e, Graded) and e.arm == ARMS[0] and e.session.endswith("/2"))]
    with pytest.raises(AgentGuardError, match="did not run the same plans"):
        summarise(events)
