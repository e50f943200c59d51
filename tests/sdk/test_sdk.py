"""Sessions, events, budgets and errors of the SDK, the same in each of its ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import agentguard
from agentguard import (
    AnswerDelta,
    CompactionAdvised,
    ConfigError,
    Economics,
    StepEvent,
    StepRequest,
    StepStarted,
    StepSummary,
    ThinkDelta,
    ToolCall,
    TraceClosed,
)
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.pool import EnginePool
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, text_chunk, thinking, upstream
from tests.sdk.conftest import ASK, THINKS_AND_ANSWERS, WAYS, rig, until
from tests.test_overflow import checking

every_way = pytest.mark.parametrize("way", WAYS)


@every_way
async def test_a_step_whose_limit_was_lowered_begins_once(way: str) -> None:
    """The server's own count of the prompt is far above our estimate."""
    script = Script(chat=checking(850), tokenizes=False)
    async with rig(way, script) as r, r.guard.session("s") as s:
        events = [event async for event in s.stream(ASK, max_tokens=900)]
        assert [type(e) for e in events if not isinstance(e, ThinkDelta | AnswerDelta)] == [
            StepStarted, CompactionAdvised, StepSummary, Economics,
        ]  # fmt: skip
        assert (len(script.seen), events[0].budget) == (2, 1000 - 850 - 8)
        assert [e.undone for e in r.finished] == [True, False]
        assert events[-2].accounts == r.finished[1]


@every_way
async def test_a_step_is_told_as_typed_events_in_order(way: str) -> None:
    async with rig(way, Script(chat=list(THINKS_AND_ANSWERS))) as r, r.guard.session("fix-1234") as s:
        events = [event async for event in s.stream(ASK, max_tokens=100)]
        assert [type(e) for e in events] == [
            StepStarted, ThinkDelta, ThinkDelta, AnswerDelta, AnswerDelta, StepSummary, Economics,
        ]  # fmt: skip
        started, *deltas, summary, economics = events
        assert (started.session, started.step, started.prompt_tokens, started.think_cap) == ("fix-1234", 1, 3, 50)
        assert [(d.text, d.think_tokens, d.think_cap) for d in deltas[:2]] == [("aa", 2, 50), ("a", 3, 50)]
        assert [(d.text, d.answer_tokens) for d in deltas[2:]] == [("b", 1), ("b", 2)]
        assert (summary.content, summary.reasoning, summary.finish_reason, summary.closed) == ("bb", "aaa", "stop", "")
        assert (summary.think_tokens, summary.answer_tokens, summary.tokens) == (3, 2, 7)
        assert summary.accounts == r.finished[0]
        assert summary.message == {"role": "assistant", "content": "bb"}
        assert (economics.workload, economics.arm) == (summary.accounts.workload, "strict")
        assert s.economics == economics
        assert economics.own is not None
        assert (economics.own.steps, economics.inflation, economics.gain) == (1, None, None)


