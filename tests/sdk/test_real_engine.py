"""The SDK on a real engine: what it leaves behind there, and an engine it starts itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import agentguard
from agentguard.engines import vllm_process as module
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.vllm_process import VllmProcess
from agentguard.events import StepFinished, VerificationStep
from agentguard.policy import Policy
from tests.conftest import RunningStack
from tests.sdk.conftest import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(200)]


async def test_leaving_a_stream_at_each_event_ends_it_in_a_real_engine(running: RunningStack) -> None:
    engine = OpenAIEngine(running.stack.engine.url, api_key=running.stack.engine.api_key)

    async def at_work() -> float:
        text = await engine.metrics() or ""
        return sum(float(n) for n in re.findall(r"^vllm:num_requests_(?:running|waiting){.*} (\S+)$", text, re.MULTILINE))

    mark = len(running.events)
    async with agentguard.connect(running.stack.url) as guard:
        for n in range(1, 11):
            async with guard.session(f"left-{n}") as s:
                seen = 0
                async for _ in s.stream("a=47;b=a+8;c=b-3;d=c+9;e=d-2;?e", max_tokens=600, temperature=1.0):
                    seen += 1
                    if seen == n:
                        break
                async with asyncio.timeout(10):
                    while await at_work() or running.stack.guard.running:
                        await asyncio.sleep(0.02)
                budget = await s.refresh()
                (step,) = [e for e in running.events[mark:] if isinstance(e, StepFinished) and e.session == s.id]
                assert (budget.steps, budget.tokens, budget.think_tokens) == (1, step.tokens, step.think_tokens)
    await engine.aclose()


async def test_a_policy_starts_an_engine_and_guards_it_here(
    running: RunningStack, reference_policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The session's engine stands in for the process that would be started, of which tests/engine knows the rest: the guard, its
    telemetry and its economics are this connection's own."""
    asked: list[Policy] = []

    @asynccontextmanager
    async def vllm_process(policy: Policy) -> AsyncIterator[VllmProcess]:
        asked.append(policy)
        yield running.stack.engine

    monkeypatch.setattr(module, "vllm_process", vllm_process)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {reference_policy.model}\ndraft: {reference_policy.draft}\nrule: cactus:delta=0.5\n")
    async with agentguard.connect(recipe) as guard, guard.session("mine", rule="cactus:delta=0.5") as s:
        seen: list[VerificationStep] = []

        async def follow() -> None:
            async for event in guard.events():
                if isinstance(event, VerificationStep):
                    seen.append(event)

        following = asyncio.create_task(follow())
        reply = await s.complete("a=47;b=a+8;c=b-3;?c", temperature=1.0, max_tokens=400)
        await until(lambda: sum(r.request == reply.accounts.request for e in seen for r in e.requests) == reply.accounts.rounds)
        following.cancel()
        await asyncio.wait([following])
        assert reply.accounts.rule.startswith("cactus:delta=0.5")
        assert asked[0].rule == "cactus:delta=0.5"
        assert s.economics is not None
