"""The guard: asyncio middleware around an Engine.

For each step it measures the prompt, computes the adaptive cutoff, sends the budget and the rule with the request, lets `Step`
count and close and continue what comes back, and publishes the step's accounts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentguard.accounting import Accounting, key_of
from agentguard.economics.cells import CANCELLED
from agentguard.economics.classes import Classes, is_side_call, kind_of
from agentguard.economics.ledger import Ledger, ledger_of
from agentguard.economics.report import class_report
from agentguard.engines.base import Engine, EngineInfo, Stream
from agentguard.engines.facts import MISSING_S
from agentguard.engines.pool import pool_of
from agentguard.errors import (
    AgentGuardError,
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    EngineError,
    EngineRequestError,
    OtherModelError,
    loggable,
    nearest,
)
from agentguard.events import (
    CompactionAdvised,
    DraftUpdated,
    EconomicsReport,
    EngineDied,
    EngineReady,
    Event,
    Note,
    SessionAlarm,
    SessionState,
    StepFinished,
    StepStarted,
    TraceClosed,
    TtsChanged,
    VerificationStep,
    arm_reports,
)
from agentguard.identity import Identity
from agentguard.overflow import Fit, LimitTooLargeError, digest, is_overflow, prompt_told, refit, smaller
from agentguard.policy import Policy
from agentguard.redact import without_content
from agentguard.requests import ChatRequest
from agentguard.rulespec import RuleSpec
from agentguard.session import Session, Sessions
from agentguard.step import Closed, Step
from agentguard.store.books import Books
from agentguard.store.sessions import MemorySessions
from agentguard.telemetry.hub import Hub
from agentguard.trace.controller import Controller
from agentguard.trace.cutoff import Cap, Term, growth_pressure, step_budget, think_cap
from agentguard.trace.loops import LoopDetector
from agentguard.trace.markers import Family, Markers, generic, of_policy
from agentguard.trace.opening import BLANKS
from agentguard.trace.tally import MarkerIds

logger = logging.getLogger(__name__)
logging.getLogger("agentguard").addHandler(logging.NullHandler())  # in somebody else's program our lines are theirs to show
REFUSED = (400, 404, 413, 422)
"""An engine's word that the request itself is wrong: to ask the same again brings nothing."""
_DATA = re.compile(r"data:[\w/+.-]+;base64,[\w+/=]+")


@dataclass(slots=True)
class Reply:
    """What the guard tells about a step besides its chunks: filled while it runs. ``compact``: the client should compact its
    context, which is filled to ``fill`` of ``window`` tokens; ``warnings``: the session's meters near their limit. ``events``: what
    was published about the step, in order. ``think``, ``answer`` and ``think_cap`` are where it stood, in tokens, when its latest
    chunk was given."""

    request: str = ""
    fill: float = 0.0
    window: int = 0
    warnings: list[str] = field(default_factory=list)
    compact: bool = False
    closed: str = ""
    notes: list[Note] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    think: int = 0
    answer: int = 0
    think_cap: int = 0

    def forget(self) -> None:
        """The attempt gave nothing and is made again: whoever asked for the step is told of the one that stands."""
        self.events = [event for event in self.events if isinstance(event, SessionAlarm)]