@every_way
async def test_a_whole_reply_and_the_request_that_was_sent(way: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(way, script) as r, r.guard.session("s", agent="sub", temperature=0.5, top_p=0.9) as s:
        reply = await s.complete("hi", tools=tools, max_tokens=90, think_tokens=7, seed=3, rule="strict", presence_penalty=0.1)
        assert reply.content == "bb"
        assert r.finished[0].agent == "sub"
    (_, body, headers) = script.seen[0]
    assert body["messages"] == ASK
    assert body["tools"] == tools
    assert (body["temperature"], body["top_p"], body["seed"], body["presence_penalty"]) == (0.5, 0.9, 3, 0.1)
    assert (body["max_tokens"], body["thinking_token_budget"], body["vllm_xargs"]["ag_rule"]) == (90, 7, "strict")
    assert headers["x-session-id"] == "s"


@every_way
async def test_tool_calls_are_put_together(way: str) -> None:
    def piece(index: int, **function: str) -> list[dict[str, Any]]:
        return [{"index": index, **({"id": f"c{index}", "type": "function"} if "name" in function else {}), "function": function}]

    script = Script(
        chat=[
            chunk([A, END], reasoning="a"), chunk([B], tool_calls=piece(0, name="run", arguments="")),
            chunk([B], tool_calls=piece(0, arguments='{"a":')), chunk([B], tool_calls=piece(0, arguments="1}")),
            chunk([B], tool_calls=piece(1, name="stop", arguments="[]")), chunk([STOP], finish="tool_calls"), USAGE,
        ]
    )  # fmt: skip
    async with rig(way, script) as r, r.guard.session("s") as s:
        events = [event async for event in s.stream(ASK)]
    run, stop = (e for e in events if isinstance(e, ToolCall))
    assert (run.id, run.name, run.parsed()) == ("c0", "run", {"a": 1})
    with pytest.raises(agentguard.ToolArgumentsError, match=r"tool 'stop' are no JSON object: '\[\]'; tell the model"):
        stop.parsed()
    summary = next(e for e in events if isinstance(e, StepSummary))
    assert summary.tool_calls == [run, stop]
    assert summary.message["tool_calls"][0] == {
        "id": "c0", "type": "function", "function": {"name": "run", "arguments": '{"a":1}'},
    }  # fmt: skip


@every_way
async def test_the_budget_is_live_and_a_trace_can_be_closed(way: str) -> None:
    """The plugin's route sets the budget that ends the scripted trace."""
    script = Script(plugin=True)

    def trace(_: dict[str, Any]) -> Any:
        script.budget = None
        yield chunk([], role="assistant")
        for piece in thinking(400):
            if script.budget is not None:
                break
            yield piece
            yield 0.002
        yield chunk([END])
        yield chunk([B, STOP], content="b", finish="stop")
        yield USAGE

    script.chat = trace
    async with rig(way, script, policy={"limits": {"steps": 9}}) as r, r.guard.session("s") as s:
        assert (s.budget.steps, s.budget.steps_left, s.budget.tokens_left, s.budget.running) == (0, 9, None, ())
        seen, told = [], 0
        async with s.stream(ASK, max_tokens=900) as stream:
            async for event in stream:
                seen.append(event)
                if isinstance(event, ThinkDelta) and event.think_tokens == 20:
                    (running,) = s.budget.running
                    assert running.think_tokens >= 20  # what was read ahead counts
                    assert running.think_left == running.think_cap - running.think_tokens
                    assert (s.budget.tokens, s.budget.window) == (running.think_tokens, 1000)
                    told = await stream.close_now("enough")
        assert told == 1
        (closed,) = [e for e in seen if isinstance(e, TraceClosed)]
        assert (closed.reason, closed.detail, closed.how) == ("operator", "enough", "engine")
        assert stream.summary is not None
        assert (stream.summary.closed, stream.summary.content) == ("operator", "b")
        budget = s.budget
        assert (budget.running, budget.complete, budget.steps, budget.steps_left) == ((), True, 1, 8)
        assert (budget.tokens, budget.think_tokens) == (stream.summary.tokens, stream.summary.think_tokens)
        assert budget.context_tokens == 3
        assert (await s.close_now(), await stream.close_now()) == (0, 0)
        assert (await s.refresh()).state == r.inside.state(next(iter(r.inside.sessions)).identity)


@every_way
async def test_a_limit_stops_the_session_and_is_raised(way: str) -> None:
    async with rig(way, Script(chat=list(THINKS_AND_ANSWERS)), policy={"limits": {"steps": 2}}) as r, r.guard.session("s") as s:
        with pytest.raises(agentguard.ActionRefusedError, match="has no step yet"):
            await s.raise_limit("steps", 5)
        events = [event for _ in range(2) async for event in s.stream(ASK)]
        at, alarm = next((i, e) for i, e in enumerate(events) if isinstance(e, agentguard.SessionAlarm))
        assert isinstance(events[at - 1], StepSummary)
        assert (alarm.meter, alarm.value, alarm.limit) == ("steps", 2, 2)
        assert s.budget.steps_left == 0
        with pytest.raises(agentguard.SessionLimitError, match="steps is 2 of 2"):
            await s.complete(ASK)
        assert (await s.raise_limit("steps", 3)).steps_left == 1
        assert (await s.complete(ASK)).content == "bb"
        for meter, limit in (("stpes", 3), ("steps", 0)):
            with pytest.raises(ConfigError):
                await s.raise_limit(meter, limit)  # type: ignore[arg-type]


@every_way
async def test_errors_are_the_same_everywhere(way: str) -> None:
    async with rig(way, Script(chat=list(THINKS_AND_ANSWERS)), retries=0) as r, r.guard.session("s") as s:
        with pytest.raises(ConfigError, match="did you mean 'cactus'"):
            await s.complete(ASK, rule="cactuz:1")
        with pytest.raises(ConfigError, match="messages"):
            await s.complete([])
        with pytest.raises(ConfigError, match="leave it out"):
            await s.complete(ASK, stream=True)
    async with rig(way, Script(prompt=[5] * 999 + [1]), retries=0) as r, r.guard.session("s") as s:
        with pytest.raises(agentguard.ContextLengthError, match=r"fills the context window of 1000 tokens .*; compact it"):
            await s.complete(ASK)
    async with rig(way, Script(status=429, retry_after="7"), retries=0) as r, r.guard.session("s") as s:
        with pytest.raises(agentguard.EngineRequestError, match="scripted refusal") as refused:
            await s.complete(ASK)
        assert (refused.value.status, refused.value.retry_after) == (429, "7")
    async with rig(way, Script(chat=[chunk([A], reasoning="a")], hang_up=True), retries=0) as r, r.guard.session("s") as s:
        told: list[type] = []

        async def read() -> None:
            async for event in s.stream(ASK):
                told.append(type(event))

        with pytest.raises(agentguard.EngineDiedError):
            await read()
        assert told == [StepStarted, ThinkDelta]
        assert (s.budget.running, s.budget.steps, s.budget.think_tokens, s.budget.complete) == ((), 1, 1, True)
        assert r.finished[0].error


@every_way
async def test_a_session_goes_on_under_its_name(way: str) -> None:
    async with rig(way, Script(chat=list(THINKS_AND_ANSWERS))) as r:
        async with r.guard.session("s") as s:
            await s.complete(ASK)
        with pytest.raises(ConfigError, match="not open"):
            s.stream(ASK)
        async with r.guard.session("s") as again:
            assert (again.budget.steps, again.budget.tokens) == (1, 7)
            await asyncio.gather(again.complete(ASK), again.complete(ASK))
            assert (again.budget.steps, again.budget.tokens, again.budget.complete) == (3, 21, True)
        with pytest.raises(ConfigError, match="x-agentguard-session"):
            r.guard.session("two words")
        assert (r.guard.model, r.guard.window) == ("scripted", 1000)
        assert sum(row.steps for row in await r.guard.economics()) == 3


@every_way
async def test_the_guards_events_of_all_sessions_can_be_followed(way: str) -> None:
    async with rig(way, Script(chat=list(THINKS_AND_ANSWERS))) as r, r.guard.session("s") as s:
        kinds: list[str] = []

        async def follow() -> None:
            async for event in r.guard.events():
                kinds.append(type(event).__name__)

        following = asyncio.create_task(follow())
        await asyncio.sleep(0.1)
        await s.complete(ASK)
        await until(lambda: "StepFinished" in kinds)
        following.cancel()
        await asyncio.wait([following])
        assert kinds == ["StepStarted", "StepFinished"]


async def test_a_gateways_key_and_its_operators_key() -> None:
    from tests.test_guard import rig as gateway_rig

    async with gateway_rig(Script(chat=list(THINKS_AND_ANSWERS)), api_key="agents", operator_key="op", limits={"steps": 1}) as g:
        with pytest.raises(agentguard.EngineRequestError, match=r"missing or wrong API key.*api_key="):
            async with agentguard.connect(g.url):
                pass
        async with agentguard.connect(g.url, api_key="agents") as guard, guard.session("s") as s:
            await s.complete(ASK)
            assert s.budget.steps == 1
            with pytest.raises(agentguard.EngineRequestError, match="operator_key="):
                await s.raise_limit("steps", 2)
        async with agentguard.connect(g.url, api_key="agents", operator_key="op") as guard, guard.session("s") as s:
            assert (s.budget.steps, s.budget.steps_left) == (1, 0)
            assert (await s.raise_limit("steps", 2)).steps_left == 1


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("http://127.0.0.1:1", {"buffer": 0}, "at least 1 event"),
        ("http://127.0.0.1:1", {"retries": -1}, "0 for none"),
        ("no-such-recipe.yaml", {}, "No such file"),
        ({"model": "x", "rul": "strict"}, {}, "did you mean 'rule'"),
        ({"model": "x"}, {"policy": {"model": "x"}}, "target is the policy already"),
        (7, {}, "give a URL, a Policy"),
        ({"model": "/no/such/model"}, {}, "does not exist"),
        ({"model": "/no/such/model"}, {"in_process": True}, "does not exist"),
    ],
)
async def test_a_wrong_target_is_named(target: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        async with agentguard.connect(target, **options):
            pass


def test_the_sdk_and_the_gateway_mean_the_same_names() -> None:
    """The SDK's environment has no web server, so it does not import them."""
    from agentguard.economics import classes
    from agentguard.gateway import step_events
    from agentguard.sdk import remote

    assert (remote.EVENTS_HEADER, remote.EVENT, remote.STATE) == (
        step_events.EVENTS_HEADER, step_events.EVENT, step_events.STATE,
    )  # fmt: skip
    assert remote.SIDE_HEADER == classes.SIDE_HEADER


async def test_nobody_at_the_address_is_a_clear_error() -> None:
    with pytest.raises(agentguard.EngineDiedError, match=r"nobody answers at http://127.0.0.1:1 .*; start .* or correct the URL"):
        async with agentguard.connect("http://127.0.0.1:1/v1"):
            pass


@every_way
async def test_a_slow_consumer_stops_the_reading(way: str) -> None:
    """Chunks of 10 kB fill the sockets between; what runs in a process without them stops after a few pieces."""
    sent = 0

    def endless(_: dict[str, Any]) -> Any:
        nonlocal sent
        yield chunk([A, END], reasoning="a")
        while sent < 20_000:
            sent += 1
            yield chunk([B], content=f"{sent:010d}" * 1000)
        yield chunk([STOP], finish="stop")
        yield USAGE

    async with rig(way, Script(chat=endless, window=100_000), buffer=4) as r, r.guard.session("s") as s:
        events = aiter(s.stream(ASK))
        assert isinstance(await anext(events), StepStarted)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.5)
        assert 4 <= sent < 10_000
        read = [await anext(events) for _ in range(20)]
        numbers = [int(e.text[:10]) for e in read if isinstance(e, AnswerDelta)]
        assert numbers == list(range(1, len(numbers) + 1))  # nothing is left out on the way
        await events.aclose()
        await until(lambda: r.script.streaming == 0)


