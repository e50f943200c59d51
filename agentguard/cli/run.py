"""Running a coroutine from a command, so that signals end it cleanly."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TextIO, TypeVar

import structlog

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], *, serves: bool = False, log: TextIO | None = None) -> T:
    """asyncio.run, with SIGTERM and SIGHUP (unless ignored, as under nohup) treated like Ctrl-C: the task is cancelled, its
    clean-up runs, KeyboardInterrupt is raised.

    Our log goes to stderr meanwhile, or to ``log``; stdout is data. ``serves``: on uvloop where it is installed (a paced chunk
    through the gateway took 207 µs of CPU without it, 170 µs with it; benchmarks/gateway.py).
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(log or sys.stderr))

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        terminated = False

        def on_end() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, on_end)
        try:
            return await work
        except asyncio.CancelledError:
            if terminated:
                raise KeyboardInterrupt from None
            raise

    with asyncio.Runner(loop_factory=_fast_loop() if serves else None) as runner:
        return runner.run(main())


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
