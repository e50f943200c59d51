"""Fan-out of events inside the gateway. Publishing never waits and never holds more than each subscriber's bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from agentguard.errors import loggable
from agentguard.events import Event

logger = logging.getLogger(__name__)
Sink = Callable[[Event], None]


class Subscription:
    """A bounded queue; when it is full the oldest event is dropped and counted."""

    def __init__(self, limit: int) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue(limit)
        self.dropped = 0

    def put(self, event: Event) -> None:
        """Never waits; drops the oldest event where there is no room."""
        if self._queue.full():
            self._queue.get_nowait()
            self.dropped += 1
        self._queue.put_nowait(event)

    async def get(self) -> Event:
        """The oldest event that is left; waits for one."""
        return await self._queue.get()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            yield await self.get()


class Hub:
    """The one place events go through. ``publish`` is synchronous: call it from the loop's thread."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def publish(self, event: Event) -> None:
        """Call every sink with the event, in the order in which they came.

        A sink that raises is logged and the others are called: whoever publishes has a step to finish, and counting it must not
        break it.
        """
        for sink in list(self._sinks):
            try:
                sink(event)
            except Exception as error:
                told = {"sink": getattr(sink, "__qualname__", repr(sink)), "event": type(event).__name__}
                logger.error("sink_failed", extra=told | {"error": loggable(error)})

    @contextmanager
    def sink(self, sink: Sink) -> Iterator[None]:
        """Call ``sink`` for every event; it must return at once."""
        self._sinks.append(sink)
        try:
            yield
        finally:
            self._sinks.remove(sink)

    @contextmanager
    def subscribe(self, limit: int = 1024) -> Iterator[Subscription]:
        """A queue of at most ``limit`` events while the block runs."""
        subscription = Subscription(limit)
        with self.sink(subscription.put):
            yield subscription
