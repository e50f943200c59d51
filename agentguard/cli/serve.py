"""`agentguard serve`: vLLM with the plugin, and the gateway in front of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from agentguard.cli.options import configuration, policy_options, warn
from agentguard.cli.run import run


@click.command()
@click.argument("model", required=False)
@policy_options
@click.option("--upstream", metavar="URL", help="Guard an OpenAI-compatible server that runs already, instead of starting vLLM.")
@click.option("--upstream-key", envvar="AGENTGUARD_UPSTREAM_KEY", help="Key the guard sends to the upstream.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the gateway.")
@click.option("--port", default=8484, show_default=True, type=click.IntRange(1, 65535), help="Port of the gateway.")
@click.option("--api-key", envvar="AGENTGUARD_API_KEY", help="Key clients must send; required on a host that is not loopback.")
@click.option(
    "--operator-key", envvar="AGENTGUARD_OPERATOR_KEY", help="Key for closing traces and raising limits; else the clients' does."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout when it is ready.")
def serve(
    model: str | None, draft: str | None, recipe: Path | None, settings: tuple[str, ...], upstream: str | None,
    upstream_key: str | None, rule: str | None, host: str, port: int, api_key: str | None, operator_key: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Start vLLM with the plugin and the gateway for a local MODEL, or only the gateway in front of --upstream."""
    from agentguard.configuration import for_upstream
    from agentguard.errors import ConfigError

    gathered = configuration({"model": model, "draft": draft, "rule": rule}, settings, recipe)
    if "model" not in gathered.values and not upstream:
        raise ConfigError("MODEL", None, "give a model's path, a recipe with 'model:', or --upstream")
    if host not in ("127.0.0.1", "localhost", "::1") and not api_key:
        raise ConfigError("host", host, "is reachable from outside; set --api-key or AGENTGUARD_API_KEY, or bind to 127.0.0.1")
    if upstream:
        if not upstream.startswith(("http://", "https://")):
            raise ConfigError("upstream", upstream, "give a URL such as http://127.0.0.1:8000")
        root = upstream.rstrip("/").removesuffix("/v1")
        gathered = for_upstream(gathered)
        gathered.policy(model="of the upstream")  # what is wrong is said before anybody is asked
        run(_guard(gathered.values, root, upstream_key, host, port, api_key, operator_key, as_json), serves=True)
    else:
        policy = gathered.policy()
        warn(policy)
        run(_serve(policy, host, port, api_key, operator_key, as_json), serves=True)


async def _guard(
    policy: dict[str, Any], upstream: str, key: str | None, host: str, port: int, api_key: str | None, operator_key: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    from agentguard.gateway.server import serve_upstream

    served = serve_upstream(policy, upstream, key=key, host=host, port=port, api_key=api_key, operator_key=operator_key)
    async with served as (guard, url):
        how = "exact, in the engine" if guard.engine.facts.plugin else "by the gateway: the engine has no plugin"
        click.echo(f"ready: {url}/v1 guards {guard.info.model} at {upstream}  (closes {how})", err=True)
        counted = "" if guard.exact else "; counted by text, as this server tells no token ids"
        click.echo(f"think markers: {guard.derived}{counted}", err=True)
        if as_json:
            _ready(url, guard.info, upstream=upstream, closes="engine" if guard.engine.facts.plugin else "gateway")
        await asyncio.Event().wait()


def _ready(url: str, info: Any, **more: str) -> None:
    told = {"event": "ready", "url": url, "base_url": f"{url}/v1", "model": info.model, "max_model_len": info.max_model_len}
    click.echo(json.dumps(told | more))


async def _serve(policy: Any, host: str, port: int, api_key: str | None, operator_key: str | None, as_json: bool) -> None:
    from agentguard.gateway.server import serve_stack

    click.echo(f"starting {policy.model} …", err=True)
    async with serve_stack(policy, host=host, port=port, api_key=api_key, operator_key=operator_key) as stack:
        click.echo(f"ready: {stack.url}/v1  (events: {stack.url}/agentguard/events, engine log: {stack.engine.log})", err=True)
        click.echo(f"think markers: {stack.guard.derived}", err=True)
        if as_json:
            _ready(stack.url, stack.guard.info, engine_log=str(stack.engine.log))
        watching = asyncio.create_task(stack.until_engine_ends(), name="engine watch")
        raise await watching
