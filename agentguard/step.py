"""One model call while it runs: counted, watched, closed where its trace must end, and continued until there is an answer.

The stream of the engine passes through `Step.run`. Whatever happens upstream, the client sees one stream: one id, one finish
reason, the usage of all parts together, and an answer or a line that says why there is none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentguard.continuation import Behind, as_note, at_token_level, fit, through_template, without_copies, without_partial
from agentguard.engines.base import Chunk, Engine, Stream
from agentguard.engines.facts import Carrier
from agentguard.errors import EngineDiedError, EngineError, loggable
from agentguard.events import Note
from agentguard.reading import Reading, unfinished
from agentguard.requests import ChatRequest
from agentguard.trace.controller import Close, Controller
from agentguard.trace.cutoff import CloseReason, Term
from agentguard.trace.markers import Family
from agentguard.trace.opening import another_chat, switches, tail
from agentguard.trace.tally import MarkerIds, Tally

logger = logging.getLogger(__name__)
OVERRUN = 256
"""Tokens past what the engine was allowed before its stream is ended here: rounds may end late, an endless stream never does."""
WAIT = 64
"""Think tokens after a close was ordered in the engine before the stream is cut instead; a close takes effect within a round."""
NO_ANSWER = "(no answer: the token limit was used up by the reasoning)"
FILTERED = "content_filter"
NO_ANSWER_FILTERED = "(no answer: the server's content filter ended it)"
How = Literal["engine", "tokens", "chat", "note", "none"]
_BY_CAP = (CloseReason.BUDGET, CloseReason.RESERVE, CloseReason.SESSION)


@dataclass(frozen=True, slots=True)
class Closed:
    """A forced close that has taken effect."""

    reason: CloseReason
    think: int
    cap: int
    how: How
    detail: str


class Step:
    """``prompt``: its ids, None when the server cannot tell; ``usual_answer``: p90 of the session's answers, 0 for unknown.

    reading: what the stream has said, for whoever keeps the step's record. closed: why its trace was closed first, None where the
    model did it. continued: the answer came from a request of its own.
    """

    def __init__(
        self, engine: Engine, request: ChatRequest, upstream: dict[str, Any], controller: Controller, *, request_id: str,
        session: str, prompt: list[int] | None, prompt_tokens: int, family: Family, ids: MarkerIds | None,
        usual_answer: int = 0, on_close: Callable[[Closed], None] = lambda _: None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self.controller = controller
        cap = controller.cap
        self.reading = Reading(
            request, engine.facts, family, ids, prompt=prompt, prompt_tokens=prompt_tokens, most=max(cap.budget, 1) + OVERRUN,
            window=cap.window,
        )  # fmt: skip
        self.closed: CloseReason | None = None
        self.continued = False
        self._engine = engine
        self._request = request
        self._upstream = upstream
        self._rendered = prompt
        self._session = session
        self._family = family
        self._marker_ids = ids
        self._usual_answer = usual_answer
        self._on_close = on_close
        self._clock = clock
        # one token over the limit, and the transition the server may write before the marker
        self._slack = 1 + (len(ids.closing) - len(ids.end) if ids is not None else 0)
        self._off = cap.off
        self._limit = cap.think_cap
        self._pending: Close | None = None
        self._pending_at = 0

    def ask_to_close(self, why: str) -> None:
        """An operator closes the trace; see `Controller.ask_to_close`."""
        self.controller.ask_to_close(why)

    async def run(self) -> Stream:
        """The step as OpenAI chunks. Closing the iterator aborts it in the engine."""
        read = self.reading
        cut: Close | None = None
        last: Chunk | None = None
        await self._learn_opening()
        # a stock server counts what the prompt opened towards the budget, the guard counts what the model wrote
        if "thinking_token_budget" in self._upstream:
            self._upstream["thinking_token_budget"] += read.given
            if read.doubtful and not self._engine.facts.plugin:
                # stock takes the quoted marker for an open block and would close the answer; what thinks all the same is cut here
                del self._upstream["thinking_token_budget"]
        async with aclosing(self._whole(self._engine.chat(self._upstream, self.request_id, self._session))) as chunks:
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
                shown = read.take(chunk)
                if read.entered:
                    self.controller.new_block()
                if read.left:
                    self._left_block()
                if read.overrun:
                    for held in (last, shown):
                        if held is not None:
                            yield unfinished(held)
                    read.finish_reason = "length"
                    last = read.choice({}, "length")
                    break
                if shown is None:
                    continue
                if last is not None:  # some servers go on behind a finish reason
                    yield unfinished(last)
                    last = None
                if shown["choices"][0].get("finish_reason"):
                    last = shown
                    continue
                cut = await self._control()
                yield shown
                if cut is not None:
                    break
        read.ended()
        if cut is None and self._pending is not None and read.tally.inside:
            cut = self._pending  # ordered, and the stream ended before it came
        if cut is None and last is None and read.finish_reason:
            last = read.choice({}, read.finish_reason)
        if cut is None and last is None:
            raise EngineError(f"engine {self._engine.name} ended request {self.request_id} without a finish reason")
        read.tally.finish(stopped=last is not None and read.turn_ended)
        if last is not None:
            read.settle()
        if cut is not None or self._needs_answer():
            if last is not None:
                yield unfinished(last)
            async with aclosing(self._go_on(cut)) as more:
                async for chunk in more:
                    yield chunk
            last = read.choice({}, read.finish_reason)
        elif read.empty and read.finish_reason == FILTERED and not self._off:
            assert last is not None
            yield unfinished(last)
            yield read.choice({"content": NO_ANSWER_FILTERED})
            last = read.choice({}, FILTERED)
        read.look_back(closed=self.closed is not None, usual_answer=self._usual_answer)
        assert last is not None
        yield last
        yield read.final_usage()

    async def _learn_opening(self) -> None:
        """Where a start marker stands open in the prompt, and it cannot be seen whether the template wrote it or the client quotes
        it: ask how a chat that says something else is rendered, once for a template and its switches. A server that cannot say it
        now is asked again at the next step, and until then the marker is taken for the template's."""
        facts, ids = self._engine.facts, self._marker_ids
        if ids is None or not self.reading.doubtful or switches(self._upstream) in facts.tails:
            return
        try:
            asked, bare = [
                await self._engine.tokenize_chat(another_chat(self._upstream, generation=generation))
                for generation in (True, False)
            ]
        except EngineDiedError:
            raise
        except EngineError as error:
            self._warn("opening_unknown", error=loggable(error))
            asked = bare = None
        if asked is None or bare is None:
            self.reading.open_again(unknown=True)
            return
        facts.learn_tail(switches(self._upstream), tail(asked, bare, ids))
        self.reading.open_again()

    async def _whole(self, chunks: Stream) -> Stream:
        """The chunks. A fault behind the finish reason takes nothing back: the answer was whole."""
        read = self.reading
        async with aclosing(chunks):
            while True:
                try:
                    chunk = await anext(chunks, None)
                except EngineError as error:
                    if not read.finish_reason:
                        raise
                    read.note(Note.FAULT_BEHIND)
                    self._warn("fault_behind_the_end", error=loggable(error))
                    return
                if chunk is None:
                    return
                yield chunk

    def _patience(self) -> float | None:
        """Seconds to wait for the next chunk: until the deadline while the trace is open, else as long as the engine's client."""
        read = self.reading
        if self._off or not read.tally.inside or not read.empty:
            return None
        left = self.controller.time_left(self._clock())
        return None if left is None else max(0.0, left) + 0.001

    # -- closing ------------------------------------------------------------------------------------------------------

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

    @property
    def _kept_here(self) -> bool:
        """The server does not keep the client's own budget, so the guard does, closing switched off or not."""
        return self.controller.cap.bound_by is Term.CLIENT and not self._in_engine

    def _reached(self) -> bool:
        tally = self.reading.tally
        return (tally.think if self._engine.facts.plugin else tally.block) >= self._limit

    @property
    def _in_engine(self) -> bool:
        """The server closes at the limit it was sent, as far as is known."""
        facts = self._engine.facts
        return facts.plugin or ("thinking_token_budget" in self._upstream and facts.budget in ("unknown", "works"))

    async def _control(self) -> Close | None:
        """Ask the controller about what has come, and order a close in the engine; a verdict that is returned cuts the stream."""
        read, tally = self.reading, self.reading.tally
        ids, text = read.fresh()
        if not tally.inside or not read.empty:
            return None
        if self._off and not self.controller.wanted:
            return self.controller.at_cap(tally.think) if self._kept_here else None
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
                read.note(Note.BUDGET_IGNORED)
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

    def _report(self, close: Close, how: How) -> None:
        self.closed = self.closed or close.reason
        cap = self.controller.cap.think_cap
        self._on_close(Closed(close.reason, self.reading.tally.think, cap, how, close.detail))

    # -- going on -----------------------------------------------------------------------------------------------------

    def _needs_answer(self) -> bool:
        """A step without an answer goes on, whatever ended it: a client's stop is meant for the answer, so one that fires inside
        the trace ends that alone. But for the end of the trace as the client's stop, and for what a content filter ended."""
        read = self.reading
        return read.empty and not self._off and not read.wanted_no_answer and read.finish_reason != FILTERED

    async def _go_on(self, cut: Close | None) -> Stream:
        """The answer behind a trace that was cut, or behind one the model left without an answer."""
        read = self.reading
        if cut is None and read.turn_ended and read.tally.inside:
            read.note(Note.NO_CLOSE_TAG)
        behind = self._behind(cut)
        open_trace = read.tally.inside
        read.tally.close()
        self.continued = True
        self._pending = None
        how: How = "none"
        read.begin_answer()
        try:
            if open_trace and read.inline:
                # the client reads the trace in the content, so it has to see its end there
                yield read.choice({"content": self._family.closing})
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
                read.rounds = read.drafted = read.accepted = None  # a cut stream has no counters, and a part of them is none
            if open_trace and how in ("tokens", "chat"):
                read.tally.markers += len(self._marker_ids.closing) if self._marker_ids is not None else 1
        read.settle_continuation(came=how != "none")
        if read.empty:
            read.finish_reason = "length"
            yield read.choice({"content": NO_ANSWER})
        read.finish_reason = read.finish_reason or "length"

    async def _way(self, kind: How, body: dict[str, Any], prompt: list[int] | None) -> Stream:
        """One way of going on, as the client sees it."""
        read, name = self.reading, f"{self.request_id}-answer"
        chunks = self._engine.complete(prompt, body, name) if prompt is not None else self._engine.chat(body, name, self._session)
        # behind a note the model may think again, and where its template opens the block it does
        known = kind != "note" and isinstance(read.tally, Tally)
        async with aclosing(self._whole(chunks)) as whole:
            async for chunk in whole:
                shown = read.take_answer(chunk, known=known)
                if shown is not None:
                    yield shown
                if read.overrun:
                    read.finish_reason = "length"
                    break
        misfiled = read.misfiled()
        if misfiled is not None:
            yield misfiled

    def _behind(self, cut: Close | None) -> Behind:
        read = self.reading
        inside, trace, text = read.tally.inside, list(read.ids), read.trace
        if read.turn_ended and trace:
            trace.pop()
        if self._marker_ids is not None and inside:
            trace = without_partial(trace, self._marker_ids.end)
        if cut is not None and cut.loop is not None:
            trace, text = without_copies(trace, text, cut.loop)
        cap = self.controller.cap
        marker = 1 if self._marker_ids is None else len(self._marker_ids.closing)
        left = cap.budget - read.tally.total - (marker if inside else 0)
        room = cap.window - read.prompt_tokens - len(trace) - marker
        return Behind(read.prompt or (), trace, inside, text, min(left, room))

    async def _ways(self, behind: Behind) -> AsyncIterator[tuple[How, dict[str, Any], list[int] | None]]:
        """Ways to go on, the best first: (how, body, prompt ids or None for the chat route)."""
        upstream = {k: v for k, v in self._upstream.items() if k != "thinking_token_budget"}
        xargs = dict(upstream.get("vllm_xargs") or {})
        if self._engine.facts.plugin:
            xargs["ag_think_tokens"] = 0  # a block that is opened again is closed at once
        if xargs:
            upstream["vllm_xargs"] = xargs
        exact = bool(behind.prompt) and isinstance(self.reading.tally, Tally)
        # ids stand for no picture: what they were made from goes only with the messages
        plain = not self._request.tools and not upstream.get("logprobs") and self._request.text_only
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
        if self._marker_ids is None or not self._rendered or not behind.trace:
            return True
        try:
            rendered = await self._engine.tokenize_chat(body)
        except EngineDiedError:
            raise
        except EngineError:
            return False
        if rendered is None:
            return True
        # /tokenize against /tokenize: a server fills in a picture's place only when it serves
        good = fit(rendered, replace(behind, prompt=self._rendered), self._marker_ids) != "lost"
        if good:
            self._engine.facts.carrier = carrier
        elif carrier == "content" and self._engine.facts.carrier == "unknown":
            self._engine.facts.carrier = ""
        return good
