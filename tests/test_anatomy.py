"""Which tokens a rule let through, counted from rounds made by hand."""

from __future__ import annotations

import asyncio

import pytest

from agentguard.events import DraftRows, Fate, StepFinished, StepStarted, VerificationStep, Verified
from agentguard.study import anatomy
from agentguard.study.anatomy import OUTPUT_BIN, Anatomy, add_round, hesitation_ids
from agentguard.study.records import RelaxedToken, RoundStats
from tests.study_sessions import session

S, R, C, U, L, M = Fate.STRICT, Fate.RELAXED, Fate.COIN, Fate.UNREAD, Fate.LOW_SUPPORT, Fate.MASKED


def verified(
    fates: list[Fate], *, p: list[float] | None = None, q: list[float] | None = None, rank: list[int] | None = None,
    token: list[int] | None = None, request: str = "r", rule: str = "cactus:delta=1",
) -> Verified:  # fmt: skip
    n = len(fates)
    rows = DraftRows(
        token=token or [5] * n,
        p=p or [0.5] * n,
        q=q or [0.5] * n,
        rank=rank or [0] * n,
        strict=[1.0] * n,
        flags=[0] * n,
        fate=fates,
    )
    accepted = sum(fate in (S, R) for fate in fates)
    return Verified(request=request, rule_asked=rule, rule_effective=rule, drafted=n, accepted=accepted, rows=rows)


def test_a_round_by_hand() -> None:
    stats = RoundStats()
    one = verified([S, R, C, U], p=[0.9, 0.02, 0.1, 0.3], rank=[0, 41, 3, 1], token=[11, 12, 13, 14])
    place = add_round(stats, one, 70, {12: "wait", 11: "but", 13: "hmm"})
    assert place == 73  # two accepted and the token behind them
    assert (stats.rounds, stats.drafted, stats.accepted) == (1, 4, 2)
    assert stats.by_position == [1, 1]
    assert stats.drafted_at == [1, 1, 1, 1]
    assert stats.fates == {"strict": 1, "relaxed": 1, "coin": 1, "unread": 1}
    assert (stats.strict_n, stats.strict_p, stats.strict_rank) == (1, 0.9, {1: 1})
    assert stats.relaxed == [RelaxedToken(12, 0.02, 42, 71)]  # ranks count from 1, and it was the second token of the round
    assert (stats.strict_words, stats.relaxed_words) == ({"but": 1}, {"wait": 1})  # a rejected word was not written
    assert stats.by_output == [[0, 0], [1, 2]]
    assert stats.effective == {"cactus:delta=1": 1}


def test_places_follow_from_what_was_accepted() -> None:
    stats, place = RoundStats(), 0
    for fates in ([S] * 6, [C] + [U] * 5, [S, S, L, U, U, U]):
        place = add_round(stats, verified(fates), place)
    assert place == 7 + 1 + 3
    assert stats.by_position == [2, 2, 1, 1, 1, 1]
    assert stats.by_output == [[3, 8]]
    far = RoundStats()
    add_round(far, verified([S]), 3 * OUTPUT_BIN)
    assert far.by_output == [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_tokens_without_a_draft_probability_are_told_apart() -> None:
    stats = RoundStats()
    add_round(stats, verified([S, M, C], q=[-1.0, -1.0, 0.5]), 0)
    assert stats.unjudged == 1  # a masked row never has one


def test_a_round_without_drafts_is_a_token_and_no_round() -> None:
    stats = RoundStats()
    assert add_round(stats, verified([]), 4) == 5
    assert (stats.rounds, stats.by_output) == (0, [])


def started(name: str, request: str) -> StepStarted:
    return StepStarted(
        t=0.0,
        session=name,
        step=1,
        request=request,
        model="m",
        rule="strict",
        prompt_tokens=1,
        budget=1,
        think_cap=1,
        bound_by="off",
    )


def frame(*requests: Verified) -> VerificationStep:
    return VerificationStep(t=0.0, engine="e", step=1, requests=list(requests))


def finished(name: str, request: str, rounds: int) -> StepFinished:
    made = session("strict", 0, rounds=rounds).steps[0].finished
    return StepFinished(**{f: getattr(made, f) for f in made.__struct_fields__} | {"session": name, "request": request})


async def test_rounds_are_collected_by_session_and_late_frames_are_waited_for() -> None:
    sink = Anatomy()
    sink.watch("a")
    sink.watch("b")
    sink(started("a", "r1"))
    sink(started("b", "r2"))
    sink(started("unwatched", "r3"))
    sink(frame(verified([S, S], request="r1"), verified([C, U], request="r2"), verified([S], request="r3")))
    sink(finished("a", "r1", 2))
    waiting = asyncio.create_task(sink.take("a", 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    sink(frame(verified([S, C], request="r1")))  # the last frame comes behind the text
    steps, stats = await waiting
    assert (len(steps), stats.rounds, stats.accepted) == (1, 2, 3)
    sink(finished("b", "r2", 1))
    assert (await sink.take("b", 1))[1].fates == {"coin": 1, "unread": 1}
    assert sink._open == {}
    assert sink._by_request == {}


async def test_frames_that_never_come_cost_no_more_than_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy, "SETTLE_S", 0.01)
    sink = Anatomy()
    sink.watch("a")
    sink(started("a", "r1"))
    sink(frame(verified([S], request="r1")))
    sink(finished("a", "r1", 5))
    steps, stats = await sink.take("a", 1)
    assert (steps[0].rounds, stats.rounds) == (5, 1)
    assert sink._by_request == {}


class Words:
    """An engine that knows a few texts as one token."""

    async def tokenize_text(self, text: str) -> list[int] | None:
        return {"wait": [1], " wait": [2], "Wait": [3, 4], "but": [5]}.get(text, [8, 9])


async def test_words_are_found_where_they_are_one_token() -> None:
    assert await hesitation_ids(Words(), ("wait", "but", "however")) == {1: "wait", 2: "wait", 5: "but"}  # type: ignore[arg-type]
