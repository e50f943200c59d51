"""A chain of the user's own policies around each step: redaction, rate limits, a cutoff or a retry of one's own.

The contract:

- A middleware is an async generator function of two arguments, ``(request, call_next)``, or an object with such a ``handle``. It
  yields the events the caller is to see.
- ``call_next(request)`` runs the rest of the chain and then the step, and returns its events. It may be called with a changed
  copy (`StepRequest.copy`), once, not at all, or again for another attempt. Each call that reaches the guard is a step of the
  session and counts as one. Nothing runs before its events are read.
- Order: the first of the list is the outermost. It sees the request first and the events last, so what it changes in the
  request all the others see, and what they change in the events it sees.
- An event may be dropped, changed (`msgspec.structs.replace`) or added. A stream has to bring a `StepSummary`; `complete` raises
  without one.
- What ``call_next`` raises passes through a middleware that does not catch it, and so does a cancellation. However a middleware
  ends, every stream it has opened is closed by the chain, which ends the step in the engine.
- A chain is checked when it is made, by `validated`: the offender is named, with the remedy.
- Deltas have been counted already when a middleware sees them, so a session's budget is not changed by what it hides.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from agentguard.errors import ConfigError
from agentguard.sdk.events import StepEvent
from agentguard.sdk.request import StepRequest

Events: TypeAlias = AsyncGenerator[StepEvent, None]
"""The events of one step. Closing the generator ends the step in the engine."""
CallNext: TypeAlias = Callable[[StepRequest], Events]
"""The rest of the chain; see the contract above. Raises what the guard raises, with the first event or later."""
Handle: TypeAlias = Callable[[StepRequest, CallNext], Events]
"""A middleware's work."""


class Middleware:
    """Base of a middleware that is an object; one that is a function needs none. The same object serves steps that run at the same
    time, so what belongs to one step is kept in ``handle``."""

    def handle(self, request: StepRequest, call_next: CallNext) -> Events:
        """Run one step: see the module's contract."""
        raise NotImplementedError


def validated(middleware: Sequence[Middleware | Handle]) -> tuple[Handle, ...]:
    """The chain's functions, outermost first. Raises ConfigError naming the place, the offender and the remedy."""
    if isinstance(middleware, Middleware) or callable(middleware):
        raise ConfigError("middleware", middleware, "give a list, the outermost first")
    handles: list[Handle] = []
    for place, one in enumerate(middleware):
        where = f"middleware[{place}]"
        if isinstance(one, type):
            raise ConfigError(where, one, "is a class; give an object of it")
        if any(one is former for former in middleware[:place]):
            raise ConfigError(where, one, "is in the chain already; make another object for a second place")
        handle = _handle_of(one, where)
        try:
            inspect.signature(handle).bind(None, None)
        except TypeError:
            raise ConfigError(where, one, f"has to take (request, call_next), not {inspect.signature(handle)}") from None
        handles.append(handle)
    return tuple(handles)


def _handle_of(one: Any, where: str) -> Handle:
    if type(one).__name__ in ("function", "method", "partial"):
        handle, what = one, "it"
    else:
        handle, what = getattr(one, "handle", None), "its 'handle'"
        if handle is None or (isinstance(one, Middleware) and type(one).handle is Middleware.handle):
            raise ConfigError(where, one, "has no 'handle(request, call_next)'; write one, or give an async generator function")
    if inspect.iscoroutinefunction(handle):
        raise ConfigError(
            where, one, f"{what} returns once; make it yield events: 'async for event in call_next(request): yield event'"
        )
    if not inspect.isasyncgenfunction(handle):
        raise ConfigError(where, one, f"{what} is not an async generator function; write it as 'async def' with a 'yield'")
    return handle  # type: ignore[no-any-return]


def chain(handles: Sequence[Handle], step: CallNext) -> CallNext:
    """The chain as one function, with ``step`` innermost."""
    for handle in reversed(handles):
        step = _around(handle, step)
    return step


def _around(handle: Handle, inner: CallNext) -> CallNext:
    async def run(request: StepRequest) -> Events:
        opened: list[Events] = []

        def call_next(changed: StepRequest) -> Events:
            if not isinstance(changed, StepRequest):
                raise ConfigError("call_next", changed, "give a StepRequest, such as request.copy(temperature=1.0)")
            opened.append(inner(changed))
            return opened[-1]

        try:
            async with aclosing(handle(request, call_next)) as events:
                async for event in events:
                    yield event
        finally:
            for events in opened:  # a middleware that stops reading leaves its stream open
                await events.aclose()

    return run
