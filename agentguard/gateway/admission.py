"""What a gateway takes on at once: so many steps run, so many wait, and no caller keeps the others from their turn.

A step waits before its body is parsed, so that a crowd costs connections and not memory. Whoever is refused is told why and when
to come again: 429 where the caller has too much running itself, 503 where the gateway has. Whoever hangs up while it waits gives
its place back at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from agentguard.errors import BusyError
from agentguard.gateway.ahead import Ahead, Room
from agentguard.identity import CALLER, digest
from agentguard.policy import ServingLimits

logger = logging.getLogger(__name__)
RETRY_S = 5
Turn = asyncio.Future[None]
"""Waits while it is in its caller's queue, and is given with its result, in one move. Nobody else ends it."""


class Admission:
    """Callers take turns; within a caller the first comes first.

    At every moment ``waiting`` is the number of turns in the queues, ``running`` that of turns given and not yet given back, and a
    caller's count the sum of its own. Each changes only where a turn goes into a queue, out of it, or back (`enter`, `_withdraw`,
    `leave`), and none of these waits in between.
    """

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self.running = 0
        self._of: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[Turn]] = OrderedDict()
        self.waiting = 0

    async def enter(self, caller: str, gone: Callable[[], asyncio.Future[None]] | None = None) -> None:
        """Wait for a turn; `leave` gives it back. Raises BusyError.

        ``gone``: asked for once it has to wait; a future that ends when nobody waits for the turn any more (then ClientDisconnect,
        or the future's own error). Its owner ends it.
        """
        limits = self._limits
        if self._of[caller] >= limits.per_caller:
            raise BusyError(
                429, "caller_busy",
                f"this caller has {self._of[caller]} steps running or waiting, and {limits.per_caller} is the limit "
                f"(serving.per_caller); send this again when one has ended", RETRY_S,
            )  # fmt: skip
        if self.running < limits.running and not self.waiting:
            self.running += 1
            self._of[caller] += 1
            return
        if self.waiting >= limits.queue:
            raise BusyError(
                503, "gateway_busy",
                f"{self.running} steps run and {self.waiting} wait, which is all this gateway takes on (serving.running, "
                f"serving.queue); send this again later", RETRY_S,
            )  # fmt: skip
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, deque()).append(turn)
        self.waiting += 1
        self._of[caller] += 1
        entered = False
        try:
            left = None if gone is None else gone()
            # `asyncio.wait` ends no turn, where `asyncio.timeout` would cancel one that stays in its queue until its task runs
            await asyncio.wait((turn,) if left is None else (turn, left), timeout=limits.queue_s, return_when="FIRST_COMPLETED")
            if left is not None and left.done():
                left.result()
                raise ClientDisconnect
            if not turn.done():
                raise BusyError(
                    503, "gateway_busy",
                    f"no turn within {limits.queue_s:g} s: {self.running} steps run (serving.running, serving.queue_s); send this "
                    f"again later", RETRY_S,
                )  # fmt: skip
            turn.result()  # raises what `refuse` said
            entered = True
        finally:
            if not entered:
                self._withdraw(caller, turn)

    def leave(self, caller: str) -> None:
        """Give a turn back: the caller next in line has it."""
        self.running -= 1
        self._forget(caller)
        while self.running < self._limits.running and self._queues:
            # the caller whose turn it is goes to the end of the line
            next_caller, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[next_caller] = queue
            self.waiting -= 1
            self.running += 1
            turn.set_result(None)

    def refuse(self, why: Callable[[], BusyError]) -> None:
        """Send away all that wait; those that run stay."""
        for caller, queue in list(self._queues.items()):
            for turn in list(queue):
                self._withdraw(caller, turn)
                turn.set_exception(why())

    def _withdraw(self, caller: str, turn: Turn) -> None:
        """A turn that is not taken: out of its queue, or back where it was given in the same moment. Nothing for one refused."""
        queue = self._queues.get(caller, ())
        if turn in queue:
            assert isinstance(queue, deque)
            queue.remove(turn)
            if not queue:
                del self._queues[caller]
            self.waiting -= 1
            self._forget(caller)
        elif turn.done() and turn.exception() is None:
            self.leave(caller)

    def _forget(self, caller: str) -> None:
        self._of[caller] -= 1
        if not self._of[caller]:
            del self._of[caller]


class Drain:
    """How a gateway ends: nothing new, those that watch or wait for a turn are let go at once, running steps may go on until
    `expire`, and then end with a word why."""

    def __init__(self) -> None:
        self.begun = False
        self.admission: Admission | None = None
        self.expired = asyncio.Event()
        self.watchers: set[asyncio.Task[Any]] = set()
        self.streams: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        self.begun = True
        if self.admission is not None:
            self.admission.refuse(self.error)
        for task in self.watchers:
            task.cancel()

    def expire(self) -> None:
        self.begin()
        self.expired.set()
        for task in self.streams:
            task.cancel()

    @staticmethod
    def error() -> BusyError:
        return BusyError(503, "gateway_ends", "the gateway was told to end before this step had; send it again", RETRY_S)


class Admit:
    """Pure-ASGI middleware: steps pass through `Admission`, and none once the gateway ends."""

    def __init__(self, app: Any, admission: Admission, drain: Drain, paths: tuple[str, ...]) -> None:
        self.app = app
        self._admission = admission
        self._drain = drain
        self._paths = paths
        self._room = Room()
        drain.admission = admission

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        caller = digest(headers.get(b"authorization", b"").decode("latin-1"), headers.get(CALLER.encode(), b"").decode("latin-1"))
        ahead = Ahead(receive, self._room)
        try:
            try:
                if self._drain.begun:
                    raise Drain.error()
                await self._admission.enter(caller, ahead.gone)
            except BusyError as error:
                logger.info("refused", extra={"caller": caller, "code": error.code})
                await refusal(error)(scope, receive, send)
                return
            except ClientDisconnect:
                logger.info("client_gone", extra={"caller": caller})
                await CLIENT_GONE(scope, receive, send)
                return
            try:
                await self.app(scope, ahead, send)
            finally:
                self._admission.leave(caller)
        finally:
            ahead.end()


CLIENT_GONE = Response(status_code=499)
"""Nobody reads it; nginx's number for a client that hung up."""


def refusal(error: BusyError) -> JSONResponse:
    """OpenAI's error object. The rest of the request is not read, so the connection ends with it."""
    kind = "rate_limit_error" if error.status == 429 else "server_error"
    told = {"message": str(error), "type": kind, "code": error.code}
    body = {"error": told | ({"param": error.field} if error.status < 500 else {})}
    return JSONResponse(body, error.status, headers={"retry-after": str(math.ceil(error.retry_after_s)), "connection": "close"})
