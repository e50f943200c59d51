"""The guard and its gateway against a scripted upstream: what goes up, what comes down, and what faults become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx2
import pytest

from agentguard.engines.openai_http import OpenAIEngine
from agentguard.errors import ConfigError, EngineDiedError, EngineError, EngineRequestError
from agentguard.events import EngineDied, EngineReady, Event, Note, StepFinished, StepStarted, TraceClosed
from agentguard.gateway.server import bind, gateway
from agentguard.identity import Identity
from agentguard.middleware import Guard
from agentguard.policy import Policy
from agentguard.telemetry.hub import Hub
from tests.scripted import END, START, STOP, USAGE, A, B, Script, chunk, text_chunk, thinking, upstream

ME = Identity("", "me")
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
THINKS_AND_ANSWERS = [
    chunk([], role="assistant"),
    chunk([A, A], reasoning="aa"),
    chunk([A, END, B], reasoning="a", content="b"),
    chunk([B, STOP], content="b", finish="stop"),
    USAGE,
]


class Rig:
    def __init__(self, guard: Guard, events: list[Event], url: str) -> None:
        self.guard = guard
        self.events = events
        self.url = url

    async def step(self, body: dict[str, Any] | None = None, identity: Identity = ME) -> list[dict[str, Any]]:
        return [c async for c in self.guard.stream(body or ASK, identity)]

    def finished(self) -> StepFinished:
        return [e for e in self.events if isinstance(e, StepFinished)][-1]

    def started(self) -> StepStarted:
        return [e for e in self.events if isinstance(e, StepStarted)][-1]


@asynccontextmanager
async def rig(script: Script, *, api_key: str | None = None, operator_key: str | None = None, **policy: Any) -> AsyncIterator[Rig]:
    events: list[Event] = []
    hub = Hub()
    async with upstream(script) as url:
        engine = OpenAIEngine(url, read_timeout_s=10)
        with hub.sink(events.append):
            guard = await Guard.open(engine, Policy(model="scripted", **policy), hub)
            async with gateway(guard, bind("127.0.0.1", 0), api_key=api_key, operator_key=operator_key) as gateway_url:
                yield Rig(guard, events, gateway_url)
        await engine.aclose()


def text(chunks: list[dict[str, Any]], key: str = "content") -> str:
    return "".join((c["choices"][0]["delta"].get(key) or "") for c in chunks if c["choices"])


async def test_a_step_is_counted_by_kind() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS))) as r:
        chunks = await r.step()
        assert (text(chunks, "reasoning"), text(chunks)) == ("aaa", "bb")
        step = r.finished()
        assert (step.think_tokens, step.answer_tokens, step.marker_tokens, step.tokens) == (3, 2, 2, 7)
        assert (step.rounds, step.drafted, step.accepted) == (4, 24, 9)
        assert (step.closed, step.empty_answer, step.continued, step.error, step.finish_reason) == ("", False, False, "", "stop")
        assert chunks[-1]["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10, "completion_tokens_details": {"reasoning_tokens": 3},
        }  # fmt: skip


async def test_budget_rule_and_session_go_up() -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(script, rule="cactus:0.25,p_min=0.1") as r:
        await r.step({**ASK, "temperature": 0.7, "tools": [], "max_completion_tokens": 90})
    (_, body, headers) = script.seen[0]
    assert body["max_tokens"] == 90
    assert "max_completion_tokens" not in body
    assert body["thinking_token_budget"] == r.started().think_cap == 45  # half of 90: a small limit
    assert body["vllm_xargs"] == {"ag_rule": "cactus:delta=0.25,p_min=0.1,top_k=10", "ag_phase": "think"}
    assert body["temperature"] == 0.7
    assert headers["x-session-id"] == "me"
    assert headers["x-request-id"] == r.started().request


async def test_the_clients_own_think_budget_is_kept_when_it_is_smaller() -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(script) as r:
        await r.step({**ASK, "thinking_token_budget": 3})
        assert script.seen[0][1]["thinking_token_budget"] == 3
        # the prompt's own think tokens (none after START) and three more reach the budget: the engine closed it
        assert (r.started().bound_by, r.finished().closed) == ("client", "budget")
        assert [(e.reason, e.think_tokens, e.cap, e.how) for e in r.events if isinstance(e, TraceClosed)] == [
            ("budget", 3, 3, "engine")
        ]
        await r.step({**ASK, "thinking_token_budget": 5000}, Identity("", "another"))
        assert script.seen[1][1]["thinking_token_budget"] == r.started().think_cap < 100


async def test_token_ids_are_hidden_unless_asked_for() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS))) as r:
        assert not any("token_ids" in c["choices"][0] for c in await r.step() if c["choices"])
        asked = await r.step({**ASK, "return_token_ids": True})
        assert [i for c in asked if c["choices"] for i in c["choices"][0].get("token_ids", [])] == [A, A, A, END, B, B, STOP]


@pytest.mark.parametrize(
    ("chat", "behind"),
    [
        ([chunk([A, A, STOP], reasoning="aa", finish="stop"), USAGE], [A, A, END]),
        ([chunk([A, END, STOP], reasoning="a", finish="stop"), USAGE], [A, END]),
        ([chunk([A, A], reasoning="aa", finish="length"), USAGE], [A, A, END]),
        ([chunk([A, END, START, A], reasoning="aa", finish="length"), USAGE], [A, END, START, A, END]),
    ],
    ids=["stops inside the trace", "stops after the marker", "length inside the trace", "length inside a second trace"],
)
async def test_a_step_without_an_answer_is_continued_behind_its_trace(chat: list[Any], behind: list[int]) -> None:
    answer = chunk([B, STOP], finish="stop")
    answer["choices"][0] |= {"text": "b"}
    script = Script(chat=chat, complete=[answer, USAGE])
    async with rig(script) as r:
        chunks = await r.step()
        assert text(chunks) == "b"
        finishes = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
        assert finishes.count("stop") == 1
        assert finishes[-1] == "stop"
        assert script.seen[1][1]["prompt"] == [5, 6, START, *behind]
        step = r.finished()
        assert (step.continued, step.empty_answer, step.answer_tokens, step.rounds) == (True, False, 1, 8)
        assert step.tokens == step.think_tokens + step.answer_tokens + step.marker_tokens


async def test_a_tool_call_is_an_answer() -> None:
    call = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    script = Script(chat=[chunk([A, END, B], reasoning="a", tool_calls=call), chunk([STOP], finish="tool_calls"), USAGE])
    async with rig(script) as r:
        await r.step()
        assert (r.finished().continued, r.finished().empty_answer) == (False, False)


async def test_an_answer_that_stays_empty_is_reported() -> None:
    nothing = chunk([STOP], finish="stop")
    nothing["choices"][0] |= {"text": ""}
    script = Script(chat=[chunk([A, STOP], reasoning="a", finish="stop"), USAGE], complete=[nothing, USAGE])
    async with rig(script) as r:
        await r.step()
        assert r.finished().empty_answer
        assert r.finished().notes == [Note.NO_CLOSE_TAG, Note.EMPTY_ANSWER]


async def test_steps_of_a_session_are_counted_and_its_answers_set_the_reserve() -> None:
    long_answer = [chunk([A, END], reasoning="a"), chunk([B] * 300, content="b" * 300), chunk([STOP], finish="stop"), USAGE]
    async with rig(Script(chat=long_answer)) as r:
        await r.step({**ASK, "max_tokens": 900})
        await r.step({**ASK, "max_tokens": 900, "seed": 1})
        assert [e.step for e in r.events if isinstance(e, StepStarted)] == [1, 2]
        assert (r.started().think_cap, r.started().bound_by) == (600, "reserve")
        await r.step({**ASK, "max_tokens": 900}, Identity("", "another"))
        assert (r.started().step, r.started().bound_by) == (1, "fraction")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n=2"),
        ({"model": "other"}, "this gateway serves 'scripted'"),
        ({"stream_options": "x"}, "stream_options"),
        ({"vllm_xargs": {"ag_rule": "cactuz:1"}}, "did you mean 'cactus'"),
        ({"vllm_xargs": {"ag_rule": 3}}, "write the rule as a string"),
    ],
)
async def test_a_bad_request_names_the_field_and_reaches_nothing(change: dict[str, Any], named: str) -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(script) as r:
        with pytest.raises(ConfigError, match=named):
            await r.step({**ASK, **change})
        async with httpx2.AsyncClient(base_url=r.url) as client:
            reply = await client.post("/v1/chat/completions", json={**ASK, **change})
        assert reply.status_code == 400
        assert named in reply.json()["error"]["message"]
        assert script.seen == []
        assert not any(isinstance(e, StepStarted) for e in r.events)


async def test_a_prompt_that_fills_the_window_is_refused_with_the_remedy() -> None:
    async with rig(Script(prompt=[5] * 999 + [START])) as r:
        with pytest.raises(ConfigError, match=r"fills the context window of 1000 tokens .*; compact it"):
            await r.step()


async def test_an_upstream_refusal_keeps_its_status_and_message() -> None:
    async with rig(Script(status=429)) as r:
        with pytest.raises(EngineRequestError, match="scripted refusal"):
            await r.step()
        assert "scripted refusal" in r.finished().error
        async with httpx2.AsyncClient(base_url=r.url) as client:
            assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 429


async def test_an_engine_that_dies_in_the_middle_ends_the_stream_with_an_error() -> None:
    async with rig(Script(chat=[chunk([A], reasoning="a")], hang_up=True)) as r:
        for _ in range(2):
            with pytest.raises(EngineDiedError, match="is gone"):
                await r.step()
        assert r.finished().think_tokens == 1
        assert "is gone" in r.finished().error
        # asked again it was there, and then it died again
        assert [type(e) for e in r.events if isinstance(e, EngineDied | EngineReady)] == [EngineReady, EngineDied] * 2
        async with httpx2.AsyncClient(base_url=r.url) as client:
            reply = await client.post("/v1/chat/completions", json={**ASK, "stream": True})
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        assert "[DONE]" not in events
        assert json.loads(events[-1])["error"]["code"] == 503


@pytest.mark.parametrize("garbled", ["{not json", "[]", '{"error": {"message": "no", "code": "bad"}}'])
async def test_a_garbled_event_is_an_error_of_that_step_and_no_dead_engine(garbled: str) -> None:
    async with rig(Script(chat=[chunk([A], reasoning="a"), f"data: {garbled}\n\n"])) as r:
        with pytest.raises(EngineError):
            await r.step()
        assert r.finished().error
        assert not any(isinstance(e, EngineDied) for e in r.events)


async def test_a_stop_string_of_the_client_ends_the_step_and_counts_its_token() -> None:
    stopped = chunk([B], content="b", finish="stop")
    stopped["choices"][0]["stop_reason"] = "b"
    async with rig(Script(chat=[chunk([A, END], reasoning="a"), stopped, USAGE])) as r:
        await r.step({**ASK, "stop": ["b"]})
        assert (r.finished().answer_tokens, r.finished().marker_tokens, r.finished().continued) == (1, 1, False)


@pytest.mark.parametrize("reason", ["x", 77])
async def test_a_stop_of_the_client_s_that_fires_inside_the_trace_ends_the_trace(reason: str | int) -> None:
    """A stop is meant for the answer; within the trace it left an empty message."""
    silent = chunk([A, 77], reasoning="a", finish="stop")
    silent["choices"][0]["stop_reason"] = reason
    script = Script(chat=[silent, USAGE], complete=[text_chunk([B, STOP], "b", "stop"), USAGE])
    async with rig(script) as r:
        chunks = await r.step({**ASK, "stop": ["x"], "stop_token_ids": [77]})
        assert (text(chunks), r.finished().continued, r.finished().empty_answer) == ("b", True, False)
    # a stop string's tokens belong to the trace, a token that ended the turn does not
    assert script.seen[1][1]["prompt"] == [5, 6, START, A, *([77] if reason == "x" else []), END]
    assert script.seen[1][1]["stop"] == ["x"]


@pytest.mark.parametrize("reason", ["</think>", END])
async def test_a_client_that_stops_at_the_end_of_the_trace_wants_the_trace_alone(reason: str | int) -> None:
    traced = chunk([A, END], reasoning="a", finish="stop")
    traced["choices"][0]["stop_reason"] = reason
    async with rig(Script(chat=[traced, USAGE])) as r:
        chunks = await r.step({**ASK, "stop": ["</think>"], "stop_token_ids": [END]})
        assert (text(chunks), text(chunks, "reasoning"), r.finished().continued) == ("", "a", False)


@pytest.mark.parametrize("reason", ["eos", "end_turn", "stop_sequence", "abort", "length", "max_tokens"])
async def test_a_step_goes_on_whatever_its_server_calls_the_end_of_the_trace(reason: str) -> None:
    script = Script(
        chat=[chunk([A], reasoning="a"), chunk([STOP], finish=reason), USAGE],
        complete=[text_chunk([B, STOP], "b", "stop"), USAGE],
    )  # fmt: skip
    async with rig(script) as r:
        assert text(await r.step()) == "b"
    ends = reason not in ("abort", "length", "max_tokens")
    assert script.seen[1][1]["prompt"] == [5, 6, START, A, *([] if ends else [STOP]), END]


@pytest.mark.parametrize("pieces", [[([END], "</think>"), ([B, STOP], "b")], [([END, B, STOP], "</think>b")]])
async def test_a_block_that_the_model_closes_once_more_is_no_answer(pieces: list[tuple[list[int], str]]) -> None:
    *first, (ids, said) = pieces
    complete = [*(text_chunk(i, s) for i, s in first), text_chunk(ids, said, "stop"), USAGE]
    async with rig(Script(chat=[chunk([A, STOP], reasoning="a", finish="stop"), USAGE], complete=complete)) as r:
        chunks = await r.step()
        assert (text(chunks), r.finished().continued) == ("b", True)


@pytest.mark.parametrize("named", [None, [7], [STOP]])
async def test_an_end_token_of_the_model_s_own_is_no_stop_of_the_client(named: list[int] | None) -> None:
    """vLLM reports every end token of generation_config but the first as a stop reason."""
    ended = chunk([A, STOP], reasoning="a", finish="stop")
    ended["choices"][0]["stop_reason"] = STOP
    async with rig(Script(chat=[ended, USAGE], complete=[text_chunk([B, STOP], "b", "stop"), USAGE])) as r:
        chunks = await r.step(ASK if named is None else {**ASK, "stop_token_ids": named})
        finished = r.finished()
    assert (finished.continued, finished.empty_answer, text(chunks)) == (True, False, "b")


async def test_the_blocks_of_a_step_have_one_budget_together() -> None:
    """ollama/ollama#17566: six blocks, each with the whole budget, burned 32,000 tokens."""
    blocks = [
        *thinking(30),
        chunk([END]),
        chunk([B], content="b"),
        chunk([START]),
        *thinking(200),
        chunk([STOP], finish="stop"),
        USAGE,
    ]
    script = Script(chat=blocks, complete=[text_chunk([B, STOP], "b", "stop"), USAGE])
    async with rig(script) as r:
        await r.step()
        assert (r.started().think_cap, r.finished().closed) == (50, "")
        assert r.finished().think_tokens == 230  # the answer has begun, so the stream is not cut
    script = Script(chat=[*blocks[:31], chunk([START]), *blocks[33:]], complete=[text_chunk([B, STOP], "b", "stop"), USAGE])
    async with rig(script) as r:
        chunks = await r.step()
        assert (r.finished().think_tokens, r.finished().closed, text(chunks)) == (50 + 1, "reserve", "b")


