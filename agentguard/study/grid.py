"""One run over rules × support filter × close: paired, interleaved, recorded session by session.

A cell is a rule and a way of closing traces. Every cell runs the same problems with the same seeds, from number 0 up, so a cell of
96 sessions is paired with the first 96 of one of 256. Cells take turns, each number beginning with another one, so drift of the
machine hits all of them alike. All cells share one engine, which is told the rule with every request; for each way of closing there
is a gateway in front of it.

Cells with the close off run to the suite's own limit: there λ is measured, uncut. Cells with a close run under a budget B, by
default the median length of a strict trace (a pilot on other problems), and are compared with the runs of the close-off cell cut
at B. These need not be run: a run that stops at B is one that goes on beyond it, read up to B, so it is right if and only if the
free one is right within B tokens.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentguard.engines.base import Engine
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.errors import AgentGuardError, ConfigError
from agentguard.events import Graded, StudyStarted
from agentguard.gateway.server import Stack, bind, gateway
from agentguard.middleware import Guard
from agentguard.policy import Cutoff, Policy
from agentguard.reference import weights_hash
from agentguard.rulespec import DEFAULT_P_MIN, DEFAULT_TOP_K, KNOBS, RuleSpec
from agentguard.study.anatomy import HESITATIONS, Anatomy, hesitation_ids
from agentguard.study.records import Recording, SessionRecord, StepRecord
from agentguard.study.runner import StudyPlan, all_or_first_error, request_body
from agentguard.study.suites import AnySuite
from agentguard.study.suites.chain import parse_answer
from agentguard.study.voids import PROBE, PROBE_REQUESTS, PROBE_TOKENS, judge_probe

Close = Literal["off", "fixed", "adaptive"]
PILOT = 64
WARM_UP = 8
STRICT = RuleSpec("strict")
FIVE = ("mentored", "mentored-dec", "cactus", "fuzzy", "r-fuzzy", "casc-opt", "casc-tok-v3")
"""The five rules of arXiv 2610.23818 by the law they bound: forward KL (our `mentored`, and `mentored-dec` as the public five-rule
code has it), reverse KL, Jensen-Shannon (two), cascade OPT, token cascade."""
BUILT_IN_CUTOFF = Cutoff(answer_floor=8, half_below=0)
"""Answers of the chain suites have two or three tokens, and B is far below 512, where a gateway keeps half for the answer."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A rule under a way of closing, run on the first ``n`` problems."""

    rule: RuleSpec
    close: Close
    n: int

    @property
    def key(self) -> tuple[str, str]:
        return str(self.rule), self.close


def cells_of(rules: Iterable[RuleSpec], closes: Sequence[Close], n: int) -> tuple[Cell, ...]:
    """Every rule under every way of closing."""
    return tuple(Cell(rule, close, n) for close in closes for rule in rules)


