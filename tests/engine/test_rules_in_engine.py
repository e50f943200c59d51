"""Every rule in real vLLM, side by side in one batch, and with what forces or masks its rows."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from agentguard.events import Fate, RowFlag, StepFinished, Verified
from agentguard.rulespec import KNOBS, RuleSpec
from tests.conftest import RunningStack
from tests.engine.test_stack import ask, finished, verified

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]
USUAL = [str(RuleSpec(name, {k.name: float(k.usual) for k in knobs})) for name, knobs in KNOBS.items()]
ACCEPT_ALL = [
    "interp:w=1,p_min=0,top_k=0",
    "fuzzy:T=inf,p_min=0,top_k=0",
    "casc-opt:alpha=inf,p_min=0,top_k=0",
    "top-k:k=400,p_min=0,top_k=0",
]


async def rounds_of(running: RunningStack, mark: int, step: StepFinished) -> list[Verified]:
    """Every round of a step, those of a continuation behind its closed trace too."""
    rounds: list[Verified] = []
    async with asyncio.timeout(10):
        while len(rounds) < (step.rounds or 0):
            await asyncio.sleep(0.05)
            rounds = [v for name in (step.request, f"{step.request}-answer") for v in verified(running.events[mark:], name)]
    return rounds


async def test_all_rules_in_one_batch_each_under_its_own(running: RunningStack) -> None:
    mark = len(running.events)
    texts = [*USUAL, *(str(RuleSpec.parse(text).as_it_stands()) for text in USUAL)]
    await asyncio.gather(*(ask(running.stack.url, seed=i, max_tokens=300, vllm_xargs={"ag_rule": t}) for i, t in enumerate(texts)))
    steps = finished(running.events[mark:])
    assert sorted(s.rule for s in steps) == sorted(str(RuleSpec.parse(t).for_request()) for t in texts)
    fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
    for step in steps:
        spec = RuleSpec.parse(step.rule)
        rounds = await rounds_of(running, mark, step)
        assert {r.rule_asked for r in rounds} == {step.rule}
        assert {r.rule_effective for r in rounds} <= {step.rule, "strict"}
        assert any(r.rule_effective == step.rule for r in rounds)
        for r in rounds:
            rows = r.rows
            assert all(f in (Fate.STRICT, Fate.RELAXED, Fate.FORCED) for f in rows.fate[: r.accepted])
            for fate, flags, p, rank in zip(rows.fate, rows.flags, rows.p, rows.rank, strict=True):
                fates[fate] += 1
                relaxed = bool(flags & RowFlag.RELAXED)
                assert spec.relaxed or not relaxed
                low = relaxed and (p < (spec.p_min or 0) or (bool(spec.top_k) and rank >= spec.top_k))
                assert bool(flags & RowFlag.LOW_SUPPORT) == low
                assert fate != Fate.RELAXED or (relaxed and not low)
    assert all(fates[f] > 0 for f in (Fate.STRICT, Fate.RELAXED, Fate.COIN, Fate.LOW_SUPPORT, Fate.UNREAD)), fates


@pytest.mark.parametrize("rule", ["strict", *ACCEPT_ALL])
@pytest.mark.parametrize("grammar", [{"choice": ["17", "42 a", "b=3"]}, {"regex": "[a-h]=[0-9]{1,2}(;[a-h]=[0-9]{1,2}){3}"}])
async def test_a_grammar_holds_under_a_rule_that_accepts_everything(
    running: RunningStack, rule: str, grammar: dict[str, Any]
) -> None:
    xargs = {"ag_rule": rule, "ag_phase": "both"}
    replies = await asyncio.gather(
        *(ask(running.stack.url, seed=i, max_tokens=400, structured_outputs=grammar, vllm_xargs=xargs) for i in range(6))
    )
    for reply in replies:
        (choice,) = reply["choices"]
        if choice["finish_reason"] == "stop":
            content = choice["message"]["content"].strip()
            assert content in grammar["choice"] if "choice" in grammar else re.fullmatch(grammar["regex"], content), content
    assert sum(r["choices"][0]["finish_reason"] == "stop" for r in replies) >= 4


@pytest.mark.parametrize("rule", ACCEPT_ALL)
async def test_a_close_is_exact_under_a_rule_that_accepts_everything(running: RunningStack, rule: str) -> None:
    mark = len(running.events)
    budgets = [3, 6, 11, 24]
    xargs = {"ag_rule": rule}
    await asyncio.gather(
        *(ask(running.stack.url, seed=b, max_tokens=300, thinking_token_budget=b, vllm_xargs=xargs) for b in budgets)
    )
    steps = finished(running.events[mark:])
    assert sorted(s.think_tokens for s in steps) == budgets
    forced = [f for s in steps for r in await rounds_of(running, mark, s) for f in r.rows.fate if f is Fate.FORCED]
    assert forced
