"""Whole streams of an upstream, as servers write them and as they should not, through a step; and prompts that quote think markers.

What is known of a stream (its text, its trace, its calls) is written in some server's manner, and has to come out again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec

from agentguard.engines.base import Stream
from agentguard.engines.chunks import paired
from agentguard.engines.facts import Facts
from agentguard.engines.openai_http import _chunk
from agentguard.errors import AgentGuardError, EngineDiedError
from agentguard.policy import Cutoff
from agentguard.replies import collect
from agentguard.requests import ChatRequest
from agentguard.step import OVERRUN, Step
from agentguard.trace.controller import Controller
from agentguard.trace.cutoff import think_cap
from agentguard.trace.markers import generic
from agentguard.trace.tally import MarkerIds
from tests.fuzz import make
from tests.fuzz.targets import Bug, target

START, END, STOP, WORD = 1, 2, 3, 10
IDS = MarkerIds((START,), (END,), (END,), ((110,),))
LIMIT, WINDOW = 3000, 8192
_WORDS = ("so ", "the answer ", "is 5. ", "💥", "🇩🇪", "é", "\n", "x", '"', "\\", "naïve ")
_FINISH = ("stop", "stop", "length", "eos", "end_turn", "tool_calls", "content_filter", "abort")
_COUNTS = (-1, 0, 5, 10**9, 10**15, -(10**20), True, 2.5, "5", None, [], {})
_MANNERS = ("openai", "no index", "index 0", "index null", "no ids", "object", "again", "at once", "strange ids")
_TRACES = ("reasoning", "reasoning_content", "both", "reasoning_details", "thinking_blocks", "text and details")
_MEDIA = ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"type": "video_url"}, {"type": "file"})
_BESIDE: tuple[dict[str, Any], ...] = (
    {"x_new": "y"}, {"provider_specific_fields": {"a": "b"}}, {"tool_calls": None}, {"tool_calls": []}, {"refusal": None},
    {"audio": {}}, {"role": "assistant"}, {"annotations": [{"type": "x"}]}, {"function_call": None},
)  # fmt: skip
"""What is no answer, whatever holds it."""
_BENT = [
    "tool_calls", "function", "arguments", "index", "refusal", "reasoning", "reasoning_details", "token_ids", "finish_reason",
    "usage", "delta", "choices", "text", "logprobs", "metrics", "stop_reason", "audio", "prompt_token_ids", "error",
]  # fmt: skip
logging.getLogger("agentguard").addHandler(logging.NullHandler())  # faults are logged, by the thousand here


@dataclass
class Told:
    """``whole``: nothing is bent, so what was told has to come out. ``fault``: what comes behind the end."""

    messages: list[dict[str, Any]]
    ids: bool
    events: list[str]
    whole: bool
    thought: str = ""
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    finish: str = "stop"
    fault: str = ""


def make_stream(rng: random.Random) -> Told:
    content: Any = make.text(rng, _WORDS)
    media = rng.random() < 0.2
    if rng.random() < 0.5:
        content = [{"type": "text", "text": content}] + [rng.choice(_MEDIA)] * media
    told = Told([{"role": "user", "content": content}], rng.random() < 0.5, [], rng.random() < 0.6)
    told.thought = "".join(rng.choice(_WORDS) for _ in range(rng.randrange(8)))
    told.finish = rng.choice(_FINISH)
    dice = rng.random()
    if dice < 0.6:
        told.text = "".join(rng.choice(_WORDS) for _ in range(rng.randrange(8)))
    if dice > 0.4:
        manner = rng.choice(_MANNERS)
        arguments = [json.dumps({"path": rng.choice(_WORDS)}, ensure_ascii=False) for _ in range(rng.randrange(4))]
        names = ["read", "write", "read"]
        told.calls = [(f"c{i}" * (manner != "no ids"), names[i], text) for i, text in enumerate(arguments)]
        if manner == "no ids":
            told.calls = [(call, f"{name}{i}", text) for i, (call, name, text) in enumerate(told.calls)]
    deltas = [{"role": "assistant", "content": ""}, *_traced(rng, told.thought)]
    at = len(deltas)
    deltas += [{"content": piece} for piece in _pieces(rng, told.text)]
    if told.calls:
        deltas += [{"tool_calls": piece} for piece in _called(rng, told.calls, manner)]
    for delta in deltas:
        if rng.random() < 0.2:
            delta |= {k: v for k, v in rng.choice(_BESIDE).items() if k not in delta}
    chunks = [_as_chunk(delta, [END, WORD] if i == at else [WORD] * (i > 0), None) for i, delta in enumerate(deltas)]
    if not told.ids:
        for one in chunks:
            del one["choices"][0]["token_ids"]
    chunks.append(_as_chunk({}, [STOP] * told.ids, told.finish))
    counts = {name: rng.choice(_COUNTS) for name in ("prompt_tokens", "completion_tokens")}
    counts["completion_tokens_details"] = {"reasoning_tokens": rng.choice(_COUNTS)}
    spec = {f"num_{name}": rng.choice(_COUNTS) for name in ("spec_steps", "draft_tokens", "accepted_draft_tokens")}
    chunks.append({"id": "c", "choices": [], "usage": counts, "metrics": {"speculative_decoding": spec}})
    if not told.whole:
        chunks = [make.bent(rng, one, _BENT) if rng.random() < 0.3 else one for one in chunks]
    told.events = [_data(rng, one) for one in chunks]
    told.fault = rng.choice(("", "", '{"choices": [], "usa', '{"error": {"message": "late"}}', "hang up"))
    return told


def _data(rng: random.Random, chunk: Any) -> str:
    """As JSON; halves of pairs can only come escaped, as what is no UTF-8 is no text."""
    text = json.dumps(chunk, ensure_ascii=False, default=str)
    return text if rng.random() < 0.5 and paired(text) == text else json.dumps(chunk, default=str)


def _as_chunk(delta: dict[str, Any], ids: list[int], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def _pieces(rng: random.Random, text: str) -> list[str]:
    """The text cut between any two UTF-16 units, as a server does that is written in Java or in C#."""
    raw = text.encode("utf-16-le")
    units = [raw[i : i + 2] for i in range(0, len(raw), 2)]
    return [b"".join(piece).decode("utf-16-le", "surrogatepass") for piece in make.cuts(rng, units) if piece]