async def test_a_continuation_keeps_rule_format_and_ids() -> None:
    answer = chunk([B, STOP], finish="stop")
    answer["choices"][0] |= {"text": "b"}
    script = Script(chat=[chunk([A, A, STOP], reasoning="aa", finish="stop"), USAGE], complete=[answer, USAGE])
    async with rig(script) as r:
        wanted = {"response_format": {"type": "json_object"}, "presence_penalty": 0.5, "vllm_xargs": {"ag_rule": "strict"}}
        chunks = await r.step({**ASK, **wanted, "return_token_ids": True})
    body = script.seen[1][1]
    assert body["response_format"] == {"type": "json_object"}
    assert (body["presence_penalty"], body["vllm_xargs"]["ag_rule"]) == (0.5, "strict")
    assert [i for c in chunks if c["choices"] for i in c["choices"][0].get("token_ids", [])] == [A, A, STOP, B, STOP]


async def test_hidden_reasoning_is_counted_and_not_shown() -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(script) as r:
        chunks = await r.step({**ASK, "include_reasoning": False})
        assert (text(chunks, "reasoning"), text(chunks), r.finished().think_tokens) == ("", "bb", 3)
    assert script.seen[0][1]["include_reasoning"] is True


async def test_what_was_really_served_decides_whether_the_block_is_open() -> None:
    role = chunk([], role="assistant") | {"prompt_token_ids": [5, 6, 7, 8]}
    async with rig(Script(chat=[role, chunk([B, B, STOP], content="bb", finish="stop"), USAGE])) as r:
        await r.step()
        assert (r.finished().think_tokens, r.finished().answer_tokens, r.finished().prompt_tokens) == (0, 2, 4)


