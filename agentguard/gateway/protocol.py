"""uvicorn's parser with bounds: headers and URL are counted while they come in, and a client that dawdles over them is hung up on.

httptools has no limit of its own: without these a client could send headers until the memory is full, or hold connections open with
half a request. Answers are JSON with the field, as the gateway's own are.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentguard.limits import HEADERS_S, MAX_HEADERS, MAX_HEADERS_BYTES, MAX_URL

ONCE = (b"host", b"authorization", b"content-type", b"content-length", b"origin")
"""Headers that decide who may do what: of two, one part of a program reads the first and another the last."""


class _Refused(Exception):  # never seen outside; httptools wraps it
    pass


class BoundedHttp(HttpToolsProtocol):
    """Refuses with 414, 431 or 400, and closes the connection."""

    _bytes = 0
    _silent = 0
    """Bytes fed since the parser last told us something: a header, a chunk's extension or a trailer that never ends."""
    _waiting: asyncio.TimerHandle | None = None
    _refusal: tuple[int, str, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._silent += len(data)
        super().data_received(data)
        if self._silent > MAX_HEADERS_BYTES and self._refusal is None:
            self._refusal = (431, "headers", f"one of more than {MAX_HEADERS_BYTES} bytes; send less")
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._bytes = self._silent = 0
        self._wait()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL:
            self._refuse(414, "url", f"more than {MAX_URL} bytes; send less")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._silent = 0
        self._bytes += len(name) + len(value)
        if self._bytes > MAX_HEADERS_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse(431, "headers", f"more than {MAX_HEADERS_BYTES} bytes or {MAX_HEADERS} headers; send less")
        name = name.lower()
        if name in ONCE and sum(known == name for known, _ in self.headers) > 1:
            self._refuse(400, name.decode(), "is there twice; send it once")

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._silent = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._silent = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        status, field, why = self._refusal or (400, "request", "is no HTTP/1.1 request; see what stands before the gateway")
        self._refusal = (status, field, why)
        error = {"message": f"{field}: {why}", "type": "invalid_request_error", "code": status, "param": field}
        body = json.dumps({"error": error}).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _refuse(self, status: int, field: str, why: str) -> None:
        self._refusal = (status, field, why)
        raise _Refused(field)  # out of the parser's callback, which makes a HttpParserError of it

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(HEADERS_S, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._refusal = (408, "headers", f"not here within {HEADERS_S:g} s")
            self.send_400_response("")
