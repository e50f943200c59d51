"""`agentguard serve`: vLLM with the plugin, and the gateway in front of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from agentguard.cli.run import run


@click.command()
@click.argument("model", required=False)
@click.option("--draft", help="Draft model for speculative decoding.")
@click.option("--recipe", type=click.Path(path_type=Path), help="YAML recipe; MODEL and the options override it.")
@click.option("--rule", help="Verification rule of requests that ask for none, for example 'cactus:delta=0.25,p_min=0.1,top_k=10'.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the gateway.")
@click.option("--port", default=8484, show_default=True, type=click.IntRange(1, 65535), help="Port of the gateway.")
@click.option("--api-key", envvar="AGENTGUARD_API_KEY", help="Key clients must send; required on a host that is not loopback.")
def serve(
    model: str | None, draft: str | None, recipe: Path | None, rule: str | None, host: str, port: int, api_key: str | None
) -> None:
    """Start vLLM with the plugin and the gateway for a local MODEL."""
    from agentguard import policy as policies
    from agentguard.errors import ConfigError

    base: dict[str, Any] = policies.read(recipe) if recipe else {}
    base |= {k: v for k, v in {"model": model, "draft": draft, "rule": rule}.items() if v is not None}
    if "model" not in base:
        raise ConfigError("MODEL", None, "give a model's path, or a recipe with 'model:'")
    if host not in ("127.0.0.1", "localhost", "::1") and not api_key:
        raise ConfigError("host", host, "is reachable from outside; set --api-key or AGENTGUARD_API_KEY, or bind to 127.0.0.1")
    run(_serve(policies.parse(base), host, port, api_key))


async def _serve(policy: Any, host: str, port: int, api_key: str | None) -> None:
    from agentguard.gateway.server import serve_stack

    click.echo(f"starting {policy.model} …", err=True)
    async with serve_stack(policy, host=host, port=port, api_key=api_key) as stack:
        click.echo(f"ready: {stack.url}/v1  (events: {stack.url}/agentguard/events, engine log: {stack.engine.log})", err=True)
        watching = asyncio.create_task(stack.until_engine_ends(), name="engine watch")
        raise await watching
