"""Sessions and steps: the token accounts of a multi-step agent session."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentguard.economics.cells import SessionSums
from agentguard.events import Meter, Note, SessionState, StepFinished
from agentguard.identity import Identity
from agentguard.policy import SessionLimits
from agentguard.trace.cutoff import CloseReason, percentile

AGENTS = 64
"""Agents of a session whose windows are kept apart; the least recently used one is forgotten."""
_CUT_BY_US = (CloseReason.BUDGET, CloseReason.RESERVE, CloseReason.LOOP)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A meter at its soft limit, or at its limit (``stop``: no further step)."""

    meter: Meter
    value: int
    limit: int
    stop: bool


@dataclass(slots=True)
class Session:
    """One agent's whole run. ``next_step`` counts from 1; failed steps keep their number."""

    identity: Identity
    steps_started: int = 0
    finished: list[StepFinished] = field(default_factory=list)
    kept: int = 256
    """Steps remembered; the sums below go on for the session's whole life."""
    tokens: int = 0
    think_tokens: int = 0
    closes: int = 0
    used_tools: bool = False
    sums: dict[tuple[str, str], SessionSums] = field(default_factory=dict)
    """This session's own sums by class and arm, for the economics."""
    prompts: OrderedDict[str, deque[int]] = field(default_factory=OrderedDict)
    """Prompt lengths of the latest steps of each agent, "" for the main one: every agent has a window of its own."""
    cut: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Fingerprints of requests that were cut or got no answer, with how often; the latest 16."""
    idle: int = 0
    """Steps in a row that brought nothing."""
    raised: dict[str, int] = field(default_factory=dict)
    """Limits an operator has raised: meter and new limit."""
    warned: set[tuple[str, bool]] = field(default_factory=set)
    overflowed: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Digests of requests that did not fit into the window; the latest 16."""

    def next_step(self) -> int:
        self.steps_started += 1
        return self.steps_started

    def add(self, step: StepFinished, fingerprint: str = "", *, side: bool = False, agent: str = "") -> None:
        """``fingerprint``: of a request whose repetition would repeat the trace, "" for others; ``side``: a call beside the agent's
        own work, whose prompt says nothing about its context."""
        self.finished.append(step)
        del self.finished[: -self.kept]
        self.tokens += step.tokens
        self.think_tokens += step.think_tokens
        self.closes += bool(step.closed)
        if not side:
            self.prompts.setdefault(agent, deque(maxlen=64)).append(step.prompt_tokens)
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
            while len(self.cut) > 16:
                self.cut.popitem(last=False)

    def alarms(self, limits: SessionLimits) -> list[Alarm]:
        """Every meter at or above its soft limit. A session that was only guessed is warned about and not stopped."""
        found: list[Alarm] = []
        stops = not self.identity.guessed
        meters: list[tuple[Meter, int, int | None]] = [
            ("steps", self.steps_started, limits.steps),
            ("tokens", self.tokens, limits.tokens),
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
            closes=self.closes, step_limit=steps, token_limit=tokens, soft=limits.soft, idle=self.idle,
        )  # fmt: skip

    def remember_overflow(self, digest: str) -> None:
        self.overflowed[digest] = None
        while len(self.overflowed) > 16:
            self.overflowed.popitem(last=False)

    def expected_prompt(self, prompt: int, agent: str = "") -> int:
        """The agent's next prompt: this one and the largest growth a step of its has had."""
        lengths = [*self.prompts.get(agent, ()), prompt]
        # a prompt twice the former one is another conversation under the same id, not growth
        return prompt + max((b - a for a, b in itertools.pairwise(lengths) if b <= 2 * a), default=0)

    @property
    def answers(self) -> list[int]:
        """Answer lengths of the steps that have one."""
        return [s.answer_tokens for s in self.finished if not s.error and not s.empty_answer]

    @property
    def usual_answer(self) -> int:
        """p90 of the answers behind traces that were not closed by force; 0 for none."""
        return percentile([s.answer_tokens for s in self.finished if not s.error and not s.empty_answer and not s.closed], 0.9)

    @property
    def traces(self) -> list[int]:
        """Think tokens a step, in order."""
        return [s.think_tokens for s in self.finished if not s.error]


class Sessions:
    """The sessions of a gateway, bounded: the least recently used one is forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[Identity, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def find(self, identity: Identity) -> Session | None:
        """The session if there is one; it does not count as used."""
        return self._sessions.get(identity)

    def get(self, identity: Identity) -> Session:
        session = self._sessions.setdefault(identity, Session(identity))
        self._sessions.move_to_end(identity)
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)
        return session
