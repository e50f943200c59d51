"""What TTS does to long outputs: a frozen draft against one that learns, one request at a time, on the same problems.

Frozen and learning runs of a problem follow each other on one engine, in an order that alternates, so drift of the machine hits
both. Then come the cells of the grid, on the first problems of the plan and with outputs of `GRID_TOKENS`, which the frozen runs
are cut to for the comparison. Accepted lengths are by place in the output: thirds and buckets of `BUCKET` tokens. Everything is
computed from events; ℓ does not count the bonus token."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from agentguard import __version__
from agentguard.economics.ratios import Ratio, paired_gain, paired_ratio
from agentguard.engines.base import Engine
from agentguard.engines.vllm_process import describe
from agentguard.errors import ConfigError, EngineError
from agentguard.events import DraftUpdated, Event, StepFinished, StepStarted, StudyStarted, TtsChanged, VerificationStep
from agentguard.gateway.server import Stack
from agentguard.policy import Policy
from agentguard.reference import weights_hash
from agentguard.study.runner import StudyPlan, all_or_first_error, gateway_client, session
from agentguard.study.suites import AnySuite
from agentguard.tts_settings import TtsSettings

BUCKET = 400
FROZEN, LEARNING = "frozen", "tts"
GRID: Mapping[str, Mapping[str, Any]] = {
    "S = 1": {"stride": 1},
    "S = 2": {"stride": 2},
    "S = 10": {"stride": 10},
    "S = 20": {"stride": 20},
    "rate 3e-4": {"rate": 3e-4},
    "rate 3e-3": {"rate": 3e-3},
    "rate 1e-2": {"rate": 1e-2},
    "last:1": {"scope": "last:1"},
    "lora:8": {"scope": "lora:8", "rate": 4e-3},
    "head": {"scope": "head"},
    "newest rounds only": {"rows": "stride"},
    "rejected rows too": {"rejected": True},
    "proximal 0.1": {"proximal": 0.1},
    "top 64": {"top_k": 64},
    "no reset": {"reset": "never"},
}
"""Cells of the grid: what each changes in the settings of the learning arm."""


@dataclass(slots=True)
class Run:
    """One request. ``places``: (output position of the first drafted token, accepted drafts) of each round."""

    label: str
    number: int
    tokens: int = 0
    ttlt_s: float = 0.0
    places: list[tuple[int, int]] = field(default_factory=list)
    updates: int = 0
    publish_ms: list[float] = field(default_factory=list)
    train_ms: list[float] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    lost: int = 0
    """Telemetry frames that did not come while it ran: its rounds are then short of some."""

    @property
    def rounds(self) -> int:
        return len(self.places)

    def length(self, low: float = 0, high: float = float("inf")) -> float | None:
        """ℓ over the rounds that begin at low <= position < high; None without one."""
        some = [accepted for at, accepted in self.places if low <= at < high]
        return sum(some) / len(some) if some else None

    def third(self, which: int) -> float | None:
        return self.length(which * self.tokens / 3, (which + 1) * self.tokens / 3 if which < 2 else float("inf"))


class Collector:
    """Runs out of the event stream. One request at a time: telemetry of TTS belongs to the request that runs."""

    def __init__(self, prefix: str) -> None:
        self.runs: dict[str, Run] = {}
        self._prefix = prefix
        self._by_request: dict[str, Run] = {}
        self._running: Run | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case StepStarted() if event.session.startswith(self._prefix):
                label, number = event.session.removeprefix(self._prefix).rsplit("/", 1)
                run = self.runs[event.session] = Run(unquote(label), int(number))
                self._by_request[event.request] = self._running = run
            case VerificationStep():
                if self._running is not None:
                    self._running.lost += event.lost
                for verified in event.requests:
                    known = self._by_request.get(verified.request)
                    if known is not None:
                        # the first token comes from the prompt's own step; every round then gives one more than it accepts
                        at = 1 if not known.places else known.places[-1][0] + known.places[-1][1] + 1
                        known.places.append((at, verified.accepted))
            case DraftUpdated() if self._running is not None:
                self._running.updates += 1
                self._running.publish_ms.append(event.publish_ms)
                self._running.train_ms.append(event.train_ms)
            case TtsChanged() if self._running is not None and event.state not in ("live", "paused", "starting"):
                self._running.changes.append(f"{event.state}: {event.reason}")
            case StepFinished(undone=False) if event.session in self.runs:
                run = self.runs[event.session]
                run.tokens, run.ttlt_s = event.tokens, event.ttlt_s
                self._running = None

    def of(self, label: str) -> list[Run]:
        return sorted((r for r in self.runs.values() if r.label == label), key=lambda r: r.number)


@dataclass(frozen=True, slots=True)
class Against:
    """An arm against the frozen draft on the same problems; ratios with their paired 95 % intervals."""

    label: str
    n: int
    length: Ratio
    """ℓ over the whole output."""
    thirds: list[Ratio]
    gain: list[Ratio]
    """ℓ over the frozen draft's, by third of the output."""
    buckets: list[dict[str, Any]]
    """ℓ by `BUCKET` tokens of output, and over the frozen draft's there."""
    rounds: Ratio
    """Rounds a token, over the frozen draft's."""
    speed: Ratio
    """Tokens a second, over the frozen draft's."""
    tokens_per_s: float
    ttlt_s: float
    updates: float
    publish_ms: float | None
    train_ms: float | None
    changes: dict[str, int]
    lost_frames: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def run_tts(
    plan: StudyPlan, stack: Stack, settings: TtsSettings, grid: Mapping[str, Mapping[str, Any]], grid_n: int,
    on_step: Callable[[], None] = lambda: None,
) -> list[Against]:  # fmt: skip
    """Run the pairs and the cells. Raises ConfigError for a suite of several steps, whose later problems depend on answers."""
    if plan.suite.steps != 1:
        raise ConfigError("suite", plan.suite.name, "runs are paired by problem, and a later step's problem depends on the answer")
    prefix = f"tts/{uuid.uuid4().hex[:8]}/"
    collector = Collector(prefix)
    engine = stack.guard.engine
    stack.hub.publish(
        StudyStarted(
            t=time.time(), suite=plan.suite.name, seed=plan.seed, sessions=plan.sessions, temperature=plan.temperature,
            arms=[FROZEN, LEARNING, *grid],
        )
    )  # fmt: skip
    with stack.hub.sink(collector):
        async with gateway_client(stack) as client:

            async def one(label: str, number: int) -> None:
                name = f"{prefix}{quote(label)}/{number}"
                await session(plan, client, stack.guard.info.model, stack.hub, name, number, plan.arms[0], on_step, label=label)

            await switch(engine, learning=True, settings=asdict(settings))
            for number in range(plan.sessions):
                for label in (FROZEN, LEARNING) if number % 2 == 0 else (LEARNING, FROZEN):
                    await switch(engine, learning=label == LEARNING)
                    await one(label, number)
            for label, changes in grid.items():
                await switch(engine, learning=True, settings=asdict(settings) | dict(changes))
                for number in range(min(grid_n, plan.sessions)):
                    await one(label, number)
            if grid:
                await switch(engine, learning=True, settings=asdict(settings))
            await asyncio.sleep(0.5)  # the last step's telemetry
    frozen = {r.number: r for r in collector.of(FROZEN)}
    return [against(label, collector.of(label), frozen) for label in (FROZEN, LEARNING, *grid)]


