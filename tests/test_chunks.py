"""Servers differ in what they stream: what the guard makes of it, chunk by chunk and in whole replies."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from agentguard.engines.asgi import AsgiTransport
from agentguard.engines.chunks import Chunks, count, joined, paired, sendable
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.errors import EngineError
from agentguard.events import Note
from agentguard.replies import collect
from agentguard.telemetry.hub import Hub
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, text_chunk, thinking
from tests.test_guard import ASK, THINKS_AND_ANSWERS, rig, text

ANSWER = [text_chunk([B, STOP], "b", "stop"), USAGE]


def beside(field: dict[str, Any], *, alone: bool) -> list[dict[str, Any]]:
    """A trace of 300 tokens whose deltas have ``field`` too, or alone."""
    out = thinking(300)
    for one in out:
        delta = one["choices"][0]["delta"]
        said = delta.pop("reasoning") if alone else delta["reasoning"]
        delta |= json.loads(json.dumps(field).replace("SAID", said))
    return [*out, chunk([], finish="length"), USAGE]


DETAILS = {"reasoning_details": [{"type": "reasoning.text", "text": "SAID", "index": 0}]}
SUMMARY = {"reasoning_details": [{"type": "reasoning.summary", "summary": "SAID"}]}
BLOCKS = {"thinking_blocks": [{"type": "thinking", "thinking": "SAID"}]}
OTHERS = {"provider_specific_fields": {"x": "SAID"}, "tool_calls": [], "refusal": None, "audio": {}, "x_new": "SAID"}


@pytest.mark.parametrize(
    ("field", "alone"), [(DETAILS, False), (DETAILS, True), (SUMMARY, True), (BLOCKS, False), (BLOCKS, True), (OTHERS, False)]
)
@pytest.mark.parametrize("ids", [True, False])
async def test_what_a_trace_has_beside_its_text_is_no_answer(field: dict[str, Any], alone: bool, ids: bool) -> None:
    script = Script(
        chat=lambda _: beside(field, alone=alone), complete=ANSWER, again=[chunk([B], content="b"), *DONE], tokenizes=ids
    )
    async with rig(script) as r:
        chunks = await r.step()
        assert (text(chunks), r.finished().closed, r.finished().empty_answer) == ("b", "reserve", False)
        assert r.finished().think_tokens == 51
        # a trace that came in blocks alone reads as one that did not, and none is said twice
        assert len(text(chunks, "reasoning")) == 51


DONE = [chunk([STOP], finish="stop"), USAGE]


def call(name: str, arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | fields


@pytest.mark.parametrize(
    "pieces",
    [
        [[call("read", id="c1")], [call("write", id="c2")]],
        [[call("read", id="c1"), call("write", id="c2")]],
        [[call("read", id="c1", index=0)], [call("write", id="c2", index=0)]],
        [[call("read", id="c1", index=None)], [call("write", id="c2", index=1)]],
        [[call("read", id="c1", index=1)], [call("write", id="c2", index=2)]],
        [[call("read", "{", id="c1", index=0)], [{"index": 0, "function": {"arguments": "}"}}], [call("write", id="c2", index=1)]],
        # id and name with each piece, or another id with each piece
        [[call("read", "{", id="c1", index=0)], [call("read", "}", id="c1", index=0)], [call("write", id="c2", index=1)]],
        [
            [call("read", "{", id="c1", index=0)],
            [{"id": "x", "index": 0, "function": {"arguments": "}"}}],
            [call("write", id="c2", index=1)],
        ],
        [[call("read", "{", id="c1")], [{"function": {"arguments": "}"}}], [call("write", id="c2")]],
        # the id behind the name
        [
            [{"index": 0, "function": {"name": "read"}}],
            [{"index": 0, "id": "c1", "type": "function", "function": {"arguments": "{}"}}],
            [call("write", id="c2", index=1)],
        ],
        [[call("read", {}, id="c1", index=0)], [call("write", {}, id="c2", index=1)]],
        [[None, "x", 5, [], {}, {"function": None}, call("read", id="c1", index=0)], [call("write", id="c2", index=True)]],
    ],
)
async def test_tool_calls_are_told_apart(pieces: list[list[Any]]) -> None:
    chat = [
        chunk([A, END], reasoning="a"),
        *(chunk([B], tool_calls=piece) for piece in pieces),
        chunk([STOP], finish="tool_calls"),
        USAGE,
    ]
    expected = [call("read", id="c1"), call("write", id="c2")]
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read", "write")]
    async with rig(Script(chat=chat)) as r, httpx2.AsyncClient(base_url=r.url) as client:
        whole = await client.post("/v1/chat/completions", json=ASK | {"tools": tools})
        assert whole.json()["choices"][0]["message"]["tool_calls"] == expected
        put_together: dict[int, dict[str, Any]] = {}
        for one in await r.step({**ASK, "tools": tools}):
            for piece in one["choices"][0]["delta"].get("tool_calls") or () if one["choices"] else ():
                mine = put_together.setdefault(piece["index"], call("", ""))
                mine |= {k: piece[k] for k in ("id",) if k in piece}
                for key, value in piece["function"].items():
                    mine["function"][key] += value
        assert [put_together[i] for i in range(2)] == expected


def test_a_function_s_name_may_come_in_pieces() -> None:
    chunks = Chunks()
    pieces = [
        {"index": 0, "id": "a", "function": {"name": "get_", "arguments": ""}}, {"index": 0, "function": {"name": "weather"}},
        {"index": 0, "function": {"arguments": "{}"}},
    ]  # fmt: skip
    told = [
        chunks.take({"choices": [{"delta": {"tool_calls": [piece]}}]})["choices"][0]["delta"]["tool_calls"][0] for piece in pieces
    ]
    assert [one["index"] for one in told] == [0, 0, 0]
    assert "".join(one["function"].get("name", "") for one in told) == "get_weather"


def test_calls_without_ids_are_told_apart_by_the_next_function_s_name() -> None:
    shape = Chunks()
    deltas = [shape.take({"choices": [{"delta": {"tool_calls": [piece]}}]}) for piece in (
        call("read", "{", index=0), {"index": 0, "function": {"arguments": "}"}}, call("write", index=0), call("write"),
    )]  # fmt: skip
    assert [d["choices"][0]["delta"]["tool_calls"][0]["index"] for d in deltas] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([{"refusal": "I "}, {"refusal": "cannot"}], {"refusal": "I cannot"}),
        (
            [{"function_call": {"name": "f", "arguments": ""}}, {"function_call": {"arguments": "{}"}}],
            {"function_call": {"name": "f", "arguments": "{}"}},
        ),
        (
            [{"audio": {"id": "a", "data": "x"}}, {"audio": {"data": "y", "expires_at": 5}}],
            {"audio": {"id": "a", "data": "xy", "expires_at": 5}},
        ),
        ([{"images": [{"type": "image_url"}]}, {"images": [{"type": "image_url"}]}], {"images": [{"type": "image_url"}] * 2}),
        (
            [{"content": "b", "annotations": [{"type": "url_citation"}]}] * 2,
            {"content": "bb", "annotations": [{"type": "url_citation"}] * 2},
        ),
        (
            [{"content": "b", **json.loads(json.dumps(DETAILS))}] * 2,
            {"reasoning_details": [{"type": "reasoning.text", "text": "SAIDSAID", "index": 0}]},
        ),
    ],
)
async def test_whole_replies_hold_all_that_was_streamed(pieces: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    chat = [chunk([A, END], reasoning="a"), *(chunk([B], **piece) for piece in pieces), *DONE]
    async with rig(Script(chat=chat)) as r, httpx2.AsyncClient(base_url=r.url) as client:
        message = (await client.post("/v1/chat/completions", json=ASK)).json()["choices"][0]["message"]
        assert {k: message.get(k) for k in whole} == whole
        assert not r.finished().empty_answer
        assert not r.finished().continued


async def test_hidden_reasoning_is_hidden_in_blocks_too() -> None:
    async with rig(Script(chat=[*beside(DETAILS, alone=True)[:3], chunk([END, B], content="b"), *DONE])) as r:
        chunks = await r.step({**ASK, "include_reasoning": False})
        assert "reasoning" not in json.dumps([c["choices"] for c in chunks])
        assert (text(chunks), r.finished().think_tokens) == ("b", 3)


@pytest.mark.parametrize(
    ("reasoning", "total"), [(-1, 5), (10**9, 5), (True, 5), ("2", 5), (2, -5), (2, 10**15), (2, True), (-1, 10**15), (2.5, 2.5)]
)
async def test_a_count_that_cannot_be_true_is_not_believed(reasoning: Any, total: Any) -> None:
    usage = {"prompt_tokens": total, "completion_tokens": total, "completion_tokens_details": {"reasoning_tokens": reasoning}}
    spec = {"num_spec_steps": reasoning, "num_draft_tokens": -3, "num_accepted_draft_tokens": total}
    last = USAGE | {"usage": usage, "metrics": {"speculative_decoding": spec}}
    chat = [chunk([], reasoning="aaa"), chunk([], content="bbb"), chunk([], finish="stop"), last]
    async with rig(Script(chat=chat, tokenizes=False)) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.post("/v1/chat/completions", json=ASK)
        assert reply.status_code == 200
        done = r.finished()
        assert 0 < done.think_tokens < done.tokens <= 5
        assert (done.error, done.rounds, done.reported_think) == ("", None, None)
        assert sum(session.tokens for session in r.guard.sessions) == done.tokens


PAIR = ["smile \ud83d", "\ude00!"]


@pytest.mark.parametrize(
    ("field", "stream"), [("content", True), ("content", False), ("reasoning", False), ("refusal", False), ("arguments", False)]
)
async def test_a_pair_that_is_split_over_chunks_comes_out_whole(field: str, stream: bool) -> None:
    def delta(piece: str) -> dict[str, Any]:
        return {"tool_calls": [call("f", piece, index=0, id="c")]} if field == "arguments" else {field: piece}

    chat = [f"data: {json.dumps(chunk([A], **delta(piece)))}\n\n" for piece in PAIR]
    half = json.dumps(chunk([END, B], content="end \ud83d"))
    chat += [f"data: {half}\n\n"]
    async with rig(Script(chat=[*chat, *DONE])) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.post("/v1/chat/completions", json=ASK | {"stream": stream})
        assert reply.status_code == 200
        said = (
            [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")] if stream else [reply.json()]
        )
        told = json.dumps(said, ensure_ascii=False)
        assert "😀!" in told
        assert "�" in told  # half a character at the end of the answer is none
        told.encode()
        assert r.finished().error == ""


async def test_what_cannot_be_sent_on_is_made_sendable_wherever_it_stands() -> None:
    odd = chunk([A, END, B], content="b") | {"model": "half \ud83d", "x": [float("nan"), {"\udc00": "\ud83d\ude00"}]}
    async with rig(Script(chat=[f"data: {json.dumps(odd)}\n\n", *DONE])) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.post("/v1/chat/completions", json=ASK | {"stream": True})
        assert '"half �"' in reply.text
        assert '[null,{"�":"😀"}]' in reply.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/models", "/metrics"])
async def test_a_body_that_cannot_be_decoded_is_an_error_of_the_engine(path: str) -> None:
    async def garbled(_: Any) -> Response:
        return Response(b"not gzip at all", headers={"content-encoding": "gzip", "content-type": "text/event-stream"})

    app = Starlette(routes=[Route(path, garbled, methods=["GET", "POST"])])
    engine = OpenAIEngine("http://engine", transport=AsgiTransport(app))
    calls = {
        "/v1/chat/completions": lambda: collect(engine.chat({}, "r", "s")), "/tokenize": lambda: engine.tokenize_chat({}),
        "/v1/models": engine.info, "/metrics": engine.metrics,
    }  # fmt: skip
    with pytest.raises(EngineError, match="cannot be understood"):
        await calls[path]()
    await engine.aclose()


@pytest.mark.parametrize(
    ("behind", "hang_up"),
    [
        (['data: {"choices":[],"usa\n\n'], False),
        ([{"error": {"message": "late", "code": 500}}], False),
        ([USAGE], True),
        ([{"choices": "x"}], False),
    ],
)
@pytest.mark.parametrize("continued", [False, True])
async def test_a_fault_behind_the_finish_reason_takes_no_answer_back(behind: list[Any], hang_up: bool, continued: bool) -> None:
    chat: list[Any] = [*THINKS_AND_ANSWERS[:-1], *behind]
    script = Script(chat=chat, hang_up=hang_up)
    if continued:
        script = Script(chat=[*thinking(3), *DONE], complete=[text_chunk([B, STOP], "bb", "stop"), *behind])
        if hang_up:  # the trace's stream breaks too, behind its end
            script.hang_up = True
    async with rig(script) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.post("/v1/chat/completions", json=ASK)
        assert reply.json()["choices"][0]["message"]["content"] == "bb"
        chunks = await r.step()
        assert (text(chunks), chunks[-2]["choices"][0]["finish_reason"], r.finished().error) == ("bb", "stop", "")
        assert Note.FAULT_BEHIND in r.finished().notes


async def test_a_content_filter_leaves_a_line() -> None:
    async with rig(Script(chat=[*thinking(3), chunk([], finish="content_filter"), USAGE], complete=ANSWER)) as r:
        chunks = await r.step()
        assert (text(chunks), len(chunks[-1]["choices"])) == ("(no answer: the server's content filter ended it)", 0)
        assert chunks[-2]["choices"][0]["finish_reason"] == "content_filter"
        assert Note.EMPTY_ANSWER in r.finished().notes


MEDIA = [
    {"role": "user", "content": [{"type": kind, kind: {"url": "data:x/y;base64,AAAA"}}]}
    for kind in ("image_url", "input_audio", "video_url", "file")
] + [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]


@pytest.mark.parametrize("message", MEDIA, ids=lambda m: json.dumps(m)[:40])
@pytest.mark.parametrize("carrier", ["reasoning", ""])
async def test_a_step_with_pictures_goes_on_with_its_pictures(message: dict[str, Any], carrier: str) -> None:
    again = [chunk([], role="assistant"), chunk([B], content="b"), *DONE]
    # the server fills in what stands for the picture when it serves
    served = chunk([], role="assistant") | {"prompt_token_ids": [5, 77, 77, 77, 77, 6, 1]}
    script = Script(chat=[served, *thinking(200)], again=again, complete=ANSWER, carrier=carrier)
    async with rig(script) as r:
        assert text(await r.step({**ASK, "messages": [message, *ASK["messages"]]})) == "b"
        assert r.finished().closed
    assert [path for path, _, _ in script.seen] == ["/v1/chat/completions"] * 2
    assert script.seen[1][1]["messages"][0] == message
    assert script.seen[1][1].get("continue_final_message", False) is bool(carrier)


def test_half_a_pair_in_a_trace_and_in_its_blocks_counts_once() -> None:
    shape = Chunks()
    deltas = [{"reasoning": half, "reasoning_details": [{"type": "reasoning.text", "text": half}]} for half in ("\ud83d", "\ude00")]
    taken = [shape.take({"choices": [{"delta": delta}]})["choices"][0]["delta"] for delta in deltas]
    assert "".join(delta["reasoning"] for delta in taken) == "😀"


def test_counts_and_texts_by_themselves() -> None:
    assert [count(value, 5) for value in (0, 5, 6, -1, True, 1.0, None, "1")] == [0, 5] + [None] * 6
    assert paired("\ud83d\ude00 \ud83d x \udc00") == "😀 � x �"
    assert sendable({"a": [float("inf"), 1.5, "\ud800", 2]}) == {"a": [None, 1.5, "�", 2]}
    signed = joined(
        [{"type": "thinking", "thinking": "a"}], [{"type": "thinking", "thinking": "b", "signature": "s"}, {"type": "x"}]
    )
    assert signed == [{"type": "thinking", "thinking": "ab", "signature": "s"}, {"type": "x"}]


def test_a_sink_that_fails_breaks_nothing() -> None:
    hub, seen = Hub(), list[Any]()

    def broken(_: Any) -> None:
        raise ValueError("negative")

    with hub.sink(broken), hub.sink(seen.append):
        hub.publish("event")  # type: ignore[arg-type]
    assert seen == ["event"]
