"""Running a coroutine from a command, so that signals end it cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TextIO, TypeVar

import click

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], *, serves: bool = False, log: TextIO | None = None) -> T:
    """asyncio.run, with SIGTERM and SIGHUP (unless ignored, as under nohup) treated like Ctrl-C: the task is cancelled, its
    clean-up runs, KeyboardInterrupt is raised.

    The log goes to stderr meanwhile, or to ``log``, in the form that `agentguard --log-format` asks for; stdout is data.
    ``serves``: on uvloop where it is installed (a paced chunk through the gateway took 207 µs of CPU without it, 170 µs with it;
    benchmarks/gateway.py).
    """
    from agentguard import logs

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

    with logs.to(log or sys.stderr, *log_options()), asyncio.Runner(loop_factory=_fast_loop() if serves else None) as runner:
        return runner.run(main())


def log_options() -> tuple[Any, str]:
    """Format and level as the command line or the environment says them."""
    context = click.get_current_context(silent=True)
    given = context.find_root().params if context is not None else {}
    return (
        given.get("log_format") or os.environ.get("AGENTGUARD_LOG_FORMAT") or "console",
        given.get("log_level") or os.environ.get("AGENTGUARD_LOG_LEVEL") or "info",
    )


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