def _traced(rng: random.Random, thought: str) -> list[dict[str, Any]]:
    how = rng.choice(_TRACES)
    out: list[dict[str, Any]] = []
    for piece in _pieces(rng, thought):
        detail = {"reasoning_details": [{"type": "reasoning.text", "text": piece, "index": 0}]}
        out.append({
            "both": {"reasoning": piece, "reasoning_content": piece}, "reasoning_details": detail,
            "thinking_blocks": {"thinking_blocks": [{"type": "thinking", "thinking": piece}]},
            "text and details": {"reasoning": piece, **detail},
        }.get(how, {how: piece}))  # fmt: skip
    return out


def _called(rng: random.Random, calls: list[tuple[str, str, str]], manner: str) -> list[list[Any]]:
    whole = [
        {"id": call, "type": "function", "index": i, "function": {"name": name, "arguments": text}}
        for i, (call, name, text) in enumerate(calls)
    ]
    junk = [[None], ["x"], [5], [{}], [[]]]
    out: list[list[Any]] = []
    for i, one in enumerate(whole):
        function: dict[str, Any] = one["function"]  # type: ignore[assignment]
        if manner in ("openai", "again", "strange ids"):
            pieces = _pieces(rng, function["arguments"])
            for j, piece in enumerate(pieces):
                begins = {"id": one["id"], "type": "function"} if manner == "again" or j == 0 else {}
                begins |= {"id": f"x{i}{j}"} if manner == "strange ids" and j else {}
                named = {"name": function["name"]} if manner == "again" or j == 0 else {}
                out.append([{**begins, "index": i, "function": {**named, "arguments": piece}}])
            continue
        if manner == "object":
            function["arguments"] = json.loads(function["arguments"])
        elif manner in ("index 0", "index null"):
            one["index"] = 0 if manner == "index 0" else None
        elif manner in ("no index", "at once"):
            del one["index"]
        elif manner == "no ids":
            del one["id"]
        out.append([one])
    if manner == "at once":
        out = [whole]
    return [piece + rng.choice(junk) if rng.random() < 0.1 else piece for piece in out]


class _Engine:
    """Tells the stream, and answers whatever is asked behind it."""

    name = "e"

    def __init__(self, told: Told, chunks: ModuleType) -> None:
        self.facts, self._told, self._chunks = Facts(tokenize=False), told, chunks
        self.asked = self.completed = 0

    async def chat(self, body: Any, request_id: str, session: str) -> Stream:
        self.asked += 1
        shape = self._chunks.Chunks()
        if self.asked > 1:
            for finish in (None, "stop"):
                yield shape.take(_as_chunk({} if finish else {"content": "b"}, [WORD], finish))
            return
        for data in self._told.events:
            yield _chunk(data, shape)
        if self._told.fault == "hang up":
            raise EngineDiedError("gone")
        if self._told.fault:
            yield _chunk(self._told.fault, shape)

    async def complete(self, prompt: Any, body: Any, request_id: str) -> Stream:
        self.completed += 1
        yield self._chunks.Chunks().take({"choices": [{"text": "b", "token_ids": [WORD, STOP], "finish_reason": "stop"}]})

    async def tokenize_chat(self, body: Any) -> list[int] | None:
        return None

    async def set_think_tokens(self, request_id: str, tokens: int) -> None:
        return None


_LOOPS: list[asyncio.AbstractEventLoop] = []


def _run(work: Any) -> Any:
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0].run_until_complete(work)


async def _again(chunks: list[Any]) -> AsyncIterator[Any]:
    for chunk in chunks:
        yield chunk


