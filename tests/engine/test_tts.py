"""TTS in a served engine: back at its own weights for each request, and harmless when its trainer stops or ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from agentguard.events import DraftUpdated, StepFinished, TtsChanged, VerificationStep
from agentguard.gateway.server import serve_stack
from agentguard.policy import Policy
from agentguard.reference import reference_model
from agentguard.study import suites
from agentguard.telemetry.hub import Hub
from agentguard.tts_settings import TtsSettings
from tests.conftest import RunningStack
from tests.eagle_head import make_head

TARGET = reference_model("target")
pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def learning() -> AsyncIterator[RunningStack]:
    events: list[Any] = []
    hub = Hub()
    policy = Policy(
        model=str(TARGET), draft=str(reference_model("draft-short")),
        tts=TtsSettings(min_tokens=16, auto_off=False),
    )  # fmt: skip
    with hub.sink(events.append):
        async with serve_stack(policy, hub=hub) as stack:
            await until(lambda: any(isinstance(e, TtsChanged) and e.state == "live" for e in events))
            yield RunningStack(stack, events)


async def until(condition: Callable[[], object], timeout_s: float = 90) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


async def ask(running: RunningStack, number: int, tokens: int = 500) -> str:
    suite = suites.get("chain-long")
    problem = suite.problem(3, number, 1, None)
    body = {
        **suite.sampling, "model": running.stack.guard.info.model, "messages": [{"role": "user", "content": problem.text}],
        "temperature": 1.0, "max_tokens": tokens, "seed": number,
    }  # fmt: skip
    async with httpx2.AsyncClient(base_url=running.stack.url, timeout=120) as client:
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: str = reply.json()["choices"][0]["finish_reason"]
    return found


def of(running: RunningStack, kind: type[Any], since: int) -> list[Any]:
    return [e for e in running.events[since:] if isinstance(e, kind)]


async def test_a_request_is_learned_from_and_the_next_starts_afresh(learning: RunningStack) -> None:
    since = len(learning.events)
    await ask(learning, 0)
    await ask(learning, 1)
    updates = of(learning, DraftUpdated, since)
    epochs = sorted({u.epoch for u in updates})
    assert len(epochs) == 2
    assert epochs[1] == epochs[0] + 1
    for epoch in epochs:
        mine = [u for u in updates if u.epoch == epoch]
        assert len(mine) >= 10
        assert mine[0].loss > 2 * mine[-1].loss
        assert all(u.publish_ms > 0 and u.train_ms > 0 and u.rows > 0 for u in mine)
    starts = [next(u for u in updates if u.epoch == e).loss for e in epochs]
    assert min(starts) > 0.5 * max(starts), "the second request began with what the first had learned"
    steps = of(learning, StepFinished, since)
    assert all(s.error == "" and s.tokens > 200 for s in steps)


async def test_a_short_request_is_left_alone(learning: RunningStack) -> None:
    engine = learning.stack.guard.engine
    await engine.tts(settings={"min_tokens": 400})
    since = len(learning.events)
    await ask(learning, 2, tokens=120)
    assert of(learning, VerificationStep, since)
    assert of(learning, DraftUpdated, since) == []
    await engine.tts(settings={"min_tokens": 16})


async def test_a_killed_trainer_is_visible_and_comes_back(learning: RunningStack) -> None:
    engine = learning.stack.guard.engine
    since = len(learning.events)
    running = asyncio.create_task(ask(learning, 4, tokens=1500))
    await until(lambda: len(of(learning, DraftUpdated, since)) >= 5)
    first = (await engine.tts())["trainer_pid"]
    os.kill(first, signal.SIGKILL)
    assert await running == "stop"
    (ended,) = (c for c in of(learning, TtsChanged, since) if c.state == "restarting")
    assert "status -9" in ended.reason
    assert ended.version == 0, "the draft is back at its own weights"
    await until(lambda: any(c.state == "live" for c in of(learning, TtsChanged, since)))
    again = len(learning.events)
    await ask(learning, 5)
    assert len(of(learning, DraftUpdated, again)) >= 5
    assert (await engine.tts())["trainer_pid"] != first


async def test_a_stopped_trainer_stops_nobody(learning: RunningStack) -> None:
    """Its queue fills, frames are dropped, the request ends as it would; then learning goes on where the tokens are."""
    engine = learning.stack.guard.engine
    pid = (await engine.tts())["trainer_pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        since = len(learning.events)
        assert await ask(learning, 6, tokens=1000) == "stop"
        assert of(learning, DraftUpdated, since) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    since = len(learning.events)
    await ask(learning, 7)
    assert len(of(learning, DraftUpdated, since)) >= 5


async def test_an_operator_pauses_and_changes_it_over_the_gateway(learning: RunningStack) -> None:
    async with httpx2.AsyncClient(base_url=learning.stack.url, timeout=120) as client:
        paused = await client.post("/agentguard/tts", json={"enabled": False})
        assert paused.json()["state"] == "paused"
        since = len(learning.events)
        await ask(learning, 8)
        assert of(learning, DraftUpdated, since) == []
        wrong = await client.post("/agentguard/tts", json={"settings": {"strid": 3}})
        assert wrong.status_code == 400
        assert "did you mean 'stride'" in wrong.text
        live = await client.post("/agentguard/tts", json={"enabled": True, "settings": {"scope": "lora:4", "stride": 3}})
        assert (live.json()["state"], live.json()["settings"]["scope"]) == ("live", "lora:4")
        assert live.json()["trainer"]["trained_parameters"] < 40_000
        since = len(learning.events)
        await ask(learning, 9)
        assert len(of(learning, DraftUpdated, since)) >= 10
        assert (await client.get("/agentguard/tts")).json()["updates"] > 0
        await client.post("/agentguard/tts", json={"settings": {"scope": "full", "stride": 5}})


async def test_requests_side_by_side_share_what_is_learned(learning: RunningStack) -> None:
    since = len(learning.events)
    await asyncio.gather(*(ask(learning, 20 + i, tokens=300) for i in range(6)))
    updates = of(learning, DraftUpdated, since)
    assert updates  # how many depends on how much of a core the trainer has
    assert len({u.epoch for u in updates}) == 1
    assert max(u.rows for u in updates) > 150, "more rows than one request's window gives"


async def test_an_untrained_eagle_head_learns_to_draft_in_one_request(tmp_path: Path) -> None:
    """The method is read from the head's files; from noise, it drafts tokens that are accepted within some hundred tokens."""
    head = await asyncio.to_thread(make_head, tmp_path / "head", TARGET, words=400)
    events: list[Any] = []
    hub = Hub()
    policy = Policy(model=str(TARGET), draft=str(head), tts=TtsSettings(min_tokens=16, rate=3e-3))
    with hub.sink(events.append):
        async with serve_stack(policy, hub=hub) as stack:
            await until(lambda: any(isinstance(e, TtsChanged) and e.state == "live" for e in events))
            await ask(RunningStack(stack, events), 0, tokens=800)
    updates = [e for e in events if isinstance(e, DraftUpdated)]
    assert updates[-1].loss < 0.6 * updates[0].loss
    assert max(u.live for u in updates) > 3 * max(u.frozen for u in updates)
    accepted = [r.accepted for e in events if isinstance(e, VerificationStep) for r in e.requests]
    third = len(accepted) // 3  # how far it gets depends on how much of a core the trainer has
    assert sum(accepted[-third:]) > 1.3 * sum(accepted[:third])
    assert {e.state for e in events if isinstance(e, TtsChanged)} <= {"starting", "live", "skipped"}