@every_way
async def test_leaving_the_loop_ends_the_step_in_the_engine(way: str) -> None:
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with rig(way, script) as r, r.guard.session("s") as s:
        async for event in s.stream(ASK):
            if isinstance(event, ThinkDelta):
                break
        await asyncio.wait_for(script.aborted.wait(), 5)
        await until(lambda: bool(r.finished))
        assert (r.finished[0].error, r.finished[0].think_tokens) == ("cancelled", 2)
        assert not s._streams
        budget = await s.refresh()
        assert (budget.steps, budget.think_tokens, budget.complete) == (1, 2, True)


@every_way
async def test_the_end_of_a_session_ends_its_streams(way: str) -> None:
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with rig(way, script) as r:
        async with r.guard.session("s") as s:
            stream = s.stream(ASK)
            events = aiter(stream)
            await anext(events)
            await anext(events)
            waiting = asyncio.create_task(anext(events))
            await asyncio.sleep(0.05)
        await until(lambda: script.streaming == 0)
        with pytest.raises(agentguard.StreamClosedError, match="closed while it was read"):
            await waiting
        with pytest.raises(agentguard.StreamClosedError, match="is over"):
            await anext(aiter(stream))


@every_way
async def test_a_step_that_takes_too_long_is_ended(way: str) -> None:
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with rig(way, script) as r, r.guard.session("s", timeout_s=0.3) as s:
        with pytest.raises(agentguard.StepTimeoutError, match=r"within 0.3 s \(timeout_s\)"):
            await s.complete(ASK)
        await asyncio.wait_for(script.aborted.wait(), 5)
        await until(lambda: bool(r.finished))
        assert r.finished[0].error == "cancelled"