async def switch(engine: Engine, *, learning: bool, settings: Mapping[str, Any] | None = None) -> None:
    """Let the draft learn, or freeze it. Raises EngineError where the engine did not do so: a run under a wrong name is worse than
    none."""
    found = await engine.tts(enabled=learning, settings=settings)
    if found["state"] != ("live" if learning else "paused"):
        raise EngineError(f"TTS is {found['state']!r} ({found['reason']}), so nothing can be said about it; see the engine's log")


async def run_batch(plan: StudyPlan, stack: Stack, size: int, on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """``size`` requests at once, which share one state of the draft: ℓ frozen and learning, over the same problems."""
    prefix = f"tts/{uuid.uuid4().hex[:8]}/"
    collector = Collector(prefix)
    with stack.hub.sink(collector):
        async with gateway_client(stack) as client:
            gate = asyncio.Semaphore(size)

            async def one(label: str, number: int) -> None:
                async with gate:
                    name = f"{prefix}{quote(label)}/{number}"
                    await session(plan, client, stack.guard.info.model, stack.hub, name, number, plan.arms[0], on_step, label=label)

            for label in (FROZEN, LEARNING):
                await switch(stack.guard.engine, learning=label == LEARNING)
                await all_or_first_error(one(label, number) for number in range(plan.sessions))
            await asyncio.sleep(0.5)
    frozen = {r.number: r for r in collector.of(FROZEN)}
    rows = [against(label, collector.of(label), frozen).as_json() for label in (FROZEN, LEARNING)]
    for row in rows:  # an update belongs to all that run, not to one of them
        for key in ("updates", "publish_ms", "train_ms", "changes"):
            del row[key]
    return {"size": size, "arms": rows}


async def run_alternating(
    plan: StudyPlan, other: AnySuite, stack: Stack, on_step: Callable[[], None] = lambda: None
) -> dict[str, Any]:  # fmt: skip
    """A stream of requests whose domain changes with each: the plan's suite, then ``other``, and so on, with a frozen draft and
    then with one that learns. What the draft learned for one must not cost the other: ℓ over the frozen draft's, by domain and over
    all."""
    if other.steps != 1:
        raise ConfigError("suite", other.name, "runs are paired by problem, and a later step's problem depends on the answer")
    prefix = f"tts/{uuid.uuid4().hex[:8]}/"
    collector = Collector(prefix)
    suites = (plan.suite, other)
    with stack.hub.sink(collector):
        async with gateway_client(stack) as client:
            for label in (FROZEN, LEARNING):
                await switch(stack.guard.engine, learning=label == LEARNING)
                for number in range(2 * plan.sessions):
                    asked = replace(plan, suite=suites[number % 2])
                    name = f"{prefix}{label}/{number}"
                    await session(
                        asked, client, stack.guard.info.model, stack.hub, name, number, plan.arms[0], on_step, label=label
                    )
            await asyncio.sleep(0.5)
    runs = {label: {r.number: r for r in collector.of(label)} for label in (FROZEN, LEARNING)}

    def over(numbers: Sequence[int]) -> dict[str, Any]:
        """Pooled over rounds: what a stream of these requests gains or loses."""
        pairs = {label: [(sum(a for _, a in runs[label][n].places), runs[label][n].rounds) for n in numbers] for label in runs}
        gain = paired_gain(pairs[LEARNING], pairs[FROZEN])
        length = {label: sum(a for a, _ in pairs[label]) / sum(r for _, r in pairs[label]) for label in runs}
        ratio = paired_ratio(
            [runs[LEARNING][n].length() or 0.0 for n in numbers], [runs[FROZEN][n].length() or 0.0 for n in numbers]
        )
        return {"n": len(numbers), "length": length, "ratio": asdict(ratio), "gain": asdict(gain)}

    everything = range(2 * plan.sessions)
    by_suite = {suite.name: over(everything[i::2]) for i, suite in enumerate(suites)}
    return {"suites": by_suite, "all": over(everything)}


def against(label: str, runs: Sequence[Run], frozen: Mapping[int, Run]) -> Against:
    """The arm's row; ``frozen`` by problem number."""
    base = [frozen[r.number] for r in runs]
    ones = [1.0] * len(runs)
    longest = max(r.tokens for r in runs)
    buckets = []
    for low in range(0, longest, BUCKET):
        pairs = [(r.length(low, low + BUCKET), b.length(low, low + BUCKET)) for r, b in zip(runs, base, strict=True)]
        known = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
        if len(known) < max(2, len(runs) // 2):
            continue
        mine, theirs = [m for m, _ in known], [t for _, t in known]
        buckets.append(
            {
                "from": low,
                "n": len(known),
                "length": asdict(paired_ratio(mine, [1.0] * len(mine))),
                "gain": asdict(paired_ratio(mine, theirs)),
            }
        )
    both = [[(r.third(i), b.third(i)) for r, b in zip(runs, base, strict=True)] for i in range(3)]
    thirds = [[(mine, theirs) for mine, theirs in third if mine is not None and theirs is not None] for third in both]
    changes: dict[str, int] = {}
    for change in (c.partition(":")[0] for r in runs for c in r.changes):
        changes[change] = changes.get(change, 0) + 1
    return Against(
        label=label,
        n=len(runs),
        length=paired_ratio([r.length() or 0.0 for r in runs], ones),
        thirds=[paired_ratio([mine for mine, _ in third], [1.0] * len(third)) for third in thirds],
        gain=[paired_ratio([mine for mine, _ in third], [theirs for _, theirs in third]) for third in thirds],
        buckets=buckets,
        rounds=paired_ratio([r.rounds / r.tokens for r in runs], [b.rounds / b.tokens for b in base]),
        speed=paired_ratio([b.ttlt_s / b.tokens for b in base], [r.ttlt_s / r.tokens for r in runs]),
        tokens_per_s=sum(r.tokens for r in runs) / sum(r.ttlt_s for r in runs),
        ttlt_s=statistics.fmean(r.ttlt_s for r in runs),
        updates=statistics.fmean(r.updates for r in runs),
        publish_ms=_median(ms for r in runs for ms in r.publish_ms),
        train_ms=_median(ms for r in runs for ms in r.train_ms),
        changes=changes,
        lost_frames=sum(r.lost for r in runs),
    )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def document(
    rows: Sequence[Against], plan: StudyPlan, policy: Policy, settings: TtsSettings, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """What `--json` writes. ``last_third_gain``: fraction by which ℓ in the last third of the output grows, frozen to learning."""
    learning = next((r for r in rows if r.label == LEARNING), None)
    last = (
        {}
        if learning is None
        else {
            "last_third_gain": learning.gain[-1].value - 1,
            "last_third_gain_ci": [learning.gain[-1].low - 1, learning.gain[-1].high - 1],
        }
    )
    models = {"target": Path(policy.model), "draft": Path(policy.draft or "")}
    return {
        "agentguard": __version__,
        "suite": plan.suite.name,
        "seed": plan.seed,
        "n": plan.sessions,
        "max_tokens": plan.suite.max_tokens,
        "temperature": plan.temperature,
        "engine": describe(policy),
        "sha256": {name: weights_hash(path) for name, path in models.items()},
        "settings": asdict(settings),
        **last,
        "arms": [row.as_json() for row in rows],
        **extra,
    }