class Guard:
    """One engine or a pool of them, many sessions. Create with `Guard.open`; it owns no task of its own."""

    def __init__(
        self, engine: Engine, policy: Policy, hub: Hub, info: EngineInfo, family: Family, ids: MarkerIds | None,
        ledger: Ledger | None = None, books: Books | None = None,
    ) -> None:  # fmt: skip
        self._pool = pool_of(engine)
        self._pool.serve(info)
        self._pool.listener = self
        self.engine = engine
        self.books = books or Books(MemorySessions(policy.max_sessions))
        self.policy = policy
        self.hub = hub
        self.info = info
        self.family = family
        self.derived = ""
        """Where the family comes from, and what of it is only assumed."""
        self.sessions = Sessions(policy.max_sessions)
        self.accounting = Accounting(self.books, self.sessions)
        self.running: dict[str, tuple[Identity, Step]] = {}
        """Steps that run now, by request id."""
        self.begun: dict[str, StepStarted] = {}
        """What was published of them when they began."""
        self.died: EngineDied | None = None
        """Set while the engine is gone."""
        self._cause: type[EngineDiedError] = EngineDiedError
        self.learning: dict[type, DraftUpdated | TtsChanged] = {}
        """The latest of each kind that the engine's trainer told."""
        self.ledger = ledger or ledger_of(policy, on_event=hub.publish)
        self._classes = Classes()
        self._ids = ids
        self._ids_at = time.monotonic() + MISSING_S

    @classmethod
    async def open(
        cls, engine: Engine, policy: Policy, hub: Hub, markers: Markers | None = None, ledger: Ledger | None = None,
        books: Books | None = None,
    ) -> Guard:  # fmt: skip
        """Ask the engine for its model and window, and for the ids of its think markers where it can tell."""
        derived = await asyncio.to_thread(of_policy, policy)
        family = derived.family if markers is None else generic(markers.start, markers.end)
        info = await engine.info()
        ids = await _marker_ids(engine, family)
        guard = cls(engine, policy, hub, info, family, ids, ledger, books)
        hub.publish(guard.ready())
        guard.derived = derived.statement if markers is None else "the markers were given"
        return guard

    @property
    def exact(self) -> bool:
        """Tokens are counted by id; otherwise counts are estimates from the text."""
        return self._ids is not None

    def engines(self) -> dict[str, str]:
        """The engines by name, with why one is away, "" for one that is not."""
        return {engine.name: str(self._pool.away.get(engine.name, "")) for engine in self._pool.engines}

    def standings(self) -> dict[str, str]:
        """How each engine is: "ok", "unwell" where it says nothing or nothing that can be read when it is looked at, "away"."""
        pool = self._pool
        return {
            engine.name: "away" if engine.name in pool.away else "unwell" if engine.name in pool.unwell else "ok"
            for engine in pool.engines
        }  # fmt: skip

    def away(self) -> dict[str, str]:
        """Why engines are away, for everybody: without their addresses."""
        return {
            name: str(error) if isinstance(error, OtherModelError) else "does not answer"
            for name, error in self._pool.away.items()
        }  # fmt: skip

    def engine_away(self, engine: Engine, error: EngineDiedError) -> None:
        """Told by the pool: to everybody who listens, and that others are left."""
        if self.died is None or (self.died.engine, self._cause) != (engine.name, type(error)):
            self.died, self._cause = EngineDied(t=time.time(), engine=engine.name, reason=str(error)), type(error)
            self.hub.publish(self.died)
        if self._pool.healthy:
            self._ready_again()

    async def engine_back(self, engine: Engine, *, proven: bool) -> None:
        """Told by the pool: what engines serve now is what steps that begin go by."""
        info = self._pool.serves
        if info != self.info:
            logger.warning("window_changed", extra={"engine": engine.name, "window": info.max_model_len})
            for session in self.sessions:
                session.overflowed.clear()  # what did not fit may fit now
            self.info, proven = info, True
        if proven:
            self._pool.works(engine)
            self._ready_again()
        self._ids_at = 0.0
        await self._learn_ids(engine)

    async def _learn_ids(self, engine: Engine) -> None:
        """Ask again for marker ids that the server could not tell: its route may have been missing for a moment."""
        if self._ids is None and time.monotonic() >= self._ids_at:
            self._ids_at = time.monotonic() + MISSING_S
            self._ids = await _marker_ids(engine, self.family)

    def _works(self, engine: Engine) -> None:
        """A step has shown that the engine works, which may have come back for it."""
        if self._pool.works(engine) and self.died is not None:
            self._ready_again()

    def _ready_again(self) -> None:
        self.died = None
        self.hub.publish(self.ready())

    def ready(self) -> EngineReady:
        """The event that tells a reader of the model, its window in tokens and the cutoff's band."""
        cutoff = self.policy.cutoff
        return EngineReady(
            t=time.time(), engine=self._pool.first.name, model=self.info.model, max_model_len=self.info.max_model_len,
            f_min=cutoff.f_min if cutoff.mode == "adaptive" else cutoff.f_max, f_max=cutoff.f_max,
        )  # fmt: skip

    def observe(self, event: Event) -> None:
        """Take the engine's telemetry into the economics, and to the steps that wait for a sign of readiness; a sink of the hub."""
        if isinstance(event, DraftUpdated | TtsChanged):
            self.learning[type(event)] = event
        if isinstance(event, VerificationStep):
            self.ledger.verified(event)
            if self.policy.cutoff.ready is not None:
                for request in event.requests:
                    if request.request in self.running:
                        self.running[request.request][1].controller.hear(request.end)

    def close(self, *, request: str = "", session: str = "", why: str = "operator") -> int:
        """Close the traces of a running request, or of all of a session's; with their next tokens. Returns how many were told."""
        told = [step for rid, (identity, step) in self.running.items() if request == rid or (session and session == str(identity))]
        for step in told:
            step.ask_to_close(why)
        return len(told)

    async def raise_limit(self, session: str, meter: str, limit: int) -> bool:
        """See `Accounting.raise_limit`."""
        return await self.accounting.raise_limit(session, meter, limit)

    def state(self, identity: Identity) -> SessionState:
        """What a session has used and may use, as far as this worker knows; of one that has not begun, its limits."""
        return (self.sessions.find(identity) or Session(identity)).state(self.policy.limits)

    async def account(self, identity: Identity) -> SessionState:
        """The same with what other workers have added, of the sessions that were used last. Raises StoreError."""
        await self.accounting.refresh(identity)
        return self.state(identity)

    async def stream(
        self, body: Mapping[str, Any], identity: Identity, *, route: str = "chat", side: bool = False, reply: Reply | None = None
    ) -> Stream:
        """One guarded step as OpenAI chunks. The last chunk carries usage and the finish reason came before it.

        ``route`` names the protocol the client speaks and ``side`` that it calls this a side call, both for the economics;
        ``reply`` is filled with what there is to tell besides.
        Raises ConfigError for a bad request (nothing was sent), ContextLengthError for a prompt that leaves no room,
        SessionLimitError for a session at its limit, SessionBusyError while its running steps hold what is left, StoreError for a
        limited session whose account cannot be read, EngineRequestError and EngineDiedError from the engine. Closing the iterator
        cancels the step in the engine; its accounts are published either way.
        """
        reply = reply if reply is not None else Reply()
        request = ChatRequest.read(body)
        if request.model not in (None, self.info.model):
            raise ConfigError("model", request.model, f"this gateway serves {self.info.model!r}; ask for that, or leave it out")
        asked = self._asked_rule(request)
        session = self.sessions.get(identity)
        if session.overflowed and (window := session.overflowed.get(self._digest(body))) is not None:
            raise ContextLengthError(None, window)
        failed: list[str] = []
        fit = Fit()
        while True:
            engine = self._pool.choose(str(identity), failed)
            assert engine is not None
            told = False
            try:
                if engine.name in self._pool.away:
                    await self._pool.look(engine, proven=False)
                async with aclosing(self._step(engine, body, request, identity, asked, route, side, reply, fit)) as chunks:
                    async for chunk in chunks:
                        told = True
                        yield chunk
                return
            except LimitTooLargeError as refused:
                reply.forget()
                fit = refused.fit
                logger.info("limit_lowered", extra={"session": str(identity), "engine": engine.name, "max_tokens": fit.most})
            except EngineDiedError as error:
                if engine.name not in self._pool.away:
                    self._pool.failed(engine, EngineDiedError(without_content(str(error), body)))
                failed.append(engine.name)
                # in the middle of a stream another engine would go on with other words, so the client is told and may ask again
                if told or self._pool.choose(str(identity), failed) is None:
                    raise
                reply.forget()
                logger.warning("failover", extra={"session": str(identity), "engine": engine.name, "error": loggable(error)})

    async def _step(
        self, engine: Engine, body: Mapping[str, Any], request: ChatRequest, identity: Identity, asked: str, route: str, side: bool,
        reply: Reply, fit: Fit,
    ) -> Stream:  # fmt: skip
        """One step on one engine: what it may use is reserved once its prompt is measured, and settled when it has ended.

        An attempt that the engine fails before its first chunk is no step: its reservation is undone, and its event tells why. One
        that is asked again with a lower limit is marked as undone, for nobody to count.

        ``fit``: what a refusal has told of the request's size. Raises LimitTooLargeError for a limit that has to be lower.
        """
        prompt = await engine.tokenize_chat({"model": self.info.model, **body})
        exact = prompt is not None or fit.prompt is not None
        if prompt is not None:
            await self._learn_ids(engine)
        length = fit.prompt or (len(prompt) if prompt is not None else self._estimate(body, engine))
        try:
            want = self._want(request, length, exact=exact)
        except ContextLengthError:
            self.sessions.get(identity).remember_overflow(self._digest(body), self.info.max_model_len)
            raise
        want = want if fit.most is None else min(want, fit.most)
        request_id = uuid.uuid4().hex
        reserved = await self.accounting.reserve(self.policy, identity, request_id, want)
        session, number, account = reserved.session, reserved.number, reserved.account
        reply.warnings = reserved.warnings
        event: StepFinished | None = None
        fingerprint = ""
        undone = refused = lowered = False
        try:
            budget, moved = request.budget
            kind = kind_of(request.messages, number)
            workload = self._classes.name(self.info.model, route, kind)
            side = is_side_call(body, request.limit, session_used_tools=session.used_tools, first=number == 1, marked=side)
            assigned = self.ledger.assign(str(identity), workload, pinned=asked, side=side)
            cap = self._cap(reserved.tokens, budget, session, length, workload, exact=exact)
            fingerprint = request.fingerprint()
            retries = session.cut.get(fingerprint, 0)
            if retries and not cap.off:
                # a deterministic server repeats the very trace that was cut, so it gets half the room, and then none
                cap = cap.limited(cap.think_cap // 2 if retries == 1 else 0, Term.RETRY)
            session.used_tools |= bool(request.tools)
            self.ledger.started(request_id, assigned)
            started = time.perf_counter()
            controller = Controller(
                cap, traces=session.lengths.traces, deadline_s=self.policy.cutoff.deadline_s,
                loops=LoopDetector() if self.policy.cutoff.loops else None, ready=self.policy.cutoff.ready,
            )  # fmt: skip
            xargs = {"ag_phase": self.policy.phase} | dict(request.vllm_xargs or {}) | {"ag_rule": assigned.rule}
            upstream = self._upstream(engine, request, cap, xargs, exact=exact, limited=self.policy.limits.tokens is not None)
            step = Step(
                engine, request, upstream, controller, request_id=request_id, session=identity.session, prompt=prompt,
                prompt_tokens=length, family=self.family, ids=self._ids, usual_answer=session.lengths.usual_answer,
                on_close=partial(self._closed, reply, str(identity), number, request_id),
            )  # fmt: skip
            read = step.reading
            self.books.follow(account, key_of(identity), lambda: read.tally.total)
            read.notes += [Note.BUDGET_MOVED] * moved + [Note.IDENTICAL_RETRY] * bool(retries)
            if moved:
                told = {"session": str(identity), "request": request_id, "budget": budget}
                logger.warning("budget_alias", extra=told | {"remedy": "send it as thinking_token_budget"})
            advice = self._advise(reply, session, identity, number, request_id, length, side=side)
            self.running[request_id] = (identity, step)
            self.begun[request_id] = StepStarted(
                t=time.time(), session=str(identity), step=number, request=request_id, model=self.info.model, rule=assigned.rule,
                prompt_tokens=length, budget=cap.budget, think_cap=cap.think_cap, bound_by=cap.bound_by, arm=assigned.arm,
                workload=assigned.workload, assigned=assigned.reason, agent=identity.agent,
            )  # fmt: skip
            self._publish(self.begun[request_id], reply)
            reply.think_cap = cap.think_cap
            error, began = CANCELLED, False
            try:
                async with aclosing(step.run()) as chunks:
                    async for chunk in chunks:
                        if not began and advice is not None:
                            self._publish(advice, reply)
                        began = True
                        reply.closed, reply.notes = step.closed or "", read.notes
                        reply.think, reply.answer = read.tally.think, read.tally.answer
                        reply.think_cap = step.controller.cap.think_cap
                        yield chunk
                error = ""
                self._works(engine)
            except EngineRequestError as failure:
                if failure.status < 500:  # who refuses a request has read it
                    self._works(engine)
                error = without_content(str(failure), body)
                undone = not began and not read.tally.total
                refused = undone and failure.status in REFUSED
                if undone and is_overflow(failure):
                    lower = self._refit(failure, fit, upstream)
                    refused = lower is None
                    if lower is not None:
                        lowered = True
                        raise LimitTooLargeError(failure, lower) from failure
                    # agents act on the code, and few know every server's own words for it (earendil-works/pi#5930)
                    window = smaller(self.info.max_model_len, str(failure))
                    session.remember_overflow(self._digest(body), window)
                    raise self._too_long(failure, None if prompt is None else length, window) from failure
                raise
            except AgentGuardError as failure:
                error = without_content(str(failure), body)
                undone = isinstance(failure, EngineError) and not began and not read.tally.total
                raise
            except Exception as failure:
                error = without_content(f"internal: {failure!r}", body)
                raise
            finally:
                del self.running[request_id], self.begun[request_id]
                tally = read.tally
                event = StepFinished(
                    t=time.time(), session=str(identity), step=number, request=request_id, model=self.info.model,
                    rule=assigned.rule, prompt_tokens=read.prompt_tokens, tokens=tally.total, think_tokens=tally.think,
                    answer_tokens=tally.answer, marker_tokens=tally.markers, rounds=read.rounds, drafted=read.drafted,
                    accepted=read.accepted, closed=step.closed or "", continued=step.continued,
                    empty_answer=read.empty and not error, finish_reason=read.finish_reason, estimated=read.estimated,
                    ttlt_s=time.perf_counter() - started, error=error, arm=assigned.arm, workload=assigned.workload,
                    notes=list(read.notes), reported_think=read.reported_think, agent=identity.agent, undone=lowered,
                )  # fmt: skip
                if advice is not None and not began and not lowered:
                    self._publish(advice, reply)
                if undone:
                    session.undo(refused=refused)
                else:
                    session.add(event, fingerprint, side=side, agent=identity.agent)
                self._publish(event, reply)
                if not lowered:
                    self._alarm(reply, session, number)
                try:
                    self.ledger.finished(event, assigned, session.sums)
                except Exception as failure:  # counting must never break a client's stream
                    logger.error("economics_failed", extra={"request": request_id, "error": loggable(failure)})
        finally:
            await self.accounting.settle(session, account, None if undone else event, fingerprint, side=side)

    def _upstream(
        self, engine: Engine, request: ChatRequest, cap: Cap, xargs: dict[str, Any], *, exact: bool, limited: bool
    ) -> dict[str, Any]:
        """The body for the engine: the client's own, with the step's limits in the form this server knows."""
        body = request.forwarded() | {"model": self.info.model, "return_token_ids": True, "include_reasoning": True}
        # without a limit of anybody's a server knows better than our estimate what is left
        if exact or request.limit is not None or limited:
            body["max_tokens"] = cap.budget
        closes = cap.bound_by is not Term.OFF
        if closes and engine.facts.plugin:
            xargs = xargs | {"ag_think_tokens": cap.think_cap}
        elif closes and engine.facts.budget != "rejected":
            body["thinking_token_budget"] = cap.think_cap
        return body | {"vllm_xargs": xargs}

    def _want(self, request: ChatRequest, prompt: int, *, exact: bool) -> int:
        """What the step may generate at most. Raises ContextLengthError for a prompt that leaves no room for an answer."""
        cutoff, window = self.policy.cutoff, self.info.max_model_len
        room = window - prompt - cutoff.margin
        if exact and room < self._least(window):
            raise ContextLengthError(prompt, window, max(0, room))
        return step_budget(cutoff, window=window, prompt=self._believed(prompt, exact=exact), limit=request.limit)

    def _least(self, window: int) -> int:
        """An answer must fit, or the step would end without one; a window that is small itself asks for less."""
        return min(self.policy.cutoff.answer_floor, window // 8)

    def _refit(self, refused: EngineRequestError, fit: Fit, upstream: Mapping[str, Any]) -> Fit | None:
        window = smaller(self.info.max_model_len, str(refused))
        return refit(
            str(refused), fit, window=window, sent=upstream.get("max_tokens"), least=self._least(window),
            margin=self.policy.cutoff.margin,
        )  # fmt: skip

    def _too_long(self, refused: EngineRequestError, prompt: int | None, window: int) -> ContextLengthError:
        """With the prompt's tokens as the server has counted them, or else we."""
        told = prompt_told(str(refused))
        known = prompt if told is None else told
        return ContextLengthError(known, window, 0 if known is None else max(0, window - known - self.policy.cutoff.margin))

    def _digest(self, body: Mapping[str, Any]) -> str:
        return digest(body, self.info.model, self.info.max_model_len)

    def _cap(self, granted: int, budget: int | None, session: Session, prompt: int, workload: str, *, exact: bool) -> Cap:
        return think_cap(
            self.policy.cutoff, window=self.info.max_model_len, prompt=self._believed(prompt, exact=exact), limit=granted,
            answers=session.lengths.answers, asked=budget,
            growth=max(growth_pressure(session.lengths.traces), self.ledger.pressure(workload)),
        )  # fmt: skip

    def _believed(self, prompt: int, *, exact: bool) -> int:
        """A wrong estimate must not refuse a request or leave no room to think."""
        return prompt if exact else min(prompt, self.info.max_model_len // 2)

    def _estimate(self, body: Mapping[str, Any], engine: Engine) -> int:
        """A prompt's tokens on a server that cannot tell: its characters by the server's usual rate, pictures and other data left
        out."""
        asked = {k: body[k] for k in ("messages", "tools") if body.get(k)}
        text = _DATA.sub("", json.dumps(asked, ensure_ascii=False, default=str))
        return max(1, round(len(text) / engine.facts.chars_per_token))

    def _advise(
        self, reply: Reply, session: Session, identity: Identity, number: int, request_id: str, prompt: int, *, side: bool
    ) -> CompactionAdvised | None:
        """Tell the client to compact before its next prompt passes the cutoff of the window. The event is published once the
        attempt stands."""
        window, expected = self.info.max_model_len, session.expected_prompt(prompt, identity.agent)
        reply.request, reply.fill, reply.window = request_id, prompt / window, window
        reply.compact = not side and expected >= self.policy.cutoff.f_min * window
        if not reply.compact:
            return None
        return CompactionAdvised(
            t=time.time(), session=str(identity), step=number, request=request_id, context_tokens=prompt, next_tokens=expected,
            window=window,
        )  # fmt: skip

    def _closed(self, reply: Reply, session: str, number: int, request_id: str, closed: Closed) -> None:
        event = TraceClosed(
            t=time.time(), session=session, step=number, request=request_id, reason=closed.reason, think_tokens=closed.think,
            cap=closed.cap, how=closed.how, detail=closed.detail,
        )  # fmt: skip
        self._publish(event, reply)

    def _publish(self, event: Event, reply: Reply) -> None:
        """To everybody who listens, and to the one who asked for the step."""
        self.hub.publish(event)
        reply.events.append(event)

    def _alarm(self, reply: Reply, session: Session, number: int) -> None:
        for alarm in session.alarms(self.policy.limits):
            if (alarm.meter, alarm.stop) not in session.warned:
                session.warned.add((alarm.meter, alarm.stop))
                event = SessionAlarm(
                    t=time.time(), session=str(session.identity), step=number, meter=alarm.meter, value=alarm.value,
                    limit=alarm.limit, stopped=alarm.stop,
                )  # fmt: skip
                self._publish(event, reply)

    def _asked_rule(self, request: ChatRequest) -> str:
        """The rule a request names itself, with its filter written out; "" for none."""
        for key in request.vllm_xargs or {}:
            if key.startswith("ag_") and key not in ("ag_rule", "ag_phase"):
                raise ConfigError(f"vllm_xargs.{key}", (request.vllm_xargs or {})[key], nearest(key, ("ag_rule", "ag_phase")))
        rule = (request.vllm_xargs or {}).get("ag_rule")
        if rule is None:
            return ""
        if not isinstance(rule, str):
            raise ConfigError("vllm_xargs.ag_rule", rule, "write the rule as a string, for example 'cactus:delta=0.25'")
        return str(RuleSpec.parse(rule, what="vllm_xargs.ag_rule").for_request())


def economics_of(ledger: Ledger, reply: Reply) -> EconomicsReport:
    """The economics of the class of the step that ended last, as they stand now."""
    workload = next((event.workload for event in reversed(reply.events) if isinstance(event, StepFinished)), "")
    return EconomicsReport(t=time.time(), rows=arm_reports(class_report(ledger, workload)))


async def _marker_ids(engine: Engine, family: Family) -> MarkerIds | None:
    """The family's markers as ids, None where the server cannot tell: counts are then estimates from the text."""
    found = [await engine.tokenize_text(text) for text in (family.markers.start, family.markers.end, family.closing)]
    start, end, closing = found
    if not start or not end or not closing:
        return None
    blanks = [await engine.tokenize_text(text) for text in (*BLANKS, family.label) if text]
    return MarkerIds(tuple(start), tuple(end), tuple(closing), tuple(tuple(ids) for ids in blanks if ids))
