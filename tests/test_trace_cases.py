"""What users reported about runaway and lost reasoning (design note budgets.md, section 5; the numbers are its cases).

Against a scripted server on a real socket: these are servers that loop, stall, ignore budgets and misfile text, which the reference
pair does not do. What the real engine can show is in tests/engine/test_trace_control.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from agentguard.continuation import without_copies, without_partial
from agentguard.errors import ConfigError, EngineRequestError, SessionLimitError
from agentguard.events import Note, SessionAlarm, TraceClosed
from agentguard.identity import Identity
from agentguard.trace import Splitter
from agentguard.trace.loops import Loop
from tests.scripted import END, START, STOP, USAGE, A, B, Script, chunk, ids_of, text_chunk, thinking
from tests.test_guard import ASK, ME, Rig, rig, text

TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object", "properties": {}}}}]
ANSWER = [text_chunk([B, STOP], "b", "stop"), USAGE]
CHAT_ANSWER = [chunk([], role="assistant"), chunk([B], content="b"), chunk([STOP], finish="stop"), USAGE]
BIG: dict[str, Any] = {**ASK, "max_tokens": 4096}


def closes(r: Rig) -> list[TraceClosed]:
    return [e for e in r.events if isinstance(e, TraceClosed)]


def finishes(chunks: list[dict[str, Any]]) -> list[str]:
    return [c["choices"][0]["finish_reason"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]


def runaway(**options: Any) -> Script:
    """A server that thinks for 4,000 tokens whatever its budget is, and answers when its trace is continued."""
    return Script(**({"chat": [*thinking(4000), chunk([], finish="length"), USAGE], "complete": ANSWER, "window": 8192} | options))


# -- runaway thinking ---------------------------------------------------------------------------------------------------------


async def test_01_a_trace_of_4000_tokens_is_closed_at_its_budget_of_256() -> None:
    script = runaway(chat=[*thinking(400), 30.0, *thinking(3600), chunk([], finish="length"), USAGE])
    async with rig(script) as r:
        chunks = await r.step({**BIG, "thinking_token_budget": 256})
        assert abs(r.finished().think_tokens - 256) <= 1
        assert (text(chunks), finishes(chunks)) == ("b", ["stop"])
        assert len({c["id"] for c in chunks}) == 1
        await asyncio.wait_for(script.aborted.wait(), 5)
        assert script.seen[1][1]["prompt"][-1] == END
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == r.finished().tokens == r.finished().think_tokens + 3
        assert [(e.reason, e.how) for e in closes(r)] == [("budget", "tokens")]


@pytest.mark.parametrize("helped", [True, False])
async def test_02_content_is_never_null_and_never_the_raw_reasoning(helped: bool) -> None:
    nothing = [text_chunk([STOP], "", "stop"), USAGE]
    script = runaway(complete=ANSWER if helped else nothing, again=nothing)
    async with rig(script) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.post("/v1/chat/completions", json={**BIG, "max_tokens": 600})
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == ("b" if helped else "(no answer: the token limit was used up by the reasoning)")
        assert reply.json()["choices"][0]["finish_reason"] == ("stop" if helped else "length")
        assert message["reasoning"] not in message["content"]
        assert (Note.EMPTY_ANSWER in r.finished().notes) is not helped


async def test_03_a_think_budget_leaves_the_rest_of_max_tokens_to_the_answer() -> None:
    script = runaway()
    async with rig(script) as r:
        await r.step({**BIG, "thinking_token_budget": 512})
    assert script.seen[1][1]["max_tokens"] >= 3000


async def test_04_the_recipe_s_budget_holds_where_the_client_sends_none() -> None:
    async with rig(runaway(), cutoff={"think_tokens": 300}) as r:
        await r.step(BIG)
        assert (r.finished().think_tokens, r.started().bound_by, r.finished().closed) == (301, "policy", "budget")


async def test_05_every_turn_at_512_tokens_has_content() -> None:
    async with rig(runaway()) as r:
        for turn in range(8):
            chunks = await r.step({**ASK, "max_tokens": 512, "seed": turn})
            assert text(chunks) == "b"
            assert r.finished().tokens <= 512


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 700}, {"max_completion_tokens": 700}, {"max_tokens": 700, "max_completion_tokens": 700}]
)
async def test_06_either_name_of_the_limit_means_the_same(fields: dict[str, int]) -> None:
    script = runaway()
    async with rig(script) as r:
        await r.step({"messages": ASK["messages"], **fields})
        assert (r.started().budget, r.started().think_cap) == (700, 595)
    assert script.seen[0][1]["max_tokens"] == 700
    assert "max_completion_tokens" not in script.seen[0][1]


PARAGRAPH = (
    "Let me look at the configuration file once more, because the loader reads the section before the defaults are merged and the "
    "test expects the opposite order. If the merge comes second then the user's value wins, which is what the ticket asks for. "
    "However, the function that resolves the path is called from three places, and only one of them passes the base directory. "
    "So the other two would resolve against the working directory, which explains the failure on the build machine. I should "
    "change the signature and make the base directory mandatory, then fix the callers one after the other and run the tests. "
    "The documentation has to mention it as well, since plugins call this function directly and would break without a note. "
    "Let me write the patch for the loader first and then see what the type checker says about the remaining call sites.\n"
)
SENTENCE = "The user wants me to update the handler, so I need to read the handler file first. "


async def looped(unit: str, copies: int, **body: Any) -> tuple[Rig, Script, list[dict[str, Any]]]:
    script = Script(
        chat=[*thinking(0, a="First I read the task. " + unit * copies), chunk([], finish="length"), USAGE], complete=ANSWER,
        again=CHAT_ANSWER, window=200_000, prompt=[5, 6, START],
    )  # fmt: skip
    async with rig(script) as r:
        chunks = await r.step({**ASK, "max_tokens": 100_000, **body})
        return r, script, chunks


async def test_07_the_third_copy_of_a_paragraph_closes_the_trace() -> None:
    assert 700 <= len(PARAGRAPH) <= 900
    r, _, chunks = await looped(PARAGRAPH, 30)
    assert (r.finished().closed, text(chunks)) == ("loop", "b")
    assert r.finished().think_tokens <= 3.2 * len(PARAGRAPH)


async def test_08_a_sentence_said_hundreds_of_times_is_closed_within_five_repeats() -> None:
    r, _, chunks = await looped(SENTENCE, 300)
    assert (r.finished().closed, text(chunks)) == ("loop", "b")
    assert r.finished().think_tokens <= 23 + 6 * len(SENTENCE)


async def test_09_a_run_of_one_character_is_closed_and_not_replayed() -> None:
    r, script, chunks = await looped("!", 5000)
    assert (r.finished().closed, text(chunks)) == ("loop", "b")
    assert r.finished().think_tokens <= 23 + 70
    assert script.seen[1][1]["prompt"] == [5, 6, START, END]


async def test_10_the_same_token_again_and_again_is_a_loop_of_period_one() -> None:
    items = [*thinking(40), *(chunk([777], reasoning=" so") for _ in range(3000)), chunk([], finish="length"), USAGE]
    async with rig(Script(chat=items, complete=ANSWER, window=50_000)) as r:
        assert text(await r.step({**ASK, "max_tokens": 20_000})) == "b"
        assert r.finished().closed == "loop"
        assert "64 copies" in closes(r)[0].detail
        assert r.finished().think_tokens <= 40 + 70


async def test_11_a_loop_in_the_reasoning_is_found_although_no_tool_is_called() -> None:
    r, script, chunks = await looped(PARAGRAPH, 30, tools=TOOLS)
    assert (r.finished().closed, text(chunks)) == ("loop", "b")
    # a step with tools goes on through the chat route, where the server's tool parser runs
    assert [path for path, _, _ in script.seen] == ["/v1/chat/completions"] * 2
    assert script.seen[1][1]["tools"] == TOOLS


async def test_12_a_deadline_closes_a_slow_trace() -> None:
    slow: list[Any] = [piece for delta in thinking(400) for piece in (delta, 0.01)]
    async with rig(Script(chat=slow, complete=ANSWER, window=8192), cutoff={"deadline_s": 0.3}) as r:
        assert text(await r.step(BIG)) == "b"
        assert r.finished().closed == "deadline"
        assert 0 < r.finished().think_tokens < 400


@pytest.mark.parametrize(("asked", "think"), [(None, 300), (40, 40), (0, 0), (-1, 3481)])
async def test_14_budgets_by_request_and_by_model_0_for_none_and_minus_1_for_no_limit(asked: int | None, think: int) -> None:
    body = BIG if asked is None else {**BIG, "thinking_token_budget": asked}
    script = runaway()
    async with rig(script, cutoff={"think_tokens": 300}) as r:
        chunks = await r.step(body)
        assert r.started().think_cap == think
        assert script.seen[0][1]["thinking_token_budget"] == think
        assert abs(r.finished().think_tokens - think) <= 1
        assert text(chunks) == "b"  # without a limit of the client's the answer's room is kept all the same


async def test_15_the_same_request_after_a_cut_gets_another_plan() -> None:
    script = runaway()
    async with rig(script) as r:
        caps = []
        for _ in range(4):
            await r.step({**BIG, "temperature": 0})
            caps.append((r.started().think_cap, r.started().bound_by, Note.IDENTICAL_RETRY in r.finished().notes))
        await r.step({**BIG, "temperature": 0}, Identity("", "another"))
        assert r.started().bound_by == "fraction"
    assert caps == [(3481, "fraction", False), (1740, "retry", True), (0, "retry", True), (0, "retry", True)]


async def test_16_meters_of_a_session_warn_and_stop_and_an_operator_lets_it_go_on() -> None:
    script = Script(chat=[chunk([A, END, B], reasoning="a", content="b"), chunk([STOP], content="", finish="stop"), USAGE])
    async with rig(script, limits={"steps": 5, "tokens": 1000}) as r, httpx2.AsyncClient(base_url=r.url) as client:
        for i in range(5):
            await r.step({**ASK, "seed": i})
        with pytest.raises(SessionLimitError, match="steps is 5 of 5"):
            await r.step()
        alarms = [(e.meter, e.value, e.stopped) for e in r.events if isinstance(e, SessionAlarm)]
        assert alarms == [("steps", 4, False), ("steps", 5, True)]
        refused = await client.post("/v1/chat/completions", json=ASK, headers={"X-Session-Id": "me"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "session_limit")
        other = await client.post("/v1/chat/completions", json=ASK, headers={"X-Session-Id": "other"})
        assert other.status_code == 200
        raised = await client.post("/agentguard/sessions/limit", json={"session": "me", "meter": "steps", "limit": 9})
        assert raised.json() == {"known": True}
        await r.step()


async def test_16_steps_that_bring_nothing_raise_the_alarm() -> None:
    async with rig(runaway(), limits={"no_progress": 3, "stop_without_progress": True}) as r:
        for _ in range(4):
            await r.step({**BIG, "temperature": 0})  # the same request, cut each time: three repeats
        assert [(e.meter, e.value) for e in r.events if isinstance(e, SessionAlarm)] == [("no_progress", 3)]
        with pytest.raises(SessionLimitError, match="no_progress"):
            await r.step(BIG)
        await r.guard.raise_limit("me", "no_progress", 1)
        await r.step(BIG)


@pytest.mark.parametrize(
    ("thought", "planned"),
    [("I will call read_file on it.", True), ("Nothing to do here.", False), ("my_read_file_2 is odd", False)],
)
async def test_17_a_tool_that_was_planned_and_not_called_is_reported(thought: str, planned: bool) -> None:
    items = [*thinking(0, a=thought), chunk([END, B], content="done"), chunk([STOP], finish="stop"), USAGE]
    async with rig(Script(chat=items)) as r:
        await r.step({**ASK, "tools": TOOLS})
        assert (Note.PLANNED_NOT_CALLED in r.finished().notes) is planned


# -- budgets the server ignores -----------------------------------------------------------------------------------------------


async def test_18_a_server_that_ignores_its_budget_is_cut_and_remembered() -> None:
    script = runaway()
    async with rig(script) as r:
        await r.step({**BIG, "thinking_token_budget": 512})
        assert r.finished().think_tokens == 513
        assert r.finished().notes == [Note.BUDGET_IGNORED]
        assert r.guard.engine.facts.budget == "ignored"
        await r.step({**BIG, "thinking_token_budget": 512, "seed": 1})
        # known now: cut at the very token
        assert (r.finished().think_tokens, r.finished().notes) == (512, [])


async def test_19_a_plugin_whose_limit_does_not_bite_is_cut_too() -> None:
    script = runaway(plugin=True)
    async with rig(script) as r:
        await r.step({**BIG, "thinking_token_budget": 512})
        assert script.seen[0][1]["vllm_xargs"]["ag_think_tokens"] == 512
        assert "thinking_token_budget" not in script.seen[0][1]
        assert (r.finished().think_tokens, r.finished().notes, r.finished().closed) == (513, [Note.BUDGET_IGNORED], "budget")
    # a close that is ordered while the request runs, and does not come
    script = Script(
        chat=[*thinking(0, a=SENTENCE * 40), chunk([], finish="length"), USAGE], complete=ANSWER, plugin=True, window=8192
    )
    async with rig(script) as r:
        assert text(await r.step(BIG)) == "b"
        assert [body for path, body, _ in script.seen if path.endswith("budget")] == [
            {"request": r.finished().request, "tokens": 0}
        ]
        assert r.finished().closed == "loop"
        assert r.finished().think_tokens <= 6 * len(SENTENCE) + 64


@pytest.mark.parametrize(
    "where",
    [
        {"chat_template_kwargs": {"thinking_token_budget": 77, "enable_thinking": True}},
        {"chat_template_kwargs": {"thinking_budget": 77, "enable_thinking": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 77}, "chat_template_kwargs": {"enable_thinking": True}},
    ],
)
async def test_20_a_budget_in_a_place_no_server_reads_is_moved(where: dict[str, Any]) -> None:
    script = runaway()
    async with rig(script) as r:
        await r.step({**BIG, **where})
        assert Note.BUDGET_MOVED in r.finished().notes
    body = script.seen[0][1]
    assert (body["thinking_token_budget"], body["chat_template_kwargs"]) == (77, {"enable_thinking": True})
    assert "thinking" not in body


async def test_21_a_server_that_refuses_budgets_is_asked_again_without_and_remembered() -> None:
    script = runaway(refuses=("thinking_token_budget",))
    async with rig(script) as r:
        for seed in range(2):
            chunks = await r.step({**BIG, "thinking_token_budget": 200, "seed": seed})
            assert (text(chunks), r.finished().think_tokens, r.finished().closed) == ("b", 200, "budget")
    assert script.refused == ["thinking_token_budget"]


async def test_21_a_refusal_that_names_no_field_of_ours_reaches_the_client() -> None:
    script = Script(status=400)
    async with rig(script) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.post("/v1/chat/completions", json=ASK)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "scripted refusal")
    assert len(script.seen) == 1


async def test_22_a_budget_above_max_tokens_is_clamped_not_refused() -> None:
    script = runaway()
    async with rig(script) as r:
        await r.step({**ASK, "max_tokens": 1000, "thinking_token_budget": 5120})
        assert r.started().think_cap == 850
    assert script.seen[0][1]["thinking_token_budget"] == 850


async def test_23_a_small_max_tokens_keeps_half_for_the_answer() -> None:
    script = runaway()
    async with rig(script) as r:
        await r.step({**ASK, "max_tokens": 200})
        assert r.started().think_cap <= 100


# -- reasoning that is lost or misfiled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("ids", [True, False])
async def test_24_both_names_of_the_reasoning_field_are_counted_and_passed_on(name: str, ids: bool) -> None:
    def delta(token: int, **fields: str) -> dict[str, Any]:
        return chunk([token] if ids else [], **fields)

    usage = {**USAGE, "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}
    items = [delta(A, **{name: "x"}), delta(A, **{name: "y"}), delta(A, **{name: "z"})]
    # with `reasoning` the helper's own keyword is used
    items = [c | {"choices": [c["choices"][0] | {"delta": {name: text}}]} for c, text in zip(items, "xyz", strict=True)]
    items += [chunk([END, B] if ids else [], content="b"), chunk([STOP] if ids else [], finish="stop"), usage]
    async with rig(Script(chat=items, tokenizes=ids)) as r:
        chunks = await r.step()
        assert [c["choices"][0]["delta"].get(name) for c in chunks[:3]] == ["x", "y", "z"]
        if ids:
            assert (r.finished().think_tokens, r.finished().estimated) == (3, True)  # the scripted usage counts otherwise
        else:
            assert (r.finished().tokens, r.finished().estimated) == (5, True)
            assert r.finished().think_tokens == 4  # five tokens, of whose four characters three are reasoning


async def test_27_a_turn_that_ends_inside_its_trace_is_no_overrun() -> None:
    script = Script(chat=[*thinking(30), chunk([STOP], finish="stop"), USAGE], complete=ANSWER)
    async with rig(script) as r:
        assert text(await r.step()) == "b"
        assert (r.finished().closed, r.finished().continued) == ("", True)
        assert r.finished().notes == [Note.NO_CLOSE_TAG]
        assert closes(r) == []


@pytest.mark.parametrize("ids", [True, False])
async def test_28_a_literal_think_tag_in_the_content_counts_as_thinking(ids: bool) -> None:
    """After a tool's result the server's parser no longer expects a trace."""
    spoken = ["<th", "ink>let me", " see</thi", "nk>", "The file is empty."]
    items: list[Any] = [chunk([END, B] if ids else [], content="ok. ")]
    items += [
        chunk([START, *ids_of("let")] if ids and i == 0 else ids_of(t) if ids else [], content=t) for i, t in enumerate(spoken)
    ]
    usage = {**USAGE, "usage": {"prompt_tokens": 3, "completion_tokens": 30, "total_tokens": 33}}
    messages = [*ASK["messages"], {"role": "tool", "tool_call_id": "c", "content": ""}]
    async with rig(Script(chat=[*items, chunk([], finish="stop"), usage], tokenizes=ids)) as r:
        chunks = await r.step({**ASK, "messages": messages})
        assert text(chunks) == "ok. " + "".join(spoken)  # the client's text is the server's
        assert r.finished().think_tokens > 0


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_29_a_continuation_misfiled_as_reasoning_is_the_answer(name: str) -> None:
    def wrong(piece: str) -> dict[str, Any]:
        one = chunk([B])
        return one | {"choices": [one["choices"][0] | {"delta": {name: piece}}]}

    again = [chunk([], role="assistant"), wrong("the "), wrong("answer"), chunk([STOP], finish="stop"), USAGE]
    script = runaway(again=again, carrier="content")
    async with rig(script) as r:
        chunks = await r.step({**BIG, "thinking_token_budget": 50, "tools": TOOLS})
        assert text(chunks) == "the answer"
        assert sum("role" in c["choices"][0]["delta"] for c in chunks if c["choices"]) == 0
        assert [e.how for e in closes(r)] == ["chat"]


async def test_30_an_empty_answer_is_seen_by_client_and_operator() -> None:
    nothing = [text_chunk([STOP], "", "stop"), USAGE]
    script = Script(chat=[*thinking(20), chunk([STOP], finish="stop"), USAGE], complete=nothing, again=nothing)
    async with rig(script) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.post("/v1/chat/completions", json=ASK)
        assert reply.json()["choices"][0]["message"]["content"].startswith("(no answer")
        assert reply.headers["x-agentguard-notes"] == "no_close_tag,empty_answer"
        assert r.finished().empty_answer
        streamed = (await client.post("/v1/chat/completions", json={**ASK, "stream": True, "seed": 1})).text
        assert ": agentguard closed=no notes=no_close_tag,empty_answer\n" in streamed


async def test_31_reasoning_in_the_history_is_passed_on_untouched() -> None:
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning": "<think>as it was</think>", "reasoning_content": "this too"},
        {"role": "user", "content": "more", "cache_control": {"type": "ephemeral"}},
    ]
    script = Script(chat=[chunk([A, END, B], reasoning="a", content="b"), chunk([STOP], finish="stop"), USAGE])
    async with rig(script) as r:
        await r.step({**ASK, "messages": history})
    assert script.seen[0][1]["messages"] == history


# -- how a trace is continued -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("carrier", "field"), [("reasoning", "reasoning"), ("content", "content")])
async def test_a_template_that_shows_the_trace_carries_it(carrier: str, field: str) -> None:
    script = runaway(again=CHAT_ANSWER, carrier=carrier)
    async with rig(script) as r:
        for seed in range(2):
            script.seen.clear()
            assert text(await r.step({**BIG, "thinking_token_budget": 50, "tools": TOOLS, "seed": seed})) == "b"
        assert r.guard.engine.facts.carrier == carrier
    body = script.seen[1][1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert len(body["messages"][-1][field]) >= 50
    assert "thinking_token_budget" not in body


async def test_where_no_template_carries_it_the_model_gets_a_note_and_thinking_off() -> None:
    script = runaway(again=CHAT_ANSWER)
    async with rig(script) as r:
        assert text(await r.step({**BIG, "thinking_token_budget": 50, "tools": TOOLS})) == "b"
        assert [e.how for e in closes(r)] == ["note"]
        assert r.guard.engine.facts.carrier == ""
    body = script.seen[1][1]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["messages"][-1]["role"] == "user"
    assert script.seen[1][1]["messages"][:-1] == ASK["messages"]


async def test_a_refused_continuation_falls_back_to_the_next_way() -> None:
    calls: list[dict[str, Any]] = []

    def again(body: dict[str, Any]) -> list[Any]:
        calls.append(body)
        if body.get("continue_final_message"):
            return ['data: {"error": {"message": "cannot continue", "code": 400}}\n\n']
        return CHAT_ANSWER

    script = runaway(again=again, carrier="content")
    async with rig(script) as r:
        assert text(await r.step({**BIG, "thinking_token_budget": 50, "tools": TOOLS})) == "b"
    assert [bool(c.get("continue_final_message")) for c in calls] == [True, False]


async def test_a_server_without_ids_and_tokenizer_is_guarded_by_its_text() -> None:
    """Nothing but the OpenAI protocol: counts are estimates until the usage comes, and are marked as such."""

    def chat(body: dict[str, Any]) -> list[Any]:
        return [
            *thinking(0, a="".join(f"line {i} of it. " for i in range(900)), size=4, ids=False),
            chunk([], finish="length"),
            USAGE,
        ]

    usage = {**USAGE, "usage": {"prompt_tokens": 300, "completion_tokens": 2, "total_tokens": 302}}
    again = [chunk([], content="b"), chunk([], finish="stop"), usage]
    script = Script(chat=chat, again=again, tokenizes=False, refuses=("thinking_token_budget", "return_token_ids"), window=8192)
    async with rig(script) as r:
        chunks = await r.step({**BIG, "thinking_token_budget": 200})
        assert (text(chunks), finishes(chunks)) == ("b", ["stop"])
        assert r.finished().think_tokens == 200
        assert (r.finished().estimated, r.finished().closed) == (True, "budget")
    assert script.seen[1][1]["messages"][-1]["reasoning"].startswith("line 0 of it.")
    assert sorted(script.refused) == ["return_token_ids", "thinking_token_budget"]


async def test_a_tool_call_or_an_answer_that_has_begun_is_never_cut() -> None:
    call = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}]
    long_answer = [
        *thinking(10),
        chunk([END]),
        *(chunk([B], content="b ") for _ in range(700)),
        chunk([STOP], finish="stop"),
        USAGE,
    ]
    async with rig(Script(chat=long_answer)) as r:
        await r.step({**ASK, "max_tokens": 900})
        assert (r.finished().closed, r.finished().continued) == ("", False)
    script = Script(chat=[chunk([A], reasoning="a", tool_calls=call), *thinking(700), chunk([STOP], finish="tool_calls"), USAGE])
    async with rig(script) as r:
        await r.step({**ASK, "max_tokens": 900, "tools": TOOLS})
        assert (r.finished().closed, r.finished().continued, r.finished().finish_reason) == ("", False, "tool_calls")


async def test_an_operator_closes_a_running_step() -> None:
    endless: list[Any] = [piece for delta in thinking(3000) for piece in (delta, 0.005)]
    async with rig(Script(chat=endless, complete=ANSWER, window=8192)) as r, httpx2.AsyncClient(base_url=r.url) as client:
        task = asyncio.create_task(r.step(BIG))
        while not r.guard.running:
            await asyncio.sleep(0.01)
        reply = await client.post("/agentguard/close", json={"session": str(ME), "why": "enough"})
        assert reply.json() == {"told": 1}
        assert text(await task) == "b"
        assert [(e.reason, e.detail) for e in closes(r)] == [("operator", "enough")]
        assert r.guard.running == {}
        assert (await client.post("/agentguard/close", json={"session": "nobody"})).status_code == 404
        assert (await client.post("/agentguard/close", json={})).status_code == 400


async def test_an_answer_that_goes_on_reasoning_is_reported() -> None:
    """Case `resumes-unmarked` of the splitter's cases, seen over a session whose answers are short."""
    short = [*thinking(5), chunk([END, B], content="7"), chunk([STOP], finish="stop"), USAGE]
    script = Script(chat=short, again=[*thinking(4000), chunk([], finish="length"), USAGE], window=8192)
    script.complete = [text_chunk(ids_of(p), p) for p in "so, thinking on without a marker. Answer: 7"] + [
        text_chunk([STOP], "", "stop")
    ]
    async with rig(script) as r:
        for seed in range(3):
            script.seen.clear()
            await r.step({**BIG, "seed": seed})
        await r.step({**BIG, "thinking_token_budget": 50})
        assert (r.finished().closed, r.finished().notes) == ("budget", [Note.BUDGET_IGNORED, Note.ANSWER_GREW])


