"""When is the answer ready? A trace is closed in a branch of a few tokens at every tenth of its length, and the branch is graded.

The probe variant of the answer-ready signal (after DEER, arXiv 2504.15895, and Answer Convergence, arXiv 2506.02536): offline,
because each probe costs a prompt. It shows what closing at a fraction f of a trace would have answered, and how well the two
signals that cost nothing (the probability of the end marker, the entropy at it) tell a ready trace.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from agentguard.economics.ratios import Ratio, share
from agentguard.engines.base import Engine
from agentguard.errors import ConfigError, EngineError
from agentguard.gateway.server import Stack
from agentguard.study.runner import StudyPlan
from agentguard.study.suites import Gradable
from agentguard.trace.markers import Family
from agentguard.trace.tally import find_last

FRACTIONS = tuple(i / 10 for i in range(1, 11))
ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Probed:
    """One trace. ``right``: the graded branch at each of `FRACTIONS`; ``end``, ``entropy``: the end marker's probability and the
    entropy in nats (over the 20 likeliest tokens) before each branch; ``tokens``: the trace's length."""

    tokens: int
    right: tuple[bool, ...]
    end: tuple[float, ...]
    entropy: tuple[float, ...]

    @property
    def ready(self) -> float | None:
        """The first fraction from which on every branch is right, None when the last one is wrong."""
        if not self.right[-1]:
            return None
        last_wrong = max((i for i, right in enumerate(self.right) if not right), default=-1)
        return FRACTIONS[last_wrong + 1]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """``right_at``: share of right branches at each fraction with its 95 % interval; ``ready_median``: of traces that end right;
    ``auc_end``, ``auc_entropy``: how often a right branch has the higher end probability (lower entropy) than a wrong one."""

    traces: int
    right_at: dict[str, Ratio]
    ready_median: float | None
    auc_end: float | None
    auc_entropy: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def run_probe(plan: StudyPlan, stack: Stack) -> ProbeResult:
    """Probe ``plan.sessions`` strict traces of a single-step suite. Raises ConfigError for another one."""
    if plan.suite.steps != 1:
        raise ConfigError("suite", plan.suite.name, "a probe grades single problems; use chain")
    gate = asyncio.Semaphore(plan.concurrency)

    async def one(number: int) -> Probed | None:
        async with gate:
            problem = plan.suite.problem(plan.seed, number, 1, None)
            return await probe(stack.guard.engine, stack.guard.info.model, stack.guard.family, problem, seed=number)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(n), name=f"probe {n}") for n in range(plan.sessions)]
    return summarise_probe([p for p in (task.result() for task in tasks) if p is not None])


async def probe(engine: Engine, model: str, family: Family, problem: Gradable, *, seed: int, limit: int = 1500) -> Probed | None:
    """One trace and its branches; None when the model did not close it within ``limit`` tokens. Raises EngineError for a server
    that tells no token ids."""
    body = {"model": model, "messages": [{"role": "user", "content": problem.text}]}
    prompt = await engine.tokenize_chat(body)
    end, closing = await engine.tokenize_text(family.markers.end), await engine.tokenize_text(family.closing)
    if not prompt or not end or not closing:
        raise EngineError(f"{engine.name} tells no token ids, which a probe needs; use vLLM")
    drawn = {"model": model, "temperature": 1.0, "seed": seed, "max_tokens": limit, "return_token_ids": True}
    ids, _, _ = await _complete(engine, prompt, drawn, f"probe-{seed:06}-trace")
    at = find_last(ids, end)
    if at < len(FRACTIONS):
        return None
    asked = {"model": model, "temperature": 0, "max_tokens": ANSWER_TOKENS, "return_token_ids": True}
    right, ends, nats = [], [], []
    for i, fraction in enumerate(FRACTIONS):
        trace = ids[: round(fraction * at)]
        _, text, _ = await _complete(engine, [*prompt, *trace, *closing], asked, f"probe-{seed:06}-{i:02}-close")
        right.append(bool(problem.grade(text)))
        _, _, top = await _complete(
            engine, [*prompt, *trace], asked | {"max_tokens": 1, "logprobs": 20}, f"probe-{seed:06}-{i:02}-look"
        )
        ends.append(math.exp(top[family.markers.end]) if family.markers.end in top else 0.0)
        nats.append(-sum(math.exp(v) * v for v in top.values()))
    return Probed(at, tuple(right), tuple(ends), tuple(nats))


async def _complete(
    engine: Engine, prompt: Sequence[int], body: dict[str, Any], name: str
) -> tuple[list[int], str, dict[str, float]]:
    """Generated ids, their text, and the log probabilities of the first token's alternatives."""
    ids: list[int] = []
    text, top = "", dict[str, float]()
    async with aclosing(engine.complete(prompt, body, name)) as chunks:
        async for chunk in chunks:
            for choice in chunk.get("choices") or ():
                ids += choice.get("token_ids") or []
                text += choice.get("text") or ""
                alternatives = (choice.get("logprobs") or {}).get("top_logprobs") or []
                if alternatives and not top:
                    top = dict(alternatives[0] or {})
    return ids, text, top


def summarise_probe(probed: Sequence[Probed]) -> ProbeResult:
    ready = sorted(p.ready for p in probed if p.ready is not None)
    scored = [(p.end[i], -p.entropy[i], p.right[i]) for p in probed for i in range(len(FRACTIONS) - 1)]
    return ProbeResult(
        traces=len(probed),
        right_at={f"{f:g}": share(sum(p.right[i] for p in probed), len(probed)) for i, f in enumerate(FRACTIONS)} if probed else {},
        ready_median=ready[len(ready) // 2] if ready else None,
        auc_end=_auc([(s, r) for s, _, r in scored]),
        auc_entropy=_auc([(s, r) for _, s, r in scored]),
    )


def _auc(scored: Sequence[tuple[float, bool]]) -> float | None:
    """Area under the ROC curve; ties count half. None where all are right or all wrong."""
    good = [score for score, right in scored if right]
    bad = [score for score, right in scored if not right]
    if not good or not bad:
        return None
    pairs = random.Random(0)  # noqa: S311  # nosec B311  # seeds and jitter, no secret
    if len(good) * len(bad) > 2_000_000:  # a sample of the pairs tells the same
        good, bad = pairs.sample(good, min(len(good), 1400)), pairs.sample(bad, min(len(bad), 1400))
    wins = sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
    return wins / (len(good) * len(bad))
