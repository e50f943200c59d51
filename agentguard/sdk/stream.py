"""One step's events, read ahead of their consumer by a bounded number.

A task of its own reads the step into a queue, so that the guard goes on watching the trace while the consumer works on an
event. A full queue stops the reading, and with it the connection: the engine's server then waits with what it has. The stream
ends its task and the step in the engine when it is exhausted, left with `break`, closed, or when its session or connection
ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from agentguard.errors import AgentGuardError, StepTimeoutError, StreamClosedError
from agentguard.sdk.events import Economics, Retried, StepEvent, StepSummary
from agentguard.sdk.middleware import CallNext
from agentguard.sdk.request import StepRequest


class _End:
    """The last thing in a queue. ``error`` is raised at the consumer."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class StepStream:
    """A running step: ``async for event in stream``, once. Made by `Session.stream`.

    ``summary`` and ``economics`` are None until they have been read. Closing it, leaving the loop or being cancelled ends the
    step in the engine; its accounts are kept by the guard. Raises in the loop what the step raises (docs/sdk.md, "Errors").
    """

    def __init__(
        self, request: StepRequest, run: Callable[[StepStream], CallNext], *, buffer: int,
        close: Callable[[str, str], Coroutine[Any, Any, int]], on_begin: Callable[[StepStream], bool],
        on_end: Callable[[StepStream], None],
    ) -> None:  # fmt: skip
        self.summary: StepSummary | None = None
        self.economics: Economics | None = None
        self.request_id = ""
        """The guard's name of the step, as in its events; "" until it has begun."""
        self._request = request
        self._run = run(self)
        self._close = close
        self._on_begin = on_begin
        self._on_end = on_end
        self._queue: asyncio.Queue[StepEvent | _End] = asyncio.Queue(buffer)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._why: BaseException | None = None
        self._stopping = False
        self._read_out = False

    # -- the consumer's side ------------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncGenerator[StepEvent, None]:
        """The events as they come. The generator closes the stream, however it is left."""
        if self._stopping or self._read_out:
            raise self._over()
        try:
            self._begin()
            while True:
                item = await self._queue.get()
                if isinstance(item, _End):
                    self._read_out = True
                    if item.error is not None:
                        raise item.error
                    return
                self._note(item)
                yield item
        finally:
            await self.aclose()

    async def until_done(self) -> StepSummary:
        """Read what is left and return the summary. Raises AgentGuardError where a middleware kept it back."""
        async with aclosing(self.__aiter__()) as events:
            async for _ in events:
                pass
        if self.summary is None:
            raise AgentGuardError("the step ended without a StepSummary: a middleware of the chain kept it back; let it through")
        return self.summary

    async def close_now(self, why: str = "asked for") -> int:
        """Close the step's trace with its next tokens; the answer still comes. Returns how many traces were told: 0 for a step that
        has not begun or has ended."""
        return await self._close(self.request_id, why) if self.request_id else 0

    async def aclose(self) -> None:
        """End the step, in the engine too, and wait until it has ended. May be called again."""
        self.stop()
        if self._task is not None and not self._task.done():
            # waiting is all that a cancellation of the caller breaks off: the task has been told once and ends by itself, and its
            # session waits for it
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """End the step without waiting for its end, as `aclose` does."""
        self._stop(None)

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.aclose()

    def _note(self, event: StepEvent) -> None:
        if isinstance(event, Retried):
            self.summary = self.economics = None
        elif isinstance(event, StepSummary):
            self.summary = event
        elif isinstance(event, Economics):
            self.economics = event

    def _over(self) -> StreamClosedError:
        return StreamClosedError(f"the stream of session {self._request.session!r} is over; ask for another step")

    # -- the reader's side --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._task is not None or self._stopping:
            return
        if not self._on_begin(self):  # its session has ended
            self._stopping = True
            raise self._over()
        self._task = asyncio.create_task(self._read(), name=f"agentguard step {self._request.session}")
        self._task.add_done_callback(self._ended)
        if self._request.timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._request.timeout_s, self._time_out)

    async def _read(self) -> None:
        error: Exception | None = None
        try:
            async with aclosing(self._run(self._request)) as events:
                async for event in events:
                    await self._queue.put(event)
        except Exception as failure:  # it is the consumer's, who gets it behind what was read before
            error = failure
        await self._queue.put(_End(error))

    def _time_out(self) -> None:
        self._stop(StepTimeoutError(self._request.session, self._request.timeout_s or 0.0))

    def _stop(self, why: BaseException | None) -> None:
        """End the reader, once: a second cancellation would break off its own cleaning up."""
        if self._stopping:
            return
        self._stopping, self._why = True, why
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The reader is gone. One that was ended before it was through has put no end into the queue."""
        if self._timer is not None:
            self._timer.cancel()
        if task.cancelled() or task.exception() is not None:
            name = self._request.session
            error = self._why or StreamClosedError(
                f"the stream of session {name!r} was closed while it was read; ask for another step"
            )
            if not self._stopping:  # by somebody else: the loop at its end
                error = asyncio.CancelledError()
            while not self._queue.empty():  # nobody is to see more of a step that was ended
                self._queue.get_nowait()
            self._queue.put_nowait(_End(error))
        self._on_end(self)
