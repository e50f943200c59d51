"""A whole study: engine, gateway, sessions, recording, table. `agentguard study run` and `agentguard demo` are thin callers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentguard import __version__
from agentguard.economics.ledger import ledger_of
from agentguard.economics.report import finite
from agentguard.engines.vllm_process import describe
from agentguard.errors import EngineError
from agentguard.events import RuleSwitched
from agentguard.gateway.server import Stack, serve_stack
from agentguard.study.grid import Grid, fresh_engines, run_grid
from agentguard.study.guarded import GuardResult, summarise_guard
from agentguard.study.provenance import command_line, provenance
from agentguard.study.records import Header, Recording
from agentguard.study.results import ArmResult, summarise
from agentguard.study.runner import StudyPlan, gateway_client, run
from agentguard.study.voids import check_policy
from agentguard.telemetry.recorder import record, replay

if TYPE_CHECKING:
    from agentguard.policy import Policy

T = TypeVar("T")
ENGINE_END_S = 20.0
__all__ = ["Outcome", "run_study", "with_stack", "write_json"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished study: its rows, recomputed from the recording at ``events``."""

    plan: StudyPlan
    policy: Policy
    rows: list[ArmResult]
    events: Path
    guard: GuardResult | None = None


async def run_study(
    plan: StudyPlan,
    policy: Policy,
    events: Path,
    *,
    on_ready: Callable[[Stack], None] = lambda _: None,
    on_step: Callable[[], None] = lambda: None,
) -> Outcome:
    """Serve the policy's models, run the plan through the gateway and summarise the recording.

    Raises EngineDiedError as soon as the engine's process ends, whatever the sessions are doing.
    """
    async with serve_stack(policy) as stack:
        on_ready(stack)
        async with record(stack.hub, events), gateway_client(stack) as client:
            await _unless_engine_ends(stack, run(plan, client, stack.guard.info.model, stack.hub, on_step))
    if plan.guarded:
        return Outcome(plan, policy, [], events, await asyncio.to_thread(_guard_result, policy, events))
    return Outcome(plan, policy, await asyncio.to_thread(lambda: summarise(replay(events))), events)


async def with_stack(policy: Policy, work: Callable[[Stack], Coroutine[Any, Any, T]]) -> T:
    """Serve the policy's models while ``work`` runs, or raise how the engine ended."""
    async with serve_stack(policy) as stack:
        result: list[T] = []

        async def keep() -> None:
            result.append(await work(stack))

        await _unless_engine_ends(stack, keep())
        return result[0]


async def run_cells(
    grid: Grid,
    policy: Policy,
    path: Path,
    *,
    resume: bool = False,
    fresh: bool = False,
    events: Path | None = None,
    on_ready: Callable[[Stack], None] = lambda _: None,
    on_found: Callable[[int], None] = lambda _: None,
    on_session: Callable[[], None] = lambda: None,
) -> Recording:
    """Run the grid into the recording at ``path``, or finish one that is there (``resume``).

    ``fresh`` starts an engine anew for each rule; ``events`` keeps every event besides;
    ``on_found`` is told how many sessions were there already. Raises ConfigError and VoidError for a
    set-up that would measure nothing, EngineDiedError as soon as the engine's process ends.
    """
    check_policy(policy, (cell.rule for cell in grid.cells), grid.temperature)
    recording = await asyncio.to_thread(_open_recording, grid, policy, path, resume)
    on_found(len(recording.records))
    parts = fresh_engines(grid) if fresh else [grid]
    for part in parts:
        if next(part.todo(recording.records), None) is None:
            continue

        async def work(stack: Stack, part: Grid = part) -> None:
            on_ready(stack)
            async with AsyncExitStack() as kept:
                if events is not None:
                    await kept.enter_async_context(record(stack.hub, events))
                await run_grid(part, stack, recording, on_session)

        await with_stack(policy, work)
    return recording


def _open_recording(grid: Grid, policy: Policy, path: Path, resume: bool) -> Recording:
    plan = grid.as_json(policy)
    if resume:
        return Recording.resume(path, plan)
    return Recording.new(path, Header(plan=plan, provenance=provenance(policy, plan, command_line())))


def _guard_result(policy: Policy, events: Path) -> GuardResult:
    recomputed: list[RuleSwitched] = []
    return summarise_guard(replay(events), ledger_of(policy, on_event=recomputed.append), recomputed)


async def _unless_engine_ends(stack: Stack, work: Any) -> None:
    """Await ``work``, or raise how the engine ended if that comes first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(stack.until_engine_ends(), name="engine watch")
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise watching.result()
        failure = working.exception()
        if failure is not None:
            if isinstance(failure, EngineError) and getattr(failure, "status", 500) >= 500:
                # a dead engine shows as a broken request first; its server ends some seconds later, and then says why
                await asyncio.wait((watching,), timeout=ENGINE_END_S)
            raise watching.result() if watching.done() else failure
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def write_json(outcome: Outcome, path: Path) -> None:
    """The table's numbers with what produced them."""
    plan = outcome.plan
    document = {
        "agentguard": __version__,
        "suite": plan.suite.name,
        "seed": plan.seed,
        "temperature": plan.temperature,
        "engine": describe(outcome.policy),
        "events": outcome.events.name,
        "arms": [row.as_json() for row in outcome.rows],
    }
    if outcome.guard is not None:
        document["guard"] = finite(
            {
                "rows": [row.as_json() for row in outcome.guard.rows],
                "switches": [msgspec.to_builtins(s) for s in outcome.guard.switches],
            }
        )
    path.write_text(json.dumps(document, indent=1) + "\n")
