"""An HTTP client's way to an ASGI app in the same process, without a socket.

httpx2's own ASGITransport gives a response when the app has ended, so a stream would come at once and whole; this one gives
each piece as the app sends it, holds the app back after `AHEAD` pieces nobody has read, and ends it when the response is
closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import httpx2

AHEAD = 16
"""Pieces of a response the app may be ahead of its reader."""
GRACE_S = 5.0
"""How long an app may take to notice that nobody listens."""
Message: TypeAlias = MutableMapping[str, Any]
App: TypeAlias = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class AsgiTransport(httpx2.AsyncBaseTransport):
    """``app`` answers in tasks of this transport, which ends them with itself. ``dead``: asked after an answer of status 500 or
    more; the
    engine behind the app is gone, so the answer is a broken connection."""

    def __init__(self, app: App, *, dead: Callable[[], bool] = lambda: False) -> None:
        self._app = app
        self._dead = dead
        self._running: set[_Exchange] = set()

    @property
    def running(self) -> int:
        """Requests the app is at work on."""
        return len(self._running)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        body = b"".join([part async for part in request.stream])
        exchange = _Exchange(self._app, request, body, self._running.discard)
        self._running.add(exchange)
        try:
            status, headers = await exchange.head()
            if status >= 500 and self._dead():
                raise httpx2.ReadError("the engine behind the app is gone", request=request)
        except BaseException:
            await exchange.aclose()
            raise
        return httpx2.Response(status, headers=headers, stream=exchange)

    async def aclose(self) -> None:
        """End what runs, and wait for it."""
        exchanges = list(self._running)
        for exchange in exchanges:
            exchange.hang_up()
        await asyncio.gather(*(exchange.aclose() for exchange in exchanges))


class _Exchange(httpx2.AsyncByteStream):
    """One request and its response. The pieces are bytes; None stands for the end."""

    def __init__(self, app: App, request: httpx2.Request, body: bytes, on_end: Callable[[_Exchange], None]) -> None:
        self._request = request
        self._body: bytes | None = body
        self._patience: float | None = request.extensions.get("timeout", {}).get("read")
        self._head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()  # bounded by the room
        self._room = asyncio.Event()
        self._room.set()
        self._gone = asyncio.Event()
        self._on_end = on_end
        url = request.url
        scope = {
            # 2.3: the app listens for the end of the connection by itself, as it does behind uvicorn
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw], "scheme": url.scheme, "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0], "query_string": url.query, "server": (url.host, url.port),
            "client": ("127.0.0.1", 0), "root_path": "",
        }  # fmt: skip
        self._task = asyncio.create_task(self._run(app, scope), name=f"agentguard app {url.path}")
        self._task.add_done_callback(self._ended)

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers. Raises httpx2.ReadTimeout, and httpx2.ReadError for an app that ends without them."""
        async with self._patient():
            await asyncio.wait([self._head])
        return self._head.result()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            async with self._patient():
                piece = await self._pieces.get()
            if piece is None:
                break
            if self._pieces.qsize() < AHEAD:
                self._room.set()
            yield piece
        error = None if not self._task.done() or self._task.cancelled() else self._task.exception()
        if error is not None:
            raise self._broken(error)

    async def aclose(self) -> None:
        """Hang up, and wait until the app has ended; cancel it after `GRACE_S`. A caller that is cancelled stops waiting: the app
        has been told."""
        self.hang_up()
        if not self._task.done():
            await asyncio.wait([self._task], timeout=GRACE_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    def hang_up(self) -> None:
        """Tell the app that nobody listens any more, as a broken connection does."""
        self._gone.set()
        self._room.set()

    def _patient(self) -> _Patience:
        return _Patience(self._patience, self._request)

    def _broken(self, error: BaseException) -> httpx2.ReadError:
        return httpx2.ReadError(f"the app failed: {error!r}", request=self._request)

    # -- the app's side -----------------------------------------------------------------------------------------------------------

    async def _run(self, app: App, scope: MutableMapping[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._gone.set()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head.set_result((message["status"], list(message.get("headers", ()))))
        elif message["type"] == "http.response.body":
            if message.get("body"):
                # never waits once the connection is gone: a generator of the app's that is cancelled here, and not where it waits
                # itself, would stay open until it is collected, and the engine would go on
                await self._room.wait()
                if self._gone.is_set():
                    return
                self._pieces.put_nowait(message["body"])
                if self._pieces.qsize() >= AHEAD:
                    self._room.clear()
            if not message.get("more_body", False):
                self._pieces.put_nowait(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self._head.done():
            self._head.set_exception(self._broken(error or RuntimeError("it ended without an answer")))
            self._head.exception()  # a request that was closed asks for it no more
        self._pieces.put_nowait(None)
        self._on_end(self)


class _Patience:
    """`asyncio.timeout` whose end is httpx2's."""

    def __init__(self, seconds: float | None, request: httpx2.Request) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._request = request

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            raise httpx2.ReadTimeout("the app sent nothing in time", request=self._request) from None
