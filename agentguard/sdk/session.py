"""One agent's session: its steps, its budget, and what can be done about both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from agentguard.errors import ActionRefusedError, ConfigError
from agentguard.events import Meter, StepStarted
from agentguard.sdk.backend import Account, Served
from agentguard.sdk.budget import Budget, RunningBudget
from agentguard.sdk.events import AnswerDelta, Economics, StepSummary, ThinkDelta
from agentguard.sdk.middleware import Events, Handle, chain
from agentguard.sdk.request import StepRequest
from agentguard.sdk.stream import StepStream

METERS: tuple[Meter, ...] = ("steps", "tokens", "no_progress")


class Session:
    """Made by `Connection.session`, used with ``async with``: its end closes the streams that still run. Steps may run side by
    side;
    they share the account."""

    def __init__(
        self, name: str, account: Account, served: Served, handles: Sequence[Handle], *, buffer: int, defaults: StepRequest,
        on_begin: Callable[[Session], None] = lambda _: None, on_end: Callable[[Session], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.id = name
        """The id it was opened with."""
        self.economics: Economics | None = None
        """The latest step's economics; None before the first has ended."""
        self._account = account
        self._served = served
        self._handles = handles
        self._buffer = buffer
        self._defaults = defaults
        self._on_begin = on_begin
        self._on_end = on_end
        self._streams: set[StepStream] = set()
        self._running: dict[str, RunningBudget] = {}
        self._context = 0
        self._open = False

    async def __aenter__(self) -> Self:
        await self._account.refresh()
        self._open = True
        self._on_begin(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the streams that still run, and wait for their ends. The session's account stays at the guard."""
        streams = self.stop()
        try:
            await asyncio.gather(*(stream.aclose() for stream in streams))
        finally:
            self._on_end(self)

    def stop(self) -> list[StepStream]:
        """End the streams without waiting for their ends: a caller that is cancelled while it waits has told all of them. Returns
        them."""
        self._open = False
        streams = list(self._streams)
        for stream in streams:
            stream.stop()
        return streams

    # -- steps --------------------------------------------------------------------------------------------------------------------

    def stream(
        self, messages: str | Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None, think_tokens: int | None = None, temperature: float | None = None, seed: int | None = None,
        rule: str | None = None, timeout_s: float | None = None, side: bool = False, **extra: Any,
    ) -> StepStream:  # fmt: skip
        """A step as events: ``async for event in session.stream(messages)``. Nothing is sent before the loop begins.

        ``messages`` and ``tools`` are in the form of OpenAI's chat completions; a text is one message of the user. The other
        arguments are those of `StepRequest`; what is None takes the session's default. ``extra`` is passed on with the request
        as it is. Raises ConfigError for arguments of a wrong form, the rest in the loop.
        """
        if not self._open:
            raise ConfigError("session", self.id, "is not open; use it inside 'async with guard.session(…) as s'")
        given = {
            "max_tokens": max_tokens, "think_tokens": think_tokens, "temperature": temperature, "seed": seed, "rule": rule,
            "timeout_s": timeout_s,
        }  # fmt: skip
        reserved = {"stream", "stream_options", "n", "model"} & extra.keys()
        if reserved:
            name = sorted(reserved)[0]
            raise ConfigError(name, extra[name], "is not for a step of a session; leave it out")
        request = self._defaults.copy(
            messages=messages, tools=tools, side=side, extra={**self._defaults.extra, **extra},
            **{name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
        if not request.messages:
            raise ConfigError("messages", messages, "give at least one message")
        return StepStream(
            request, lambda stream: chain(self._handles, partial(self._step, stream)), buffer=self._buffer,
            close=self._account.close, on_begin=self._begin, on_end=self._streams.discard,
        )  # fmt: skip

    def _begin(self, stream: StepStream) -> bool:
        """May it begin? Only a stream that runs is held: one that nobody reads is its caller's to forget."""
        if self._open:
            self._streams.add(stream)
        return self._open

    async def complete(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> StepSummary:
        """A step as a whole: the arguments of `stream`, the summary at its end. Raises what the step raises."""
        async with self.stream(messages, **options) as stream:
            return await stream.until_done()

    async def _step(self, stream: StepStream, request: StepRequest) -> Events:
        """The innermost of the chain: the guard's own step, and its place in the budget."""
        mine: RunningBudget | None = None
        try:
            async with aclosing(self._account.step(request)) as events:
                async for event in events:
                    if isinstance(event, StepStarted):
                        if mine is not None:  # an engine of a pool was gone, and another one takes over
                            self._running.pop(mine.request, None)
                        stream.request_id, self._context = event.request, event.prompt_tokens
                        mine = RunningBudget(event.request, event.step, event.prompt_tokens, event.budget, event.think_cap)
                    elif mine is not None and isinstance(event, ThinkDelta):
                        mine = replace(mine, think_tokens=event.think_tokens, think_cap=event.think_cap)
                    elif mine is not None and isinstance(event, AnswerDelta):
                        mine = replace(mine, answer_tokens=event.answer_tokens)
                    elif isinstance(event, StepSummary) and mine is not None:
                        self._running.pop(mine.request, None)
                        mine = None
                    elif isinstance(event, Economics):
                        self.economics = event
                    if mine is not None:
                        self._running[mine.request] = mine
                    yield event
        finally:
            if mine is not None:
                self._running.pop(mine.request, None)

    # -- the budget ---------------------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> Budget:
        """What the session has used and has left, at this moment."""
        return Budget(
            self._account.state, tuple(self._running.values()), self._served.window, self._context, self._account.complete
        )

    async def refresh(self) -> Budget:
        """Ask the guard for the account: needed only where others use the same session, or a step was broken off."""
        await self._account.refresh()
        return self.budget

    async def close_now(self, why: str = "asked for") -> int:
        """Close the traces of the session's running steps, with their next tokens; the answers still come.

        Returns how many were told, 0 when none runs. A gateway with an operator's key wants it (``connect(…, operator_key=…)``).
        """
        return await self._account.close("", why)

    async def raise_limit(self, meter: Meter, limit: int) -> Budget:
        """A new limit of "steps" or "tokens" for this session; "no_progress" begins to count anew, whatever the number.

        Raises ConfigError for another meter or a limit below 1, ActionRefusedError where the guard knows no such session yet.
        """
        if meter not in METERS:
            raise ConfigError("meter", meter, f"one of {', '.join(METERS)}")
        if limit < 1:
            raise ConfigError("limit", limit, "at least 1, in all")
        if not await self._account.raise_limit(meter, limit):
            raise ActionRefusedError(f"session {self.id!r} has no step yet, so it has no limit to raise; run one first")
        return self.budget