async def test_counts_that_differ_from_the_engines_are_marked() -> None:
    usage = {**USAGE, "usage": {"prompt_tokens": 3, "completion_tokens": 99, "total_tokens": 102}}
    async with rig(Script(chat=[*THINKS_AND_ANSWERS[:-1], usage])) as r:
        await r.step()
        assert r.finished().estimated
    honest = {**USAGE, "usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}}
    async with rig(Script(chat=[*THINKS_AND_ANSWERS[:-1], honest])) as r:
        await r.step()
        assert not r.finished().estimated


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_stops_the_step(stream: bool) -> None:
    script = Script(chat=[chunk([A, A], reasoning="aa")] if stream else [], hold=asyncio.Event())
    async with rig(script) as r:
        async with httpx2.AsyncClient(base_url=r.url, timeout=0.7) as client:
            with pytest.raises(httpx2.ReadTimeout):
                await client.post("/v1/chat/completions", json={**ASK, "stream": stream})
        await asyncio.wait_for(script.aborted.wait(), 5)
        async with asyncio.timeout(5):
            while not any(isinstance(e, StepFinished) for e in r.events):
                await asyncio.sleep(0.02)
        assert r.finished().error == "cancelled"


async def test_a_stream_without_a_finish_reason_is_an_error_not_an_answer() -> None:
    async with rig(Script(chat=[chunk([A, END, B], content="b"), USAGE])) as r:
        with pytest.raises(EngineError, match="without a finish reason"):
            await r.step()


async def test_an_error_event_in_the_stream_is_raised() -> None:
    failed = 'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
    async with rig(Script(chat=[chunk([A], reasoning="a"), failed])) as r:
        with pytest.raises(EngineRequestError, match="EngineCore died"):
            await r.step()


async def test_closing_a_step_aborts_it_upstream_and_keeps_its_accounts() -> None:
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with rig(script) as r:
        async with aclosing(r.guard.stream(ASK, ME)) as chunks:
            await anext(chunks)
        await asyncio.wait_for(script.aborted.wait(), 5)
        assert (r.finished().error, r.finished().think_tokens) == ("cancelled", 2)


async def test_cancelling_the_task_of_a_step_aborts_it_upstream() -> None:
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with rig(script) as r:
        task = asyncio.create_task(r.step())
        while not script.seen:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(script.aborted.wait(), 5)
        assert r.finished().error == "cancelled"


async def test_a_client_that_hangs_up_while_sending_its_request_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    async with rig(Script()) as r:
        host, port = r.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        await asyncio.sleep(0.3)
        async with httpx2.AsyncClient(base_url=r.url) as client:
            assert (await client.get("/health")).status_code == 200
    assert "Traceback" not in capfd.readouterr().err


async def test_streamed_and_whole_replies_say_the_same() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS))) as r, httpx2.AsyncClient(base_url=r.url) as client:
        whole = (await client.post("/v1/chat/completions", json=ASK)).json()
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "bb", "reasoning": "aaa"}
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == 7
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = (await client.post("/v1/chat/completions", json={**ASK, **options})).text
        events = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert text([json.loads(e) for e in events[:-1]]) == "bb"
        assert json.loads(events[-2])["usage"] == whole["usage"]


