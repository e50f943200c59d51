"""What the guard made of a study: its verdicts and switches, recomputed from the recorded events alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from agentguard.economics.cells import SessionSums
from agentguard.economics.ledger import Assignment, Ledger, Row
from agentguard.events import Event, RuleSwitched, StepFinished, StepStarted, VerificationStep
from agentguard.study.table import interval_text


@dataclass(frozen=True, slots=True)
class GuardResult:
    """``rows``: every arm of every class at the end; ``switches``: what the gateway did; ``recomputed``: what the same events
    do again."""

    rows: list[Row]
    switches: list[RuleSwitched]
    recomputed: list[RuleSwitched]


def summarise_guard(events: Iterable[Event], ledger: Ledger, recomputed: list[RuleSwitched]) -> GuardResult:
    """Feed a new ledger of the same recipe, whose switches go to ``recomputed``, with what was recorded."""
    assigned: dict[str, Assignment] = {}
    sums: dict[str, dict[tuple[str, str], SessionSums]] = {}
    switches = []
    for event in events:
        if isinstance(event, RuleSwitched):
            switches.append(event)
        elif isinstance(event, StepStarted):
            assigned[event.request] = assignment = Assignment(event.rule, event.arm, event.workload, event.assigned)
            ledger.started(event.request, assignment)
        elif isinstance(event, StepFinished):
            ledger.finished(event, assigned[event.request], sums.setdefault(event.session, {}))
        elif isinstance(event, VerificationStep):
            ledger.verified(event)
    return GuardResult(list(ledger.rows()), switches, recomputed)


def render_guard(result: GuardResult, title: str) -> Table:
    """The model's rows: one arm a line."""
    table = Table(title=title, caption="ratios to strict [95 % confidence sequence]")
    for heading in ("arm", "sessions", "ℓ", "gain", "λ", "rounds ratio", "new requests run", "verdict"):
        table.add_column(heading)
    for row in result.rows:
        gain = "—" if row.gain is None else f"{row.gain:.2f}"
        length = "—" if row.accepted_length is None else f"{row.accepted_length:.2f}"
        table.add_row(
            row.arm, str(row.sessions), length, gain, interval_text(row.ratios["tokens"]), interval_text(row.ratios["rounds"]),
            row.arm if row.on else "strict", f"{row.verdict}: {row.reason}" if row.reason else row.verdict,
        )  # fmt: skip
    return table
