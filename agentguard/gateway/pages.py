"""Keeps web pages out. A browser sends a request for any page that asks, also to loopback, where a gateway may have no key; what
tells such a request is its content type, its Origin, what the browser says of the site (Sec-Fetch-Site), or under DNS rebinding its
Host.

With keys a page of another host has none, so only the routes that act are looked at; without keys every route but health is. No
answer allows another origin (CORS stays closed), and none may be embedded or guessed at by a browser.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from agentguard.gateway.auth import OPEN

GUARDED = ("/agentguard/", "/guard/")
CLOSED = (
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
"""In every answer: prompts and answers belong into no cache, and into no page as a script or an image."""


def refusal(
    method: str, path: str, headers: Mapping[str, str], *, keyed: bool, allowed_hosts: Collection[str] = ()
) -> tuple[str, str] | None:
    """The header because of which a request is refused and why, None where it is not. ``keyed``: every route wants a key;
    ``allowed_hosts``: names, with or without a port, that are answered without one."""
    if path in OPEN or (keyed and not path.startswith(GUARDED)):
        return None
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and urlsplit_host(origin) != host:
        return "origin", f"a page of {origin[:80]} asked; pages of other hosts may not"
    if origin is None and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return "sec-fetch-site", "a page of another site asked; pages of other hosts may not"
    if not keyed and not _is_address(host) and host not in allowed_hosts and host.rpartition(":")[0] not in allowed_hosts:
        return (
            "host",
            f"{host[:80]!r} is a name; without a key only an address, localhost or an --allowed-host is answered (DNS rebinding)",
        )
    if method == "POST" and path.startswith(GUARDED) and not _is_json(headers.get("content-type", "")):
        return "content-type", "send it with 'content-type: application/json' (curl --json)"
    return None


def urlsplit_host(origin: str) -> str:
    """Host and port of an origin, "" for what has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _is_address(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost":
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class RefusePages:
    """Pure-ASGI middleware: 403 with the reason; `CLOSED` on every answer."""

    def __init__(self, app: Any, keyed: bool, allowed_hosts: Collection[str] = ()) -> None:
        self.app = app
        self._keyed = keyed
        self._allowed = allowed_hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def closed(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *CLOSED]}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = refusal(scope["method"], scope["path"], headers, keyed=self._keyed, allowed_hosts=self._allowed)
        if refused is not None:
            field, reason = refused
            body = {"message": f"{field}: {reason}", "type": "invalid_request_error", "code": 403, "param": field}
            await JSONResponse({"error": body}, 403)(scope, receive, closed)
            return
        await self.app(scope, receive, closed)
