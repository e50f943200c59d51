"""Keeps web pages out of the operator's routes. A browser sends a request for any page that asks, also to loopback, where a gateway
may have no key; what tells such a request is its content type, its Origin, or under DNS rebinding its Host."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

GUARDED = ("/agentguard/", "/guard/")


def refusal(method: str, path: str, headers: Mapping[str, str], *, keyed: bool) -> str:
    """Why a request is refused, "" where it is not. ``keyed``: the gateway wants a key, which no page of another host has."""
    if not path.startswith(GUARDED):
        return ""
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return f"a page of {origin[:80]} asked; pages of other hosts may not"
    if not keyed and not _is_address(host):
        return f"host {host[:80]!r} is a name; without a key only an address or localhost is answered (DNS rebinding)"
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "send it with 'content-type: application/json' (curl --json)"
    return ""


def _is_address(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class RefusePages:
    """Pure-ASGI middleware: 403 with the reason."""

    def __init__(self, app: Any, keyed: bool) -> None:
        self.app = app
        self._keyed = keyed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            reason = refusal(scope["method"], scope["path"], headers, keyed=self._keyed)
            if reason:
                body = {"error": {"message": reason, "type": "invalid_request_error", "code": 403}}
                await JSONResponse(body, 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)
