"""Chat completions, messages and responses through a real LiteLLM, with the official SDKs: whatever the guard does to the stream
below, each protocol keeps its grammar (design note budgets.md, section 5; the numbers are its cases)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.proxy.agent import DONE, agent
from tests.proxy.conftest import Behind
from tests.scripted import END, STOP, USAGE, A, B, Items, Script, chunk, thinking

# the first run makes LiteLLM's environment
pytestmark = [pytest.mark.proxy, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ASK = [{"role": "user", "content": "write the file"}]
PROTOCOLS = ("chat", "messages", "responses")
CALLED = [{"command": "printf 'made by the agent' > x"}]
ANSWERS: Items = [
    chunk([], role="assistant"), chunk([A, A], reasoning="ab"), chunk([A, END, B], reasoning="c", content="d"),
    chunk([B, STOP], content="e", finish="stop"), USAGE,
]  # fmt: skip


@dataclass
class Turn:
    """What a client sees of one step, whatever its protocol."""

    think: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""
    reasoning_tokens: int | None = None
    tokens: int = 0
    raw: Any = None


async def chat(behind: Behind, *, stream: bool, tools: bool = True, **extra: Any) -> Turn:
    client = behind.openai()
    options: dict[str, Any] = {"model": "scripted", "messages": ASK, "max_tokens": 4000} | extra
    if tools:
        options["tools"] = [{"type": "function", "function": {"name": "bash", "description": "a shell", "parameters": SCHEMA}}]
    turn = Turn()
    if not stream:
        reply = await client.chat.completions.create(**options)
        message, turn.finish = reply.choices[0].message, reply.choices[0].finish_reason
        turn.think, turn.text = getattr(message, "reasoning_content", None) or "", message.content or ""
        turn.calls = [json.loads(c.function.arguments) for c in message.tool_calls or ()]  # type: ignore[union-attr]
        usage = reply.usage
    else:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
        parts = [c async for c in await client.chat.completions.create(**options)]
        turn.raw = parts
        choices = [c.choices[0] for c in parts if c.choices]
        assert len({c.id for c in parts}) == 1
        (turn.finish,) = [c.finish_reason for c in choices if c.finish_reason]
        turn.think = "".join(getattr(c.delta, "reasoning_content", None) or "" for c in choices)
        turn.text = "".join(c.delta.content or "" for c in choices)
        written = "".join(t.function.arguments or "" for c in choices for t in c.delta.tool_calls or ())
        turn.calls = [json.loads(written)] if written else []
        usage = parts[-1].usage
    assert usage is not None
    turn.tokens = usage.completion_tokens
    turn.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens if usage.completion_tokens_details else None
    return turn


async def messages(behind: Behind, *, stream: bool, tools: bool = True, **extra: Any) -> Turn:
    client = behind.anthropic()
    # Claude Code asks so for a model it does not know (case 13)
    options: dict[str, Any] = {"model": "claude-anything", "messages": ASK, "max_tokens": 4000, "thinking": {"type": "adaptive"}}
    options |= extra
    if tools:
        options["tools"] = [{"name": "bash", "description": "a shell", "input_schema": SCHEMA}]
    if not stream:
        reply = await client.messages.create(**options)
    else:
        async with client.messages.stream(**options) as events:
            raw = [event async for event in events]
            reply = await events.get_final_message()
        check_blocks([e.model_dump() for e in raw if e.type in BLOCK_EVENTS])
    order = [block.type for block in reply.content]
    assert order == sorted(order, key=("thinking", "text", "tool_use").index)
    return Turn(
        think="".join(b.thinking for b in reply.content if b.type == "thinking"),
        text="".join(b.text for b in reply.content if b.type == "text"),
        calls=[b.input for b in reply.content if b.type == "tool_use"],  # type: ignore[misc]
        finish=reply.stop_reason or "", tokens=reply.usage.output_tokens, raw=reply,
    )  # fmt: skip


async def responses(behind: Behind, *, stream: bool, tools: bool = True, **extra: Any) -> Turn:
    client = behind.openai()
    options: dict[str, Any] = {"model": "scripted", "input": "write the file", "max_output_tokens": 4000, "store": False} | extra
    if tools:
        options["tools"] = [{"type": "function", "name": "bash", "description": "a shell", "parameters": SCHEMA, "strict": False}]
    if not stream:
        reply = await client.responses.create(**options)
    else:
        raw = [event async for event in await client.responses.create(stream=True, **options)]
        kinds = [event.type for event in raw]
        assert kinds[0] == "response.created"
        if kinds[-1] == "response.failed":
            raise RuntimeError(raw[-1].response.error.message)
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
        reply = raw[-1].response
    turn = Turn(finish=reply.status or "", tokens=reply.usage.output_tokens if reply.usage else 0, raw=reply)
    for item in reply.output:
        if item.type == "reasoning":
            turn.think += "".join(part.text for part in [*(item.summary or ()), *(item.content or ())])
        elif item.type == "message":
            turn.text += "".join(part.text for part in item.content if part.type == "output_text")
        elif item.type == "function_call":
            turn.calls.append(json.loads(item.arguments))
    turn.reasoning_tokens = reply.usage.output_tokens_details.reasoning_tokens if reply.usage else None
    return turn


ASKS: dict[str, Callable[..., Coroutine[Any, Any, Turn]]] = {"chat": chat, "messages": messages, "responses": responses}
TOOL_FINISH = {"chat": "tool_calls", "messages": "tool_use", "responses": "completed"}
TEXT_FINISH = {"chat": "stop", "messages": "end_turn", "responses": "completed"}
BLOCK_EVENTS = ("message_start", "message_delta", "message_stop", *(f"content_block_{what}" for what in ("start", "delta", "stop")))
DELTAS = {"thinking": ("thinking_delta", "signature_delta"), "text": ("text_delta",), "tool_use": ("input_json_delta",)}


def check_blocks(events: list[dict[str, Any]]) -> list[str]:
    """The grammar of a messages stream (case 25): numbered blocks one behind the other, and in each only its own deltas."""
    kinds: list[str] = []
    open_block: str | None = None
    assert events[0]["type"] == "message_start"
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(kinds)
            open_block = event["content_block"]["type"]
            kinds.append(open_block)
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(kinds) - 1
            assert open_block is not None
            assert event["delta"]["type"] in DELTAS[open_block]
        else:
            assert event["type"] == "content_block_stop"
            assert event["index"] == len(kinds) - 1
            open_block = None
    assert open_block is None
    return kinds


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_step_that_needs_no_help_passes_unchanged(behind: Behind, protocol: str, stream: bool) -> None:
    behind.says(Script(chat=ANSWERS, window=8192))
    turn = await ASKS[protocol](behind, stream=stream, tools=False)
    assert (turn.think, turn.text, turn.calls, turn.finish) == ("abc", "de", [], TEXT_FINISH[protocol])
    (step,) = behind.finished
    assert (step.closed, step.think_tokens, step.answer_tokens) == ("", 3, 2)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_13_25_a_cut_trace_goes_on_to_its_tool_call(behind: Behind, protocol: str, stream: bool) -> None:
    behind.says(Script(chat=agent("x"), window=8192, carrier="reasoning"))
    turn = await ASKS[protocol](behind, stream=stream)
    assert (turn.calls, turn.finish) == (CALLED, TOOL_FINISH[protocol])
    assert 200 <= len(turn.think) <= 203  # a letter a token
    (step,) = behind.finished
    assert (step.closed, step.continued, step.error) == ("budget", True, "")
    assert 200 <= step.think_tokens <= 203
    if turn.reasoning_tokens is not None:
        assert turn.reasoning_tokens == step.think_tokens


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_cut_trace_without_tools_goes_on_to_its_answer(behind: Behind, protocol: str, stream: bool) -> None:
    from tests.scripted import text_chunk

    answer = [text_chunk([B], "so "), text_chunk([B, STOP], "it is", "stop"), USAGE]
    behind.says(Script(chat=[*thinking(4000), chunk([], finish="length"), USAGE], complete=answer, window=8192))
    turn = await ASKS[protocol](behind, stream=stream, tools=False)
    assert (turn.text, turn.finish, behind.finished[0].closed) == ("so it is", TEXT_FINISH[protocol], "budget")


async def test_25_thinking_between_two_tool_calls_keeps_the_block_grammar(behind: Behind) -> None:
    """The thinking of the first turn comes back as a block in the second, and the server reads it as reasoning."""
    script = behind.says(Script(chat=agent("x"), window=8192, carrier="reasoning"))
    first = await messages(behind, stream=True)
    blocks = [b.model_dump(exclude_none=True) for b in first.raw.content]
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "done"}
    history = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    second = await messages(behind, stream=True, messages=history)
    assert (second.text.strip(), second.finish) == (DONE, "end_turn")
    assert second.think
    one, two = behind.finished
    assert (one.session, one.step, two.session, two.step) == (two.session, 1, one.session, 2)
    sent = script.seen[-1][1]["messages"]
    assert any(first.think in str(m.get("reasoning_content") or m.get("reasoning") or "") for m in sent if m["role"] == "assistant")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_41_a_step_that_ran_out_of_tokens_says_so(behind: Behind, protocol: str, stream: bool) -> None:
    cut = [chunk([A, END, B], reasoning="a", content="b"), chunk([B], content="c", finish="length"), USAGE]
    behind.says(Script(chat=cut, window=8192))
    turn = await ASKS[protocol](behind, stream=stream, tools=False)
    assert turn.text == "bc"
    if protocol == "responses":
        assert turn.finish == "incomplete"
        assert turn.raw.incomplete_details.reason == "max_output_tokens"
    else:
        assert turn.finish == {"chat": "length", "messages": "max_tokens"}[protocol]


BUDGETS = [
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1234}}),
    ("messages", {"extra_body": {"thinking_token_budget": 1234}}),
    ("messages", {"extra_body": {"chat_template_kwargs": {"thinking_budget": 1234}}}),
    ("chat", {"extra_body": {"thinking": {"type": "enabled", "budget_tokens": 1234}}}),
    ("chat", {"extra_body": {"thinking_token_budget": 1234}}),
    ("chat", {"extra_body": {"chat_template_kwargs": {"thinking_token_budget": 1234}}}),
    ("responses", {"extra_body": {"thinking_token_budget": 1234}}),
    ("responses", {"extra_body": {"chat_template_kwargs": {"budget_tokens": 1234}}}),
]


@pytest.mark.parametrize(("protocol", "asked"), BUDGETS)
async def test_a_client_s_exact_budget_reaches_the_server(behind: Behind, protocol: str, asked: dict[str, Any]) -> None:
    script = behind.says(Script(chat=ANSWERS, window=8192))
    await ASKS[protocol](behind, stream=True, tools=False, **asked)
    (started,) = behind.started
    assert (started.think_cap, started.bound_by) == (1234, "client")
    assert script.seen[0][1]["thinking_token_budget"] in (1234, 1235)  # counted from the marker that the prompt opens with


@pytest.mark.parametrize(
    ("protocol", "asked"),
    [
        ("chat", {"reasoning_effort": "high"}),
        ("messages", {"output_config": {"effort": "high"}}),
        ("responses", {"reasoning": {"effort": "high"}}),
    ],
)
async def test_an_effort_reaches_the_server(behind: Behind, protocol: str, asked: dict[str, Any]) -> None:
    script = behind.says(Script(chat=ANSWERS, window=8192))
    await ASKS[protocol](behind, stream=True, tools=False, **asked)
    assert script.seen[0][1]["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("protocol", "asked", "session"),
    [
        ("chat", {"extra_headers": {"x-session-id": "ses_abcdefgh"}}, "ses_abcdefgh"),
        ("chat", {"extra_headers": {"x-litellm-trace-id": "t1", "x-session-id": "ses_abcdefgh"}}, "t1"),
        ("messages", {"extra_headers": {"x-claude-code-session-id": "c0ffee00-1234"}}, "c0ffee00-1234"),
        ("messages", {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "c0ffee00"})}}, "c0ffee00"),
        ("messages", {"metadata": {"user_id": "user_x_account__session_11112222"}}, "11112222"),
        ("responses", {"extra_headers": {"session-id": "01a2-b3c4"}}, "01a2-b3c4"),
        ("responses", {"metadata": {"session_id": "mine-1234"}}, "mine-1234"),
    ],
)
async def test_a_session_is_recognised_in_every_protocol(
    behind: Behind, protocol: str, asked: dict[str, Any], session: str
) -> None:
    behind.says(Script(chat=ANSWERS, window=8192))
    for _ in range(2):
        await ASKS[protocol](behind, stream=True, tools=False, **asked)
    assert [s.session.partition("/")[2] for s in behind.finished] == [session] * 2
    assert behind.finished[1].step == behind.finished[0].step + 1


async def test_33_subagents_share_an_account_and_have_windows_of_their_own(behind: Behind) -> None:
    behind.says(Script(chat=ANSWERS, window=8192))
    child = {"x-session-id": "ses_child000", "x-parent-session-id": "ses_parent00"}
    helper = {"x-claude-code-session-id": "ses_parent00", "x-claude-code-agent-id": "helper"}
    for headers in ({"x-session-id": "ses_parent00"}, child, helper):
        await chat(behind, stream=True, tools=False, extra_headers=headers)
    assert {s.session.partition("/")[2] for s in behind.finished} == {"ses_parent00"}
    assert [(s.step, s.agent) for s in behind.finished] == [(1, ""), (2, "ses_child000"), (3, "helper")]


# -- errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_39_40_a_stopped_session_gets_a_reason_and_goes_on_when_its_limit_is_raised(behind: Behind, protocol: str) -> None:
    behind.says(Script(chat=ANSWERS, window=8192))
    behind.limits(steps=2)
    headers = {"x-session-id": f"limited-{protocol}"}
    for _ in range(2):
        await ASKS[protocol](behind, stream=True, tools=False, extra_headers=headers)
    with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as refused:
        await ASKS[protocol](behind, stream=True, tools=False, extra_headers=headers)
    assert "steps is 2 of 2" in str(refused.value)
    assert "raise the limit" in str(refused.value)
    if protocol != "messages":  # there LiteLLM keeps no header of an error
        assert refused.value.response.headers["retry-after"] == "60"
        assert refused.value.response.headers["x-should-retry"] == "false"
    session = behind.finished[-1].session
    async with httpx2.AsyncClient(base_url=behind.gateway) as operator:
        raised = await operator.post("/agentguard/sessions/limit", json={"session": session, "meter": "steps", "limit": 9})
        assert raised.json() == {"known": True}
    assert (await ASKS[protocol](behind, stream=True, tools=False, extra_headers=headers)).text == "de"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_overloaded_engine_is_told_as_such(behind: Behind, protocol: str, stream: bool) -> None:
    script = behind.says(Script(status=503, message="the server is overloaded", window=8192))
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as refused:
        await ASKS[protocol](behind, stream=stream, tools=False)
    assert refused.value.status_code == 503
    assert "overloaded" in str(refused.value)
    assert len(script.seen) == 1  # nobody in between tried again
    behind.says(Script(chat=ANSWERS, window=8192))
    assert (await ASKS[protocol](behind, stream=stream, tools=False)).text == "de"  # and nobody was put aside


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_engine_that_dies_in_the_middle_ends_the_stream_with_an_error(behind: Behind, protocol: str) -> None:
    behind.says(Script(chat=thinking(20), hang_up=True, window=8192))
    with pytest.raises((openai.APIError, anthropic.APIError, RuntimeError)) as died:
        await ASKS[protocol](behind, stream=True, tools=False)
    assert "is gone" in str(died.value) or "before its end" in str(died.value)
    assert behind.finished[0].error


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_client_that_hangs_up_stops_the_engine(behind: Behind, protocol: str, stream: bool) -> None:
    script = behind.says(Script(chat=thinking(20), hold=asyncio.Event(), window=8192, aborted=asyncio.Event()))
    working = asyncio.create_task(ASKS[protocol](behind, stream=stream, tools=False))
    while not script.seen:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await asyncio.wait_for(script.aborted.wait(), 10)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_34_a_prompt_that_does_not_fit_is_told_so_and_not_sent_again(behind: Behind, protocol: str) -> None:
    script = behind.says(Script(status=400, message="This model's maximum context length is 8192 tokens, too long", window=8192))
    for _ in range(3):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="context window of 8192 tokens"):
            await ASKS[protocol](behind, stream=True, tools=False, extra_headers={"x-session-id": f"overflow-{protocol}"})
    assert len(script.seen) == 1


async def test_a_wrong_key_is_refused_and_no_key_stands_in_a_command_line_or_a_log(behind: Behind) -> None:
    client = openai.AsyncOpenAI(base_url=f"{behind.proxy.url}/v1", api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.APIStatusError) as refused:  # LiteLLM answers 400 where it has no database to look the key up in
        await client.chat.completions.create(model="scripted", messages=ASK)  # type: ignore[arg-type]
    assert refused.value.status_code in (400, 401)
    await client.close()
    assert behind.key not in str(refused.value)
    assert behind.key not in await asyncio.to_thread(everything_said, behind)


def everything_said(behind: Behind) -> str:
    from pathlib import Path

    said = [behind.proxy.log.read_text(), repr(behind.events), repr(behind.guard.sessions)]
    said += [path.read_text() for path in behind.proxy.log.parent.rglob("*.yaml")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(said)