def full_cells(n: int = 256, n_rest: int = 96, closes: Sequence[Close] = ("off", "adaptive")) -> tuple[Cell, ...]:
    """All rules at their usual knobs, without and with the default filter, under each close: ``n`` sessions for strict and the
    rules of the paper, ``n_rest`` for the others. Strict with the filter is one of them: its effect is told from a rule's."""
    rules = []
    for name, knobs in KNOBS.items():
        plain = RuleSpec(name, {knob.name: float(knob.usual) for knob in knobs})
        rules += [plain, plain.filtered_by(DEFAULT_P_MIN, DEFAULT_TOP_K)]
    return tuple(Cell(rule, close, n if rule.name in ("strict", *FIVE) else n_rest) for close in closes for rule in rules)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is run. ``budget``: tokens of a run in the cells that close; None takes the median strict trace of a pilot."""

    suite: AnySuite
    cells: tuple[Cell, ...]
    seed: int
    temperature: float = 1.0
    concurrency: int = 24
    budget: int | None = None

    def __post_init__(self) -> None:
        if (str(STRICT), "off") not in (cell.key for cell in self.cells):
            arms = ";".join(str(cell.rule) for cell in self.cells)
            raise ConfigError("arms", arms, "needs 'strict' among the arms: λ and gain are ratios to it")
        if len({cell.key for cell in self.cells}) != len(self.cells):
            raise ConfigError("arms", ";".join(str(cell.rule) for cell in self.cells), "an arm is given twice; keep one")
        strict = max(cell.n for cell in self.cells if cell.rule == STRICT)
        if any(cell.n > strict for cell in self.cells):
            raise ConfigError("n", max(c.n for c in self.cells), f"an arm has more sessions than strict ({strict}) to pair with")
        if self.closing and self.suite.steps != 1:
            raise ConfigError("--close", self.suite.name, "a budget is of one call, and its sessions have several; use off")
        if self.closing and not self.suite.graded:
            raise ConfigError("--close", self.suite.name, "grades nothing, and closing is judged by right answers; use off")

    @property
    def closing(self) -> tuple[Close, ...]:
        """The ways of closing besides off."""
        return tuple(dict.fromkeys(cell.close for cell in self.cells if cell.close != "off"))

    @property
    def pilot(self) -> int:
        return PILOT if self.closing and self.budget is None else 0

    @property
    def sessions(self) -> int:
        return self.pilot + sum(cell.n for cell in self.cells)

    def as_json(self, policy: Policy) -> dict[str, Any]:
        """All that decides what is run; what a recording must agree in to be gone on with. Blocking: hashes the weights."""
        options = policy.model_dump(mode="json", include={"phase", "markers", "cutoff", "engine"})
        options["engine"].pop("start_timeout_s")
        return {
            "suite": self.suite.name,
            "steps": self.suite.steps,
            "max_tokens": self.suite.max_tokens,
            "tasks": _tasks_hash(self.suite, self.seed, max(cell.n for cell in self.cells)),
            "seed": self.seed,
            "temperature": self.temperature,
            "budget": self.budget,
            "cells": [[str(cell.rule), cell.close, cell.n] for cell in self.cells],
            "model": [Path(policy.model).name, _hash(policy.model)],
            "draft": policy.draft and [Path(policy.draft).name, _hash(policy.draft)],
            "options": options,
        }

    def todo(self, done: Iterable[SessionRecord]) -> Iterator[tuple[Cell, int]]:
        """Cells and numbers that are still to run: number by number, each beginning with another cell."""
        finished = {record.key for record in done}
        for number in range(max(cell.n for cell in self.cells)):
            turn = number % len(self.cells)
            for cell in (*self.cells[turn:], *self.cells[:turn]):
                if number < cell.n and (*cell.key, number) not in finished:
                    yield cell, number


def budget_of(grid: Grid, records: Iterable[SessionRecord]) -> int:
    """B of the cells that close: what was asked for, else the median length of the pilot's traces; 0 without such cells."""
    if not grid.closing:
        return 0
    if grid.budget is not None:
        return grid.budget
    return round(statistics.median(sum(step.finished.think_tokens for step in r.steps) for r in records if r.close == "pilot"))