async def test_a_stream_is_read_once() -> None:
    async with rig("app", Script(chat=list(THINKS_AND_ANSWERS))) as r, r.guard.session("s") as s:
        stream = s.stream(ASK)
        assert (await stream.until_done()).content == "bb"
        with pytest.raises(agentguard.StreamClosedError):
            await stream.until_done()
        # one that was read to its end before its consumer began is whole
        async with s.stream(ASK) as stream:
            await until(lambda: stream._task.done())
            assert len([e async for e in stream]) == 7
        never = s.stream(ASK)
        await never.aclose()
        assert len(r.script.seen) == 2


# -- middleware ----------------------------------------------------------------------------------------------


def shouting(name: str, log: list[str]) -> Any:
    async def middleware(request: StepRequest, call_next: agentguard.CallNext) -> AsyncGenerator[StepEvent, None]:
        log.append(f"{name} asks")
        async for event in call_next(request.copy(extra={**request.extra, name: len(request.extra)})):
            if isinstance(event, StepSummary):
                log.append(f"{name} sees {event.content}")
                event = agentguard.StepSummary(
                    content=event.content + name, reasoning="", tool_calls=[], finish_reason="stop", accounts=event.accounts
                )
            yield event

    return middleware


async def test_the_first_middleware_is_the_outermost() -> None:
    log: list[str] = []
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with (
        rig("sockets", script, middleware=[shouting("x", log)]) as r,
        r.guard.session("s", middleware=[shouting("y", log)]) as s,
    ):
        assert (await s.complete(ASK)).content == "bbyx"
    assert log == ["x asks", "y asks", "y sees bb", "x sees bby"]
    assert (script.seen[0][1]["x"], script.seen[0][1]["y"]) == (0, 1)


