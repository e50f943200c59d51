"""A client that exists already, guarded in one line: openai's over real sockets, and a function of litellm's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import agentguard
from agentguard import ConfigError
from agentguard.events import Event, StepFinished, TraceClosed
from agentguard.telemetry.hub import Hub
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, text_chunk, thinking, upstream
from tests.sdk.conftest import ASK, THINKS_AND_ANSWERS, until


@asynccontextmanager
async def client_at(script: Script, **options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Any, list[Event]]]:
    """The client, the guarded one and the guard's events."""
    events: list[Event] = []
    hub = Hub()
    async with upstream(script) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        with hub.sink(events.append):
            yield client, agentguard.wrap(client, hub=hub, **options), events


def finished(events: list[Event]) -> list[StepFinished]:
    return [e for e in events if isinstance(e, StepFinished)]


async def test_a_guarded_client_answers_as_its_own_objects() -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with client_at(script) as (_, guarded, events):
        whole = await guarded.chat.completions.create(
            model="scripted", messages=ASK, max_tokens=90, extra_headers={"x-session-id": "mine", "x-other": "1"},
            extra_body={"thinking_token_budget": 7, "top_k": 3}, tools=openai.NOT_GIVEN,
        )  # fmt: skip
        assert isinstance(whole, ChatCompletion)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("bb", "stop")
        assert whole.choices[0].message.reasoning == "aaa"  # type: ignore[attr-defined]
        assert whole.usage is not None
        assert (whole.usage.completion_tokens, whole.usage.completion_tokens_details.reasoning_tokens) == (7, 3)
        (_, body, headers) = script.seen[0]
        assert (body["top_k"], body["thinking_token_budget"], body["max_tokens"], body["return_token_ids"]) == (3, 7, 90, True)
        assert (headers["x-session-id"], headers["x-other"], headers["authorization"]) == ("mine", "1", "Bearer k")
        (step,) = finished(events)
        assert (step.session, step.tokens, step.think_tokens, step.estimated) == ("mine", 7, 3, True)  # USAGE says 5

        stream = await guarded.chat.completions.create(model="scripted", messages=[*ASK, whole.choices[0].message], stream=True)
        chunks = [c async for c in stream]
        assert all(isinstance(c, ChatCompletionChunk) for c in chunks)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "bb"
        assert chunks[-1].choices[0].finish_reason == "stop"
        options = {"include_usage": True}
        stream = await guarded.chat.completions.create(model="scripted", messages=ASK, stream=True, stream_options=options)
        assert [c.usage.total_tokens async for c in stream if c.usage] == [10]
        assert [m.id async for m in guarded.models.list()] == ["scripted"]


async def test_a_runaway_trace_is_closed_and_answered_through_the_client() -> None:
    script = Script(
        chat=[chunk([], role="assistant"), *thinking(900)], complete=[text_chunk([B, STOP], "b", "stop"), USAGE],
        refuses=("thinking_token_budget",),
    )  # fmt: skip
    async with client_at(script, policy={"cutoff": {"loops": False}}) as (_, guarded, events):
        whole = await guarded.chat.completions.create(model="scripted", messages=ASK, max_tokens=100)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("b", "stop")
        (closed,) = [e for e in events if isinstance(e, TraceClosed)]
        assert (closed.reason, closed.how) == ("reserve", "tokens")
        assert finished(events)[0].closed == "reserve"
        assert script.refused == ["thinking_token_budget"]
        await guarded.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "again"}], max_tokens=100)
        assert script.refused == ["thinking_token_budget"]  # remembered
    await until(lambda: script.streaming == 0)


async def test_a_budget_is_set_through_the_client_where_the_plugin_is() -> None:
    script = Script(plugin=True)

    def trace(body: dict[str, Any]) -> Any:
        script.budget = None
        for piece in thinking(0, a="ab" * 200, size=2):
            if script.budget is not None:
                break
            yield piece
            yield 0.002
        yield chunk([2])
        yield chunk([B, STOP], content="b", finish="stop")
        yield USAGE

    script.chat = trace
    async with client_at(script) as (_, guarded, events):
        whole = await guarded.chat.completions.create(model="scripted", messages=ASK, max_tokens=900)
        assert whole.choices[0].message.content == "b"
        assert (finished(events)[0].closed, script.budget) == ("loop", 0)


