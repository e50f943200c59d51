"""Sessions and steps: the token accounts of a multi-step agent session."""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from agentguard.economics.cells import SessionSums
from agentguard.events import Meter, Note, SessionState, StepFinished
from agentguard.identity import Identity
from agentguard.lengths import KEPT, Lengths, bounded
from agentguard.policy import SessionLimits
from agentguard.trace.cutoff import CloseReason

AGENTS = 64
"""Agents of a session whose windows are kept apart; the least recently used one is forgotten."""
PROMPTS = 64
"""Prompt lengths kept of each agent."""
LATEST = 12
"""Steps kept whole, for those who begin to watch."""
DIGESTS = 16
"""Requests remembered because they were cut, or did not fit."""
_CUT_BY_US = (CloseReason.BUDGET, CloseReason.RESERVE, CloseReason.LOOP)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A meter at its soft limit, or at its limit (``stop``: no further step)."""

    meter: Meter
    value: int
    limit: int
    stop: bool


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a session remembers of a step, for other workers and for this one after a restart. No content.

    step: None for an operator's word that the session may go on; sums: class, arm, moves, steps and sums of the session's own sums
    as they are after the step.
    """

    step: StepFinished | None = None
    fingerprint: str = ""
    side: bool = False
    tools: bool = False
    sums: tuple[str, str, int, int, dict[str, float]] | None = None


