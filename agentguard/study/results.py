"""From recorded events to the study's table. Everything shown is computed here, and only from events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentguard.economics.cells import QUANTITIES, Cell, Mean, SessionSums, is_censored, measured
from agentguard.economics.ratios import Ratio, paired_gain, paired_ratio, share
from agentguard.errors import AgentGuardError
from agentguard.events import Event, Graded, StepFinished, StudyStarted
from agentguard.rulespec import RuleSpec


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm's row. Token counts are generated tokens; ``accepted_length`` is draft tokens a round, without the bonus token.

    ``gain`` = (ℓ + 1) / (ℓ_strict + 1); ``inflation`` (λ) and ``rounds_ratio`` are ratios to strict of the sums over sessions.
    ``accuracy`` is the share of right steps, its interval as if each session were one trial: steps of a session are correlated.
    """

    rule: str
    filter: bool
    sessions: int
    steps: int
    right: int | None
    """None where the suite grades nothing."""
    tokens: int
    think_tokens: int
    rounds: int
    accepted_length: float
    gain: Ratio
    accuracy: Ratio | None
    inflation: Ratio
    rounds_ratio: Ratio
    closes: int
    empty_answers: int
    ttlt_s: float
    a_step: dict[str, Mean | None]
    """Means a step with the variance of their estimate: what a gateway can take as its baseline."""

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        inflation, rounds, gain, accuracy = (row.pop(k) for k in ("inflation", "rounds_ratio", "gain", "accuracy"))
        return row | {
            "gain": gain["value"],
            "gain_ci": [gain["low"], gain["high"]],
            "accuracy": accuracy and accuracy["value"],
            "accuracy_ci": accuracy and [accuracy["low"], accuracy["high"]],
            "lambda": inflation["value"],
            "lambda_ci": [inflation["low"], inflation["high"]],
            "rounds_ratio": rounds["value"],
            "rounds_ratio_ci": [rounds["low"], rounds["high"]],
        }


def summarise(events: Iterable[Event]) -> list[ArmResult]:
    """The rows of a study, strict first, then in the order of its plan.

    The order is read from the `StudyStarted` event: sessions run side by side, so no order of theirs is the plan's. Sessions are
    paired by the name's part after the last '/', which is the plan's number. Raises AgentGuardError when there is no strict arm, or
    when a session is missing in one of the arms.
    """
    arms: dict[str, dict[str, list[StepFinished]]] = {}
    finished: dict[tuple[str, int], StepFinished] = {}
    right: dict[str, list[bool]] = {}
    planned: list[str] = []
    for event in events:
        if isinstance(event, StudyStarted):
            planned = event.arms
        elif isinstance(event, StepFinished):
            finished[event.session, event.step] = event
        elif isinstance(event, Graded):
            step = finished.get((event.session, event.step))
            if step is None:
                raise AgentGuardError(
                    f"the recording grades step {event.step} of {event.session} but does not hold it; record again"
                )
            arms.setdefault(event.arm, {}).setdefault(event.session.rpartition("/")[2], []).append(step)
            if event.right is not None:
                right.setdefault(event.arm, []).append(event.right)
    if "strict" not in arms:
        raise AgentGuardError(
            "the recording has no strict arm, so λ and gain have no baseline; run the study with 'strict' among --arms"
        )
    strict = arms["strict"]
    order = sorted(planned, key=lambda arm: arm != "strict")
    for arm in order:
        if arms.get(arm, {}).keys() != strict.keys():
            missing = sorted(arms.get(arm, {}).keys() ^ strict.keys())
            raise AgentGuardError(
                f"arm {arm!r} and strict did not run the same plans (differing: {missing[:5]}); run the study again"
            )
    return [_row(arm, arms[arm], strict, right.get(arm)) for arm in order]


def _row(
    arm: str, plans: dict[str, list[StepFinished]], strict: dict[str, list[StepFinished]], right: list[bool] | None
) -> ArmResult:
    steps = [s for plan in plans.values() for s in plan]
    if any(s.rounds is None and not s.continued for s in steps):  # a stream that was cut has no counters
        raise AgentGuardError(
            f"arm {arm!r} has steps without the engine's round counts; start the engine with a draft model and "
            "--per-request-spec-decode-metrics summary"
        )
    keys = sorted(plans)
    return ArmResult(
        rule=arm,
        filter=RuleSpec.parse(arm).filtered,
        sessions=len(plans),
        steps=len(steps),
        right=None if right is None else sum(right),
        tokens=sum(s.tokens for s in steps),
        think_tokens=sum(s.think_tokens for s in steps),
        rounds=sum(s.rounds or 0 for s in steps),
        accepted_length=accepted_length(steps),
        gain=paired_gain([_verified(plans[k]) for k in keys], [_verified(strict[k]) for k in keys]),
        accuracy=None if right is None else share(len(plans) * sum(right) / len(right), len(plans)),
        inflation=paired_ratio([sum(s.tokens for s in plans[k]) for k in keys], [sum(s.tokens for s in strict[k]) for k in keys]),
        rounds_ratio=paired_ratio([_verified(plans[k])[1] for k in keys], [_verified(strict[k])[1] for k in keys]),
        closes=sum(bool(s.closed) for s in steps),
        empty_answers=sum(s.empty_answer for s in steps),
        ttlt_s=sum(s.ttlt_s for s in steps) / len(steps),
        a_step=a_step(plans.values()),
    )


def a_step(plans: Iterable[Sequence[StepFinished]]) -> dict[str, Mean | None]:
    """Means a step of sessions, each with the variance of its estimate."""
    cell = Cell()
    for plan in plans:
        session = SessionSums()
        for step in plan:
            cell.add_step(session, measured(step), censored=is_censored(step))
    return {quantity: cell.mean(quantity) for quantity in QUANTITIES}


def accepted_length(steps: Sequence[StepFinished]) -> float:
    """ℓ over all rounds of the steps."""
    accepted, rounds = _verified(steps)
    return accepted / rounds if rounds else 0.0


def _verified(steps: Sequence[StepFinished]) -> tuple[int, int]:
    """Accepted draft tokens and rounds."""
    return sum(s.accepted or 0 for s in steps), sum(s.rounds or 0 for s in steps)