async def test_the_clients_errors_stay_its_own_and_the_guards_are_ours() -> None:
    script = Script(status=429)
    async with client_at(script, policy={"limits": {"steps": 2}}) as (client, guarded, events):
        with pytest.raises(openai.RateLimitError, match="scripted refusal"):
            await guarded.chat.completions.create(model="scripted", messages=ASK)
        assert "scripted refusal" in finished(events)[0].error
        with pytest.raises(ConfigError, match="known: scripted"):
            await guarded.chat.completions.create(model="other", messages=ASK)
        with pytest.raises(ConfigError, match="messages"):
            await guarded.chat.completions.create(model="scripted", messages=[])
        script.status, script.chat, script.hang_up = 200, [chunk([A], reasoning="a")], True
        stream = await guarded.chat.completions.create(
            model="scripted", messages=ASK, stream=True, extra_headers={"x-session-id": "x"}
        )
        with pytest.raises(openai.APIConnectionError):
            [c async for c in stream]
        assert "is gone" in finished(events)[-1].error
        script.hang_up, script.chat = False, list(THINKS_AND_ANSWERS)
        headers = {"x-session-id": "two"}
        for _ in range(2):
            await guarded.chat.completions.create(model="scripted", messages=ASK, extra_headers=headers)
        with pytest.raises(agentguard.SessionLimitError, match="steps is 2 of 2"):
            await guarded.chat.completions.create(model="scripted", messages=ASK, extra_headers=headers)
        for attribute in ("parse", "stream"):
            with pytest.raises(AttributeError, match="is not guarded"):
                getattr(guarded.chat.completions, attribute)
        with pytest.raises(AttributeError, match="goes round the guard"):
            _ = guarded.responses
        assert guarded.unguarded is client


async def test_closing_or_cancelling_a_guarded_call_ends_the_step() -> None:
    script = Script(chat=[chunk([A, A], reasoning="aa")], hold=asyncio.Event())
    async with client_at(script) as (_, guarded, events):
        for end in ("close", "with", "cancel"):
            if end == "cancel":
                call = asyncio.create_task(guarded.chat.completions.create(model="scripted", messages=ASK))
                await until(lambda: script.streaming == 1)
                await asyncio.sleep(0.05)
                call.cancel()
                await asyncio.wait([call])
                assert call.cancelled()
            else:
                stream = await guarded.chat.completions.create(model="scripted", messages=ASK, stream=True)
                if end == "close":
                    await stream.close()
                else:
                    async with stream:
                        await anext(stream)
            await until(lambda: script.streaming == 0)
            assert finished(events)[-1].error == "cancelled"
        assert len(finished(events)) == 3


async def test_a_client_of_a_gateway_is_told_so() -> None:
    from tests.test_guard import rig as gateway_rig

    async with (
        gateway_rig(Script(chat=list(THINKS_AND_ANSWERS))) as g,
        openai.AsyncOpenAI(base_url=f"{g.url}/v1", api_key="k") as client,
    ):
        with pytest.raises(ConfigError, match="is at a gateway, which guards already"):
            await agentguard.wrap(client).chat.completions.create(model="scripted", messages=ASK)


