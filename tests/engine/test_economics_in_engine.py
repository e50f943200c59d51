"""The net-win guard on real traffic: real vLLM, the gateway's own arms, the reference pair."""

from __future__ import annotations

import pytest

from agentguard.economics.ledger import ledger_of
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.events import Event, RuleSwitched, StepStarted, VerificationStep
from agentguard.gateway.server import bind, gateway
from agentguard.middleware import Guard
from agentguard.study import suites
from agentguard.study.guarded import summarise_guard
from agentguard.study.runner import StudyPlan, parse_arms, run
from agentguard.telemetry.hub import Hub
from tests.conftest import RunningStack

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]


async def test_the_guard_switches_a_losing_rule_off_and_keeps_a_winning_one(running: RunningStack) -> None:
    """A live study with the gateway's own arms: fuzzy:T=0.3 needs four times the rounds (docs/rules.md), casc-tok-v3 fewer."""
    plan = StudyPlan(
        suites.get("chain"), parse_arms("strict;fuzzy:T=0.3;casc-tok-v3:alpha=0.3,p_min=0.1,top_k=10"), 90, seed=1, guarded=True
    )
    fuzzy, token = list(plan.economics().arms)
    policy = running.stack.guard.policy.model_copy(update={"economics": plan.economics()})
    hub = Hub()
    events: list[Event] = []
    with hub.sink(events.append), running.stack.hub.sink(lambda e: hub.publish(e) if isinstance(e, VerificationStep) else None):
        engine = OpenAIEngine(running.stack.engine.url, api_key=running.stack.engine.api_key)
        guard = await Guard.open(engine, policy, hub)
        with hub.sink(guard.observe):
            async with gateway(guard, bind("127.0.0.1", 0)) as url:
                client = OpenAIEngine(url)
                await run(plan, client, guard.info.model, hub)
                await client.aclose()
        await engine.aclose()
    again: list[RuleSwitched] = []
    result = summarise_guard(events, ledger_of(policy, on_event=again.append), again)
    rows = {row.arm: row for row in result.rows}
    assert [(s.arm, s.on, s.quantity) for s in result.switches] == [(fuzzy, False, "rounds")]
    assert result.switches[0].low > 1
    assert [(s.arm, s.sessions, s.ratio) for s in result.recomputed] == [(s.arm, s.sessions, s.ratio) for s in result.switches]
    assert (rows[fuzzy].on, rows[fuzzy].verdict) == (False, "loss")
    assert rows[token].on
    after = [e for e in events if isinstance(e, StepStarted) and e.arm == fuzzy and e.t > result.switches[0].t]
    assert sum(e.rule == "strict" for e in after) > 0.7 * len(after) > 0, "the rest explores, or was assigned before"
    # ℓ strict verification would have had on an arm's own drafts, without a control group, is near that of the control
    control = rows["strict"].accepted_length
    assert control is not None
    assert rows["strict"].strict_accepted_length == pytest.approx(control, rel=0.05)
    assert all(row.means["rounds"] and row.steps == row.sessions for row in rows.values())
