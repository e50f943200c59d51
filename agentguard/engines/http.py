"""The HTTP client every part uses towards an engine or a gateway."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import httpx2

KEEPALIVE_S = 2.0
"""Idle connections are given up before the server does it. uvicorn and vLLM close them after 5 s, which is httpx's default too, and
a request sent into a connection that is just being closed fails with a ReadError (once in 796 steps beside a busy CPU)."""


def http_client(
    url: str, *, timeout: httpx2.Timeout | float, headers: Mapping[str, str] | None = None,
    transport: httpx2.AsyncBaseTransport | None = None,
) -> httpx2.AsyncClient:  # fmt: skip
    """A pooled client for one server, deaf to proxy variables. ``transport``: another way to it than the network.

    For http:// it gets an empty TLS context, which trusts nobody: reading the CA bundle would block the event loop for some
    20 ms, and plain HTTP has no use for it.
    """
    verify: ssl.SSLContext | bool = True if url.startswith("https://") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # far more than steps run (serving.running): what waits for a connection looks like an engine that says nothing
    limits = httpx2.Limits(max_connections=8192, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S)
    return httpx2.AsyncClient(
        base_url=url, headers=headers, timeout=timeout, limits=limits, verify=verify, trust_env=False, transport=transport
    )
