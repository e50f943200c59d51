"""Background work with an owner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def owned_task(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``work`` beside the block and cancel it at the end; if it failed, its error is raised there.

    A TaskGroup would wrap the block's own error in an ExceptionGroup, and callers match on agentguard's error types.
    """
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
