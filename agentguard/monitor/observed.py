"""What the steps that were seen say of the rules they ran under, where the gateway has no arm to report on: its requests name their
rules themselves, as those of `agentguard demo` do. Measured with the economics' own sums; no verdict follows from it.
"""

from __future__ import annotations

from agentguard.economics.cells import CANCELLED, Cell, SessionSums, is_censored, measured
from agentguard.economics.netwin import difference
from agentguard.events import StepFinished
from agentguard.monitor.snapshot import ArmRow

STRICT = "strict"
RULES = 16
"""Rules told apart; steps under a further one are not counted."""


class Observed:
    """Sums by rule since the monitor began."""

    def __init__(self) -> None:
        self._cells: dict[str, Cell] = {}
        self._rounds: dict[str, tuple[int, int]] = {}
        """Rounds and accepted tokens by rule, from the engine's own counters."""
        self._censored: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._cells)

    def take(self, step: StepFinished, sums: dict[str, SessionSums]) -> None:
        """``sums``: the session's own, by rule; changed here. A step that has an arm is the gateway's to count; a failed one counts
        nowhere, as there."""
        if step.arm or step.error not in ("", CANCELLED) or not step.tokens:
            return
        cell = self._cells.get(step.rule)
        if cell is None:
            if len(self._cells) >= RULES:
                return
            cell = self._cells[step.rule] = Cell()
        # as in a study's table, a closed trace counts with its length; the gateway's economics count with what it would have become
        cell.add_step(sums.setdefault(step.rule, SessionSums()), measured(step), censored=False)
        self._censored[step.rule] = self._censored.get(step.rule, 0) + is_censored(step)
        if step.rounds is not None and step.accepted is not None:
            rounds, accepted = self._rounds.get(step.rule, (0, 0))
            self._rounds[step.rule] = rounds + step.rounds, accepted + step.accepted

    def rows(self, workload: str) -> tuple[ArmRow, ...]:
        """One row a rule, strict first; none while only strict was seen."""
        if not any(rule != STRICT for rule in self._cells):
            return ()
        return tuple(self._row(rule, workload) for rule in sorted(self._cells, key=lambda rule: rule != STRICT))

    def _row(self, rule: str, workload: str) -> ArmRow:
        cell, control = self._cells[rule], self._cells.get(STRICT, Cell())
        mine, strict = self._length(rule), self._length(STRICT)
        ratios = {name: None if rule == STRICT else difference(cell, control, name) for name in ("tokens", "rounds", "ttlt")}
        shown = {name: None if ratio is None else ratio.interval() for name, ratio in ratios.items()}
        return ArmRow(
            workload=workload, arm=rule, on=True, since_t=None, verdict="control" if rule == STRICT else "undecided",
            reason="" if rule == STRICT else "requests name this rule themselves, so the guard does not judge it",
            baseline="strict steps seen", sessions=cell.sessions, steps=cell.steps, censored=self._censored.get(rule, 0),
            accepted_length=mine, gain=None if rule == STRICT or mine is None or strict is None else (mine + 1) / (strict + 1),
            length_ratio=shown["tokens"], rounds_ratio=shown["rounds"], ttlt_ratio=shown["ttlt"],
        )  # fmt: skip

    def _length(self, rule: str) -> float | None:
        rounds, accepted = self._rounds.get(rule, (0, 0))
        return accepted / rounds if rounds else None
