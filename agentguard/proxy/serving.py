"""Engine, gateway and LiteLLM together: what runs already is used, what is missing is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from agentguard.engines.http import http_client
from agentguard.errors import ConfigError, EngineDiedError, EngineError
from agentguard.gateway.server import serve_stack, serve_upstream
from agentguard.policy import Policy
from agentguard.proxy.process import Proxy, litellm_process

GATEWAY = "http://127.0.0.1:8484"


@dataclass(frozen=True, slots=True)
class Backend:
    """What stands behind the proxy. gateway: the URL of a running one; upstream: a server to put a gateway in front of; policy: a
    model to serve, or how the upstream is guarded; port: of a gateway that is started, 0 takes a free one. All None: the gateway
    that runs at `GATEWAY`."""

    gateway: str | None = None
    gateway_key: str | None = field(default=None, repr=False)
    upstream: str | None = None
    upstream_key: str | None = field(default=None, repr=False)
    operator_key: str | None = field(default=None, repr=False)
    policy: Policy | None = None
    port: int = 8484


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that runs. ``ends``: waits for the engine that was started with it to end, None if none was."""

    url: str
    model: str
    window: int
    note: str
    ends: Any = None


@asynccontextmanager
async def gateway_for(backend: Backend) -> AsyncIterator[Gateway]:
    """Raises ConfigError when there is nothing to guard, EngineError when the gateway does not answer as one."""
    keys: dict[str, Any] = {"port": backend.port, "api_key": backend.gateway_key, "operator_key": backend.operator_key}
    if backend.upstream is not None:
        served = serve_upstream(backend.policy, backend.upstream, key=backend.upstream_key, **keys)
        async with served as (guard, url):
            yield Gateway(url, guard.info.model, guard.info.max_model_len, f"guards {guard.info.model} at {backend.upstream}")
    elif backend.policy is not None:
        async with serve_stack(backend.policy, **keys) as stack:
            info = stack.guard.info
            note = f"guards {info.model}, engine log: {stack.engine.log}"
            yield Gateway(stack.url, info.model, info.max_model_len, note, stack.until_engine_ends)
    else:
        url = gateway_url(backend)
        model, window = await model_of(url, backend.gateway_key)
        yield Gateway(url, model, window, f"runs already, guards {model}")


def gateway_url(backend: Backend) -> str:
    """Of the gateway that runs already, without /v1."""
    return (backend.gateway or GATEWAY).rstrip("/").removesuffix("/v1")


async def model_of(url: str, key: str | None) -> tuple[str, int]:
    """The model behind a gateway and its window (0: not told). Raises ConfigError when nobody answers, for a wrong key, and for a
    server that is no gateway of ours."""
    async with http_client(url, timeout=10, headers={"Authorization": f"Bearer {key}"} if key else None) as client:
        try:
            reply = await client.get("/v1/models")
            ours = await client.get("/agentguard/sessions")
        except httpx2.TransportError as error:
            what = "give a MODEL to serve, --upstream for a server that runs already, or --gateway for a gateway elsewhere"
            raise ConfigError("gateway", url, f"nobody answers there ({type(error).__name__}); {what}") from None
    if reply.status_code == 401:
        raise ConfigError("gateway", url, "wants another key; set AGENTGUARD_API_KEY")
    if ours.status_code == 404:
        raise ConfigError("gateway", url, "answers, but is no gateway of ours; put one in front of it with --upstream")
    try:
        first = reply.json()["data"][0]
        return str(first["id"]), int(first.get("max_model_len") or 0)
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"{url}/v1/models did not answer as a gateway does (status {reply.status_code})") from None


async def answers(url: str, key: str) -> bool:
    """Does a proxy that takes our key answer there? Raises ConfigError for one that does not."""
    async with http_client(url, timeout=10, headers={"Authorization": f"Bearer {key}"}) as client:
        try:
            reply = await client.get("/v1/models")
        except httpx2.TransportError:
            return False
    if reply.status_code != 200:
        raise ConfigError(
            "port",
            url,
            f"something answers there with {reply.status_code}, not our proxy; set AGENTGUARD_PROXY_KEY, or give --port",
        )
    return True


@asynccontextmanager
async def serve_proxy(
    command: Path, backend: Backend, *, master_key: str, host: str = "127.0.0.1", port: int = 4000, workers: int = 1
) -> AsyncIterator[tuple[Gateway, Proxy]]:
    """The gateway and LiteLLM in front of it; both are stopped at the end, LiteLLM first."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(gateway_for(backend))
        proxy = await stack.enter_async_context(
            litellm_process(
                command, model=gateway.model, gateway=gateway.url, master_key=master_key, gateway_key=backend.gateway_key,
                host=host, port=port, workers=workers,
            )
        )  # fmt: skip
        yield gateway, proxy


async def first_end(gateway: Gateway, proxy: Proxy) -> EngineDiedError:
    """Wait until one of the processes ends; the error that says which."""
    waiting = [asyncio.ensure_future(proxy.until_it_ends())]
    if gateway.ends is not None:
        waiting.append(asyncio.ensure_future(gateway.ends()))
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
