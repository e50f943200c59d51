"""A worker's side of the session store: reservations before steps, settlements after them, and what happens while it is away.

A settlement is queued first and sent then, so that no cancellation loses it; the queue is bounded, and sent in order until the
store has it. While the store is away a reservation fails at once: whether the step may run without one is the guard's decision. One
alone asks whether it is back, the queue where it holds something and else a reservation, so that nobody else waits for the answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from agentguard.errors import loggable
from agentguard.store import StoreError, StoreRefusedError
from agentguard.store.accounts import Ask, Grant, Key, Refusal, Settlement
from agentguard.store.sessions import MemorySessions, SessionStore
from agentguard.tasks import owned_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

T = TypeVar("T")
logger = logging.getLogger(__name__)
PATIENCE_S = 5.0
"""How long a step waits for the store."""
SETTLED_S = 1.0
"""How long the end of a stream waits for its settlement, which goes on behind it."""
RETRY_S = 0.5
"""Between two tries while it is away."""
QUEUE = 10_000
"""Settlements that wait for a store that is away. The oldest is given up first: its reservation then ends with its lease and counts
as lost, so a limit still holds."""
BATCH = 64
SWEEP_S = 3600.0
LAST_S = 5.0
"""For the last settlements when the worker ends."""


@dataclass(slots=True, eq=False)
class _Posted:
    key: Key
    settlement: Settlement
    told: Callable[[int], None]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Books:
    """``lease_s``: how long a reservation outlives its worker; ``retention_s``: how long a session nobody uses is kept."""

    def __init__(self, store: SessionStore, *, lease_s: float = 30.0, retention_s: float = 30 * 86_400.0) -> None:
        self.store = store
        self.lease_s = lease_s
        self.away = ""
        """Why the store cannot be reached, "" while it can."""
        self.given_up = 0
        """Settlements that found no place in the queue."""
        self._retention_s = retention_s
        self._retry_at = 0.0
        self._running: dict[str, tuple[Key, Callable[[], int]]] = {}
        self._queue: OrderedDict[str, _Posted] = OrderedDict()
        self._wake = asyncio.Event()
        self._asking = False
        """A reservation asks a store that is away."""

    @property
    def waiting(self) -> int:
        """Settlements the store does not have yet."""
        return len(self._queue)

    async def reserve(self, key: Key, ask: Ask) -> Grant | Refusal:
        """Raises StoreError, at once while the store is known to be away. A step that is given up leaves no reservation behind."""
        if isinstance(self.store, MemorySessions):
            return await self.store.reserve(key, ask)
        asks = bool(self.away)
        if asks and (self._queue or self._asking or time.monotonic() < self._retry_at):
            raise StoreError(self.away)
        self._asking |= asks
        try:
            answer = await _within(PATIENCE_S, self.store.reserve(key, ask))
        except BaseException as error:
            # it may have been made all the same, so it is taken back, before or after it arrives
            self.post(key, Settlement(ask.step, undo=True))
            if isinstance(error, StoreError | TimeoutError):
                raise self._failed(error) from None
            raise
        finally:
            self._asking &= not asks
        self._answered()
        return answer

    async def recall(self, name: str) -> str:
        """A note of this or another gateway, "" for none; while the store is away too: what is noted is no account."""
        if isinstance(self.store, MemorySessions) or self.away:
            return ""
        try:
            text = await _within(PATIENCE_S, self.store.recall(name))
        except (StoreError, TimeoutError) as error:
            self._failed(error)
            return ""
        return text

    async def note(self, name: str, text: str) -> None:
        """Keep a note for `recall`; nothing while the store is away."""
        if isinstance(self.store, MemorySessions) or self.away:
            return
        try:
            await _within(PATIENCE_S, self.store.note(name, text))
        except (StoreError, TimeoutError) as error:
            self._failed(error)

    def follow(self, step: str, key: Key, count: Callable[[], int]) -> None:
        """Renew the step's lease until it is settled; ``count``: its tokens so far."""
        self._running[step] = (key, count)

    def post(self, key: Key, settlement: Settlement, told: Callable[[int], None] = lambda _: None) -> asyncio.Event:
        """Queue a settlement; the event is set when the store has it. ``told`` gets the number of its record."""
        self._running.pop(settlement.step, None)
        posted = _Posted(key, settlement, told)
        if isinstance(self.store, MemorySessions):
            told(self.store.settle_now(key, settlement))
            posted.done.set()
            return posted.done
        self._queue[settlement.step] = posted
        if len(self._queue) > QUEUE:
            _, oldest = self._queue.popitem(last=False)
            oldest.done.set()
            if not self.given_up:
                logger.error(
                    "settlements_given_up", extra={"waiting": QUEUE, "remedy": "the store is away for too long; see its log"}
                )
            self.given_up += 1
        self._wake.set()
        return posted.done

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Settle, renew leases and sweep while the block runs; at its end what is left is sent once more."""
        if isinstance(self.store, MemorySessions):
            yield
            return
        async with owned_loop(self._settle, "settlements"), owned_loop(self._renew, "leases"):
            try:
                yield
            finally:
                try:
                    async with asyncio.timeout(LAST_S):
                        while self._queue:
                            await next(iter(self._queue.values())).done.wait()
                except TimeoutError:
                    logger.error("settlements_lost", extra={"waiting": len(self._queue), "store": self.away})

    async def _settle(self) -> None:
        self._wake.set()  # what a loop that failed left behind
        while True:
            await self._wake.wait()
            self._wake.clear()
            size = BATCH
            while self._queue:
                batch = list(islice(self._queue.values(), size))
                try:
                    work = self.store.settle([(posted.key, posted.settlement) for posted in batch])
                    numbers = await _within(PATIENCE_S, work)
                except StoreRefusedError as error:
                    if size == 1:  # the others must not wait for it for ever
                        logger.error("settlement_refused", extra={"session": str(batch[0].key), "error": loggable(error)})
                        self._queue.pop(batch[0].settlement.step, None)
                        self.given_up += 1
                        batch[0].done.set()
                    size = 1 if size > 1 else BATCH
                    continue
                except Exception as error:  # whatever it is, the task must live, or nothing would ever be settled again
                    self._failed(error)
                    await asyncio.sleep(RETRY_S)
                    continue
                self._answered()
                for posted, number in zip(batch, numbers, strict=True):
                    if self._queue.get(posted.settlement.step) is posted:
                        del self._queue[posted.settlement.step]
                    try:
                        posted.told(number)
                    finally:
                        posted.done.set()

    async def _renew(self) -> None:
        swept, wall = time.monotonic(), time.time()
        while True:
            await asyncio.sleep(self.lease_s / 4)
            try:
                if self._running:
                    seen = {step: (key, count()) for step, (key, count) in self._running.items()}
                    await _within(PATIENCE_S, self.store.renew(seen, self.lease_s))
                if time.monotonic() - swept >= SWEEP_S:
                    passed, jumped = time.monotonic() - swept, time.time() - wall
                    swept, wall = time.monotonic(), time.time()
                    if abs(jumped - passed) < SWEEP_S:
                        await _within(PATIENCE_S, self.store.sweep(self._retention_s))
                    else:  # every session would look old after a leap of the clock
                        remedy = "no session is swept this time"
                        logger.warning("clock_jumped", extra={"seconds": round(jumped - passed), "remedy": remedy})
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> StoreError:
        reason = f"the store did not answer within {PATIENCE_S:g} s" if isinstance(error, TimeoutError) else str(error)
        if not isinstance(error, StoreError | TimeoutError):
            logger.error("session_store_failed", extra={"error": loggable(error)})
        if not self.away:  # once, not at every step
            logger.warning("session_store_unreachable", extra={"error": reason})
        self.away, self._retry_at = reason, time.monotonic() + RETRY_S
        return StoreError(reason)

    def _answered(self) -> None:
        if self.away:
            logger.info("session_store_back", extra={"waiting": len(self._queue)})
        self.away = ""


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, or TimeoutError. A loop that is busy for seconds finds timer and answer due at once, and then the
    answer counts: `asyncio.timeout` would have cancelled it, and taken a busy gateway for a store that is away."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=seconds)
        for _ in range(16):
            if task.done():
                return task.result()
            await asyncio.sleep(0)
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
