"""What closing a trace at 80-85 % of its budget does to budget-bound runs: rescues, regressions, empty answers.

After arXiv 2610.23818, section on budget forcing. A pilot fixes the budget B, the median length of strict traces. Every problem
then runs with at most B tokens under each way of closing: off (the server stops at B, whatever the model is doing), fixed (closed
at 0.85 B) and adaptive. A run is budget-bound when, with the close off, it passes 0.85 B inside its trace. Runs are paired by
problem and seed; everything is computed from recorded events.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentguard.economics.ratios import Z_95
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.errors import AgentGuardError, ConfigError
from agentguard.events import Event, Graded, StepFinished, StudyStarted
from agentguard.gateway.server import Stack, bind, gateway
from agentguard.middleware import Guard
from agentguard.policy import Cutoff, Policy
from agentguard.study.runner import StudyPlan, all_or_first_error, session

Mode = Literal["off", "fixed", "adaptive"]
MODES: Mapping[Mode, tuple[Mode, ...]] = {"off": ("off",), "fixed": ("off", "fixed"), "adaptive": ("off", "fixed", "adaptive")}
"""What runs for each value of --close: what it is compared with, and itself last."""
BOUND = 0.85
PILOT = 64
# answers of the suites have two or three tokens, and B is far below 512, where a gateway keeps half for the answer
CUTOFF = Cutoff(answer_floor=8, half_below=0)


@dataclass(frozen=True, slots=True)
class Closing:
    """One way of closing against off, over the budget-bound runs.

    ``rescued``: wrong or empty with the close off, right with it; ``regressed``: the other way round; ``empty``: closed runs
    without an answer. ``difference`` is the share of right answers minus that of the fixed close, with its paired 95 % interval;
    None where there is nothing to compare with.
    """

    mode: Mode
    budget: int
    n: int
    rescued: int
    regressed: int
    empty: int
    right: int
    right_off: int
    closed: dict[str, int] = field(default_factory=dict)
    difference: tuple[float, float, float] | None = None

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name != "difference"}
        if self.difference is not None:
            row["right_minus_fixed"], *row["right_minus_fixed_ci"] = self.difference
        return row


async def run_closing(plan: StudyPlan, mode: Mode, stack: Stack, on_step: Callable[[], None] = lambda: None) -> None:
    """Run the pilot and the plan's sessions under each way of closing, through a gateway for each. Events go to the stack's hub."""
    if plan.suite.steps != 1:
        raise ConfigError("suite", plan.suite.name, "runs are paired by problem, and a later step's problem depends on the answer")
    if not plan.suite.graded:
        raise ConfigError("suite", plan.suite.name, "grades nothing, and this study counts rescued answers")
    if len(plan.arms) != 1:
        raise ConfigError("arms", ";".join(map(str, plan.arms)), "closing is studied under one rule; name one")
    nonce = uuid.uuid4().hex[:8]
    gate = asyncio.Semaphore(plan.concurrency)
    async with AsyncExitStack() as cleanup:

        async def client(mode: Mode) -> OpenAIEngine:
            cutoff = CUTOFF.model_copy(update={"mode": mode})
            policy: Policy = stack.guard.policy.model_copy(update={"cutoff": cutoff})
            guard = await Guard.open(stack.guard.engine, policy, stack.hub)
            url = await cleanup.enter_async_context(gateway(guard, cleanup.enter_context(bind("127.0.0.1", 0))))
            made = OpenAIEngine(url, name=f"gateway {mode}")
            cleanup.push_async_callback(made.aclose)
            return made

        async def one(label: str, through: OpenAIEngine, asked: StudyPlan, number: int) -> None:
            async with gate:
                name = f"close/{nonce}/{label}/{number}"
                await session(asked, through, stack.guard.info.model, stack.hub, name, number, asked.arms[0], on_step, label=label)

        clients = {m: await client(m) for m in MODES[mode]}
        pilot = replace(plan, seed=plan.seed + 1_000_003)  # other problems than those that are judged
        traces: list[int] = []
        collect = _collector(traces, f"close/{nonce}/pilot/")
        with stack.hub.sink(collect):
            await all_or_first_error(one("pilot", clients["off"], pilot, i) for i in range(PILOT))
        budget = round(statistics.median(traces))
        bounded = replace(plan, suite=plan.suite.shortened(budget))
        stack.hub.publish(
            StudyStarted(
                t=time.time(), suite=plan.suite.name, seed=plan.seed, sessions=plan.sessions, temperature=plan.temperature,
                arms=list(clients), budget=budget,
            )
        )  # fmt: skip
        await all_or_first_error(one(m, c, bounded, i) for i in range(plan.sessions) for m, c in clients.items())


def _collector(traces: list[int], prefix: str) -> Callable[[Event], None]:
    def collect(event: Event) -> None:
        if isinstance(event, StepFinished) and event.session.startswith(prefix) and not event.error:
            traces.append(event.think_tokens)

    return collect


def summarise_closing(events: Iterable[Event]) -> list[Closing]:
    """One row for each way of closing of a recording, off first."""
    budget, modes = 0, list[Mode]()
    finished: dict[str, StepFinished] = {}
    runs: dict[str, dict[str, tuple[StepFinished, bool]]] = {}
    for event in events:
        if isinstance(event, StudyStarted):
            budget, modes = event.budget, [m for m in ("off", "fixed", "adaptive") if m in event.arms]
        elif isinstance(event, StepFinished):
            finished[event.session] = event
        elif isinstance(event, Graded) and event.arm in MODES:
            runs.setdefault(event.arm, {})[event.session.rpartition("/")[2]] = finished[event.session], bool(event.right)
    if not budget or "off" not in runs:
        raise AgentGuardError("the recording holds no study of closing; record one with 'agentguard study run --close adaptive'")
    bound = [n for n, (step, _) in runs["off"].items() if step.think_tokens >= BOUND * budget]
    return [_row(mode, budget, bound, runs) for mode in modes]


def _row(mode: Mode, budget: int, bound: list[str], runs: Mapping[str, Mapping[str, tuple[StepFinished, bool]]]) -> Closing:
    missing = [n for n in bound if n not in runs[mode]]
    if missing:
        raise AgentGuardError(f"close {mode!r} did not run the same problems (missing: {missing[:5]}); run the study again")
    mine, off = [runs[mode][n] for n in bound], [runs["off"][n][1] for n in bound]
    reasons: dict[str, int] = {}
    for step, _ in mine:
        reasons[step.closed or "none"] = reasons.get(step.closed or "none", 0) + 1
    difference = None
    if mode == "adaptive" and bound:
        differences = [right - runs["fixed"][n][1] for n, (_, right) in zip(bound, mine, strict=True)]
        mean, n = statistics.fmean(differences), len(differences)
        half = Z_95 * statistics.pstdev(differences) / math.sqrt(n)
        difference = (mean, mean - half, mean + half)
    return Closing(
        mode=mode,
        budget=budget,
        n=len(bound),
        rescued=sum(right and not before for (_, right), before in zip(mine, off, strict=True)),
        regressed=sum(before and not right for (_, right), before in zip(mine, off, strict=True)),
        empty=sum(step.empty_answer for step, _ in mine) if mode != "off" else 0,
        right=sum(right for _, right in mine),
        right_off=sum(off),
        closed=dict(sorted(reasons.items())),
        difference=difference,
    )