async def test_a_closed_step_streams_like_any_other() -> None:
    async with rig(runaway()) as r, httpx2.AsyncClient(base_url=r.url) as client:
        body = {**BIG, "thinking_token_budget": 64, "stream": True, "stream_options": {"include_usage": True}}
        reply = await client.post("/v1/chat/completions", json=body)
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
        assert finishes(events) == ["stop"]
        assert ": agentguard closed=budget notes=backend_ignored_budget" in reply.text
        assert reply.text.endswith("data: [DONE]\n\n")
        assert reply.headers["x-agentguard-request"] == r.finished().request


# -- what a review found ------------------------------------------------------------------------------------------------------


async def test_one_client_s_refusal_teaches_the_guard_nothing_about_others() -> None:
    """A 400 that quotes names of fields, and one about a field the client itself sent."""
    quoting = Script(status=400)
    async with rig(quoting) as r:
        for message in ("temperature='vllm_xargs return_token_ids' is unsupported", "min_tokens is not supported here"):
            quoting.message = message
            with pytest.raises(EngineRequestError):
                await r.step({**ASK, "min_tokens": 3})
        assert r.guard.engine.facts.dropped == set()
        with pytest.raises(ConfigError, match="known: ag_phase, ag_rule"):
            await r.step({**ASK, "vllm_xargs": {"ag_foo": 1}})