async def test_a_function_of_litellms_shape() -> None:
    """What an `acompletion` of one's own looks like: chunks as mappings, everything by keyword."""
    script = Script(chat=[chunk([], role="assistant"), *thinking(900, ids=False)], again=list(THINKS_AND_ANSWERS), tokenizes=False)
    seen: list[dict[str, Any]] = []
    async with upstream(script) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:

        async def acompletion(model: str, messages: list[Any], max_tokens: int | None = None, **options: Any) -> Any:
            seen.append(options)
            stream = await client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens, **options)

            async def pieces() -> AsyncIterator[dict[str, Any]]:
                async with stream:
                    async for one in stream:
                        yield one.model_dump(exclude_unset=True)

            return pieces()

        guarded = agentguard.wrap(acompletion, window=1000, policy={"cutoff": {"loops": False}})
        whole = await guarded(model="scripted", messages=ASK, max_tokens=100)
        # closed by the guard's own count of the text, continued through the chat template
        assert whole["choices"][0]["message"]["content"] == "bb"
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 50
        assert "vllm_xargs" in seen[0]["extra_body"]
        with pytest.raises(ConfigError, match="give it in tokens"):
            await agentguard.wrap(acompletion)(model="scripted", messages=ASK)
    await until(lambda: script.streaming == 0)


async def test_streams_side_by_side_keep_their_own_class_while_traces_are_cut_and_continued() -> None:
    """A cut trace goes on at the completions route, whose chunks are of another class: its own caller does not see that, nor does
    anybody else's stream of the same client."""
    runaway = thinking(200, size=2)

    def chat(body: dict[str, Any]) -> Any:
        if body["messages"][0]["content"] == "plain":  # slow enough to run while the others are continued
            return [chunk([A, END], reasoning="a"), *(piece for _ in range(12) for piece in (chunk([B], content="b"), 0.02)),
                    chunk([STOP], finish="stop"), USAGE]  # fmt: skip
        return [chunk([], role="assistant"), *runaway]

    def complete(_: dict[str, Any]) -> Any:
        return [text_chunk([B], "an"), 0.05, text_chunk([B], "sw"), 0.05, text_chunk([B, STOP], "er", "stop"), USAGE]

    script = Script(chat=chat, complete=complete)
    async with client_at(script, policy={"cutoff": {"loops": False}}) as (_, guarded, events):

        async def read(word: str) -> str:
            said = ""
            async with await guarded.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": word}], max_tokens=100, stream=True
            ) as stream:
                async for one in stream:
                    assert type(one) is ChatCompletionChunk
                    said += one.choices[0].delta.content or ""  # a caller's own loop: a dict here would break it
            return said

        words = ["plain", *(f"cut {n}" for n in range(4)), "plain"]
        said = await asyncio.gather(*(read(word) for word in words))
        assert said == ["b" * 12, *["answer"] * 4, "b" * 12]
        whole = await guarded.chat.completions.create(model="scripted", messages=ASK, max_tokens=100)
        assert isinstance(whole, ChatCompletion)
        assert whole.choices[0].message.content == "answer"
        assert sum(isinstance(e, TraceClosed) and e.how == "tokens" for e in events) == 5
    await until(lambda: script.streaming == 0)


async def test_a_function_may_answer_every_call_with_another_class() -> None:
    """The class of a stream's chunks is that stream's, however the calls of a function mix."""

    class Piece:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

        def model_dump(self, **_: Any) -> dict[str, Any]:
            return self.fields

    async def acompletion(model: str, messages: list[Any], **options: Any) -> AsyncIterator[Any]:
        async def pieces() -> AsyncIterator[Any]:
            for one in THINKS_AND_ANSWERS:
                await asyncio.sleep(0.003 if messages[0]["content"] == "mapping" else 0.01)
                yield one if messages[0]["content"] == "mapping" else Piece(**one)
            await asyncio.sleep(0.05)  # the finish reason, which is held back to the end, comes after others' chunks

        return pieces()

    guarded = agentguard.wrap(acompletion, window=1000)

    async def read(word: str) -> set[type]:
        stream = await guarded(model="m", messages=[{"role": "user", "content": word}], stream=True)
        return {type(one) async for one in stream}

    kinds = await asyncio.gather(*(read(word) for word in ["mapping", "object"] * 3))
    assert kinds == [{dict}, {Piece}] * 3


@pytest.mark.parametrize(
    ("client", "named"),
    [(openai.OpenAI(api_key="k"), "wrap an AsyncOpenAI"), (len, "is not asynchronous"), (7, "give an openai.AsyncOpenAI")],
)
def test_what_cannot_be_wrapped_is_named(client: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        agentguard.wrap(client)