async def run_grid(grid: Grid, stack: Stack, recording: Recording, on_session: Callable[[], None] = lambda: None) -> None:
    """Run what the recording does not hold yet. ``on_session`` is told of each session that is over.

    Raises VoidError where the engine does not do what the rules say, before anything is recorded; the first error of a session
    stops all of them and is raised.
    """
    stack.hub.publish(
        StudyStarted(
            t=time.time(), suite=grid.suite.name, seed=grid.seed, sessions=max(c.n for c in grid.cells),
            temperature=grid.temperature, arms=list(dict.fromkeys(str(cell.rule) for cell in grid.cells)), budget=grid.budget or 0,
        )
    )  # fmt: skip
    anatomy = Anatomy(await hesitation_ids(stack.guard.engine, HESITATIONS))
    async with AsyncExitStack() as cleanup:
        cleanup.enter_context(stack.hub.sink(anatomy))
        off = await cleanup.enter_async_context(_closing_client(stack, grid, "off"))
        runner = _Runner(grid, stack, anatomy, recording, on_session)
        await _probe(grid, stack, anatomy, off)
        for number in range(WARM_UP):  # the engine's first requests are slower than the rest
            await runner.session(Cell(STRICT, "off", WARM_UP), number, off, label="warm-up", keep=False)
        piloted = {record.number for record in recording.records if record.close == "pilot"}
        pilot = [(Cell(STRICT, "off", PILOT), n, off, "pilot") for n in range(grid.pilot) if n not in piloted]
        await runner.all(pilot)
        clients: dict[str, OpenAIEngine] = {"off": off}
        for close in grid.closing:
            clients[close] = await cleanup.enter_async_context(_closing_client(stack, grid, close))
        runner.budget = budget_of(grid, recording.records)
        await runner.all([(cell, number, clients[cell.close], cell.close) for cell, number in grid.todo(recording.records)])


@asynccontextmanager
async def _closing_client(stack: Stack, grid: Grid, close: Close) -> AsyncIterator[OpenAIEngine]:
    """A gateway of its own that closes traces so, in front of the stack's engine, and a client of it."""
    cutoff = BUILT_IN_CUTOFF if grid.suite.name.startswith("chain") else stack.guard.policy.cutoff
    policy = stack.guard.policy.model_copy(update={"cutoff": cutoff.model_copy(update={"mode": close})})
    guard = await Guard.open(stack.guard.engine, policy, stack.hub)
    with bind("127.0.0.1", 0) as listener:
        async with gateway(guard, listener) as url:
            client = OpenAIEngine(url, name=f"gateway, close {close}")
            try:
                yield client
            finally:
                await client.aclose()


async def _probe(grid: Grid, stack: Stack, anatomy: Anatomy, client: Engine) -> None:
    """Does the engine do what a rule says? See `voids.judge_probe`."""
    plan = StudyPlan(grid.suite.shortened(PROBE_TOKENS), (PROBE,), PROBE_REQUESTS, grid.seed, baseline=False)
    nonce, found = uuid.uuid4().hex[:8], []
    for number in range(PROBE_REQUESTS):
        session = f"study/{nonce}/probe/{number}"
        anatomy.watch(session)
        text = plan.suite.problem(plan.seed, number, 1, None).text
        body = request_body(plan, stack.guard.info.model, [{"role": "user", "content": text}], number, 1, PROBE)
        async with aclosing(client.chat(body, f"{number}-probe", session)) as chunks:
            async for _ in chunks:
                pass
        found.append(await anatomy.take(session, 1))
    judge_probe([stats for _, stats in found], sum(step.rounds or 0 for steps, _ in found for step in steps))


