"""The economics of a gateway: who runs under which rule, what it cost, and whether it pays.

Synchronous and in memory; `agentguard.store.sync` keeps it on disk or shares it between gateways.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentguard.economics.arms import STRICT, Arms
from agentguard.economics.baseline import baseline_of
from agentguard.economics.cells import CANCELLED, QUANTITIES, Cell, Mean, SessionSums, is_censored, measured, strict_expectation
from agentguard.economics.classes import model_of
from agentguard.economics.netwin import MIN_SESSIONS, Control, Switch, Verdict, combined, difference, judge
from agentguard.economics.ratios import Ratio
from agentguard.errors import ConfigError, nearest
from agentguard.events import RuleSwitched, StepFinished, VerificationStep
from agentguard.policy import Policy
from agentguard.rulespec import RuleSpec

RUNNING = 4096
"""Requests whose telemetry may still come; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a request runs under.

    ``rule``: sent to the engine; ``arm``: what its session was assigned, "" for a request that is not counted (it chose its own
    rule, or is a side call); ``reason`` says which.
    """

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

    ``evidence``: "own", or "model" while the class is small and all classes of its model judge it together.
    """

    workload: str
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
    pinned: str = ""
    """The rule an operator holds the arm at: the arm itself, or strict; "" lets the guard decide."""

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
        self.outbox: tuple[str, dict[tuple[str, str], Cell]] | None = None
        """A batch on its way to the store, under a name of its own, until the store has said that it holds it."""
        self.moved: set[tuple[str, str]] = set()
        """Switches the store has not seen."""
        self._guard = guard
        self._exploration = exploration
        self._min_sessions = min_sessions
        self._baseline = dict(baseline) if baseline is not None else None
        self._source = baseline_source
        self.on_event = on_event
        self._clock = clock
        self._running: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self.pins: dict[tuple[str, str], str] = {}
        """What an operator holds arms at, by class ("" for all) and arm. Not kept in the store: a restart forgets it."""

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
        pinned = self.pinned(workload, arm)
        if pinned:
            return pinned, "pinned by an operator"
        if not self._guard:
            return arm, "assigned"
        switch = self.switches.get((workload, arm))
        if switch is None or switch.on:
            return arm, "assigned"
        if self.arms.explores(identity, self._exploration):
            return arm, "exploration"
        return STRICT, f"switched to strict: {switch.verdict.reason}"

    def pin(self, workload: str, arm: str, rule: str | None) -> None:
        """Hold a relaxed arm at a rule, itself or strict, for new requests of a class ("" for all classes); None lets the guard
        decide again. A pinned arm is measured, but not switched. Raises ConfigError."""
        if arm not in self.arms.rules:
            raise ConfigError("arm", arm, nearest(arm, self.arms.rules) if self.arms.rules else "this gateway has no relaxed arm")
        if workload and workload not in self._workloads():
            raise ConfigError("workload", workload, nearest(workload, self._workloads()))
        if rule is None:
            # letting go of all classes lets go of each
            for key in [key for key in self.pins if key[1] == arm and workload in ("", key[0])]:
                del self.pins[key]
        elif rule in (arm, STRICT):
            self.pins[workload, arm] = rule
        else:
            raise ConfigError("rule", rule, f"an arm is held at itself ({arm!r}) or at 'strict'; null lets the guard decide")

    def pinned(self, workload: str, arm: str) -> str:
        """The rule an operator holds the arm at, "" for none; the class's own pin goes before that of all classes."""
        return self.pins.get((workload, arm)) or self.pins.get(("", arm), "")

    def started(self, request: str, assignment: Assignment) -> None:
        """The request's telemetry will be counted to its arm."""
        if assignment.counted:
            self._running[request] = (assignment.workload, assignment.arm)
            while len(self._running) > RUNNING:
                self._running.popitem(last=False)

    def finished(self, step: StepFinished, assignment: Assignment, sums: dict[tuple[str, str], SessionSums]) -> None:
        """Count a step. ``sums``: its session's own sums, kept by the session and changed here.

        A failed step counts nowhere, nor one that was undone; a cancelled one is a censored one.
        """
        if not assignment.counted or step.error not in ("", CANCELLED) or not step.tokens:
            return
        key = (assignment.workload, assignment.arm)
        # a session that runs on after a move is a new one to what is judged next
        moves = self.switches[key].moves if key in self.switches else 0
        if key not in sums or sums[key].moves != moves:
            sums[key] = SessionSums(moves=moves)
        cell, values = self._cell(key), measured(step)
        if step.rounds is None and cell.get("tokens"):
            # the engine's counters come with the end of the stream, which a client that hung up never saw
            values["rounds"] = step.tokens * cell.get("rounds") / cell.get("tokens")
        self._add(key, cell.add_step(sums[key], values, censored=is_censored(step)))
        self._judge(assignment)

    def verified(self, frame: VerificationStep) -> None:
        """Count the rounds of requests that belong to an arm."""
        for request in frame.requests:
            # a step that was continued has a second request
            found = self._running.get(request.request.removesuffix("-answer"))
            if found is None or request.drafted == 0:
                continue
            strict = strict_expectation(request.rows.strict)
            if math.isfinite(strict):
                self._add(found, self._cell(found).add_round(request.accepted, strict))

    def _cell(self, key: tuple[str, str]) -> Cell:
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = Cell()
        return cell

    def _add(self, key: tuple[str, str], added: Mapping[str, float]) -> None:
        """Remember for the store what a cell has grown by."""
        cell = self.pending.get(key)
        if cell is None:
            cell = self.pending[key] = Cell()
        cell.merge(added)

    # -- the guard -----------------------------------------------------------------------------------------------------------------

    def _judge(self, assignment: Assignment) -> None:
        """Judge the arms of a class again: the step's own arm, or all of them after a step of the control."""
        for arm in self.arms.rules if assignment.arm == STRICT else (assignment.arm,):
            key = (assignment.workload, arm)
            switch = self.switches.setdefault(key, Switch())
            own, control = self.cells.get(key, Cell()), self._control(assignment.workload)
            verdict, evidence = self._verdict(assignment.workload, arm, switch, own, control)
            if not self._guard or self.pinned(*key) or verdict.word != ("loss" if switch.on else "win"):
                switch.judged(verdict)
                continue
            switch.move(verdict, own, control, self._clock())
            self.moved.add(key)
            self.on_event(self._switched(key, switch, evidence, own, control))

    def _control(self, workload: str) -> Control:
        return self._baseline if self._baseline is not None else self.cells.get((workload, STRICT), Cell())

    def _verdict(self, workload: str, arm: str, switch: Switch, own: Cell, control: Control) -> tuple[Verdict, str]:
        """By the class's sessions since its last move; a small class that has never moved is judged by its model's classes."""
        recent, beside = switch.since(own, control)
        sessions = _smaller(recent, beside)
        if sessions >= self._min_sessions or switch.moves:
            rounds, ttlt = difference(recent, beside, "rounds"), difference(recent, beside, "ttlt")
            return judge(rounds, ttlt, sessions, self._min_sessions), "own"
        model = model_of(workload)
        peers = [name for name in self._workloads() if model_of(name) == model]
        pairs = [(self.cells.get((name, arm), Cell()), self._control(name)) for name in peers]
        together = [
            combined(d for cell, other in pairs if (d := difference(cell, other, quantity)) is not None)
            for quantity in ("rounds", "ttlt")
        ]
        return judge(together[0], together[1], sum(_smaller(*pair) for pair in pairs), self._min_sessions), "model"

    def _workloads(self) -> list[str]:
        return sorted({workload for workload, _ in self.cells})

    def _switched(self, key: tuple[str, str], switch: Switch, evidence: str, own: Cell, control: Control) -> RuleSwitched:
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

    def pressure(self, workload: str) -> float:
        """λ's term of the cutoff's growth pressure, in [0, 1]: how far the lower bound of λ is above the gain, in the worst arm.

        The same for every arm of a class, control included: a cutoff that differed between arms would bias λ itself.
        """
        worst, control = 0.0, self._control(workload)
        for arm in self.arms.rules:
            own = self.cells.get((workload, arm))
            if own is None or _smaller(own, control) < self._min_sessions:
                continue
            inflation, gain = difference(own, control, "tokens"), self._gain(own, control)
            if inflation is not None and gain is not None:
                worst = max(worst, inflation.interval().low / gain - 1)
        return min(1.0, worst)

    @staticmethod
    def _gain(own: Cell, control: Control) -> float | None:
        """(ℓ + 1)/(ℓ_strict + 1): the control's own ℓ, or the counterfactual of the arm's drafts without one."""
        mine = own.accepted_length
        strict = control.accepted_length if isinstance(control, Cell) else None
        strict = own.strict_accepted_length if strict is None else strict
        return None if mine is None or strict is None else (mine + 1) / (strict + 1)

    # -- what is shown
    # ---------------------------------------------------------------------------------------------------------------

    def rows(self, workload: str | None = None) -> Iterator[Row]:
        """Every arm of every class that has steps, control first; or those of one class."""
        for name in self._workloads() if workload is None else (workload,):
            for arm in (STRICT, *self.arms.rules):
                cell = self.cells.get((name, arm))
                if cell is not None:
                    yield self._row(name, arm, cell)

    def _row(self, workload: str, arm: str, cell: Cell) -> Row:
        control, is_control = self._control(workload), arm == STRICT
        switch = self.switches.get((workload, arm), Switch())
        means = {quantity: cell.mean(quantity) for quantity in QUANTITIES}
        ratios = {quantity: None if is_control else difference(cell, control, quantity) for quantity in QUANTITIES}
        return Row(
            workload=workload,
            arm=arm,
            on=switch.on,
            since=switch.at,
            verdict="control" if is_control else switch.verdict.word,
            reason="" if is_control else switch.reason,
            baseline=self._source,
            evidence="own" if _smaller(cell, control) >= self._min_sessions else "model",
            sessions=cell.sessions,
            steps=cell.steps,
            censored=round(cell.get("censored")),
            means={quantity: None if mean is None else mean.value for quantity, mean in means.items()},
            ratios={quantity: None if ratio is None else ratio.interval() for quantity, ratio in ratios.items()},
            accepted_length=cell.accepted_length,
            strict_accepted_length=cell.strict_accepted_length,
            gain=None if is_control else self._gain(cell, control),
            by_position=cell.by_position,
            pinned="" if is_control else self.pinned(workload, arm),
        )


def _smaller(arm: Cell, control: Control) -> int:
    """Sessions of the smaller arm; fixed means count as enough."""
    return min(arm.sessions, control.sessions) if isinstance(control, Cell) else arm.sessions


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


def setup_of(policy: Policy) -> str:
    """A name for what lengths and rounds were measured with; sums of another setup say nothing about this one."""
    parts = (policy.model, policy.draft, policy.engine.draft_tokens, policy.phase, policy.cutoff.model_dump_json())
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()
