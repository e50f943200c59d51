"""The economics of a gateway: who runs under which rule, what it cost, and whether it pays.

Synchronous and in memory; `agentguard.store.sync` keeps it on disk or shares it between gateways.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentguard.economics.arms import STRICT, Arms
from agentguard.economics.baseline import baseline_of
from agentguard.economics.cells import QUANTITIES, Cell, Mean, SessionSums, is_censored, measured, strict_expectation
from agentguard.economics.classes import model_of
from agentguard.economics.netwin import MIN_SESSIONS, Switch, compare
from agentguard.economics.ratios import Ratio
from agentguard.events import RuleSwitched, StepFinished, VerificationStep
from agentguard.policy import Policy
from agentguard.rulespec import RuleSpec

RUNNING = 4096
"""Requests whose telemetry may still come; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a request runs under. ``rule``: sent to the engine; ``arm``: what its session was assigned, "" for a request that is not
    counted (it chose its own rule, or is a side call); ``reason`` says which."""

    rule: str
    arm: str
    workload: str
    reason: str

    @property
    def counted(self) -> bool:
        """Does the step say something about its arm? Not when the guard had switched the arm to strict."""
        return bool(self.arm) and self.rule == self.arm


@dataclass(frozen=True, slots=True)
class Row:
    """One arm in one class, as `GET /guard/v1/economics` shows it. Ratios are to ``baseline``; None is not known yet.

    ``pooled``: the sums of a model's classes together, where nothing is switched; ``evidence``: the class whose sums judge this
    one.
    """

    workload: str
    pooled: bool
    arm: str
    on: bool
    since: float
    verdict: str
    reason: str
    baseline: str
    evidence: str
    sessions: int
    steps: int
    censored: int
    means: dict[str, float | None]
    ratios: dict[str, Ratio | None]
    accepted_length: float | None
    strict_accepted_length: float | None
    gain: float | None
    by_position: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Ledger:
    """Arms, sums and switches.

    ``default``: the rule where there is no relaxed arm; ``baseline``: means a step under strict, None for the live control group;
    ``on_event`` gets a RuleSwitched for every switch.
    """

    def __init__(
        self,
        arms: Arms,
        *,
        default: str = STRICT,
        guard: bool = True,
        exploration: float = 0.02,
        min_sessions: int = MIN_SESSIONS,
        baseline: Mapping[str, Mean] | None = None,
        baseline_source: str = "live control",
        on_event: Callable[[RuleSwitched], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.arms = arms
        self._default = default
        self.cells: dict[tuple[str, str], Cell] = {}
        self.switches: dict[tuple[str, str], Switch] = {}
        self.pending: dict[tuple[str, str], Cell] = {}
        """What was added since the store last took it."""
        self.moved: set[tuple[str, str]] = set()
        """Switches the store has not seen."""
        self._guard = guard
        self._exploration = exploration
        self._min_sessions = min_sessions
        self._baseline = dict(baseline) if baseline is not None else None
        self._source = baseline_source
        self._on_event = on_event
        self._clock = clock
        self._running: OrderedDict[str, tuple[str, str]] = OrderedDict()

    # -- a request -----------------------------------------------------------------------------------------------------------------

    def assign(self, identity: str, workload: str, *, pinned: str = "", side: bool = False) -> Assignment:
        """The rule of a new request. ``pinned``: the rule it asked for itself; ``side``: a call beside the agent's own work."""
        if pinned:
            return Assignment(pinned, "", workload, "the request names its rule")
        arm = self.arms.assign(identity)
        if side:
            # it runs as its session does, but a title's length says nothing about a rule
            return Assignment(self._rule(arm, identity, workload)[0], "", workload, "side call")
        rule, reason = self._rule(arm, identity, workload)
        return Assignment(rule, arm, workload, reason)

    def _rule(self, arm: str, identity: str, workload: str) -> tuple[str, str]:
        if arm == STRICT:
            return (STRICT, "control") if self.arms.rules else (self._default, "no relaxed arm")
        switch = self.switches.get((workload, arm))
        if switch is None or switch.on:
            return arm, "assigned"
        if self.arms.explores(identity, self._exploration):
            return arm, "exploration"
        return STRICT, f"switched to strict: {switch.verdict.reason}"

    def started(self, request: str, assignment: Assignment) -> None:
        """The request's telemetry will be counted to its arm."""
        if assignment.counted:
            self._running[request] = (assignment.workload, assignment.arm)
            while len(self._running) > RUNNING:
                self._running.popitem(last=False)

    def finished(self, step: StepFinished, assignment: Assignment, sums: dict[tuple[str, str], SessionSums]) -> None:
        """Count a step. ``sums``: its session's own sums, kept by the session and changed here. A failed step counts nowhere."""
        if not assignment.counted or step.error:
            return
        values, censored = measured(step), is_censored(step)
        for workload in (assignment.workload, model_of(assignment.workload)):
            key = (workload, assignment.arm)
            if key not in sums:
                sums[key] = SessionSums()
            self._pending(key).merge(self._cell(key).add_step(sums[key], values, censored=censored))
        if self._guard:
            self._judge(assignment)

    def verified(self, frame: VerificationStep) -> None:
        """Count the rounds of requests that belong to an arm."""
        for request in frame.requests:
            # a step that was continued has a second request
            found = self._running.get(request.request.removesuffix("-answer"))
            if found is None or request.drafted == 0:
                continue
            workload, arm = found
            strict = strict_expectation(request.rows.strict)
            for name in (workload, model_of(workload)):
                self._pending((name, arm)).merge(self._cell((name, arm)).add_round(request.accepted, strict))

    def _cell(self, key: tuple[str, str]) -> Cell:
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = Cell()
        return cell

    def _pending(self, key: tuple[str, str]) -> Cell:
        cell = self.pending.get(key)
        if cell is None:
            cell = self.pending[key] = Cell()
        return cell

    # -- the guard -----------------------------------------------------------------------------------------------------------------

    def _judge(self, assignment: Assignment) -> None:
        """Judge the arms of a class again: the step's own arm, or all of them after a step of the control."""
        for arm in self.arms.rules if assignment.arm == STRICT else (assignment.arm,):
            key = (assignment.workload, arm)
            evidence, own, control = self._evidence(assignment.workload, arm)
            switch = self.switches.setdefault(key, Switch())
            if switch.step(own, control, self._clock(), min_sessions=self._min_sessions):
                self.moved.add(key)
                self._on_event(self._switched(key, switch, evidence, own, control))

    def _switched(
        self, key: tuple[str, str], switch: Switch, evidence: str, own: Cell, control: Cell | dict[str, Mean]
    ) -> RuleSwitched:
        verdict = switch.verdict
        ratio = (verdict.ttlt if verdict.quantity == "ttlt" else verdict.rounds) or Ratio(0.0, 0.0, 0.0, 0)
        return RuleSwitched(
            t=switch.at,
            workload=key[0],
            arm=key[1],
            on=switch.on,
            quantity=verdict.quantity,
            reason=verdict.reason,
            evidence=evidence,
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            sessions=own.sessions,
            control_sessions=control.sessions if isinstance(control, Cell) else 0,
            baseline=self._source,
        )

    def _evidence(self, workload: str, arm: str) -> tuple[str, Cell, Cell | dict[str, Mean]]:
        """The class whose sums judge this one (its model's while it is small), the arm's sums, and what they are held against."""
        own = self.cells.get((workload, arm), Cell())
        if self._baseline is not None:
            return workload, own, self._baseline
        control = self.cells.get((workload, STRICT), Cell())
        if min(own.sessions, control.sessions) >= self._min_sessions:
            return workload, own, control
        model = model_of(workload)
        return model, self.cells.get((model, arm), Cell()), self.cells.get((model, STRICT), Cell())

    def pressure(self, workload: str) -> float:
        """λ's term of the cutoff's growth pressure, in [0, 1]: how far the lower bound of λ is above the gain, in the worst arm.

        The same for every arm of a class, control included: a cutoff that differed between arms would bias λ itself.
        """
        worst = 0.0
        for arm in self.arms.rules:
            _, own, control = self._evidence(workload, arm)
            inflation, gain = compare(own, control, "tokens"), self._gain(own, control)
            if inflation is not None and gain is not None:
                worst = max(worst, inflation.low / gain - 1)
        return min(1.0, worst)

    @staticmethod
    def _gain(own: Cell, control: Cell | dict[str, Mean]) -> float | None:
        """(ℓ + 1)/(ℓ_strict + 1): the control's own ℓ, or the counterfactual of the arm's drafts without one."""
        mine = own.accepted_length
        strict = control.accepted_length if isinstance(control, Cell) else None
        strict = own.strict_accepted_length if strict is None else strict
        return None if mine is None or strict is None else (mine + 1) / (strict + 1)

    # -- what is shown
    # ---------------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[Row]:
        """Every arm of every class that has steps, control first."""
        workloads = {workload for workload, _ in self.cells}
        leaves = workloads - {model_of(workload) for workload in workloads}
        for workload in sorted(workloads):
            for arm in (STRICT, *self.arms.rules):
                cell = self.cells.get((workload, arm))
                if cell is not None:
                    yield self._row(workload, arm, cell, pooled=workload not in leaves)

    def _row(self, workload: str, arm: str, cell: Cell, *, pooled: bool) -> Row:
        evidence, own, control = self._evidence(workload, arm)
        switch = self.switches.get((workload, arm), Switch())
        is_control = arm == STRICT
        means = {quantity: cell.mean(quantity) for quantity in QUANTITIES}
        return Row(
            workload=workload,
            pooled=pooled,
            arm=arm,
            on=switch.on,
            since=switch.at,
            verdict="control" if is_control else switch.verdict.word,
            reason="" if is_control else switch.reason,
            baseline=self._source,
            evidence=evidence,
            sessions=cell.sessions,
            steps=cell.steps,
            censored=round(cell.get("censored")),
            means={quantity: None if mean is None else mean.value for quantity, mean in means.items()},
            ratios={quantity: None if is_control else compare(own, control, quantity) for quantity in QUANTITIES},
            accepted_length=cell.accepted_length,
            strict_accepted_length=cell.strict_accepted_length,
            gain=None if is_control else self._gain(own, control),
            by_position=cell.by_position,
        )


def ledger_of(
    policy: Policy, *, on_event: Callable[[RuleSwitched], None] = lambda _: None, clock: Callable[[], float] = time.time
) -> Ledger:
    """The ledger of a recipe. A study as baseline is read from its file: call it off the event loop then. Raises ConfigError."""
    wanted = policy.economics
    rules = dict(wanted.arms) or ({policy.rule: 1.0} if RuleSpec.parse(policy.rule, what="rule").relaxed else {})
    arms = Arms(
        wanted.key.encode(), wanted.control,
        tuple(str(RuleSpec.parse(rule, what="economics.arms").for_request()) for rule in rules), tuple(rules.values()),
    )  # fmt: skip
    baseline, source = baseline_of(wanted.baseline)
    return Ledger(
        arms,
        default=str(RuleSpec.parse(policy.rule, what="rule").for_request()),
        guard=wanted.guard,
        exploration=wanted.exploration,
        min_sessions=wanted.min_sessions,
        baseline=baseline,
        baseline_source=source,
        on_event=on_event,
        clock=clock,
    )
