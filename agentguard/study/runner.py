"""Run paired sessions of a suite under several rules against one gateway."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentguard.engines.base import Engine
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.errors import AgentGuardError, ConfigError
from agentguard.events import Graded, StudyStarted
from agentguard.gateway.server import Stack
from agentguard.policy import Economics
from agentguard.rulespec import RuleSpec
from agentguard.study.suites import AnySuite
from agentguard.study.suites.chain import parse_answer
from agentguard.telemetry.hub import Hub


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """What is run: ``sessions`` of the suite an arm, at most ``concurrency`` at once. Arms are interleaved session by session."""

    suite: AnySuite
    arms: tuple[RuleSpec, ...]
    sessions: int
    seed: int
    temperature: float = 1.0
    concurrency: int = 24
    guarded: bool = False
    """The gateway assigns the arms and its guard acts; a session is then one of ``sessions`` times the number of arms."""
    baseline: bool = True
    """Ratios to strict are wanted, so strict has to be among the arms."""

    def __post_init__(self) -> None:
        if self.baseline and RuleSpec("strict") not in self.arms:
            raise ConfigError("arms", ";".join(map(str, self.arms)), "needs 'strict' among the arms: λ and gain are ratios to it")
        if len(set(map(str, self.arms))) != len(self.arms):
            raise ConfigError("arms", ";".join(map(str, self.arms)), "an arm is given twice; keep one")
        if self.temperature <= 0 and any(arm.relaxed for arm in self.arms):
            raise ConfigError(
                "temperature", self.temperature, "greedy requests bypass relaxed rules, so the study would be void; use 1"
            )

    @property
    def steps(self) -> int:
        return self.sessions * self.suite.steps * len(self.arms)

    def economics(self) -> Economics:
        """How a gateway assigns this plan's sessions: half are control, the others shared evenly, by the plan's seed."""
        rules = {str(arm.as_it_stands()): 1.0 for arm in self.arms if arm.relaxed}
        if not rules:
            raise ConfigError("arms", ";".join(map(str, self.arms)), "a guard needs a relaxed arm to judge")
        # with half of the sessions as control the sequence settles sooner than beside the default 5 %
        return Economics(control=0.5, arms=rules, key=f"study/{self.seed}", exploration=0.05, min_sessions=30)


def parse_arms(text: str) -> tuple[RuleSpec, ...]:
    return tuple(RuleSpec.parse(part, what="arms") for part in text.split(";") if part.strip())


async def run(plan: StudyPlan, client: Engine, model: str, hub: Hub, on_step: Callable[[], None] = lambda: None) -> None:
    """Run the plan. ``client`` talks to the gateway whose events go to ``hub``; a verdict a step is added there.

    The first error stops all sessions and is raised.
    """
    hub.publish(
        StudyStarted(
            t=time.time(), suite=plan.suite.name, seed=plan.seed, sessions=plan.sessions, temperature=plan.temperature,
            arms=[str(arm) for arm in plan.arms],
        )
    )  # fmt: skip
    gate = asyncio.Semaphore(plan.concurrency)
    # a run is a new agent: without it a second run of a seed would go on in the sessions of the first
    nonce = uuid.uuid4().hex[:8]

    async def one(number: int, arm: RuleSpec) -> None:
        async with gate:
            await session(plan, client, model, hub, f"study/{nonce}/{arm}/{number}", number, arm, on_step)

    async def guarded(number: int) -> None:
        # no nonce: the gateway's hash of the name is what makes the arms a function of the seed
        async with gate:
            await session(plan, client, model, hub, f"study/{number}", number, None, on_step)

    if plan.guarded:
        await all_or_first_error(guarded(number) for number in range(plan.sessions * len(plan.arms)))
    else:
        await all_or_first_error(one(number, arm) for number in range(plan.sessions) for arm in plan.arms)


@asynccontextmanager
async def gateway_client(stack: Stack) -> AsyncIterator[OpenAIEngine]:
    """A client of the stack's gateway while the block runs."""
    client = OpenAIEngine(stack.url, name="gateway")
    try:
        yield client
    finally:
        await client.aclose()


async def all_or_first_error(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first error of ours stops the others and is raised."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(work):
                group.create_task(one, name=f"study {number}")
    except* AgentGuardError as errors:
        failure = errors.exceptions[0]
    if failure is not None:  # raised out here: what an except* block raises comes out as a group of its own on Python 3.11.2
        raise failure


async def session(
    plan: StudyPlan, client: Engine, model: str, hub: Hub, name: str, number: int, arm: RuleSpec | None,
    on_step: Callable[[], None], label: str | None = None,
) -> None:  # fmt: skip
    """One session. ``arm``: the rule every request names; None leaves it to the gateway. ``label``: what its verdicts are filed
    under, the rule by default."""
    messages: list[dict[str, str]] = []
    previous: int | None = None
    for step in range(1, plan.suite.steps + 1):
        problem = plan.suite.problem(plan.seed, number, step, previous)
        messages.append({"role": "user", "content": problem.text})
        body = request_body(plan, model, messages, number, step, arm)
        answer = ""
        async with aclosing(client.chat(body, f"{number}-{step}", name)) as chunks:
            async for chunk in chunks:
                for choice in chunk.get("choices") or ():
                    answer += (choice.get("delta") or {}).get("content") or ""
        right = await asyncio.to_thread(problem.grade, answer)  # code is run
        hub.publish(Graded(t=time.time(), session=name, step=step, arm=str(arm or "") if label is None else label, right=right))
        messages.append({"role": "assistant", "content": answer.strip()})
        previous = parse_answer(answer)
        on_step()


def request_body(
    plan: StudyPlan, model: str, messages: list[dict[str, str]], number: int, step: int, arm: RuleSpec | None
) -> dict[str, Any]:
    """What is sent for a step; the same for every arm but for the rule it names."""
    body = {
        **plan.suite.sampling,
        "model": model,
        "messages": messages,
        "temperature": plan.temperature,
        "max_tokens": plan.suite.max_tokens,
        "seed": _seed(plan.seed, number, step),
    }
    if arm is not None:
        body["vllm_xargs"] = {"ag_rule": str(arm.as_it_stands())}
    return body


def _seed(*parts: int) -> int:
    """A sampling seed per step, the same for every arm."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