async def test_tool_calls_in_pieces_are_put_together() -> None:
    def piece(**function: str) -> list[dict[str, Any]]:
        return [{"index": 0, **({"id": "c1", "type": "function"} if "name" in function else {}), "function": function}]

    script = Script(
        chat=[
            chunk([A, END], reasoning="a"), chunk([B], tool_calls=piece(name="run", arguments="")),
            chunk([B], tool_calls=piece(arguments='{"a":')), chunk([B], tool_calls=piece(arguments="1}")),
            chunk([STOP], finish="tool_calls"), USAGE,
        ]
    )  # fmt: skip
    async with rig(script) as r, httpx2.AsyncClient(base_url=r.url) as client:
        message = (await client.post("/v1/chat/completions", json=ASK)).json()["choices"][0]["message"]
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a":1}'}}]
    assert message["content"] is None


async def test_every_route_but_health_needs_the_key() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS)), api_key="s3cret") as r, httpx2.AsyncClient(base_url=r.url) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/v1/models", "/agentguard/events", "/agentguard/sessions"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"Authorization": "Bearer wrong"})).status_code == 401
        right = {"Authorization": "Bearer s3cret"}
        assert (await client.get("/v1/models", headers=right)).json()["data"][0]["max_model_len"] == 1000
        assert (await client.post("/v1/chat/completions", json=ASK, headers=right)).status_code == 200


