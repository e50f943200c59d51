"""Background work with an owner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from agentguard.errors import loggable

logger = logging.getLogger(__name__)
AGAIN_S = (0.5, 30.0)
"""Wait before a loop that failed begins anew: the first time, and at most when it keeps failing."""
LIVED_S = 60.0
"""A loop that lived so long begins anew without a longer wait."""
Work = Coroutine[Any, Any, None]


@contextlib.asynccontextmanager
async def owned_task(work: Work, name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``work`` beside the block and cancel it at the end. A failure goes to the log at once, since the block may last for days,
    and is raised at the block's end.

    A TaskGroup would wrap the block's own error in an ExceptionGroup, and callers match on agentguard's error types.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(tell_failure)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def owned_loop(work: Callable[[], Work], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``work``, which has no end of its own, beside the block: whatever it raises is logged and it begins anew, so that one odd
    answer or a full process table does not end what keeps a gateway well."""
    async with owned_task(_ever(work, name), name) as task:
        yield task


def tell_failure(task: asyncio.Task[Any]) -> None:
    """A task's done callback: its failure goes to the log."""
    if not task.cancelled() and isinstance(error := task.exception(), Exception):
        logger.error("task_failed", extra={"task": task.get_name(), "error": loggable(error)})


async def _ever(work: Callable[[], Work], name: str) -> None:
    wait = AGAIN_S[0]
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except Exception as error:
            if time.monotonic() - began > LIVED_S:
                wait = AGAIN_S[0]
            logger.error("task_failed", extra={"task": name, "error": loggable(error), "again_s": wait})
        await asyncio.sleep(wait)
        wait = min(2 * wait, AGAIN_S[1])
