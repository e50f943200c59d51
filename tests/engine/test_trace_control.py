"""Closing traces in real vLLM: exactly at the token, on word while a request runs, through preemption, and over whole sessions."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from agentguard.events import CompactionAdvised, Event, StepFinished, StepStarted, TraceClosed, VerificationStep
from agentguard.gateway.server import Stack, serve_stack
from agentguard.identity import Identity
from agentguard.middleware import Guard
from agentguard.policy import Policy
from agentguard.study.suites.chain import make_problem, parse_answer
from agentguard.telemetry.hub import Hub
from tests.conftest import RunningStack
from tests.engine.test_stack import ask, finished

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
ENDLESS: dict[str, Any] = {"bad_words": ["</think>"]}
"""For requests that must still think when they are told to stop, however slow this machine is just then."""
RULES = ("strict", "cactus:delta=0.5,p_min=0.1,top_k=10", "fuzzy:T=inf,p_min=0,top_k=0")
LONG = "a=47;b=a+8;c=b-3;d=c+9;e=d-2;f=e+1;g=f+7;h=g-6;?h;!40"
"""A problem whose trace is far longer than every budget here."""


def closes(events: list[Event]) -> list[TraceClosed]:
    return [e for e in events if isinstance(e, TraceClosed)]


async def stream(url: str, body: dict[str, Any]) -> str:
    """A streamed step's content."""
    content = ""
    async with (
        httpx2.AsyncClient(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    content += choice["delta"].get("content") or ""
    return content


async def exactly(url: str, events: list[Event], rules: tuple[str, ...]) -> None:
    """Budgets of 0 to 70 tokens, alone and 32 at once, streamed and whole: every close after exactly that many think tokens."""
    rng = random.Random(5)
    budgets = [0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 14, *sorted(rng.sample(range(15, 70), 21))]

    async def one(budget: int, seed: int, rule: str) -> None:
        body = {
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 900,
            "thinking_token_budget": budget,
            "vllm_xargs": {"ag_rule": rule},
        }
        if seed % 2:
            content = await stream(url, {"messages": [{"role": "user", "content": LONG}], **body})
        else:
            content = (await ask(url, messages=[{"role": "user", "content": LONG}], **body))["choices"][0]["message"]["content"]
        assert content.strip()  # what the small model says behind a trace that was just opened is now and then garbage

    for rule in rules:
        mark = len(events)
        await asyncio.gather(*(one(budget, seed, rule) for seed, budget in enumerate(budgets)))
        for budget in (0, 5, 21):
            await one(budget, budget, rule)
        caps = {e.request: e.think_cap for e in events[mark:] if isinstance(e, StepStarted)}
        steps = finished(events[mark:])
        assert sorted(caps.values()) == sorted([*budgets, 0, 5, 21])
        # under a rule that accepts everything the model now and then ends by itself before
        assert all(s.think_tokens == caps[s.request] if s.closed else s.think_tokens <= caps[s.request] for s in steps)
        assert [s.closed for s in steps].count("budget") >= 32
        assert all(e.how == "engine" and e.think_tokens == e.cap for e in closes(events[mark:]))


async def test_with_six_drafts_every_close_is_exact(running: RunningStack) -> None:
    await exactly(running.stack.url, running.events, RULES)


@pytest.fixture(scope="module", params=[1, 4])
def drafts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow(reference_policy: Policy, drafts: int) -> AsyncIterator[tuple[Stack, list[Event]]]:
    """K drafts a round, and a KV cache of 14 blocks of 128 tokens: 32 requests do not fit at once."""
    engine = {"draft_tokens": drafts, "max_model_len": 1024, "extra_args": ("--num-gpu-blocks-override", "14")}
    policy = Policy.model_validate({**reference_policy.model_dump(), "engine": engine})
    events: list[Event] = []
    hub = Hub()
    with hub.sink(events.append):
        async with serve_stack(policy, hub=hub) as stack:
            yield stack, events


async def test_with_fewer_drafts_and_preempted_requests_every_close_is_exact(narrow: tuple[Stack, list[Event]]) -> None:
    stack, events = narrow
    await exactly(stack.url, events, RULES[:2])
    budgets = list(range(150, 310, 10))
    mark = len(events)
    replies = await asyncio.gather(
        *(
            ask(
                stack.url, messages=[{"role": "user", "content": LONG}], temperature=1.0, seed=i, max_tokens=700,
                thinking_token_budget=b,
            )
            for i, b in enumerate(budgets)
        )
    )  # fmt: skip
    steps = finished(events[mark:])
    caps = {e.request: e.think_cap for e in events[mark:] if isinstance(e, StepStarted)}
    assert sorted(caps.values()) == budgets
    # a few traces end by themselves before; what is closed is closed at its budget
    assert all(s.think_tokens == caps[s.request] if s.closed else s.think_tokens <= caps[s.request] for s in steps)
    assert sum(bool(s.closed) for s in steps) >= 10
    assert all(r["choices"][0]["message"]["content"].strip() for r in replies)
    async with httpx2.AsyncClient(base_url=stack.engine.url) as client:
        metrics = (await client.get("/metrics")).text
    preempted = [line for line in metrics.splitlines() if line.startswith("vllm:num_preemptions_total")]
    assert float(preempted[0].split()[-1]) > 0, "the cache was too large to show anything"


async def test_a_natural_end_is_not_disturbed(running: RunningStack) -> None:
    """The same requests one at a time, without any limit of ours and with one they do not reach. Greedy, because a draft's random
    numbers are not the request's own: with temperature 1 no two runs of a seed draw the same tokens."""
    guard = running.stack.guard
    key = {"Authorization": f"Bearer {running.stack.engine.api_key}"}
    rng = random.Random(11)
    for _ in range(8):
        messages = [{"role": "user", "content": make_problem(rng, rng.randint(2, 6)).text}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 1500, "return_token_ids": True}
        async with httpx2.AsyncClient(base_url=running.stack.engine.url, headers=key, timeout=60) as client:
            plain = (await client.post("/v1/chat/completions", json={**body, "model": guard.info.model})).json()
        mark = len(running.events)
        guarded = await ask(running.stack.url, **{**body, "thinking_token_budget": 1000})
        assert guarded["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
        (step,) = finished(running.events[mark:])
        assert (step.closed, closes(running.events[mark:])) == ("", [])
        assert step.think_tokens == plain["usage"]["completion_tokens_details"]["reasoning_tokens"] == step.reported_think


@pytest.mark.parametrize("rule", RULES[:2])
async def test_a_limit_set_while_a_request_runs_is_exact(running: RunningStack, rule: str) -> None:
    guard = running.stack.guard
    engine = guard.engine

    async def one(i: int) -> None:
        body: dict[str, Any] = {
            "model": guard.info.model, "messages": [{"role": "user", "content": LONG}], "max_tokens": 1500, "temperature": 1.0,
            "seed": i, "return_token_ids": True, "vllm_xargs": {"ag_rule": rule}, **ENDLESS,
        }  # fmt: skip
        ids: list[int] = []
        wanted: int | None = None
        request = f"midway-{rule[:6]}-{i}"
        async for chunk in engine.chat(body, request, "me"):
            for choice in chunk["choices"]:
                ids += choice.get("token_ids") or []
            if wanted is None and len(ids) > 20 + i:
                standing = await engine.set_think_tokens(request, 3 * i)  # some of them are in the past: now, then
                assert standing is not None
                assert standing.inside
                wanted = max(standing.think, 3 * i)
        end = guard._ids.end[0] if guard._ids else -1
        assert ids.index(end) == wanted
        assert len(ids) - ids.index(end) <= 5  # the answer and no second trace

    await asyncio.gather(*(one(i) for i in range(24)))
    assert await engine.set_think_tokens("nobody-knows-it", 5) is None


async def test_an_operator_s_close_takes_effect_within_a_round(running: RunningStack) -> None:
    stack = running.stack
    mark = len(running.events)
    body = {"messages": [{"role": "user", "content": LONG}], "temperature": 1.0, "max_tokens": 2000, **ENDLESS}
    tasks = [asyncio.create_task(ask(stack.url, seed=i, **body)) for i in range(8)]
    while len(stack.guard.running) < 8 or min(s.reading.tally.think for _, s in stack.guard.running.values()) < 10:
        await asyncio.sleep(0.01)
    told = {rid: step.reading.tally.think for rid, (_, step) in stack.guard.running.items()}
    for rid in told:
        assert stack.guard.close(request=rid, why="test") == 1
    replies = await asyncio.gather(*tasks)
    assert all(r["choices"][0]["message"]["content"].strip() for r in replies)
    found = closes(running.events[mark:])
    assert {(e.reason, e.how) for e in found} == {("operator", "engine")}
    # what the engine had on its way when it was told, and one round
    assert all(0 < e.think_tokens - told[e.request] <= 60 for e in found)


async def agent(stack: Stack, name: str, steps: int, *, compacts: bool, past: int = 0) -> list[httpx2.Response]:
    """An agent whose steps build on each other; one that compacts keeps its last two turns when it is told to. ``past``: turns it
    comes with."""
    rng = random.Random(name)
    messages: list[dict[str, str]] = []
    previous: int | None = None
    for _ in range(past):
        problem = make_problem(rng, 8, previous=previous)
        previous = problem.answer
        messages += [{"role": "user", "content": problem.text}, {"role": "assistant", "content": str(previous)}]
    replies = []
    async with httpx2.AsyncClient(base_url=stack.url, headers={"X-Session-Id": name}, timeout=120) as client:
        for step in range(steps):
            problem = make_problem(rng, 8, previous=previous)
            messages.append({"role": "user", "content": problem.text})
            reply = await client.post(
                "/v1/chat/completions", json={"messages": messages, "temperature": 1.0, "seed": step, "max_tokens": 700}
            )
            replies.append(reply)
            if reply.status_code != 200:
                return replies
            content = reply.json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": content.strip()})
            previous = parse_answer(content)
            if compacts and reply.headers.get("x-agentguard-advice") == "compact":
                del messages[:-4]
    return replies


@pytest.mark.slow
async def test_sixty_steps_against_a_4k_window(running: RunningStack) -> None:
    mark = len(running.events)
    compacting, ignoring = await asyncio.gather(
        agent(running.stack, "compacts", 60, compacts=True), agent(running.stack, "ignores", 60, compacts=False, past=25)
    )
    assert [r.status_code for r in compacting] == [200] * 60
    assert [r.status_code for r in ignoring] == [200] * (len(ignoring) - 1) + [400]
    assert len(ignoring) > 20
    error = ignoring[-1].json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    for reply in [*compacting, *ignoring[:-1]]:
        assert reply.json()["choices"][0]["message"]["content"].strip()
    steps: list[StepFinished] = finished(running.events[mark:])
    assert len(steps) == 60 + len(ignoring) - 1
    assert all(s.think_tokens == s.reported_think for s in steps)
    assert not any(s.estimated or s.error for s in steps)
    assert max(s.prompt_tokens + s.tokens for s in steps) <= 4096
    # a trace ends where the window's cutoff is; only a prompt that is there already gets a little more
    beyond = [s for s in steps if s.prompt_tokens + s.think_tokens > 0.85 * 4096 and s.think_tokens > 64]
    assert beyond == []
    advised = {e.session for e in running.events[mark:] if isinstance(e, CompactionAdvised)}
    assert advised == {"compacts", "ignores"}
    assert any(s.closed == "session" for s in steps)


async def test_a_trace_is_closed_when_the_target_says_it_is_ready(running: RunningStack) -> None:
    """Off by default: on the reference pair the signal tells little (docs/trace-control.md)."""
    stack = running.stack
    cutoff = stack.guard.policy.cutoff.model_copy(update={"ready": 0.5})
    policy = stack.guard.policy.model_copy(update={"cutoff": cutoff})
    guard = await Guard.open(stack.guard.engine, policy, stack.hub)
    rng = random.Random(3)
    mark = len(running.events)

    async def one(i: int) -> str:
        body = {
            "messages": [{"role": "user", "content": make_problem(rng, 6).text + ";!9"}],
            "temperature": 1.0,
            "seed": i,
            "max_tokens": 1500,
        }
        chunks = [c async for c in guard.stream(body, Identity("", f"ready-{i}"))]
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])

    with stack.hub.sink(guard.observe):
        answers = await asyncio.gather(*(one(i) for i in range(24)))
    assert all(answer.strip() for answer in answers)
    ready = [e for e in closes(running.events[mark:]) if e.reason == "ready"]
    assert ready
    assert {e.how for e in ready} == {"engine"}
    frames = [v for e in running.events[mark:] if isinstance(e, VerificationStep) for v in e.requests]
    assert all(0 <= v.end <= 1 and 0 <= v.entropy < 6.1 for v in frames)  # ln 448 is the most there can be
    assert max(v.end for v in frames) > 0.5
