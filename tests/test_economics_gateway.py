"""The economics through the guard and its gateway: which rule a request gets, what is counted, and what is shown."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx2

from agentguard.economics.cells import SessionSums
from agentguard.economics.ledger import Assignment
from agentguard.events import OperatorActed, RuleSwitched, StepFinished
from agentguard.session import Identity
from tests.scripted import Script
from tests.test_economics import RULE, step_of
from tests.test_guard import ASK, THINKS_AND_ANSWERS, Rig, rig

ARMS: dict[str, Any] = {"control": 0.5, "arms": {"cactus:delta=1": 1.0}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def name_of(arm: str, r: Rig) -> str:
    """A session that is assigned to this arm."""
    return next(f"s{i}" for i in range(100) if r.guard.ledger.arms.assign(f"s{i}") == arm)


async def test_sessions_run_under_their_arm_and_are_counted_there() -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(script, economics=ARMS) as r:
        for arm in ("strict", RULE):
            for _ in range(2):
                await r.step(ASK, Identity("", name_of(arm, r)))
            assert (r.started().arm, r.started().rule, r.finished().arm) == (arm, arm, arm)
        assert [body["vllm_xargs"]["ag_rule"] for _, body, _ in script.seen] == ["strict", "strict", RULE, RULE]
        cells = {key: (cell.steps, cell.sessions) for key, cell in r.guard.ledger.cells.items()}
    model = r.guard.info.model
    kinds = {f"{model}/chat/first": (1, 1), f"{model}/chat/follow_up": (1, 1)}
    assert cells == {(workload, arm): n for workload, n in kinds.items() for arm in ("strict", RULE)}


async def test_a_pinned_rule_and_a_side_call_are_not_counted() -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(script, economics=ARMS) as r:
        relaxed = name_of(RULE, r)
        await r.step({**ASK, "vllm_xargs": {"ag_rule": "interp:w=1,p_min=0,top_k=0"}}, Identity("", relaxed))
        assert (r.started().rule, r.started().arm, r.started().assigned) == (
            "interp:w=1,p_min=0,top_k=0", "", "the request names its rule",
        )  # fmt: skip
        await r.step({**ASK, "tools": TOOLS}, Identity("", relaxed))
        await r.step({**ASK, "reasoning_effort": "low"}, Identity("", relaxed))
        assert (r.started().rule, r.started().arm, r.started().assigned) == (RULE, "", "side call")
        await r.step({**ASK, "max_tokens": 100}, Identity("", relaxed))  # an agent's short call without tools
        assert r.started().assigned == "side call"
        assert {key[0]: cell.steps for key, cell in r.guard.ledger.cells.items()} == {f"{r.guard.info.model}/chat/follow_up": 1}


async def test_a_header_marks_a_side_call() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS)), economics=ARMS) as r, httpx2.AsyncClient(base_url=r.url) as client:
        for value, counted in (("1", False), ("0", True)):
            reply = await client.post("/v1/chat/completions", json=ASK, headers={"X-AgentGuard-Side-Call": value})
            assert reply.status_code == 200
            assert bool(r.started().arm) == counted


async def test_a_switched_arm_runs_strict_and_the_economics_say_why() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS)), economics={**ARMS, "exploration": 0.0}) as r:
        model, book = r.guard.info.model, r.guard.ledger
        for i in range(80):
            for arm, rounds in (("strict", 40), (RULE, 90)):
                step: StepFinished = step_of(rounds + i % 9)
                book.finished(step, Assignment(arm, arm, f"{model}/chat/first", ""), {("", ""): SessionSums()})
        await r.step(ASK, Identity("", name_of(RULE, r)))
        assert (r.started().rule, r.started().arm) == ("strict", RULE)
        assert r.started().assigned.startswith("switched to strict: rounds ratio 2.")
        async with httpx2.AsyncClient(base_url=r.url) as client:
            data = (await client.get("/guard/v1/economics")).json()
            text = (await client.get("/metrics")).text
        (row,) = [row for row in data["rows"] if row["arm"] == RULE]
        assert (row["on"], row["verdict"]) == (False, "loss")
        assert f'agentguard_arm_on{{arm="{RULE}",workload="{model}/chat/first"}} 0.0' in text
        shown = await run_status(r.url)
        assert "strict now; loss" in shown
        assert json.loads(await run_status(r.url, "--json"))["rows"] == data["rows"]


async def test_economics_metrics_and_status_need_the_key() -> None:
    async with rig(Script(), api_key="secret") as r, httpx2.AsyncClient(base_url=r.url) as client:
        for path in ("/guard/v1/economics", "/metrics"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"Authorization": "Bearer secret"})).status_code == 200
        assert "401" in await run_status(r.url, fails=1)
        assert json.loads(await run_status(r.url, "--json", "--api-key", "secret"))["rows"] == []
    assert "no gateway answers" in await run_status("http://127.0.0.1:9", fails=3)


async def run_status(url: str, *options: str, fails: int = 0) -> str:
    import asyncio

    command = [sys.executable, "-m", "agentguard", "status", "--url", url, *options]
    env = {"COLUMNS": "300", "PATH": "/usr/bin"}
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == fails, done.stderr
    return done.stderr if fails else done.stdout


async def test_an_error_in_the_economics_does_not_break_the_clients_stream() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS)), economics=ARMS) as r:
        r.guard.ledger.finished = None  # type: ignore[method-assign,assignment]  # any fault: calling it raises
        chunks = await r.step(ASK, Identity("", name_of(RULE, r)))
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        assert r.finished().error == ""


async def test_an_operator_holds_an_arm_and_lets_go_of_it() -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(script, economics=ARMS) as r, httpx2.AsyncClient(base_url=r.url) as client:
        model, name = r.guard.info.model, name_of(RULE, r)
        for _ in range(2):
            await r.step(ASK, Identity("", name))

        async def pin(status: int = 200, **body: object) -> dict[str, Any]:
            reply = await client.post("/agentguard/pin", json={"arm": RULE, **body})
            assert reply.status_code == status, reply.text
            answer: dict[str, Any] = reply.json()
            return answer

        async def rule() -> tuple[str, str]:
            await r.step(ASK, Identity("", name))
            return r.started().rule, r.started().assigned

        await pin(rule="strict")
        assert await rule() == ("strict", "pinned by an operator")
        await pin(rule=RULE, workload=f"{model}/chat/follow_up")  # a class's own pin goes before that of all
        assert await rule() == (RULE, "pinned by an operator")
        rows = (await client.get("/guard/v1/economics")).json()["rows"]
        assert {row["workload"].rsplit("/")[-1]: row["pinned"] for row in rows} == {"first": "strict", "follow_up": RULE}
        await pin(rule=None)
        assert await rule() == (RULE, "assigned")
        for wrong in ({"rule": "cactus:delta=9"}, {"rule": "strict", "arm": "strict"}, {"rule": "strict", "workload": "x"}, {}):
            await pin(400, **wrong)
        acted = [event.detail for event in r.events if isinstance(event, OperatorActed)]
    assert acted == [
        "pinned to strict in all classes", f"pinned to {RULE} in {model}/chat/follow_up", "left to the guard again in all classes",
    ]  # fmt: skip


async def test_a_pinned_arm_is_measured_and_not_switched() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS)), economics={**ARMS, "exploration": 0.0}) as r:
        workload, book = f"{r.guard.info.model}/chat/first", r.guard.ledger
        book.pin("", RULE, RULE)

        def run(sessions: int) -> None:
            for i in range(sessions):
                for arm, rounds in (("strict", 40), (RULE, 90)):
                    step: StepFinished = step_of(rounds + i % 9)
                    book.finished(step, Assignment(arm, arm, workload, ""), {("", ""): SessionSums()})

        run(80)
        assert [(row.verdict, row.on) for row in book.rows() if row.arm == RULE] == [("loss", True)]
        assert not any(isinstance(event, RuleSwitched) for event in r.events)
        book.pin("", RULE, None)
        run(1)
        assert [(event.arm, event.on) for event in r.events if isinstance(event, RuleSwitched)] == [(RULE, False)]
