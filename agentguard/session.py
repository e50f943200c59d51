"""Sessions and steps: the token accounts of a multi-step agent session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentguard.economics.cells import SessionSums
from agentguard.events import StepFinished


@dataclass(frozen=True, slots=True)
class Identity:
    """Who runs the session: ids come from clients, so a caller is always part of the key."""

    caller: str
    session: str

    def __str__(self) -> str:
        return f"{self.caller}/{self.session}" if self.caller else self.session


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

    def next_step(self) -> int:
        self.steps_started += 1
        return self.steps_started

    def add(self, step: StepFinished) -> None:
        self.finished.append(step)
        del self.finished[: -self.kept]
        self.tokens += step.tokens
        self.think_tokens += step.think_tokens
        self.closes += bool(step.closed)

    @property
    def answers(self) -> list[int]:
        """Answer lengths of the steps that have one."""
        return [s.answer_tokens for s in self.finished if not s.error and not s.empty_answer]

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

    def get(self, identity: Identity) -> Session:
        session = self._sessions.setdefault(identity, Session(identity))
        self._sessions.move_to_end(identity)
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)
        return session
