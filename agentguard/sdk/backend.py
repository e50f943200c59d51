"""Where steps run: a guard in this process, or a gateway. The rest of the SDK knows only these protocols."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from agentguard.events import ArmReport, Event, Meter, SessionState
from agentguard.sdk.middleware import Events
from agentguard.sdk.request import StepRequest


@dataclass(frozen=True, slots=True)
class Served:
    """What is served. ``window``: the context window in tokens, None where a gateway does not tell it."""

    model: str
    window: int | None


class Account(Protocol):
    """One session at its guard."""

    @property
    def state(self) -> SessionState:
        """What the session has used and may use, as far as is known here."""
        ...

    @property
    def complete(self) -> bool:
        """``state`` is the guard's own; False while a step was broken off whose accounts did not arrive."""
        ...

    def step(self, request: StepRequest) -> Events:
        """Run a step. Nothing is sent before the first event is read; closing the generator ends the step in the engine."""
        ...

    async def refresh(self) -> None:
        """Ask the guard for the session's state."""
        ...

    async def close(self, request_id: str, why: str) -> int:
        """Close the trace of one of the session's steps ("": of all that run); how many were told."""
        ...

    async def raise_limit(self, meter: Meter, limit: int) -> bool:
        """Give the session a new limit; False where the guard knows no such session."""
        ...


class Backend(Protocol):
    """One guard."""

    served: Served

    def account(self, session: str, agent: str) -> Account:
        """The account of a session; nothing is sent yet. Raises ConfigError for a strange id."""
        ...

    async def economics(self) -> list[ArmReport]:
        """Every arm of every class."""
        ...

    def events(self) -> AsyncGenerator[Event, None]:
        """Everything the guard publishes, of all sessions, from now on."""
        ...
