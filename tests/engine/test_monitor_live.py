"""The monitor beside real vLLM while the demo's load runs: what it shows is what the demo's table and the gateway say."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from agentguard.cli.study import DEMO_ARMS
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.events import Event, StepFinished
from agentguard.monitor.live import open_monitor
from agentguard.monitor.options import Options
from agentguard.monitor.snapshot import Snapshot
from agentguard.rulespec import RuleSpec
from agentguard.study import suites
from agentguard.study.results import summarise
from agentguard.study.runner import StudyPlan, gateway_client, parse_arms, run
from agentguard.telemetry import exposition
from tests.conftest import RunningStack

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
SESSIONS = 5


async def test_every_family_that_is_read_is_there_in_real_vllm(running: RunningStack) -> None:
    engine = OpenAIEngine(running.stack.engine.url, api_key=running.stack.engine.api_key)
    text = await engine.metrics()
    await engine.aclose()
    assert text is not None
    missing = {name for name in exposition.FAMILIES if f"# TYPE {name} " not in text and f"# TYPE {name}_total " not in text}
    assert missing <= {"vllm:admission_rejections"}  # only with admission control
    (event,) = [event for event in exposition.read(text, 0.0) if event.engine]
    assert event.engine == "0"
    assert {"running", "waiting", "kv_use"} == event.gauges.keys()
    assert {"tokens_in", "tokens_out", "drafts", "drafted", "accepted", "tokens_in_from/local_compute"} <= event.counters.keys()
    assert event.buckets.keys() == {"ttft_s", "tpot_s", "e2e_s", "queue_s"}
    for pairs in event.buckets.values():
        assert pairs[-1][0] is None
        assert [n for _, n in pairs] == sorted(n for _, n in pairs)


async def test_what_the_monitor_shows_is_the_demos_table(running: RunningStack) -> None:
    stack = running.stack
    plan = StudyPlan(suites.get("chain-agent"), parse_arms(DEMO_ARMS), SESSIONS, seed=3)
    events: list[Event] = []
    during: list[Snapshot] = []
    async with open_monitor(Options(gateways=(stack.url,), interval_s=0.25, window_s=600.0)) as monitor:
        await monitor.wait(2)

        async def look() -> None:
            while True:
                during.append(monitor.snapshot())
                await asyncio.sleep(0.25)

        looking = asyncio.create_task(look())
        with stack.hub.sink(events.append):
            async with gateway_client(stack) as client:
                await run(plan, client, stack.guard.info.model, stack.hub)
        looking.cancel()
        mine = [event for event in events if isinstance(event, StepFinished)]
        while (shown := monitor.snapshot()).engines[0].steps != len(mine) or shown.engines[0].running:
            await asyncio.sleep(0.1)
        async with httpx2.AsyncClient(base_url=stack.url) as http:
            told = (await http.get("/guard/v1/economics")).json()["rows"]
    table = {str(RuleSpec.parse(row.rule).as_it_stands()): row for row in summarise(events)}
    arms = {arm.arm: arm for arm in shown.arms}
    assert arms.keys() == table.keys()
    for rule, row in table.items():
        arm = arms[rule]
        assert (arm.steps, arm.sessions) == (row.steps, row.sessions)
        assert arm.accepted_length == pytest.approx(row.accepted_length)
        if rule == "strict":
            continue
        assert arm.gain == pytest.approx(row.gain.value)
        assert arm.length_ratio is not None
        assert arm.rounds_ratio is not None
        assert arm.length_ratio.low <= arm.length_ratio.value <= arm.length_ratio.high
        assert arm.length_ratio.value == pytest.approx(row.inflation.value)
        assert arm.rounds_ratio.value == pytest.approx(row.rounds_ratio.value)
    (engine,), (speculation,) = shown.engines, shown.speculation
    tokens = sum(step.tokens for step in mine)
    assert engine.think_share == pytest.approx(sum(step.think_tokens for step in mine) / tokens)
    assert engine.closes == sum(bool(step.closed) for step in mine)
    assert engine.tokens_out_per_s is not None
    assert engine.window_s is not None
    # the engine's own counters: it also generates what is cut off behind the end
    assert engine.tokens_out_per_s * engine.window_s == pytest.approx(tokens, rel=0.05)
    # the page is of one rule: that of the engine's row
    of_rule = {rule: [step for step in mine if step.rule == rule] for rule in {step.rule for step in mine}}
    counts = {rule: sum(step.rounds or 0 for step in steps) for rule, steps in of_rule.items()}
    assert speculation.rule == engine.rule
    assert speculation.rule in counts
    rounds, accepted = counts[speculation.rule], sum(step.accepted or 0 for step in of_rule[speculation.rule])
    assert speculation.rounds == pytest.approx(rounds, rel=0.03)
    assert speculation.accepted_length == pytest.approx(accepted / rounds, rel=0.03)
    assert speculation.by_position == tuple(sorted(speculation.by_position, reverse=True))
    new = [row for row in shown.sessions if row.id.startswith("study/") and row.steps == plan.suite.steps]
    assert {row.id for row in new} >= {step.session for step in mine}
    assert max((one.engines[0].running or 0) for one in during) > 1
    assert {row.phase for one in during for row in one.sessions} >= {"thinking", "idle"}
    assert max(row.think_tokens or 0 for one in during for row in one.sessions) > 0
    assert told == [] or all(row["arm"] == "strict" for row in told)  # the demo's requests name their rules
