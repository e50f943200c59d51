"""Guard, gateway and engine together: real vLLM, real sockets, the reference pair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from agentguard.engines.openai_http import OpenAIEngine
from agentguard.events import Event, RowFlag, StepFinished, StepStarted, VerificationStep
from agentguard.rulespec import RuleSpec
from agentguard.study import suites
from agentguard.study.results import summarise
from agentguard.study.runner import StudyPlan, parse_arms, run
from agentguard.study.suites.chain import parse_answer
from agentguard.telemetry.recorder import record, replay
from tests.conftest import RunningStack

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]
LONG = "a=47;b=a+8;c=b-3;d=c+9;e=d-2;f=e+1;g=f+7;h=g-6;?h"
RELAXED = "cactus:delta=0.5,p_min=0.1,top_k=10"


async def ask(url: str, **body: Any) -> dict[str, Any]:
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": LONG}], **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def finished(events: Iterable[Event]) -> list[StepFinished]:
    return [e for e in events if isinstance(e, StepFinished)]


async def test_a_step_through_the_gateway_is_answered_and_accounted(running: RunningStack) -> None:
    mark = len(running.events)
    reply = await ask(running.stack.url, temperature=1.0, seed=1, max_tokens=600)
    message = reply["choices"][0]["message"]
    assert parse_answer(message["content"]) is not None
    assert message["reasoning"].startswith("a=47\nb=47+8=")
    (step,) = finished(running.events[mark:])
    assert reply["usage"]["completion_tokens"] == step.tokens == step.think_tokens + step.answer_tokens + step.marker_tokens
    assert step.answer_tokens == 2  # the newline after the marker and the number
    assert step.marker_tokens == 2  # </think> and the end of turn
    assert step.rounds is not None
    assert step.accepted is not None
    # every round gives its accepted tokens and one more; the first token comes from the prompt's own pass
    assert 0 <= step.accepted + step.rounds + 1 - step.tokens <= 6


async def test_a_steps_rounds_are_the_taps_frames(running: RunningStack) -> None:
    mark = len(running.events)
    await ask(running.stack.url, temperature=1.0, seed=2, max_tokens=600)
    (step,) = finished(running.events[mark:])
    assert step.rounds is not None
    async with asyncio.timeout(5):
        while len(verified(running.events[mark:], step.request)) < step.rounds:
            await asyncio.sleep(0.05)
    mine = verified(running.events[mark:], step.request)
    assert (len(mine), sum(v.drafted for v in mine), sum(v.accepted for v in mine)) == (step.rounds, step.drafted, step.accepted)
    assert all(len(v.rows.p) == len(v.rows.q) == len(v.rows.rank) == len(v.rows.flags) == v.drafted for v in mine)


def verified(events: Iterable[Event], request: str) -> list[Any]:
    return [v for e in events if isinstance(e, VerificationStep) for v in e.requests if v.request == request]


@pytest.mark.parametrize("rule", ["strict", RELAXED, "cactus:delta=0.5", "interp:w=1"])
async def test_a_trace_is_closed_exactly_at_its_budget_and_answered(running: RunningStack, rule: str) -> None:
    mark = len(running.events)
    budgets = [1, 2, 5, 6, 7, 13, 20, 30]
    replies = await asyncio.gather(
        *(
            ask(running.stack.url, temperature=1.0, seed=b, max_tokens=600, thinking_token_budget=b, vllm_xargs={"ag_rule": rule})
            for b in budgets
        )
    )
    assert all(parse_answer(r["choices"][0]["message"]["content"]) is not None for r in replies)
    # the newline behind the prompt's <think> is not the model's and does not count
    assert sorted(s.think_tokens for s in finished(running.events[mark:])) == budgets
    assert {s.closed for s in finished(running.events[mark:])} == {"budget"}


async def test_rules_are_chosen_per_request_in_one_batch(running: RunningStack) -> None:
    mark = len(running.events)
    rules = ["strict", "cactus:delta=0.5", RELAXED, "interp:w=0.5"] * 4
    await asyncio.gather(
        *(ask(running.stack.url, temperature=1.0, seed=i, max_tokens=600, vllm_xargs={"ag_rule": r}) for i, r in enumerate(rules))
    )
    steps = finished(running.events[mark:])
    assert sorted(s.rule for s in steps) == sorted(str(RuleSpec.parse(r).for_request()) for r in rules)
    await asyncio.sleep(0.3)
    sizes = [len(e.requests) for e in running.events[mark:] if isinstance(e, VerificationStep)]
    assert max(sizes) > 4, "the requests ran in one batch"
    for step in steps:
        frames = verified(running.events[mark:], step.request)
        assert {v.rule_asked for v in frames} == {step.rule}
        assert {v.rule_effective for v in frames} <= {step.rule, "strict"}
        assert (step.rule in {v.rule_effective for v in frames}) or step.rule == "strict"


async def test_no_filtered_token_is_accepted_inside_the_trace(running: RunningStack) -> None:
    mark = len(running.events)
    await asyncio.gather(
        *(
            ask(
                running.stack.url,
                temperature=1.0,
                seed=100 + i,
                max_tokens=600,
                vllm_xargs={"ag_rule": "interp:w=1,p_min=0.1,top_k=3"},
            )
            for i in range(16)
        )
    )
    await asyncio.sleep(0.3)
    relaxed = [
        (p, rank, flag)
        for e in running.events[mark:] if isinstance(e, VerificationStep)
        for v in e.requests
        for p, rank, flag in zip(v.rows.p, v.rows.rank, v.rows.flags, strict=True)
        if flag & RowFlag.RELAXED
    ]  # fmt: skip
    low = [r for r in relaxed if r[0] < 0.0999 or r[1] >= 3]
    assert len(low) > 20
    assert not any(flag & RowFlag.ACCEPTED for _, _, flag in low)
    assert all(flag & RowFlag.LOW_SUPPORT for _, _, flag in low)
    assert sum(bool(flag & RowFlag.ACCEPTED) for _, _, flag in relaxed) > 100


async def test_the_engine_itself_refuses_a_bad_rule_by_name(running: RunningStack) -> None:
    body = {"model": "target", "messages": [{"role": "user", "content": LONG}], "vllm_xargs": {"ag_rule": "cactus:delta=-1"}}
    key = {"Authorization": f"Bearer {running.stack.engine.api_key}"}
    async with httpx2.AsyncClient(base_url=running.stack.engine.url, headers=key) as client:
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "ag_rule='cactus:delta=-1': delta is a number from 0 to inf" in reply.text


async def test_the_engines_own_port_is_closed_to_others(running: RunningStack) -> None:
    async with httpx2.AsyncClient(base_url=running.stack.engine.url) as client:
        assert (await client.post("/v1/chat/completions", json={"model": "target", "messages": []})).status_code == 401


async def test_seeded_requests_survive_a_prefill_in_chunks(running: RunningStack) -> None:
    """Eight prompts of some 800 tokens exceed a step's 4,096, so one is prefilled in two; stock vLLM on CPU dies of its seed."""
    history = [
        {"role": role, "content": content}
        for i in range(40)
        for role, content in (("user", f"a={i};b=a+8;c=b-3;?c"), ("assistant", str((i + 5) % 100)))
    ]
    messages = [*history, {"role": "user", "content": LONG}]
    replies = await asyncio.gather(
        *(ask(running.stack.url, messages=[*messages[2 * i :]], temperature=1.0, seed=i, max_tokens=500) for i in range(8))
    )
    assert sum(r["usage"]["prompt_tokens"] for r in replies) > 4096
    assert all(r["choices"][0]["message"]["content"] for r in replies)


