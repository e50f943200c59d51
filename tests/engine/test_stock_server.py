"""The gateway in front of a stock vLLM, without our plugin: cut and continue, and a client that cannot tell."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from agentguard.engines.vllm_process import environment, free_port, stop
from agentguard.events import Event, Note, TraceClosed
from agentguard.gateway.server import serve_upstream
from agentguard.middleware import Guard
from agentguard.policy import Policy
from agentguard.telemetry.hub import Hub
from tests.engine.test_stack import finished

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
LONG = [{"role": "user", "content": "a=47;b=a+8;c=b-3;d=c+9;e=d-2;f=e+1;g=f+7;h=g-6;?h;!40"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "ok",
        "strict": True,
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@dataclass
class Guarded:
    guard: Guard
    url: str
    events: list[Event]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@asynccontextmanager
async def stock(policy: Policy, *args: str) -> AsyncIterator[Guarded]:
    """vLLM as it comes, without a draft model (its CPU wheel's speculation is broken without us), and the gateway before it."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", policy.model, "--served-model-name", "target",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096", "--enforce-eager", "--generation-config", "vllm",
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',  # the small model loves blanks
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *args,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        env = environment(policy, "sesame") | {"VLLM_PLUGINS": ""}
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            async with asyncio.timeout(180), httpx2.AsyncClient() as client:
                while True:
                    try:
                        if (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                            break
                    except httpx2.TransportError:
                        assert process.returncode is None
                    await asyncio.sleep(0.3)
            events: list[Event] = []
            hub = Hub()
            served = policy.model_copy(update={"draft": None})
            with hub.sink(events.append):
                async with serve_upstream(served, f"http://127.0.0.1:{port}", key="sesame", hub=hub) as (guard, url):
                    assert not guard.engine.facts.plugin
                    yield Guarded(guard, url, events)
        finally:
            await stop(process)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def parsed(reference_policy: Policy) -> AsyncIterator[Guarded]:
    async with stock(reference_policy, "--reasoning-parser", "qwen3") as guarded:
        yield guarded


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bare(reference_policy: Policy) -> AsyncIterator[Guarded]:
    async with stock(reference_policy) as guarded:
        yield guarded


async def closing(served: Guarded, **request: Any) -> tuple[list[Any], Any]:
    """A streamed step whose trace the gateway cuts after 40 tokens, as if the server took no budgets; (chunks, its accounts)."""
    mark, facts = len(served.events), served.guard.engine.facts
    known, facts.budget = facts.budget, "rejected"
    async with served.client() as client:
        stream = await client.chat.completions.create(
            model="target", messages=LONG, temperature=1.0, max_tokens=2000, stream=True,  # type: ignore[arg-type]
            stream_options={"include_usage": True}, extra_body={"thinking_token_budget": 40}, **request,
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    facts.budget = known
    (step,) = finished(served.events[mark:])
    assert (step.closed, step.error) == ("budget", "")
    assert 40 <= step.think_tokens <= 60  # a delta of a busy server holds more than one token
    return chunks, step


def check(chunks: list[Any], step: Any) -> None:
    """One stream: one id, one role, one finish reason, and the usage of both parts."""
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    with_choice = [c.choices[0] for c in chunks if c.choices]
    assert sum(c.delta.role is not None for c in with_choice) == 1
    assert len([c for c in with_choice if c.finish_reason]) == 1
    assert with_choice[-1].finish_reason
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (step.prompt_tokens, step.tokens)
    assert usage.completion_tokens_details.reasoning_tokens == step.think_tokens
    assert step.tokens == step.think_tokens + step.answer_tokens + step.marker_tokens


async def test_a_cut_stream_goes_on_seamlessly(parsed: Guarded) -> None:
    await seamless(parsed, lambda content: content)


async def test_a_server_without_a_reasoning_parser_too(bare: Guarded) -> None:
    """It streams the trace as content, and the client sees it as it would have."""
    await seamless(bare, lambda content: content.partition("</think>")[2])


async def seamless(guarded: Guarded, answer: Callable[[str], str]) -> None:
    chunks, step = await closing(guarded, seed=1)
    check(chunks, step)
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert answer(content).strip()
    assert [e.how for e in guarded.events if isinstance(e, TraceClosed) and e.request == step.request] == ["tokens"]


async def test_a_budget_is_enforced_by_the_server_where_it_can(parsed: Guarded) -> None:
    mark = len(parsed.events)
    async with parsed.client() as client:
        for budget in (1, 7, 40):
            reply = await client.chat.completions.create(
                model="target", messages=LONG, temperature=1.0, max_tokens=900,  # type: ignore[arg-type]
                extra_body={"thinking_token_budget": budget},
            )  # fmt: skip
            assert (reply.choices[0].message.content or "").strip()
            assert reply.usage is not None
            assert reply.usage.completion_tokens_details is not None
            assert reply.usage.completion_tokens_details.reasoning_tokens == budget
    assert [s.think_tokens for s in finished(parsed.events[mark:])] == [1, 7, 40]
    assert {e.how for e in parsed.events[mark:] if isinstance(e, TraceClosed)} == {"engine"}


async def test_a_server_without_a_reasoning_parser_refuses_budgets_and_is_cut(bare: Guarded) -> None:
    mark = len(bare.events)
    async with bare.client() as client:
        for budget in (5, 40):
            reply = await client.chat.completions.create(
                model="target", messages=LONG, temperature=1.0, max_tokens=900,  # type: ignore[arg-type]
                extra_body={"thinking_token_budget": budget},
            )  # fmt: skip
            # what the small model says behind five tokens of a trace is now and then garbage, but it is said
            assert (reply.choices[0].message.content or "").partition("</think>")[2].strip()
    steps = finished(bare.events[mark:])
    assert [s.closed for s in steps] == ["budget", "budget"]
    assert 5 <= steps[0].think_tokens <= 25
    assert 40 <= steps[1].think_tokens <= 60
    assert not any(Note.BUDGET_IGNORED in s.notes for s in steps)
    assert bare.guard.engine.facts.budget == "rejected"


async def test_a_tool_call_comes_behind_a_cut_trace(parsed: Guarded) -> None:
    chunks, step = await closing(parsed, seed=3, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "ok"}})
    check(chunks, step)
    calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["ok"]
    assert json.loads("".join(call.function.arguments or "" for call in calls))["n"] in (1, 2)
    assert [e.how for e in parsed.events if isinstance(e, TraceClosed) and e.request == step.request] == ["chat"]
    # the reference pair's template shows nothing but the content, and the gateway found that out by asking
    assert parsed.guard.engine.facts.carrier == "content"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_json_answer_comes_behind_a_cut_trace(parsed: Guarded, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if stream:
        chunks, step = await closing(parsed, seed=4, response_format=form)
        check(chunks, step)
        content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    else:
        async with parsed.client() as client:
            reply = await client.chat.completions.create(
                model="target", messages=LONG, temperature=1.0, max_tokens=900, response_format=form,  # type: ignore[arg-type, call-overload]
                extra_body={"thinking_token_budget": 30},
            )  # fmt: skip
        content = reply.choices[0].message.content
    assert json.loads(content)["a"] in (1, 2)