class _Runner:
    def __init__(self, grid: Grid, stack: Stack, anatomy: Anatomy, recording: Recording, on_session: Callable[[], None]) -> None:
        self.grid = grid
        self.stack = stack
        self.anatomy = anatomy
        self.recording = recording
        self.budget = 0
        self._on_session = on_session
        # a run is a new agent: without it a second run of a seed would go on in the sessions of the first
        self._nonce = uuid.uuid4().hex[:8]

    async def all(self, work: Sequence[tuple[Cell, int, OpenAIEngine, str]]) -> None:
        """Run the sessions in this order, as many at once as the grid says."""
        left = iter(work)

        async def worker() -> None:
            for cell, number, client, label in left:
                await self.session(cell, number, client, label=label)
                self._on_session()

        await all_or_first_error(worker() for _ in range(min(self.grid.concurrency, len(work))))

    async def session(self, cell: Cell, number: int, client: Engine, *, label: str, keep: bool = True) -> None:
        """One session, recorded when it is over."""
        grid = self.grid
        suite = grid.suite if cell.close == "off" else grid.suite.shortened(self.budget)
        # the pilot's problems are others than those that are judged
        seed = grid.seed if label == cell.close else grid.seed + 1_000_003
        plan = StudyPlan(suite, (cell.rule,), cell.n, seed, grid.temperature, baseline=False)
        name = f"study/{self._nonce}/{label}/{cell.rule}/{number}"
        self.anatomy.watch(name)
        graded: list[tuple[bool | None, int | None]] = []
        try:
            messages: list[dict[str, str]] = []
            previous: int | None = None
            for step in range(1, suite.steps + 1):
                problem = suite.problem(seed, number, step, previous)
                messages.append({"role": "user", "content": problem.text})
                body = request_body(plan, self.stack.guard.info.model, messages, number, step, cell.rule)
                reply = await _read(client, body | {"return_token_ids": True}, f"{number}-{step}", name)
                right = await asyncio.to_thread(problem.grade, reply.answer)  # code is run
                graded.append((right, reply.place(problem.proved(reply.trace))))
                self.stack.hub.publish(Graded(t=time.time(), session=name, step=step, arm=str(cell.rule), right=right))
                messages.append({"role": "assistant", "content": reply.answer.strip()})
                previous = parse_answer(reply.answer)
            finished, stats = await self.anatomy.take(name, suite.steps)
        except BaseException:
            self.anatomy.forget(name)
            raise
        if len(finished) != suite.steps:
            raise AgentGuardError(f"{len(finished)} of {suite.steps} steps of {name} came to an end; go on with --resume")
        if keep:
            steps = [StepRecord(finished=f, right=r, proved=p) for f, (r, p) in zip(finished, graded, strict=True)]
            record = SessionRecord(rule=str(cell.rule), close=label, number=number, steps=steps, stats=stats, t=time.time())
            await self.recording.append(record)


@dataclass(slots=True)
class _Reply:
    """A step as its client saw it. ``places``: characters of trace and tokens of output after each chunk."""

    answer: str
    trace: str
    places: list[tuple[int, int]]

    def place(self, characters: int | None) -> int | None:
        """Tokens generated when the trace had this many characters; exact to the tokens of one chunk, which are spread evenly."""
        if characters is None:
            return None
        i = bisect.bisect_left(self.places, (characters, 0))
        chars_before, tokens_before = self.places[i - 1] if i else (0, 0)
        chars, tokens = self.places[i]
        if chars == chars_before:
            return tokens
        return tokens_before + -(-(characters - chars_before) * (tokens - tokens_before) // (chars - chars_before))


async def _read(client: Engine, body: Mapping[str, Any], request: str, session: str) -> _Reply:
    answer, trace, tokens = [], [], 0
    places: list[tuple[int, int]] = []
    characters = 0
    async with aclosing(client.chat(body, request, session)) as chunks:
        async for chunk in chunks:
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
                tokens += len(choice.get("token_ids") or ())
                if thought:
                    trace.append(thought)
                    characters += len(thought)
                    places.append((characters, tokens))
                answer.append(delta.get("content") or "")
    return _Reply("".join(answer), "".join(trace), places)


def _tasks_hash(suite: AnySuite, seed: int, sessions: int) -> str:
    """Of what the sessions ask first: another file of tasks is another plan."""
    asked = [suite.problem(seed, number, 1, None).text for number in range(sessions)]
    return hashlib.sha256("\0".join(asked).encode()).hexdigest()[:16]


def _hash(model: str) -> str | None:
    """Of a model on disk; of one in several files, of their names and sizes. None for a model of the hub."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    parts = sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))
    return weights_hash(folder) or hashlib.sha256(repr(parts).encode()).hexdigest()


def fresh_engines(grid: Grid) -> list[Grid]:
    """The grid as one for each rule, each with strict's cells so that it can be paired; for engines that are started anew."""
    strict = [cell for cell in grid.cells if cell.rule == STRICT]
    rules = list(dict.fromkeys(str(cell.rule) for cell in grid.cells if cell.rule != STRICT))
    return [replace(grid, cells=(*strict, *(c for c in grid.cells if str(c.rule) == rule))) for rule in rules]