@target(
    "agentguard.engines.chunks", make=make_stream,
    bug=("agentguard.engines.chunks", "if call and call in self._calls:", "if call and call in self._calls[:1]:"),
)  # fmt: skip
def upstream_stream(modules: dict[str, ModuleType], told: Told) -> str:
    """A step ends with an answer, one finish reason and counts that can be true, or in one of our errors; what a whole stream said
    comes out, however it was written and whatever came behind its end."""
    engine = _Engine(told, modules["chunks"])
    cap = think_cap(Cutoff(), window=WINDOW, prompt=3, limit=LIMIT, answers=(), growth=0.0)
    step = Step(
        engine, ChatRequest.read({"messages": told.messages, "max_tokens": LIMIT}), {"messages": told.messages},  # type: ignore[arg-type]
        Controller(cap, traces=()), request_id="r", session="s", prompt=[5, 6, START] if told.ids else None, prompt_tokens=3,
        family=generic(), ids=IDS if told.ids else None,
    )  # fmt: skip

    async def drive() -> list[Any]:
        return [chunk async for chunk in step.run()]

    try:
        chunks = _run(drive())
    except AgentGuardError as error:
        if told.whole:
            raise Bug(f"{type(error).__name__} though nothing was wrong before the end: {error}") from None
        return "refused"
    msgspec.json.encode(chunks)  # UTF-8, and no NaN
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"] and c["choices"][0].get("finish_reason")]
    usage, tally = chunks[-1]["usage"], step.reading.tally
    if len(ends) != 1 or chunks[-1]["choices"]:
        raise Bug(f"finish reasons {ends}")
    total, thought = usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]
    if (
        not 0 <= thought <= total <= cap.budget + OVERRUN
        or min(tally.think, tally.answer, tally.markers, usage["prompt_tokens"]) < 0
    ):
        raise Bug(f"usage {usage}")
    if engine.completed and (len(told.messages[0]["content"]) > 1 and isinstance(told.messages[0]["content"], list)):
        raise Bug("ids went where a picture was to go")
    message = _run(collect(_again(chunks)))["choices"][0]["message"]  # type: ignore[arg-type]
    if not any(message.get(key) for key in ("content", "tool_calls", "function_call", "refusal", "audio", "images")):
        raise Bug(f"an empty message: {message}")
    if told.whole:
        _came_out(told, message)
    return "accepted"


def _came_out(told: Told, message: dict[str, Any]) -> None:
    calls = [(c.get("id", ""), c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    if calls != told.calls:
        raise Bug(f"calls {told.calls} became {calls}")
    if (told.text.strip() or told.calls) and (message.get("content") or "") != told.text:
        raise Bug(f"{told.text!r} became {message.get('content')!r}")
    if (message.get("reasoning") or message.get("reasoning_content") or "") != told.thought:
        raise Bug(f"the trace {told.thought!r} became {message.get('reasoning')!r}")


# -- prompts -------------------------------------------------------------------------------------------------------------------

_MARKERS = (((4,), (5,)), ((4, 7), (5, 7, 6)))
HEADER, BLANK = (21, 22, 23), 30


@dataclass
class Prompt:
    start: tuple[int, ...]
    end: tuple[int, ...]
    said: list[int]
    generation: list[int]


def make_prompt(rng: random.Random) -> Prompt:
    start, end = rng.choice(_MARKERS)
    words = [start, start, end, (BLANK,), (40,), (41,), HEADER, start[:1], end[-1:], (9,)]
    generation = rng.choice([
        [], [*start], [*start, BLANK], [*start, BLANK, BLANK], [*start, 40, 41], [*start, *end], [*start, BLANK, *end], [40],
    ])  # fmt: skip
    return Prompt(start, end, [token for _ in range(rng.randrange(12)) for token in rng.choice(words)], generation)


@target(
    "agentguard.trace.opening", "engine_plugins.vllm.phase", make=make_prompt,
    bug=("engine_plugins.vllm.phase", "            if token in turns:\n                return -1\n", ""),
)  # fmt: skip
def prompt_opening(modules: dict[str, ModuleType], given: Prompt) -> str:
    """A block is open where the generation prompt leaves one open, whatever was said before; the guard and the plugin agree."""
    opening, phase = modules["opening"], modules["phase"]
    ids = MarkerIds(given.start, given.end, given.end, ((BLANK,), (BLANK, BLANK)))
    prompt = [*given.said, *HEADER, *given.generation]
    bare = [8, *HEADER]
    learned = opening.tail([*bare, *given.generation], bare, ids)
    wanted = len(given.generation) - len(given.start)
    if given.generation[: len(given.start)] != [*given.start] or given.generation[-len(given.end) :] == [*given.end]:
        wanted = -1
    rest = opening.behind(prompt, ids)
    found = len(rest) if rest is not None and opening.opens(rest, ids, (learned,)) else -1
    inside = phase.ThinkMarkers(given.start, given.end, frozenset(HEADER)).given(prompt)
    if not found == inside == wanted:
        raise Bug(f"the template opens {wanted}, the guard sees {found}, the plugin {inside}")
    return "accepted" if wanted >= 0 else "refused"
