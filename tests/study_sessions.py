"""Recorded sessions made by hand."""

from __future__ import annotations

from agentguard.events import StepFinished
from agentguard.study.records import RelaxedToken, RoundStats, SessionRecord, StepRecord


def session(
    rule: str, number: int, *, close: str = "off", tokens: int = 100, think: int | None = None, answer: int = 2, rounds: int = 20,
    accepted: int = 80, right: bool | None = True, proved: int | None = None, ttlt_s: float = 1.0, finish: str = "stop",
    closed: str = "", empty: bool = False, stats: RoundStats | None = None,
) -> SessionRecord:  # fmt: skip
    """A session of one step; ``think`` is the rest of its tokens unless it is given."""
    finished = StepFinished(
        t=0.0, session=f"s/{number}", step=1, request=f"r{number}", model="m", rule=rule, prompt_tokens=9, tokens=tokens,
        think_tokens=tokens - answer if think is None else think, answer_tokens=answer, marker_tokens=0, rounds=rounds,
        drafted=6 * rounds, accepted=accepted, closed=closed, empty_answer=empty, finish_reason=finish, ttlt_s=ttlt_s,
    )  # fmt: skip
    found = stats or RoundStats(rounds=rounds, drafted=6 * rounds, accepted=accepted)
    return SessionRecord(
        rule=rule, close=close, number=number, steps=[StepRecord(finished=finished, right=right, proved=proved)], stats=found
    )


def relaxed(*tokens: tuple[float, int], place: int = 0) -> list[RelaxedToken]:
    """Tokens let through, as (p, rank)."""
    return [RelaxedToken(7, p, rank, place) for p, rank in tokens]
