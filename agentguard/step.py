"""One model call while it runs: counted, watched, closed where its trace must end, and continued until there is an answer.

The stream of the engine passes through `Step.run`. Whatever happens upstream, the client sees one stream: one id, one finish
reason, the usage of all parts together, and an answer or a line that says why there is none.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from agentguard.continuation import Behind, as_note, at_token_level, fit, through_template, without_loop
from agentguard.engines.base import Chunk, Engine, Stream
from agentguard.engines.facts import Carrier
from agentguard.errors import EngineDiedError, EngineError, EngineRequestError
from agentguard.events import Note
from agentguard.requests import ChatRequest
from agentguard.trace.controller import Close, Controller
from agentguard.trace.cutoff import CloseReason, Term
from agentguard.trace.markers import Family
from agentguard.trace.splitter import Splitter
from agentguard.trace.tally import MarkerIds, Tally, TextTally, find_last

logger = structlog.get_logger(__name__)
WAIT = 64
"""Think tokens after a close was ordered in the engine before the stream is cut instead; a close takes effect within a round."""
NO_ANSWER = "(no answer: the token limit was used up by the reasoning)"
How = Literal["engine", "tokens", "chat", "note", "none"]
_BY_CAP = (CloseReason.BUDGET, CloseReason.RESERVE, CloseReason.SESSION)
_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Closed:
    """A forced close that has taken effect."""

    reason: CloseReason
    think: int
    cap: int
    how: How
    detail: str


class Step:
    """``prompt``: its ids, None when the server cannot tell; ``usual_answer``: p90 of the session's answers, 0 for unknown."""

    def __init__(
        self, engine: Engine, request: ChatRequest, upstream: dict[str, Any], controller: Controller, *, request_id: str,
        session: str, prompt: list[int] | None, prompt_tokens: int, family: Family, ids: MarkerIds | None,
        usual_answer: int = 0, on_close: Callable[[Closed], None] = lambda _: None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self.controller = controller
        self.notes: list[Note] = []
        self.closed: CloseReason | None = None
        self.continued = False
        self.prompt_tokens = prompt_tokens
        self.rounds: int | None = None
        self.drafted: int | None = None
        self.accepted: int | None = None
        self.finish_reason = ""
        self.reported_think: int | None = None
        self.estimated = False
        self._engine = engine
        self._request = request
        self._upstream = upstream
        self._session = session
        self._prompt = prompt
        self._family = family
        self._marker_ids = ids
        self._usual_answer = usual_answer
        self._on_close = on_close
        self._clock = clock
        # one token over the limit, and the transition the server may write before the marker
        self._slack = 1 + (len(ids.closing) - len(ids.end) if ids is not None else 0)
        self._off = controller.cap.bound_by is Term.OFF
        self._limit = controller.cap.think_cap
        self._ids: list[int] = []
        self._trace: list[str] = []
        self._answered = False
        self._tools = False
        self._pending: Close | None = None
        self._pending_at = 0
        self._stop_reason: int | str | None = None
        self._shape: Chunk = {}
        self._usage: Chunk | None = None
        self._totals: list[int] = []
        self._splitter: Splitter | None = None
        self._separates = False
        self._new_ids: list[int] = []
        self._new_text = ""
        self.given = 0
        self.tally: Tally | TextTally
        if prompt is not None and ids is not None:
            self.tally = self._open(prompt, ids)
        else:
            self.tally = TextTally(engine.facts.chars_per_token, opened=bool(family.opened))
        # a stock server counts what the prompt opened towards the budget, the guard counts what the model wrote
        if "thinking_token_budget" in upstream:
            upstream["thinking_token_budget"] += self.given

    def ask_to_close(self, why: str) -> None:
        """An operator closes the trace; see `Controller.ask_to_close`."""
        self.controller.ask_to_close(why)

    @property
    def empty(self) -> bool:
        return not self._answered and not self._tools

    async def run(self) -> Stream:
        """The step as OpenAI chunks. Closing the iterator aborts it in the engine."""
        cut: Close | None = None
        last: Chunk | None = None
        async with aclosing(self._engine.chat(self._upstream, self.request_id, self._session)) as chunks:
            async for chunk in chunks:
                shown = self._take(chunk)
                if shown is None:
                    continue
                if shown["choices"][0].get("finish_reason"):
                    last = shown
                    continue
                cut = await self._control()
                yield shown
                if cut is not None:
                    break
        if cut is None and last is None:
            raise EngineError(f"engine {self._engine.name} ended request {self.request_id} without a finish reason")
        self.tally.finish(stopped=cut is None and self._turn_ended)
        if last is not None:
            self._settle()
        if cut is not None or self._needs_answer():
            if last is not None:
                yield _unfinished(last)
            async with aclosing(self._go_on(cut)) as more:
                async for chunk in more:
                    yield chunk
            last = _choice(self._shape, {}, self.finish_reason)
        self._look_back()
        assert last is not None
        yield last
        yield self._final_usage()

    # -- reading ------------------------------------------------------------------------------------------------------

    def _open(self, prompt: list[int], ids: MarkerIds) -> Tally:
        start = find_last(prompt, ids.start)
        opened = start > find_last(prompt, ids.end)
        self.given = len(prompt) - start - len(ids.start) if opened else 0
        return Tally(ids, opened=opened)

    def _take(self, chunk: Chunk) -> Chunk | None:
        """Count a chunk; returns it as the client sees it, None for one without choices."""
        if chunk.get("prompt_token_ids") and not self._ids:
            # what was really served; a server may render a request differently from what /tokenize said
            self._prompt = list(chunk["prompt_token_ids"])
            self.prompt_tokens = len(self._prompt)
            if self._marker_ids is not None:
                self.tally = self._open(self._prompt, self._marker_ids)
        if not chunk.get("choices"):
            self._take_usage(chunk)
            return None
        if not self._shape:
            self._shape = {k: chunk[k] for k in ("id", "object", "created", "model", "system_fingerprint") if k in chunk}
        choice = chunk["choices"][0]
        self._read(choice)
        if choice.get("finish_reason"):
            self.finish_reason, self._stop_reason = choice["finish_reason"], choice.get("stop_reason")
        return _public(chunk, self._request)

    def _read(self, choice: Mapping[str, Any]) -> None:
        ids = list(choice.get("token_ids") or ())
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        content = delta.get("content") or ""
        self._separates = self._separates or bool(reasoning)
        self._tools = self._tools or bool(delta.get("tool_calls"))
        tally = self.tally
        was_inside = tally.inside
        if isinstance(tally, Tally):
            if not ids and (reasoning or content):
                # the server does not stream ids after all: everything so far was without text
                tally = self.tally = TextTally(self._engine.facts.chars_per_token, opened=tally.inside)
            else:
                tally.feed(ids)
        self._ids += ids
        thought, said = self._split(reasoning, content, still_inside=was_inside and (tally.inside or not ids))
        if isinstance(tally, TextTally):
            tally.feed_text(thought, said)
        self._answered = self._answered or bool(said.strip())
        if tally.inside and not was_inside:
            self.controller.new_block()
            self._trace.clear()
        if thought:
            self._trace.append(thought)
        self._new_ids += ids
        self._new_text += thought
        if was_inside and not tally.inside:
            self._left_block()

    def _split(self, reasoning: str, content: str, *, still_inside: bool) -> tuple[str, str]:
        """Thought and answer text of a delta. Content is split too: a server without a reasoning parser streams the trace there,
        and some put a later block's markers into it."""
        if not content:
            return reasoning, ""
        if self._splitter is None:
            self._splitter = Splitter(
                self._family.pairs,
                opened=still_inside and not self._separates,
                special_tokens=self._family.special or self._separates,
            )
        segments = self._splitter.feed(content)
        return (
            reasoning + "".join(text for kind, text in segments if kind == "think"),
            "".join(text for kind, text in segments if kind == "answer"),
        )

    def _left_block(self) -> None:
        """A block ended in the stream: by itself, or because the engine closed it."""
        if self._pending is not None:
            self._report(self._pending, "engine")
            self._pending = None
        elif not self._off and self._in_engine and self._reached():
            cap = self.controller.cap
            self._report(Close(cap.bound_by.reason, f"cap {self._limit} ({cap.bound_by})"), "engine")

    def _reached(self) -> bool:
        if self._engine.facts.plugin:
            return self.tally.think >= self._limit
        return self.tally.block >= self._limit

    @property
    def _in_engine(self) -> bool:
        """The server closes at the limit it was sent, as far as is known."""
        facts = self._engine.facts
        return facts.plugin or facts.budget in ("unknown", "works")

    def _take_usage(self, chunk: Chunk) -> None:
        spec = (chunk.get("metrics") or {}).get("speculative_decoding")
        if spec:
            self.rounds = (self.rounds or 0) + spec["num_spec_steps"]
            self.drafted = (self.drafted or 0) + spec["num_draft_tokens"]
            self.accepted = (self.accepted or 0) + spec["num_accepted_draft_tokens"]
        if chunk.get("usage"):
            self._usage = chunk
            self._totals.append(chunk["usage"].get("completion_tokens") or 0)

    def _settle(self) -> None:
        """Compare with the engine's own counters at the end of a stream that was read to its end."""
        usage = (self._usage or {}).get("usage") or {}
        total = usage.get("completion_tokens")
        reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        if isinstance(self.tally, TextTally):
            if total:
                self._engine.facts.learn_rate(self.tally.settle(total, reasoning or None))
            self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
            self.estimated = self.tally.estimated
            return
        self.estimated = total is not None and total != len(self._ids)
        # vLLM's older parsers say 0 where the prompt opened the block
        if reasoning or (reasoning == 0 and not self.given):
            self.reported_think = reasoning
            if reasoning != self.tally.think:
                self._note(Note.COUNT_DIFFERS)

    @property
    def _turn_ended(self) -> bool:
        """The model ended its turn: the last token is the end of turn. With a stop string of the client's it is a real token."""
        return self.finish_reason in ("stop", "tool_calls") and not isinstance(self._stop_reason, str)

    # -- closing ------------------------------------------------------------------------------------------------------

    async def _control(self) -> Close | None:
        """Ask the controller about what has come, and order a close in the engine; a verdict that is returned cuts the stream."""
        ids, text, self._new_ids, self._new_text = self._new_ids, self._new_text, [], ""
        tally = self.tally
        if self._off or self.continued or not tally.inside or self._answered or self._tools:
            return None
        if self._pending is not None:
            return self._pending if tally.think >= self._pending_at + WAIT else None
        close = self.controller.watch(ids, text, think=tally.think, now=self._clock())
        cap, facts = self.controller.cap, self._engine.facts
        if close is None:
            if facts.plugin and cap.think_cap < self._limit and tally.think >= 0.7 * cap.think_cap:
                await self._order(cap.think_cap)
            return None
        if close.reason in _BY_CAP:
            if cap.think_cap < self._limit and facts.plugin and await self._order(cap.think_cap):
                return None
            if not self._in_engine or cap.think_cap < self._limit:
                return close
            if tally.think < self._limit + self._slack:
                return None  # the engine closes it, within the round
            facts.budget = "ignored"
            self._note(Note.BUDGET_IGNORED)
            return close
        if close.loop is not None and close.loop.kind == "run":
            return close  # a run of garbage must not stand before the answer, so the trace is left out
        if facts.plugin and await self._order(0):
            self._pending, self._pending_at = close, tally.think
            return None
        return close

    async def _order(self, tokens: int) -> bool:
        """Change the limit in the engine; False when that did not work, and the stream has to be cut."""
        try:
            standing = await self._engine.set_think_tokens(self.request_id, tokens)
        except EngineDiedError:
            raise
        except EngineError as error:
            logger.warning("budget_not_changed", request=self.request_id, error=str(error))
            return False
        if standing is None:
            return False
        self._limit = max(tokens, standing.think)
        return True

    def _report(self, close: Close, how: How) -> None:
        self.closed = self.closed or close.reason
        cap = self.controller.cap.think_cap
        self._on_close(Closed(close.reason, self.tally.think, cap, how, close.detail))

    def _note(self, note: Note) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # -- going on -----------------------------------------------------------------------------------------------------

    def _needs_answer(self) -> bool:
        """A step without an answer goes on, unless the client's own stop ended it."""
        stopped_by_client = self.finish_reason == "stop" and self._stop_reason is not None
        return self.empty and not self._off and not stopped_by_client

    async def _go_on(self, cut: Close | None) -> Stream:
        """The answer behind a trace that was cut, or behind one the model left without an answer."""
        if cut is None and self._turn_ended and self.tally.inside:
            self._note(Note.NO_CLOSE_TAG)
        if cut is not None and self.rounds is None:
            self.drafted = self.accepted = None  # a cut stream has no counters
        behind = self._behind(cut)
        if self.tally.inside:
            self.tally.markers += len(self._marker_ids.closing) if self._marker_ids is not None else 1
            self.tally.close()
        self.continued = True
        how: How = "none"
        self.finish_reason = ""
        if behind.limit > 0:
            async for kind, body, prompt in self._ways(behind):
                chunks = (
                    self._engine.complete(prompt, body, f"{self.request_id}-answer")
                    if prompt is not None
                    else self._engine.chat(body, f"{self.request_id}-answer", self._session)
                )
                try:
                    async with aclosing(chunks):
                        async for chunk in chunks:
                            shown = self._take_answer(chunk)
                            how = kind
                            if shown is not None:
                                yield shown
                except EngineRequestError as error:
                    if how != "none" or error.status not in (400, 404, 405, 422, 501):
                        raise
                    logger.warning("continuation_refused", request=self.request_id, way=kind, error=str(error)[:200])
                    if kind == "chat":
                        self._engine.facts.carrier = "unknown"
                    continue
                break
        if cut is not None:
            self._report(cut, how)
        self.tally.finish(stopped=self._turn_ended)
        if isinstance(self.tally, TextTally):
            self.estimated = True
            if how != "none" and self._usage is not None:
                self.tally.answer = self._usage["usage"].get("completion_tokens") or self.tally.answer
                self.tally.markers = 0
        if self.empty:
            self.finish_reason = "length"
            yield _choice(self._shape, {"content": NO_ANSWER}, None)
        self.finish_reason = self.finish_reason or "length"

    def _behind(self, cut: Close | None) -> Behind:
        trace = list(self._ids)
        if cut is None and self._turn_ended and trace:
            trace.pop()
        text = "".join(self._trace)
        if cut is not None and cut.loop is not None:
            if cut.loop.kind == "run":
                trace, text = [], ""
            elif isinstance(self.tally, Tally):
                trace = without_loop(trace, cut.loop.period)
        cap = self.controller.cap
        marker = 1 if self._marker_ids is None else len(self._marker_ids.closing)
        left = cap.budget - self.tally.total - (marker if self.tally.inside else 0)
        return Behind(
            self._prompt or (), trace, self.tally.inside, text, min(left, cap.window - self.prompt_tokens - len(trace) - marker)
        )

    async def _ways(self, behind: Behind) -> AsyncIterator[tuple[How, dict[str, Any], list[int] | None]]:
        """Ways to go on, the best first: (how, body, prompt ids or None for the chat route)."""
        upstream = {k: v for k, v in self._upstream.items() if k != "thinking_token_budget"}
        xargs = dict(upstream.get("vllm_xargs") or {})
        if self._engine.facts.plugin:
            xargs["ag_think_tokens"] = 0  # a block that is opened again is closed at once
        if xargs:
            upstream["vllm_xargs"] = xargs
        exact = bool(behind.prompt) and isinstance(self.tally, Tally)
        if exact and not self._request.tools and self._marker_ids is not None:
            prompt, body = at_token_level(upstream, behind, self._marker_ids)
            yield "tokens", body, prompt
        if behind.text:
            for carrier in self._carriers():
                body = through_template(upstream, behind, self._family, carrier)
                if await self._fits(body, behind, carrier):
                    yield "chat", body, None
        body = as_note(upstream, behind)
        if self._engine.facts.budget in ("unknown", "works"):
            body["thinking_token_budget"] = 0
        yield "note", body, None

    def _carriers(self) -> tuple[Carrier, ...]:
        known = self._engine.facts.carrier
        if known == "unknown":
            return ("reasoning", "content")
        return () if known == "" else (known,)

    async def _fits(self, body: Mapping[str, Any], behind: Behind, carrier: Carrier) -> bool:
        """Does the template carry the trace? Asked of /tokenize, without generating anything; where nobody can tell, a server that
        knows the fields is believed."""
        if self._marker_ids is None or not behind.prompt or not behind.trace:
            return True
        try:
            rendered = await self._engine.tokenize_chat(body)
        except EngineRequestError:
            return False
        if rendered is None:
            return True
        good = fit(rendered, behind, self._marker_ids) != "lost"
        if good:
            self._engine.facts.carrier = carrier
        elif carrier == "content" and self._engine.facts.carrier == "unknown":
            self._engine.facts.carrier = ""
        return good

    def _take_answer(self, chunk: Chunk) -> Chunk | None:
        """A chunk of a continuation, spliced: the first part's id, no second role, and what a server misfiles as reasoning is the
        answer it is, as long as no new block was opened."""
        if not chunk.get("choices"):
            self._take_usage(chunk)
            return None
        choice = dict(chunk["choices"][0])
        ids = list(choice.get("token_ids") or ())
        delta = dict(choice.get("delta") or {})
        if "text" in choice:
            delta = {"content": choice["text"] or ""}
        delta.pop("role", None)
        if isinstance(self.tally, Tally):
            self.tally.feed(ids)
        inside = isinstance(self.tally, Tally) and self.tally.inside
        if inside:
            self._note(Note.THINKS_AGAIN)
        else:
            misfiled = "".join(delta.pop(key, None) or "" for key in ("reasoning", "reasoning_content"))
            if misfiled:
                delta["content"] = misfiled + (delta.get("content") or "")
        content = delta.get("content") or ""
        if isinstance(self.tally, TextTally):
            self.tally.feed_text("", content)
        self._answered = self._answered or (bool(content.strip()) and not inside)
        self._tools = self._tools or bool(delta.get("tool_calls"))
        if choice.get("finish_reason"):
            self.finish_reason, self._stop_reason = choice["finish_reason"], choice.get("stop_reason")
        if not ids and not any(delta.values()):
            return None
        return _public(_choice(self._shape, delta, None, ids or None), self._request)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _look_back(self) -> None:
        """What is worth a note once the step is over."""
        answer = self.tally.answer
        if self.closed is not None and self._usual_answer and answer >= max(16, 3 * self._usual_answer):
            self._note(Note.ANSWER_GREW)
        if self.empty:
            self._note(Note.EMPTY_ANSWER)
        names = self._request.tool_names()
        if names and not self._tools and self.finish_reason == "stop":
            tail = "".join(self._trace)[-_TAIL:]
            if any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", tail) for name in names):
                self._note(Note.PLANNED_NOT_CALLED)

    def _final_usage(self) -> Chunk:
        """The usage chunk with the guard's counts, which cover a continuation too."""
        usage = dict((self._usage or {}).get("usage") or {})
        total = self.tally.total
        usage |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": total, "total_tokens": self.prompt_tokens + total}
        usage["completion_tokens_details"] = {"reasoning_tokens": self.tally.think}
        rest = {k: v for k, v in (self._usage or {}).items() if k not in ("id", "created", "model")}
        return {**rest, **self._shape, "choices": [], "usage": usage}


def _public(chunk: Chunk, request: ChatRequest) -> Chunk:
    """The chunk as the client asked for it: token ids only if it wanted them, reasoning unless it did not."""
    choices = []
    for choice in chunk["choices"]:
        choice = dict(choice)
        if not request.return_token_ids:
            choice.pop("token_ids", None)
        if request.include_reasoning is False:
            hidden = ("reasoning", "reasoning_content")
            choice["delta"] = {k: v for k, v in (choice.get("delta") or {}).items() if k not in hidden}
        choices.append(choice)
    shown = chunk if request.return_token_ids else {k: v for k, v in chunk.items() if k != "prompt_token_ids"}
    return {**shown, "choices": choices}


def _choice(shape: Chunk, delta: dict[str, Any], finish: str | None, ids: list[int] | None = None) -> Chunk:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    if ids is not None:
        choice["token_ids"] = ids
    return {**shape, "choices": [choice]}


def _unfinished(chunk: Chunk) -> Chunk:
    """The last chunk of a step that goes on."""
    return {**chunk, "choices": [{**chunk["choices"][0], "finish_reason": None, "stop_reason": None}]}