async def test_reasoning_behind_a_note_is_not_the_answer() -> None:
    """R1's template opens the block whatever enable_thinking says."""
    again = [
        chunk([], reasoning="secret "),
        chunk([], reasoning="thought"),
        chunk([], content="b"),
        chunk([], finish="stop"),
        USAGE,
    ]
    async with rig(runaway(again=again, chat=[*thinking(900, ids=False), chunk([], finish="length"), USAGE], tokenizes=False)) as r:
        chunks = await r.step({**BIG, "thinking_token_budget": 50, "tools": TOOLS})
        assert text(chunks) == "b"
        assert text(chunks, "reasoning").endswith("secret thought")
        assert Note.THINKS_AGAIN in r.finished().notes


async def test_an_answer_of_a_server_without_ids_is_not_taken_for_a_trace() -> None:
    answer = [*(chunk([], content=f"word{i} ") for i in range(400)), chunk([], finish="stop"), USAGE]
    async with rig(Script(chat=answer, tokenizes=False, window=8192), markers="minimax-m2") as r:
        chunks = await r.step({**ASK, "max_tokens": 600})
        assert text(chunks) == "".join(f"word{i} " for i in range(400))
        assert (r.finished().closed, r.finished().continued) == ("", False)


async def test_blocks_that_pass_the_cap_together_are_no_fault_of_the_server() -> None:
    blocks = [*thinking(40), chunk([END]), chunk([START]), *thinking(900), chunk([], finish="length"), USAGE]
    async with rig(Script(chat=blocks, complete=ANSWER, window=8192)) as r:
        await r.step({**BIG, "thinking_token_budget": 60})
        assert (r.finished().closed, r.finished().think_tokens, r.finished().notes) == ("budget", 61, [])
        assert r.guard.engine.facts.budget == "unknown"


