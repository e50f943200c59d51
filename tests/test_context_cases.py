"""What users reported about context windows and session limits (design note budgets.md, section 5; the numbers are its cases)."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from agentguard.errors import ContextLengthError, EngineRequestError, SessionLimitError
from agentguard.events import CompactionAdvised, SessionAlarm
from agentguard.identity import Identity
from tests.scripted import START, STOP, USAGE, B, Script, chunk, text_chunk, thinking
from tests.test_guard import ASK, THINKS_AND_ANSWERS, Rig, rig, text

SENT: dict[str, Any] = {"x-session-id": "me"}


def long_prompt(tokens: int) -> list[int]:
    return [*([7] * (tokens - 1)), START]


async def post(r: Rig, body: dict[str, Any] | None = None, **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=r.url) as client:
        return await client.post("/v1/chat/completions", json=body or ASK, headers=SENT | headers)


async def test_26_thinking_that_no_delta_showed_is_counted_from_the_usage() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 50, "total_tokens": 53, "completion_tokens_details": {"reasoning_tokens": 40}}
    swallowed = [chunk([], content="the "), chunk([], content="answer", finish="stop"), {**USAGE, "usage": usage}]
    async with rig(Script(chat=swallowed, tokenizes=False)) as r:
        chunks = await r.step()
        step = r.finished()
        assert (text(chunks), step.think_tokens, step.answer_tokens, step.tokens) == ("the answer", 40, 10, 50)
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 40}


async def test_32_the_fill_of_the_window_is_told_with_a_reserve_and_thinking_gets_what_remains() -> None:
    script = Script(chat=[*thinking(4000), chunk([], finish="length"), USAGE], window=1000, prompt=long_prompt(850))
    script.complete = [text_chunk([B, STOP], "b", "stop"), USAGE]
    async with rig(script) as r:
        reply = await post(r)
        assert reply.headers["x-agentguard-context-fill"] == "0.850"
        assert reply.headers["x-agentguard-context-window"] == "1000"
        assert reply.headers["x-agentguard-advice"] == "compact"
        (advice,) = [e for e in r.events if isinstance(e, CompactionAdvised)]
        assert (advice.context_tokens, advice.window) == (850, 1000)
        step = r.finished()
        # of the 142 tokens that remain the client asks for 100, and half of so little is the answer's
        assert (r.started().budget, step.closed) == (100, "reserve")
        assert step.think_tokens <= 51
        assert reply.json()["choices"][0]["message"]["content"] == "b"


async def test_33_a_subagent_s_prompts_are_no_growth_of_the_main_one_s() -> None:
    script = Script(chat=THINKS_AND_ANSWERS, window=1000)
    fills = []
    async with rig(script) as r:
        for prompt, agent in ((300, ""), (340, ""), (420, "helper"), (600, "helper"), (380, "")):
            script.prompt = long_prompt(prompt)
            reply = await post(r, **({"x-agentguard-agent": agent} if agent else {}))
            fills.append((reply.headers["x-agentguard-context-fill"], reply.headers.get("x-agentguard-advice")))
        # 380 of the main agent after 340 makes 420 next; the helper's own 180 more would make 780 of it
        assert fills == [("0.300", None), ("0.340", None), ("0.420", None), ("0.600", None), ("0.380", None)]
        assert [s.steps_started for s in r.guard.sessions] == [5]
        (session,) = r.guard.sessions
        assert session.expected_prompt(380) == 420
        assert session.expected_prompt(600, "helper") == 780


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 200 tokens. However, you requested 300",
        "The decoder prompt (length 300) is longer than the maximum model length of 200.",
        "the request exceeds the available context size. try increasing it",
        "prompt is too long: 300 tokens > 200 maximum",
    ],
)
async def test_34_every_server_s_words_for_a_full_window_become_one_code(message: str) -> None:
    script = Script(status=400, message=message, window=200)
    async with rig(script) as r:
        replies = [await post(r) for _ in range(3)]
        for reply in replies:
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], "window of 200 tokens" in error["message"]) == (
                400, "context_length_exceeded", True,
            )  # fmt: skip
            assert reply.headers["x-should-retry"] == "false"
        assert len(script.seen) == 1  # the same request again is not sent
        await post(r, ASK | {"messages": [{"role": "user", "content": "shorter"}]})
        assert len(script.seen) == 2


async def test_34_another_refusal_keeps_the_server_s_own_words() -> None:
    async with rig(Script(status=400, message="temperature must be positive", window=200)) as r:
        with pytest.raises(EngineRequestError, match="temperature"):
            await r.step()


@pytest.mark.parametrize(("prompt", "room"), [(800, 192), (927, 65), (928, 64)])
async def test_35_36_37_38_max_tokens_is_clamped_to_what_the_window_leaves(prompt: int, room: int) -> None:
    """32,000 tokens of a 32k window (case 38), max_output = max_context (37), a client that assumes 200k (36), off by one (35)."""
    script = Script(chat=THINKS_AND_ANSWERS, window=1000, prompt=long_prompt(prompt))
    async with rig(script) as r:
        reply = await post(r, {**ASK, "max_tokens": 32_000})
        assert reply.status_code == 200
        assert script.seen[0][1]["max_tokens"] == room  # window - prompt - a margin of 8
        assert reply.headers["x-agentguard-context-window"] == "1000"


async def test_35_one_token_too_many_is_told_before_the_engine_is_asked() -> None:
    script = Script(chat=THINKS_AND_ANSWERS, window=1000, prompt=long_prompt(929))
    async with rig(script) as r:
        with pytest.raises(ContextLengthError, match=r"window of 1000 tokens \(63 are left"):
            await r.step({**ASK, "max_tokens": 32_000})
        assert not [path for path, _, _ in script.seen if "completions" in path]


async def test_39_the_soft_limit_warns_in_a_header_and_the_hard_one_says_when_to_come_again() -> None:
    async with rig(Script(chat=THINKS_AND_ANSWERS), limits={"steps": 5, "soft": 0.6}) as r:
        replies = [await post(r) for _ in range(6)]
        assert [reply.status_code for reply in replies] == [200] * 5 + [429]
        assert [reply.headers.get("x-agentguard-warning") for reply in replies[:5]] == [None] * 3 + ["steps 3 of 5", "steps 4 of 5"]
        assert (replies[5].headers["retry-after"], replies[5].headers["x-should-retry"]) == ("60", "false")
        assert "steps is 5 of 5" in replies[5].json()["error"]["message"]
        assert [(e.value, e.stopped) for e in r.events if isinstance(e, SessionAlarm)] == [(3, False), (5, True)]


async def test_40_re_sent_context_is_not_counted_and_a_stop_can_be_undone() -> None:
    script = Script(chat=THINKS_AND_ANSWERS, prompt=long_prompt(150))
    me = Identity("", "me")
    async with rig(script, limits={"tokens": 14}) as r:
        await r.step(identity=me)
        await r.step(identity=me)
        assert next(iter(r.guard.sessions)).tokens == 14  # 7 a step, whatever the 150 of the prompt
        with pytest.raises(SessionLimitError, match="tokens is 14 of 14"):
            await r.step(identity=me)
        assert await r.guard.raise_limit("me", "tokens", 100)
        await r.step(identity=me)


async def test_a_session_that_is_only_guessed_is_warned_and_never_stopped() -> None:
    async with rig(Script(chat=THINKS_AND_ANSWERS), limits={"steps": 1}) as r:
        begun = {**ASK, "messages": [*ASK["messages"], {"role": "assistant", "content": "b"}, {"role": "user", "content": "go on"}]}
        async with httpx2.AsyncClient(base_url=r.url) as client:
            replies = [await client.post("/v1/chat/completions", json=body) for body in (ASK, begun, begun)]
        assert [reply.status_code for reply in replies] == [200] * 3
        assert replies[2].headers["x-agentguard-warning"] == "steps 2 of 1"
        assert [e.stopped for e in r.events if isinstance(e, SessionAlarm)] == [False]


async def test_two_callers_with_one_session_id_have_two_budgets() -> None:
    async with rig(Script(chat=THINKS_AND_ANSWERS), limits={"steps": 1}) as r:
        codes = [(await post(r, authorization=f"Bearer {key}")).status_code for key in ("one", "two", "one")]
        codes += [(await post(r, authorization="Bearer proxy", **{"x-agentguard-caller": c})).status_code for c in "xyx"]
    assert codes == [200, 200, 429] * 2


async def test_an_engine_s_own_retry_after_reaches_the_client() -> None:
    script = Script(status=429, message="too many requests", retry_after="7")
    async with rig(script) as r:
        reply = await post(r)
        assert (reply.status_code, reply.headers.get("retry-after")) == (429, "7")
