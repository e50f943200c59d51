"""The log at the edges of the program: one chain for our own lines and those of other libraries, to a console or as JSON.

Library code uses `logging.getLogger(__name__)`, with an event's name as the message and its facts in ``extra``, and configures
nothing: inside somebody else's program the lines go where that program's logging sends them, under the logger `agentguard`. The
commands install `to`, which renders them through structlog with a UTC time, level, logger and the ids that `bound` has set.

No line holds text of prompts or answers. Servers quote requests in their refusals, so an error is logged as `errors.loggable` says
it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor

LOGGER = "agentguard"
"""The public name: every line of ours has it or one below it."""
Style = Literal["console", "json"]
bound = structlog.contextvars.bound_contextvars
"""``with bound(session=…, request=…)``: lines of this task and those it starts get these ids."""
bind = structlog.contextvars.bind_contextvars
"""The same until the end of the enclosing `bound` or task."""


@contextlib.contextmanager
def to(stream: TextIO, style: Style = "console", level: str = "info") -> Iterator[None]:
    """Send all logs there while the block runs: ours from ``level`` on, those of others from warning on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(style, colors=stream.isatty()))
    root, ours = logging.getLogger(), logging.getLogger(LOGGER)
    before = (root.level, ours.level)
    _configure_structlog()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        ours.setLevel(before[1])


def silence() -> None:
    """No line at all: the monitor's screen is on the terminal, and what matters is in its event log."""
    logging.getLogger().handlers[:] = [logging.NullHandler()]


def _shared() -> Sequence[Processor]:
    return (
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    )


def _formatter(style: Style, *, colors: bool) -> logging.Formatter:
    last: tuple[Processor, ...] = (
        (structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False, default=str))
        if style == "json"
        else (structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),)
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *_shared()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def _configure_structlog() -> None:
    """Whoever logs with structlog itself goes the same way."""
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


class RequestLog:
    """Pure-ASGI middleware: what a request binds ends with it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with bound(session="", request=""):
            structlog.contextvars.unbind_contextvars("session", "request")
            await self.app(scope, receive, send)