@dataclass(slots=True)
class Session:
    """One agent's whole run. Steps count from 1. A step that failed after its first chunk keeps its number; an attempt that failed
    before it is no step, and leaves its number to the next."""

    identity: Identity
    steps_started: int = 0
    latest: list[StepFinished] = field(default_factory=list)
    """The last `LATEST` steps, for those who begin to watch."""
    lengths: Lengths = field(default_factory=Lengths)
    tokens: int = 0
    lost: int = 0
    """Tokens that steps of a worker that died may have used besides; limits count them."""
    think_tokens: int = 0
    closes: int = 0
    used_tools: bool = False
    sums: dict[tuple[str, str], SessionSums] = field(default_factory=dict)
    """This session's own sums by class and arm, for the economics."""
    prompts: OrderedDict[str, array[int]] = field(default_factory=OrderedDict)
    """Prompt lengths of the latest steps of each agent, "" for the main one: every agent has a window of its own."""
    cut: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Fingerprints of requests that were cut or got no answer, with how often; the latest `DIGESTS`."""
    idle: int = 0
    """Steps in a row that brought nothing."""
    raised: dict[str, int] = field(default_factory=dict)
    """Limits an operator has raised: meter and new limit."""
    warned: set[tuple[str, bool]] = field(default_factory=set)
    overflowed: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Digests of requests that did not fit into the window, with its tokens, the latest `DIGESTS`. No store keeps them: to ask once
    more costs little, and a memory that outlives its window would refuse what fits into the next."""
    born: str = ""
    """Which account of the store this is; a session that was forgotten begins another."""
    seq: int = 0
    """The last of the store's records that is in here."""
    own: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Requests of this worker that are in here already, and whose record the store may still give back."""

    def take(self, record: Record) -> None:
        """Add what another worker, or this one before a restart, has recorded."""
        step = record.step
        if step is None:
            self.idle = 0
            return
        if step.request in self.own:
            del self.own[step.request]  # it is given back once
            return
        self.add(step, record.fingerprint, side=record.side, agent=step.agent)
        self.used_tools |= record.tools
        if record.sums is not None:
            workload, arm, moves, steps, sums = record.sums
            self.sums[workload, arm] = SessionSums(steps, dict(sums), moves)

    def record(self, step: StepFinished, fingerprint: str, *, side: bool) -> Record:
        """The record of a step that was added."""
        self.own[step.request] = None
        while len(self.own) > KEPT:  # a store keeps no more records
            self.own.popitem(last=False)
        known = self.sums.get((step.workload, step.arm))
        sums = None if known is None else (step.workload, step.arm, known.moves, known.steps, known.sums)
        return Record(step=step, fingerprint=fingerprint, side=side, tools=self.used_tools, sums=sums)

    def recorded(self, request: str, seq: int) -> None:
        """The store keeps this worker's record of the request under this number; what lies between is other workers'."""
        if seq == self.seq + 1:
            self.seq = seq
        if 0 < seq <= self.seq:
            self.own.pop(request, None)  # it is not given back

    def add(self, step: StepFinished, fingerprint: str = "", *, side: bool = False, agent: str = "") -> None:
        """``fingerprint``: of a request whose repetition would repeat the trace, "" for others; ``side``: a call beside the agent's
        own work, whose prompt says nothing about its context."""
        self.latest.append(step)
        del self.latest[:-LATEST]
        self.lengths.add(step)
        self.tokens += step.tokens
        self.think_tokens += step.think_tokens
        self.closes += bool(step.closed)
        if not side:
            prompts = self.prompts.setdefault(agent, array("i"))
            prompts.append(bounded(step.prompt_tokens))
            del prompts[:-PROMPTS]
            self.prompts.move_to_end(agent)
            while len(self.prompts) > AGENTS:
                self.prompts.popitem(last=False)
        if step.error:
            return
        fruitless = step.closed == CloseReason.LOOP or Note.EMPTY_ANSWER in step.notes or Note.IDENTICAL_RETRY in step.notes
        self.idle = self.idle + 1 if fruitless else 0
        if not self.idle:
            self.warned = {key for key in self.warned if key[0] != "no_progress"}
        if fingerprint and (step.closed in _CUT_BY_US or Note.EMPTY_ANSWER in step.notes):
            self.cut[fingerprint] = self.cut.pop(fingerprint, 0) + 1
            while len(self.cut) > DIGESTS:
                self.cut.popitem(last=False)

    def undo(self, *, refused: bool) -> None:
        """An attempt ended before the engine gave anything, so it was no step. ``refused``: because of what was asked, and to ask
        the same again brings nothing."""
        self.steps_started = max(0, self.steps_started - 1)
        self.idle += refused

    def alarms(self, limits: SessionLimits) -> list[Alarm]:
        """Every meter at or above its soft limit. A session that was only guessed is warned about and not stopped."""
        found: list[Alarm] = []
        stops = not self.identity.guessed
        meters: list[tuple[Meter, int, int | None]] = [
            ("steps", self.steps_started, limits.steps),
            ("tokens", self.tokens + self.lost, limits.tokens),
        ]
        for meter, value, limit in meters:
            limit = self.raised.get(meter, limit) if limit is not None else None
            if limit is not None and value >= limits.soft * limit:
                found.append(Alarm(meter, value, limit, stops and value >= limit))
        if limits.no_progress is not None and self.idle >= limits.no_progress:
            found.append(Alarm("no_progress", self.idle, limits.no_progress, stops and limits.stop_without_progress))
        return found

    def state(self, limits: SessionLimits) -> SessionState:
        """The account as plain numbers, with the limits that hold now."""
        steps, tokens = (
            None if limit is None else self.raised.get(meter, limit)
            for meter, limit in (("steps", limits.steps), ("tokens", limits.tokens))
        )
        return SessionState(
            session=str(self.identity), steps=self.steps_started, tokens=self.tokens, think_tokens=self.think_tokens,
            closes=self.closes, lost=self.lost, step_limit=steps, token_limit=tokens, soft=limits.soft, idle=self.idle,
        )  # fmt: skip

    def remember_overflow(self, digest: str, window: int) -> None:
        self.overflowed[digest] = window
        while len(self.overflowed) > DIGESTS:
            self.overflowed.popitem(last=False)

    def expected_prompt(self, prompt: int, agent: str = "") -> int:
        """The agent's next prompt: this one and the largest growth a step of its has had."""
        lengths: list[int] = [*self.prompts.get(agent, ()), prompt]
        # a prompt twice the former one is another conversation under the same id, not growth
        return prompt + max([0, *(b - a for a, b in itertools.pairwise(lengths) if b <= 2 * a)])


class Sessions:
    """The sessions this worker has at hand, bounded: past the limit the caller with the most gives up its least recently used one,
    so that no caller pushes out another's. What a store keeps comes back from there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[Identity, Session] = OrderedDict()
        self._callers: dict[str, OrderedDict[Identity, None]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def find(self, identity: Identity) -> Session | None:
        """The session if there is one; it does not count as used."""
        return self._sessions.get(identity)

    def get(self, identity: Identity) -> Session:
        session = self._sessions.get(identity)
        mine = self._callers.setdefault(identity.caller, OrderedDict())
        if session is None:
            session = self._sessions[identity] = Session(identity)
            mine[identity] = None
            if len(self._sessions) > self._limit:
                largest = max(self._callers.values(), key=len)
                self.forget(next(iter(largest)))
        self._sessions.move_to_end(identity)
        if identity in mine:
            mine.move_to_end(identity)
        return session

    def forget(self, identity: Identity) -> None:
        if self._sessions.pop(identity, None) is not None:
            mine = self._callers[identity.caller]
            del mine[identity]
            if not mine:
                del self._callers[identity.caller]
