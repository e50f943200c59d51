"""Cancelling at every await: a coroutine is driven, and cancelled where it is suspended for the n-th time.

What arrives is what `asyncio.Task.cancel` brings: the awaited future is cancelled, and CancelledError is raised at the await.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Counted:
    """Awaits ``work`` and calls ``each`` whenever it is suspended."""

    def __init__(self, work: Coroutine[Any, Any, T], each: Callable[[], None]) -> None:
        self._work = work
        self._each = each

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                awaited = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration as stop:
                return stop.value
            self._each()
            error = None
            try:
                yield awaited
            except BaseException as thrown:
                error = thrown


class At:
    """Calls ``then`` when it is called for the ``n``-th time, counted from 1."""

    def __init__(self, n: int, then: Callable[[], Any]) -> None:
        self._left = n
        self._then = then

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()


async def cancelled_at(work: Coroutine[Any, Any, T], n: int) -> bool:
    """Run ``work`` in a task and cancel it at its ``n``-th suspension. False: it ended before."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        await Counted(work, At(n, task.cancel))

    return await _outcome(asyncio.create_task(run(), name="consumer"))


async def cancelled_at_others(work: Coroutine[Any, Any, T], names: tuple[str, ...], n: int, *, twice: bool = False) -> bool:
    """Run ``work`` in a task and cancel it when tasks whose coroutines' names end with one of ``names`` are suspended for the
    ``n``-th
    time, all of them together; with ``twice`` once more a moment later, while it ends what it had begun."""
    loop = asyncio.get_running_loop()
    former = loop.get_task_factory()
    consumer: list[asyncio.Task[None]] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        work = counted(coro) if getattr(coro, "__qualname__", "").endswith(names) else coro
        return asyncio.Task(work, loop=loop, **options)

    def stop() -> None:
        consumer[0].cancel()
        if twice:
            loop.call_soon(loop.call_soon, consumer[0].cancel)

    each = At(n, stop)

    async def counted(coro: Coroutine[Any, Any, Any]) -> Any:
        return await Counted(coro, each)

    async def run() -> None:
        await work

    loop.set_task_factory(factory)  # type: ignore[arg-type]
    try:
        consumer.append(asyncio.create_task(run(), name="consumer"))
        return await _outcome(consumer[0])
    finally:
        loop.set_task_factory(former)


async def _outcome(task: asyncio.Task[None]) -> bool:
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return task.cancelled()
