"""One model call while it runs: counted, watched, closed where its trace must end, and continued until there is an answer.

The stream of the engine passes through `Step.run`. Whatever happens upstream, the client sees one stream: one id, one finish
reason, the usage of all parts together, and an answer or a line that says why there is none.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from agentguard.continuation import Behind, as_note, at_token_level, fit, through_template, without_copies, without_partial
from agentguard.engines.base import Chunk, Engine, Stream
from agentguard.engines.facts import Carrier
from agentguard.errors import EngineDiedError, EngineError, loggable
from agentguard.events import Note
from agentguard.requests import ChatRequest
from agentguard.trace.controller import Close, Controller
from agentguard.trace.cutoff import CloseReason, Term
from agentguard.trace.markers import Family
from agentguard.trace.splitter import Splitter
from agentguard.trace.tally import MarkerIds, Tally, TextTally, find_last

logger = logging.getLogger(__name__)
OVERRUN = 256
"""Tokens past what the engine was allowed before its stream is ended here: rounds may end late, an endless stream never does."""
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
        self._off = controller.cap.off
        self._most = max(controller.cap.budget, 1) + OVERRUN
        self._chunks = 0
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
        self._splitter: Splitter | None = None
        self._separates = False
        self._inline = False
        self._misfiled: list[str] = []
        self._new_ids: list[int] = []
        self._new_text = ""
        self.given = 0
        self.tally: Tally | TextTally
        if prompt is not None and ids is not None:
            self.tally = self._open(prompt, ids)
        else:
            # a server that hides its reasoning looks like one that streams it as content, so content is believed to be a trace
            # only where that has been seen
            opened = bool(family.opened) and engine.facts.inline and not request.thinking_off
            self.tally = TextTally(engine.facts.chars_per_token, opened=opened)
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
            while True:
                try:
                    async with asyncio.timeout(self._patience()):
                        chunk = await anext(chunks, None)
                except TimeoutError:
                    if not self.controller.overdue(self._clock()):
                        raise
                    cut = self.controller.deadline()  # a stream that stalls inside its trace
                    break
                if chunk is None:
                    break
                shown = self._take(chunk)
                if self._overrun():
                    for held in (last, shown):
                        if held is not None:
                            yield _unfinished(held)
                    self.finish_reason = "length"
                    last = _choice(self._shape, {}, "length")
                    break
                if shown is None:
                    continue
                if last is not None:  # some servers go on behind a finish reason
                    yield _unfinished(last)
                    last = None
                if shown["choices"][0].get("finish_reason"):
                    last = shown
                    continue
                cut = await self._control()
                yield shown
                if cut is not None:
                    break
        self._read_held()
        if cut is None and self._pending is not None and self.tally.inside:
            cut = self._pending  # ordered, and the stream ended before it came
        if cut is None and last is None and self.finish_reason:
            last = _choice(self._shape, {}, self.finish_reason)
        if cut is None and last is None:
            raise EngineError(f"engine {self._engine.name} ended request {self.request_id} without a finish reason")
        self.tally.finish(stopped=last is not None and self._turn_ended)
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

    def _overrun(self) -> bool:
        """The engine sends more than it was allowed, in tokens or in chunks that hold none. A text is counted by an estimate, which
        may be some times too high."""
        self._chunks += 1
        if isinstance(self.tally, Tally):
            return self.tally.total > self._most or self._chunks > 4 * self._most
        return self.tally.total > 8 * self._most or self._chunks > 16 * self._most

    def _patience(self) -> float | None:
        """Seconds to wait for the next chunk: until the deadline while the trace is open, else as long as the engine's client."""
        if self._off or not self.tally.inside or self._answered or self._tools:
            return None
        left = self.controller.time_left(self._clock())
        return None if left is None else max(0.0, left) + 0.001

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
        if chunk.get("usage") or chunk.get("metrics"):
            self._take_usage(chunk)
            chunk = {k: v for k, v in chunk.items() if k not in ("usage", "metrics")}  # it comes once, at the end
        if not chunk.get("choices"):
            return None
        if not self._shape:
            self._shape = {k: chunk[k] for k in ("id", "object", "created", "model", "system_fingerprint") if k in chunk}
        choice = chunk["choices"][0]
        self._normalise(choice)
        self._read(choice)
        if choice.get("finish_reason"):
            self.finish_reason, self._stop_reason = choice["finish_reason"], choice.get("stop_reason")
        return _public(chunk, self._request)

    @staticmethod
    def _normalise(choice: Mapping[str, Any]) -> None:
        """What some servers write otherwise: content as a list of parts, tool calls without an index."""
        delta = choice.get("delta") or {}
        if isinstance(delta.get("content"), list):
            parts = [part for part in delta["content"] if isinstance(part, dict)]
            delta["content"] = "".join(str(part.get("text") or "") for part in parts)
        for number, call in enumerate(delta.get("tool_calls") or ()):
            call.setdefault("index", number)

    def _read(self, choice: Mapping[str, Any]) -> None:
        ids = list(choice.get("token_ids") or ())
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        content = delta.get("content") or ""
        self._separates = self._separates or bool(reasoning)
        self._tools = self._tools or _calls(delta)
        tally = self.tally
        was_inside = tally.inside
        if isinstance(tally, Tally):
            if not ids and not self._ids and (reasoning or content):
                # the server tells a prompt's ids and streams none
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
        was_open = self._splitter.inside
        segments = self._splitter.feed(content)
        thought = "".join(text for kind, text in segments if kind == "think")
        self._inline = self._inline or (bool(thought) and not self._separates)
        if self._inline and was_open and not self._splitter.inside:
            self._engine.facts.inline = True
        return reasoning + thought, "".join(text for kind, text in segments if kind == "answer")

    def _read_held(self) -> None:
        """The stream has ended: what looked like the beginning of a marker was none."""
        if self._splitter is None:
            return
        for kind, text in self._splitter.finish():
            self._answered = self._answered or (kind == "answer" and bool(text.strip()))

    def _left_block(self) -> None:
        """A block ended in the stream: by itself, or because the engine closed it."""
        if self._pending is not None:
            self._report(self._pending, "engine")
            self._pending = None
        elif self.closed is None and self._sent and self._in_engine and self._reached():
            cap, facts = self.controller.cap, self._engine.facts
            if not facts.plugin and facts.budget == "unknown":
                facts.budget = "works"
            self._report(Close(cap.bound_by.reason, f"cap {self._limit} ({cap.bound_by})"), "engine")

    @property
    def _sent(self) -> bool:
        """The engine was told a limit."""
        return not self._off or self.controller.cap.bound_by is Term.CLIENT

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
        metrics = chunk.get("metrics")
        spec = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(spec, dict):
            rounds, drafted, accepted = (spec.get(f"num_{k}") for k in ("spec_steps", "draft_tokens", "accepted_draft_tokens"))
            if isinstance(rounds, int) and isinstance(drafted, int) and isinstance(accepted, int):
                self.rounds = (self.rounds or 0) + rounds
                self.drafted = (self.drafted or 0) + drafted
                self.accepted = (self.accepted or 0) + accepted
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            details = usage.get("completion_tokens_details")
            known = {k: v for k, v in usage.items() if v is None or isinstance(v, dict) or (isinstance(v, int) and v >= 0)}
            if not isinstance(details, dict) or not isinstance(details.get("reasoning_tokens", 0), int | None):
                known.pop("completion_tokens_details", None)
            self._usage = {**chunk, "usage": known}

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

    @property
    def _stopped_by_client(self) -> bool:
        """By a stop string, or by a token the client named: with several end tokens in a model's generation_config (Qwen3,
        Llama 3, gpt-oss) vLLM reports those here too, and they are the model's own."""
        reason = self._stop_reason
        return self.finish_reason == "stop" and (isinstance(reason, str) or reason in self._request.stop_tokens)

    # -- closing ------------------------------------------------------------------------------------------------------

    async def _control(self) -> Close | None:
        """Ask the controller about what has come, and order a close in the engine; a verdict that is returned cuts the stream."""
        ids, text, self._new_ids, self._new_text = self._new_ids, self._new_text, [], ""
        tally = self.tally
        if (self._off and not self.controller.wanted) or not tally.inside or self._answered or self._tools:
            return None
        if self._pending is not None:
            return self._pending if tally.think >= self._pending_at + WAIT else None
        close = self.controller.watch(ids, text, think=tally.think, now=self._clock())
        cap, facts = self.controller.cap, self._engine.facts
        if close is None:
            # the pressure moves with every token; the engine is told once the close is near, and of steps of 1 %
            near = tally.think >= cap.think_cap - WAIT
            if facts.plugin and near and self._limit - cap.think_cap >= max(4, self._limit // 100):
                await self._order(cap.think_cap)
            return None
        if close.reason in _BY_CAP:
            if cap.think_cap < self._limit and facts.plugin and await self._order(cap.think_cap):
                # the stream lags behind the engine, which may be at the close already: nothing is ordered twice
                self._pending, self._pending_at = close, max(tally.think, self._limit)
                return None
            if not self._in_engine or cap.think_cap < self._limit:
                return close
            # a stock server counts each block anew, so the blocks of a step together may pass the cap without its fault
            own = tally.think if facts.plugin else tally.block
            if own >= self._limit + self._slack:
                if facts.budget == "unknown":
                    facts.budget = "ignored"
                self._note(Note.BUDGET_IGNORED)
                return close
            # at the limit the engine closes it, within the round
            return None if own >= self._limit or facts.plugin or tally.think < self._limit + self._slack else close
        if close.loop is not None and close.loop.kind == "run":
            return close  # a run of garbage must not stand before the answer, so the trace is left out
        if facts.plugin and await self._order(0):
            self._pending, self._pending_at = close, tally.think
            return None
        return close

    async def _order(self, tokens: int) -> bool:
        """Change the limit in the engine; False when that did not work, and the stream has to be cut.

        A request the engine no longer knows has ended there, and what is left of its stream is on its way.
        """
        try:
            standing = await self._engine.set_think_tokens(self.request_id, tokens)
        except EngineDiedError:
            raise
        except EngineError as error:
            self._warn("budget_not_changed", error=loggable(error))
            return False
        if standing is not None:
            self._limit = max(tokens, standing.think)
        return True

    def _warn(self, event: str, **facts: str) -> None:
        logger.warning(event, extra={"request": self.request_id, **facts})

    def tail(self, characters: int) -> str:
        """The trace's latest words so far."""
        return "".join(self._trace[-characters:])[-characters:]

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
        ended = self.finish_reason in ("stop", "length", "tool_calls")  # and not by a content filter, say
        return self.empty and ended and not self._off and not self._stopped_by_client

    async def _go_on(self, cut: Close | None) -> Stream:
        """The answer behind a trace that was cut, or behind one the model left without an answer."""
        if cut is None and self._turn_ended and self.tally.inside:
            self._note(Note.NO_CLOSE_TAG)
        behind = self._behind(cut)
        open_trace = self.tally.inside
        self.tally.close()
        self.continued = True
        self._pending = None
        how: How = "none"
        self.finish_reason = ""
        try:
            if open_trace and self._inline:
                # the client reads the trace in the content, so it has to see its end there
                yield _choice(self._shape, {"content": self._family.closing}, None)
            if behind.limit > 0:
                async for kind, body, prompt in self._ways(behind):
                    try:
                        async with aclosing(self._way(kind, body, prompt)) as chunks:
                            async for shown in chunks:
                                how = kind
                                yield shown
                    except EngineDiedError:
                        raise
                    except EngineError as error:
                        if how != "none":
                            raise
                        self._warn("continuation_failed", way=kind, error=loggable(error))
                        if kind == "chat":
                            self._engine.facts.carrier = "unknown"
                        continue
                    break
        finally:
            if cut is not None:
                self._report(cut, how)
                self.rounds = self.drafted = self.accepted = None  # a cut stream has no counters, and a part of them is none
            if open_trace and how in ("tokens", "chat"):
                self.tally.markers += len(self._marker_ids.closing) if self._marker_ids is not None else 1
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

    async def _way(self, kind: How, body: dict[str, Any], prompt: list[int] | None) -> Stream:
        """One way of going on, as the client sees it."""
        name = f"{self.request_id}-answer"
        chunks = self._engine.complete(prompt, body, name) if prompt is not None else self._engine.chat(body, name, self._session)
        # behind a note the model may think again, and where its template opens the block it does
        known = kind != "note" and isinstance(self.tally, Tally)
        async with aclosing(chunks):
            async for chunk in chunks:
                shown = self._take_answer(chunk, known=known)
                if shown is not None:
                    yield shown
                if self._overrun():
                    self.finish_reason = "length"
                    break
        if self._misfiled:
            text, self._misfiled = "".join(self._misfiled), []
            if self.empty:  # nothing but reasoning came: it is the answer, misfiled
                self._answered = bool(text.strip())
                yield _public(_choice(self._shape, {"content": text}, None), self._request)

    def _behind(self, cut: Close | None) -> Behind:
        trace = list(self._ids)
        if self._turn_ended and trace:
            trace.pop()
        text = "".join(self._trace)
        if self._marker_ids is not None and self.tally.inside:
            trace = without_partial(trace, self._marker_ids.end)
        if cut is not None and cut.loop is not None:
            trace, text = without_copies(trace, text, cut.loop)
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
        plain = not self._request.tools and not upstream.get("logprobs")
        if exact and plain and self._marker_ids is not None:
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
        # a server that refuses the switches for thinking
        yield "note", {k: v for k, v in body.items() if k not in ("chat_template_kwargs", "reasoning_effort")}, None

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
        except EngineDiedError:
            raise
        except EngineError:
            return False
        if rendered is None:
            return True
        good = fit(rendered, behind, self._marker_ids) != "lost"
        if good:
            self._engine.facts.carrier = carrier
        elif carrier == "content" and self._engine.facts.carrier == "unknown":
            self._engine.facts.carrier = ""
        return good

    def _take_answer(self, chunk: Chunk, *, known: bool) -> Chunk | None:
        """A chunk of a continuation, spliced: the first part's id, no second role.

        Some servers file what follows a closed block as reasoning (antirez/ds4#897). Where the block is ``known`` to be closed,
        that is the answer; elsewhere it is held back until it is clear that nothing else comes.
        """
        if chunk.get("usage") or chunk.get("metrics"):
            self._take_usage(chunk)
        if chunk.get("prompt_token_ids") and not known and self._marker_ids is not None and isinstance(self.tally, Tally):
            again = chunk["prompt_token_ids"]
            self.tally.inside = find_last(again, self._marker_ids.start) > find_last(again, self._marker_ids.end)
        if not chunk.get("choices"):
            return None
        choice = dict(chunk["choices"][0])
        self._normalise(choice)
        ids = list(choice.get("token_ids") or ())
        delta = dict(choice.get("delta") or {})
        if "text" in choice:
            delta = {"content": choice["text"] or ""}
            if not self._answered:  # some models close the closed block once more; the completions route has no parser to hide it
                delta["content"] = re.sub(rf"\A\s*{re.escape(self._family.markers.end)}", "", delta["content"])
        delta.pop("role", None)
        inside = self.tally.inside
        if isinstance(self.tally, Tally):
            self.tally.feed(ids)
            inside = inside or self.tally.inside
        content = delta.get("content") or ""
        self._tools = self._tools or _calls(delta)
        reasoning = "".join(delta.get(key) or "" for key in ("reasoning", "reasoning_content"))
        if inside:
            self._note(Note.THINKS_AGAIN)
        if reasoning and not inside:
            for key in ("reasoning", "reasoning_content"):
                delta.pop(key, None)
            if known:
                content = delta["content"] = reasoning + content
            else:
                self._misfiled.append(reasoning)
        self._answered = self._answered or bool(content.strip() and not (inside and self.tally.inside))
        if self._misfiled and (self._answered or self._tools):
            delta["reasoning"], self._misfiled = "".join(self._misfiled), []
            self._note(Note.THINKS_AGAIN)
        if isinstance(self.tally, TextTally):
            self.tally.feed_answer(content)
        if choice.get("finish_reason"):
            self.finish_reason, self._stop_reason = choice["finish_reason"], choice.get("stop_reason")
        if not ids and not any(delta.values()):
            return None
        shown = _choice(self._shape, delta, None, ids or None)
        if "text" not in choice and choice.get("logprobs"):
            shown["choices"][0]["logprobs"] = choice["logprobs"]
        return _public(shown, self._request)

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


def _calls(delta: Mapping[str, Any]) -> bool:
    """A delta that says something other than text: tool calls, and what else is neither content nor reasoning."""
    return any(value for key, value in delta.items() if key not in ("role", "content", "reasoning", "reasoning_content"))


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