async def test_a_middleware_may_answer_itself_keep_back_or_fail() -> None:
    async def cached(request: StepRequest, call_next: agentguard.CallNext) -> AsyncGenerator[StepEvent, None]:
        if request.messages[0]["content"] == "silent":
            return
        if request.messages[0]["content"] == "fail":
            raise LookupError("mine")
        async for event in call_next(request):
            yield event

    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig("app", script, middleware=[cached]) as r, r.guard.session("s") as s:
        with pytest.raises(agentguard.AgentGuardError, match="kept it back"):
            await s.complete("silent")
        with pytest.raises(LookupError, match="mine"):
            await s.complete("fail")
        assert script.seen == []
        assert (await s.complete("hi")).content == "bb"


async def test_what_a_middleware_leaves_open_is_closed() -> None:
    async def first_only(request: StepRequest, call_next: agentguard.CallNext) -> AsyncGenerator[StepEvent, None]:
        held.append(call_next(request))
        yield await anext(held[-1])

    held: list[Any] = []
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with rig("app", script, middleware=[first_only]) as r, r.guard.session("s") as s:
        assert [type(e) async for e in s.stream(ASK)] == [StepStarted]
        await until(lambda: script.streaming == 0)
        assert r.finished[0].error == "cancelled"


class NoHandle:
    pass


class Bare(agentguard.Middleware):
    pass


class Sync(agentguard.Middleware):
    def handle(self, request: Any, call_next: Any) -> Any:
        return None


async def coroutine(request: Any, call_next: Any) -> None: ...


async def one_argument(request: Any) -> Any:
    yield


