"""Requests that a web page made a browser send are kept out of the operator's routes."""

from __future__ import annotations

import httpx2
import pytest

from agentguard.gateway.pages import refusal
from tests.scripted import Script
from tests.test_guard import THINKS_AND_ANSWERS, rig

JSON = {"content-type": "application/json"}
HOME = {"host": "127.0.0.1:8484"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "keyed", "named"),
    [
        ("POST", "/agentguard/pin", HOME | JSON, False, ""),
        ("POST", "/agentguard/pin", HOME | {"content-type": "application/json; charset=utf-8"}, False, ""),
        ("POST", "/agentguard/pin", HOME | {"content-type": "text/plain"}, False, "content-type"),
        ("POST", "/agentguard/pin", HOME, True, "content-type"),
        ("POST", "/agentguard/pin", HOME | JSON | {"origin": "https://evil.example"}, True, "evil.example"),
        ("POST", "/agentguard/pin", HOME | JSON | {"origin": "null"}, False, "null"),
        ("POST", "/agentguard/pin", HOME | JSON | {"origin": "http://127.0.0.1:8484"}, False, ""),
        ("GET", "/agentguard/tails", {"host": "evil.example"}, False, "rebinding"),
        ("GET", "/guard/v1/watch", {"host": "evil.example:80"}, False, "rebinding"),
        ("GET", "/agentguard/tails", {"host": "guard.company"}, True, ""),
        ("GET", "/agentguard/events", {"host": "[::1]:8484"}, False, ""),
        ("GET", "/agentguard/events", {"host": "localhost"}, False, ""),
        ("GET", "/agentguard/events", {"host": ""}, False, "rebinding"),
        ("POST", "/v1/chat/completions", HOME | {"content-type": "text/plain"}, False, ""),
        ("POST", "/v1/chat/completions", HOME | {"origin": "https://evil.example"}, False, "evil.example"),
        ("POST", "/v1/chat/completions", {"host": "evil.example"}, False, "rebinding"),
        ("POST", "/v1/chat/completions", {"host": "evil.example", "origin": "https://evil.example"}, True, ""),
        ("GET", "/metrics", {"host": "evil.example"}, False, "rebinding"),
        ("GET", "/agentguard/events", HOME | {"sec-fetch-site": "cross-site"}, False, "another site"),
        ("GET", "/agentguard/events", HOME | {"sec-fetch-site": "same-site"}, True, "another site"),
        ("GET", "/agentguard/events", HOME | {"sec-fetch-site": "none"}, False, ""),
        ("GET", "/v1/models", HOME | {"origin": "http://[::1"}, False, "pages of other hosts"),
        ("GET", "/v1/models", {"host": "[::1"}, False, "rebinding"),
        ("GET", "/v1/models", {"host": "guard.lan:8484"}, False, ""),
        ("GET", "/v1/models", {"host": "guard.lan"}, False, ""),
        ("GET", "/health", {"host": "evil.example"}, False, ""),
    ],
)
def test_who_is_refused(method: str, path: str, headers: dict[str, str], keyed: bool, named: str) -> None:
    refused = refusal(method, path, headers, keyed=keyed, allowed_hosts=("guard.lan",))
    assert (refused is not None) == bool(named)
    if refused is not None:
        assert named in ": ".join(refused)


async def test_a_page_cannot_act_on_a_gateway_without_a_key() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS))) as r, httpx2.AsyncClient(base_url=r.url) as client:
        body = b'{"session": "me", "why": "page"}'
        page = {"content-type": "text/plain", "origin": "https://evil.example"}
        assert (await client.post("/agentguard/close", content=body, headers=page)).status_code == 403
        assert (await client.get("/agentguard/sessions", headers={"host": "evil.example"})).status_code == 403
        assert (await client.post("/agentguard/close", content=body, headers=JSON)).status_code == 404