async def test_any_text_can_be_a_prompt(running: RunningStack) -> None:
    reply = await ask(
        running.stack.url, messages=[{"role": "user", "content": "Grüße! ¿Qué 漢字 123? \x07"}], max_tokens=40, temperature=1.0
    )
    assert reply["choices"][0]["message"]["content"]


async def test_a_study_is_recomputed_from_its_recording_and_depends_on_its_seed(running: RunningStack, tmp_path: Path) -> None:
    stack = running.stack
    client = OpenAIEngine(stack.url)
    tables = []
    for seed in (0, 0, 1):
        path = tmp_path / f"{len(tables)}.jsonl"
        plan = StudyPlan(suites.get("chain-agent"), parse_arms(f"strict;{RELAXED}"), sessions=2, seed=seed, concurrency=4)
        async with record(stack.hub, path):
            await run(plan, client, stack.guard.info.model, stack.hub)
        rows = await asyncio.to_thread(lambda path=path: summarise(replay(path)))
        assert [r.rule for r in rows] == ["strict", RELAXED]
        assert [r.steps for r in rows] == [12, 12]
        assert sum(r.empty_answers for r in rows) == 0
        assert (rows[0].gain.value, rows[0].inflation.value) == (1.0, 1.0)
        # only the first step of a session is a function of the seed alone: later ones build on sampled answers
        asked = [e for e in await asyncio.to_thread(lambda path=path: list(replay(path))) if isinstance(e, StepStarted)]
        asked_first = {tuple(e.session.split("/")[-2:]): e.prompt_tokens for e in asked if e.step == 1}
        tables.append(asked_first)
    await client.aclose()
    assert len(tables[0]) == 4
    assert tables[0] == tables[1] != tables[2]


async def test_forty_steps_leave_nothing_behind(running: RunningStack) -> None:
    """Open files and processes of gateway and engine, and tasks, before and after 40 steps."""
    stack, me = running.stack, psutil.Process()
    engine = psutil.Process(stack.engine.pid)

    def count() -> tuple[int, int, int, int]:
        processes = [engine, *engine.children(recursive=True)]
        return me.num_fds(), sum(p.num_fds() for p in processes), len(me.children(recursive=True)), len(asyncio.all_tasks())

    client = OpenAIEngine(stack.url)

    async def sessions(seed: int, n: int) -> None:
        await run(StudyPlan(suites.get("chain-agent"), parse_arms("strict"), n, seed, concurrency=1), client, "target", stack.hub)

    await sessions(10, 2)  # connections and caches of the first steps
    before = count()
    await sessions(11, 7)
    await asyncio.sleep(0.5)
    after = count()
    await client.aclose()
    assert len(stack.guard.sessions) <= stack.guard.policy.max_sessions
    assert after[2:] == before[2:]
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 1
