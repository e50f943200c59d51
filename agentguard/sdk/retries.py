"""Trying a step again: because of what it became, or because the engine was not there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from contextlib import aclosing

from agentguard.errors import ConfigError, EngineDiedError, EngineRequestError, SessionBusyError, nearest
from agentguard.events import Note
from agentguard.sdk.events import Retried, StepSummary
from agentguard.sdk.middleware import CallNext, Events, Middleware
from agentguard.sdk.request import StepRequest
from agentguard.trace.cutoff import CloseReason

EMPTY = "empty"
"""A step without an answer, in `RetryCuts`' ``reasons``."""
BUSY = (429, 502, 503, 504)
LONGEST_S = 30.0


def differently(request: StepRequest, summary: StepSummary) -> StepRequest | None:
    """The default change: another way through the model. The temperature goes up by 0.3 to 1.3 at most, and a seed is moved; where
    neither can change, None."""
    warmer = min(1.3, (1.0 if request.temperature is None else request.temperature) + 0.3)
    seed = None if request.seed is None else request.seed + 1
    changed = request.copy(temperature=warmer, seed=seed)
    return changed if changed != request else None


class RetryCuts(Middleware):
    """Run a step again with changed parameters after it was cut.

    ``reasons``: close reasons (`agentguard.trace.cutoff.CloseReason`) and "empty" that are not accepted; ``attempts``: how
    often at most, each a step of the session; ``change``: makes the next request from the former one and its summary, None to
    keep what there is. The same request again would get half the room to think, for a server at temperature 0 repeats itself,
    so a change is wanted. The stream tells a `Retried` between two attempts; `complete` returns the last one. Raises
    ConfigError at construction.
    """

    def __init__(
        self,
        reasons: Collection[str] = (CloseReason.LOOP, EMPTY),
        *,
        attempts: int = 1,
        change: Callable[[StepRequest, StepSummary], StepRequest | None] = differently,
    ) -> None:
        known = [*map(str, CloseReason), EMPTY]
        for reason in (reasons,) if isinstance(reasons, str) else reasons:
            if reason not in known:
                raise ConfigError("RetryCuts.reasons", reason, nearest(str(reason), known))
        if attempts < 1:
            raise ConfigError("RetryCuts.attempts", attempts, "at least 1; leave the middleware out for none")
        if not callable(change):
            raise ConfigError("RetryCuts.change", change, "give a function (request, summary) -> request or None")
        self._reasons = frozenset((reasons,) if isinstance(reasons, str) else map(str, reasons))
        self._attempts = attempts
        self._change = change

    async def handle(self, request: StepRequest, call_next: CallNext) -> Events:
        """Pass events on, and begin again where the summary says so."""
        for attempt in range(self._attempts + 1):
            again: tuple[StepRequest, str] | None = None
            async with aclosing(call_next(request)) as events:
                async for event in events:
                    if isinstance(event, StepSummary) and attempt < self._attempts:
                        again = self._again(request, event)
                    yield event
            if again is None:
                return
            yield Retried(attempt=attempt + 1, reason=again[1], changed=request.changed(again[0]))
            request = again[0]

    def _again(self, request: StepRequest, summary: StepSummary) -> tuple[StepRequest, str] | None:
        reason = summary.closed if summary.closed in self._reasons else ""
        if not reason and EMPTY in self._reasons and Note.EMPTY_ANSWER in summary.accounts.notes:
            reason = EMPTY
        changed = self._change(request, summary) if reason else None
        return None if changed is None or changed == request else (changed, reason)


class RetryBusy(Middleware):
    """Wait and try again where the engine is gone, restarting or overloaded, or the session's running steps hold what its limit
    leaves, as long as nothing of the step was told.

    ``attempts``: how often at most; the waits are 0.5, 1, 2 … seconds times a random 0.5 to 1, or what the server asks for, and
    30 s at most. A session at its limit is not tried again: that waits for a person.
    """

    def __init__(self, attempts: int = 2, *, first_s: float = 0.5) -> None:
        if attempts < 0:
            raise ConfigError("retries", attempts, "0 for none, or how often a step is tried again")
        self._attempts = attempts
        self._first_s = first_s

    async def handle(self, request: StepRequest, call_next: CallNext) -> Events:
        """Pass events on; begin again after a failure before the first."""
        for attempt in range(self._attempts + 1):
            told = False
            try:
                async with aclosing(call_next(request)) as events:
                    async for event in events:
                        told = True
                        yield event
                return
            except (EngineDiedError, EngineRequestError, SessionBusyError) as error:
                if told or attempt == self._attempts or not _passes(error):
                    raise
                wait = _asked_wait(error) or self._first_s * 2**attempt * random.uniform(0.5, 1.0)  # noqa: S311  # nosec B311  # jitter
            await asyncio.sleep(min(wait, LONGEST_S))


def _passes(error: EngineDiedError | EngineRequestError | SessionBusyError) -> bool:
    return not isinstance(error, EngineRequestError) or error.status in BUSY


def _asked_wait(error: Exception) -> float | None:
    """Seconds the server asks to wait; a date is not read."""
    text = getattr(error, "retry_after", None) or ""
    return float(text) if text.replace(".", "", 1).isdigit() else None