async def good(request: Any, call_next: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("chain", "named"),
    [
        ([NoHandle()], r"middleware\[0\]=.*has no 'handle"),
        ([good, Bare()], r"middleware\[1\]=.*has no 'handle"),
        ([Sync()], "not an async generator function"),
        ([coroutine], "returns once; make it yield"),
        ([one_argument], r"has to take \(request, call_next\), not \(request"),
        ([Bare], "is a class; give an object"),
        ([good, good], r"middleware\[1\].*in the chain already"),
        ([len], "has no 'handle"),
        (good, "give a list"),
    ],
)
async def test_a_chain_is_checked_when_it_is_made(chain: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        async with agentguard.connect("http://127.0.0.1:1", middleware=chain):
            pass


def test_a_request_is_changed_in_copies_only() -> None:
    request = StepRequest(({"role": "user", "content": "a"},), max_tokens=5)
    other = request.copy(messages="b", temperature=0.5)
    assert (request.messages[0]["content"], other.messages) == ("a", ({"role": "user", "content": "b"},))
    assert request.changed(other) == ["messages", "temperature"]
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        request.copy(max_token=3)
    with pytest.raises(ConfigError, match=r"request\.session"):
        request.copy(session="other")
    with pytest.raises(ConfigError, match="list of mappings"):
        request.copy(tools="f")


# -- retries -------------------------------------------------------------------------------------------------


@every_way
async def test_a_loop_is_tried_again_with_changed_parameters(way: str) -> None:
    loop = [*thinking(0, a="ab" * 150, size=2)]
    script = Script(
        chat=[*loop, chunk([STOP], finish="stop"), USAGE], again=list(THINKS_AND_ANSWERS),
        complete=[text_chunk([B, STOP], "b", "stop"), USAGE],
    )  # fmt: skip
    async with rig(way, script, middleware=[agentguard.RetryCuts()]) as r, r.guard.session("s") as s:
        events = [event async for event in s.stream(ASK, seed=1, temperature=0.2, max_tokens=900)]
        at = next(i for i, e in enumerate(events) if isinstance(e, agentguard.Retried))
        assert isinstance(events[at - 1], Economics)
        assert events[at] == agentguard.Retried(attempt=1, reason="loop", changed=["temperature", "seed"])
        before, after = (e for e in events if isinstance(e, StepSummary))
        assert (before.closed, after.closed, after.content) == ("loop", "", "bb")
        asked = [body for path, body, _ in script.seen if path.endswith("chat/completions")]
        assert [(a["seed"], a["temperature"]) for a in asked] == [(1, 0.2), (2, 0.5)]
        assert [e.step for e in r.finished] == [1, 2]
        assert (s.budget.steps, s.budget.tokens) == (2, before.tokens + after.tokens)
        script.seen.clear()
        assert (await s.complete(ASK, seed=1, temperature=0.2, max_tokens=900)).content == "bb"


async def test_a_change_may_decline_and_an_empty_answer_counts() -> None:
    nothing = text_chunk([STOP], "", "stop")
    script = Script(chat=[chunk([A, STOP], reasoning="a", finish="stop"), USAGE], complete=[nothing, USAGE])
    asked: list[StepRequest] = []

    def change(request: StepRequest, summary: StepSummary) -> StepRequest | None:
        asked.append(request)
        return request.copy(max_tokens=800) if request.max_tokens == 400 else None

    retry = agentguard.RetryCuts(["empty"], attempts=3, change=change)
    async with rig("app", script, middleware=[retry]) as r, r.guard.session("s") as s:
        await s.complete(ASK, max_tokens=400)
        assert [a.max_tokens for a in asked] == [400, 800]
        assert len(r.finished) == 2
    with pytest.raises(ConfigError, match="did you mean 'loop'"):
        agentguard.RetryCuts(["lop"])
    with pytest.raises(ConfigError, match="at least 1"):
        agentguard.RetryCuts(attempts=0)


@every_way
async def test_a_busy_engine_is_asked_again_and_a_stopped_session_is_not(way: str) -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS), status=503, retry_after="0.05")

    async def recover() -> None:
        await until(lambda: len(script.seen) == 2)
        script.status = 200

    async with rig(way, script, retries=3, policy={"limits": {"steps": 9}}) as r, r.guard.session("s") as s:
        recovering = asyncio.create_task(recover())
        assert (await s.complete(ASK)).content == "bb"
        await recovering
        assert len(script.seen) == len(r.finished) >= 3
        # what was begun is not begun again
        script.chat, script.hang_up, script.status = [chunk([A], reasoning="a")], True, 200
        with pytest.raises(agentguard.EngineDiedError):
            await s.complete(ASK)
        assert len(r.finished) == len(script.seen)
        r.inside.policy = r.inside.policy.model_copy(update={"limits": r.inside.policy.limits.model_copy(update={"steps": 1})})
        before = len(script.seen)
        with pytest.raises(agentguard.SessionLimitError):
            await s.complete(ASK)
        assert len(script.seen) == before


async def test_a_step_that_moves_to_another_engine_is_one_stream() -> None:
    """Of a pool one engine breaks off before its first chunk; what the step had begun there is not left in the budget, nor told."""
    broken, well = Script(chat=[], hang_up=True), Script(chat=list(THINKS_AND_ANSWERS))
    async with upstream(broken) as first, upstream(well) as second:
        pool = EnginePool([OpenAIEngine(url, name=name) for name, url in (("broken", first), ("well", second))])
        async with agentguard.connect(pool, policy={"model": "scripted"}, retries=0) as guard:
            for n in range(8):
                async with guard.session(f"s{n}") as s:
                    events = [event async for event in s.stream(ASK)]
                    (started,) = [e for e in events if isinstance(e, StepStarted)]
                    assert isinstance(events[-2], StepSummary)
                    assert (events[-2].content, events[-2].accounts.request) == ("bb", started.request)
                    assert (s.budget.running, s.budget.tokens) == ((), 7)
        assert len(broken.seen) == 1
        await pool.aclose()