@pytest.mark.parametrize("api_key", ["agents", None])
async def test_an_agent_cannot_raise_its_own_limit_or_close_others_with_an_operator_s_key_set(api_key: str | None) -> None:
    agent = {"Authorization": "Bearer agents"}
    async with (
        rig(Script(chat=list(THINKS_AND_ANSWERS)), api_key=api_key, operator_key="0perator") as r,
        httpx2.AsyncClient(base_url=r.url) as client,
    ):
        assert (await client.post("/v1/chat/completions", json=ASK, headers=agent)).status_code == 200
        for path in ("/agentguard/close", "/agentguard/sessions/limit"):
            assert (await client.post(path, json={}, headers=agent)).status_code == (401 if api_key is None else 403)
            assert (await client.post(path, json={}, headers={"Authorization": "Bearer 0perator"})).status_code == 400


async def test_events_are_streamed_without_content() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS))) as r, httpx2.AsyncClient(base_url=r.url) as client:
        async with client.stream("GET", "/agentguard/events") as response:
            lines = response.aiter_lines()
            await anext(lines)
            async with httpx2.AsyncClient(base_url=r.url) as other:
                await other.post("/v1/chat/completions", json=ASK, headers={"X-Session-Id": "fix-1234"})
            seen = []
            async for line in lines:
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                if len(seen) == 2:
                    break
        assert [e["type"] for e in seen] == ["step_started", "step_finished"]
        assert seen[0]["session"] == "fix-1234"
        assert (await client.get("/agentguard/sessions")).json()["sessions"][0]["tokens"] == 7


async def test_a_body_that_is_no_object_is_a_400() -> None:
    async with rig(Script()) as r, httpx2.AsyncClient(base_url=r.url) as client:
        for raw in (b"", b"[]", b"{", b"\xff\xfe"):
            reply = await client.post("/v1/chat/completions", content=raw)
            assert reply.status_code == 400
            assert "body" in reply.json()["error"]["message"]