async def test_a_trace_in_the_content_gets_its_end_marker_there() -> None:
    items = [chunk(ids_of(c), content=c) for c in "thinking without a parser, on and on and on, " * 20]
    async with rig(Script(chat=[*items, chunk([], finish="length"), USAGE], complete=ANSWER, window=8192)) as r:
        assert text(await r.step({**BIG, "thinking_token_budget": 30})).endswith("</think>b")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_continuation_that_fails_falls_back_and_ends_properly(status: int) -> None:
    script = runaway(complete=[f'data: {{"error": {{"message": "busy", "code": {status}}}}}\n\n'], again=[
        f'data: {{"error": {{"message": "busy", "code": {status}}}}}\n\n'
    ])  # fmt: skip
    async with rig(script) as r:
        chunks = await r.step({**BIG, "thinking_token_budget": 50})
        assert text(chunks).startswith("(no answer")
        assert finishes(chunks) == ["length"]
        assert [(e.reason, e.how) for e in closes(r)] == [("budget", "none")]


def test_a_loop_s_copies_are_left_out_whatever_its_unit_is_counted_in() -> None:
    text = "start. " + "abc def. " * 5
    ids = list(range(len(text) // 4))
    cut_ids, cut_text = without_copies(ids, text, Loop("sentence", 9, 5))
    assert cut_text == "start. abc def. "
    assert abs(len(cut_ids) - len(ids) * len(cut_text) / len(text)) <= 1
    assert without_copies([7, 1, 2, 1, 2, 1, 2], "x" * 14, Loop("period", 2, 3)) == ([7, 1, 2], "x" * 6)
    assert without_copies([1, 1], "!!", Loop("run", 1, 64)) == ([], "")
    assert without_partial([5, 2, 3], (2, 3, 4)) == [5]


async def test_sampled_repeats_are_a_client_s_good_right() -> None:
    async with rig(runaway()) as r:
        caps = []
        for _ in range(3):
            await r.step({**BIG, "temperature": 1.0})
            caps.append(r.started().think_cap)
        assert caps == [3481] * 3


async def test_parallel_steps_cannot_pass_a_limit() -> None:
    script = Script(chat=[chunk([A, END, B], reasoning="a", content="b"), chunk([STOP], finish="stop"), USAGE])
    async with rig(script, limits={"steps": 5}) as r:
        results = await asyncio.gather(*(r.step({**ASK, "seed": i}) for i in range(20)), return_exceptions=True)
        assert sum(isinstance(x, SessionLimitError) for x in results) == 15


async def test_a_stalled_stream_is_closed_at_its_deadline() -> None:
    script = Script(chat=[*thinking(20), 30.0, *thinking(20)], complete=ANSWER, window=8192)
    async with rig(script, cutoff={"deadline_s": 0.3}) as r:
        async with asyncio.timeout(10):
            assert text(await r.step(BIG)) == "b"
        assert (r.finished().closed, r.finished().think_tokens) == ("deadline", 20)


async def test_waiting_in_a_queue_is_not_thinking() -> None:
    script = Script(chat=[0.6, *thinking(20), chunk([END, B], content="b"), chunk([STOP], finish="stop"), USAGE])
    async with rig(script, cutoff={"deadline_s": 0.5}) as r:
        await r.step()
        assert r.finished().closed == ""


async def test_switched_off_means_off_but_for_what_the_client_asks_and_the_operator() -> None:
    async with rig(runaway(), cutoff={"mode": "off"}) as r:
        chunks = await r.step({**BIG, "max_tokens": 4000})
        assert (text(chunks), r.finished().closed, r.finished().think_tokens) == ("", "", 4000)
        assert finishes(chunks) == ["length"]


async def test_side_calls_are_no_growth() -> None:
    script = Script(chat=[chunk([A, END, B], reasoning="a", content="b"), chunk([STOP], finish="stop"), USAGE])
    async with rig(script) as r, httpx2.AsyncClient(base_url=r.url) as client:
        for tokens in (500, 60, 510, 60, 520):
            script.prompt = [5] * tokens
            reply = await client.post("/v1/chat/completions", json=ASK, headers={"X-Session-Id": "s"})
            assert "x-agentguard-advice" not in reply.headers
        script.prompt = [5] * 780
        assert (await client.post("/v1/chat/completions", json=ASK, headers={"X-Session-Id": "s"})).headers[
            "x-agentguard-advice"
        ] == "compact"


async def test_odd_but_common_streams() -> None:
    """Usage beside the finish reason, text behind it, null ids, content in parts."""
    last = chunk([STOP], finish="stop") | {"usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}
    parts = chunk([B])
    parts["choices"][0]["delta"]["content"] = [{"type": "text", "text": "b1"}]
    nulls = chunk([A], reasoning="y")
    nulls["choices"][0]["token_ids"] = None
    behind = chunk([], content="2")
    async with rig(Script(chat=[chunk([A], reasoning="x"), nulls, chunk([END]), parts, last, behind])) as r:
        chunks = await r.step()
        assert text(chunks) == "b12"
        assert sum("usage" in c for c in chunks) == 1
        assert chunks[-1]["choices"] == []
        assert r.finished().think_tokens == 1


async def test_what_a_content_filter_ended_is_not_asked_again() -> None:
    refusal = chunk([], refusal="I cannot help with that.")
    script = Script(chat=[*thinking(3), refusal, chunk([], finish="content_filter"), USAGE], complete=ANSWER, again=CHAT_ANSWER)
    async with rig(script) as r:
        chunks = await r.step()
        assert (text(chunks), finishes(chunks), len(script.seen)) == ("", ["content_filter"], 1)


async def test_the_beginning_of_a_marker_at_the_end_of_an_answer_is_the_answer() -> None:
    script = Script(chat=[*thinking(3), chunk([END, B], content="<"), chunk([STOP], finish="stop"), USAGE], complete=ANSWER)
    async with rig(script) as r:
        assert text(await r.step()) == "<"
        assert not r.finished().continued


async def test_the_pressure_of_a_growing_trace_does_not_flood_the_engine() -> None:
    script = Script(chat=[*thinking(3000), chunk([], finish="length"), USAGE], complete=ANSWER, plugin=True, window=8192)
    async with rig(script) as r:
        short = Script(chat=[*thinking(1200), chunk([END, B], content="b"), chunk([STOP], finish="stop"), USAGE])
        script.chat, runaway_chat = short.chat, script.chat
        for seed in range(3):
            await r.step({**BIG, "seed": seed})
        script.chat = runaway_chat
        script.seen.clear()
        await r.step({**BIG, "max_tokens": 2600})
        assert sum(path.endswith("budget") for path, _, _ in script.seen) <= 4
        assert 0.8 * 2600 <= r.finished().think_tokens <= 0.85 * 2600


async def test_a_large_delta_of_code_does_not_hold_up_the_loop() -> None:
    """Linear, not quadratic: 320 kB took 67 s before, so this megabyte would run into the test's time limit."""
    code = "`x`\n" * 250_000
    splitter = Splitter([("<think>", "</think>")], special_tokens=True)
    assert "".join(t for _, t in [*splitter.feed(code), *splitter.finish()]) == code
