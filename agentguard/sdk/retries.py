"""Trying a step again: because of what it became, or because the engine was not there."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Collection
from contextlib import aclosing
from email.utils import parsedate_to_datetime

from agentguard.errors import AgentGuardError, ConfigError, EngineDiedError, EngineRequestError, SessionBusyError, nearest
from agentguard.events import Note
from agentguard.sdk.events import Retried, StepSummary
from agentguard.sdk.middleware import CallNext, Events, Middleware
from agentguard.sdk.request import StepRequest
from agentguard.store import StoreError
from agentguard.trace.cutoff import CloseReason

EMPTY = "empty"
"""A step without an answer, in `RetryCuts`' ``reasons``."""
BUSY = (429, 502, 503, 504)
LONGEST_S = 10.0
"""Of the waits nobody has asked for."""
RETRIES, RETRY_S = 10, 90.0
"""What is tried by default: engines here come back after 15 to 45 s."""


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

    ``attempts``: how often at most; ``within_s``: seconds from the first try to the last one's beginning. The waits are what the
    server asks for with Retry-After, else 0.5, 1, 2 … and 10 s at most, each times a random 0.5 to 1. A server that asks for more
    than is left is taken at its word: the error is raised at once, with its ``retry_after``. By default ten more tries are made
    within 90 seconds; the shortest they can take is 32 s, so an engine that restarts is waited for. A session at its limit is not
    tried again: that waits for a person. Raises ConfigError at construction.
    """

    def __init__(self, attempts: int = RETRIES, *, within_s: float = RETRY_S, first_s: float = 0.5) -> None:
        if attempts < 0:
            raise ConfigError("retries", attempts, "0 for none, or how often a step is tried again")
        if not 0 <= within_s < math.inf:
            raise ConfigError("retry_s", within_s, "seconds within which a step is tried again, a finite number")
        self._attempts = attempts
        self._within_s = within_s
        self._first_s = first_s

    async def handle(self, request: StepRequest, call_next: CallNext) -> Events:
        """Pass events on; begin again after a failure before the first."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for attempt in range(self._attempts + 1):
            told = False
            try:
                async with aclosing(call_next(request)) as events:
                    async for event in events:
                        told = True
                        yield event
                return
            except (EngineDiedError, EngineRequestError, SessionBusyError, StoreError) as error:
                if told or attempt == self._attempts or not _passes(error):
                    raise
                wait = asked_wait(error.retry_after, time.time())
                if wait is None:
                    wait = own_wait(attempt, self._first_s) * random.uniform(0.5, 1.0)  # noqa: S311  # nosec B311  # jitter
                if loop.time() - began + wait > self._within_s:
                    raise
            await asyncio.sleep(wait)


def own_wait(attempt: int, first_s: float) -> float:
    """Seconds to wait at most behind the try of that number, from 0, where the server asks for nothing."""
    return min(LONGEST_S, first_s * 2.0 ** min(attempt, 60))


def asked_wait(retry_after: str | None, now: float) -> float | None:
    """Seconds that a Retry-After asks to wait: a number of them, or a date (RFC 9110, 10.2.3) seen from the wall clock's ``now``.
    None for none and for what is neither."""
    text = (retry_after or "").strip()
    if text.replace(".", "", 1).isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return None


def _passes(error: AgentGuardError) -> bool:
    if isinstance(error, StoreError):
        return error.retry_after is not None  # a gateway's word that its store comes back; our own is for a person to repair
    return not isinstance(error, EngineRequestError) or error.status in BUSY
