"""A request that is read while it waits for its turn, so that a client that hangs up is noticed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from agentguard.limits import AHEAD, MAX_BODY

ROOM_S = 1.0
"""Between two looks for room to read on."""


@dataclass(slots=True)
class Room:
    """Bytes of bodies that are held before their turn."""

    taken: int = 0

    def left(self, held: bytearray) -> bool:
        return self.taken < AHEAD and len(held) <= MAX_BODY


class Ahead:
    """Reads a request while it waits for its turn, to notice that its client hangs up; then gives the app what it read.

    ``room`` is shared by all that wait. Who has no room left reads on once others have been let in.
    """

    def __init__(self, receive: Any, room: Room) -> None:
        self._receive = receive
        self._room = room
        self._held = bytearray()
        self._more: bool | None = None
        """Of the body behind what is held; None where nothing is held."""
        self._gone = False
        self._task: asyncio.Task[None] | None = None

    def gone(self) -> asyncio.Task[None]:
        """Begin; ends when the client hangs up."""
        self._task = asyncio.create_task(self._read(), name="queued client")
        return self._task

    async def _read(self) -> None:
        while True:
            while self._more is not False and not self._room.left(self._held):  # noqa: ASYNC110  # no hurry, and no list of waiters
                await asyncio.sleep(ROOM_S)
            message = await self._receive()
            # nothing is awaited between a message and its keeping, so no cancellation loses one
            if message["type"] == "http.disconnect":
                self._gone = True
                return
            if self._more is not False:
                self._held += message.get("body", b"")
                self._more = bool(message.get("more_body", False))
                self._room.taken += len(message.get("body", b""))

    async def __call__(self) -> Any:
        """The app's `receive`."""
        while self._task is not None and not self._task.done():  # two readers would take each other's messages
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._more is not None:
            message = {"type": "http.request", "body": bytes(self._held), "more_body": self._more}
            self._let_go()
            return message
        return {"type": "http.disconnect"} if self._gone else await self._receive()

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            if self._task.done() and not self._task.cancelled():
                self._task.exception()  # told by whoever waited for it, or of nobody's interest any more
        self._let_go()

    def _let_go(self) -> None:
        self._room.taken -= len(self._held)
        self._held, self._more = bytearray(), None
