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
@click.option("--upstream", metavar="URL", help="Guard an OpenAI-compatible server that runs already, instead of starting vLLM.")
@click.option("--upstream-key", envvar="AGENTGUARD_UPSTREAM_KEY", help="Key the guard sends to the upstream.")
@click.option("--rule", help="Verification rule of requests that ask for none, for example 'cactus:delta=0.25,p_min=0.1,top_k=10'.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the gateway; one others can reach needs keys.")
@click.option("--port", default=8484, show_default=True, type=click.IntRange(1, 65535), help="Port of the gateway.")
@click.option("--api-key", envvar="AGENTGUARD_API_KEY", help="Key clients must send; required on a host that is not loopback.")
@click.option(
    "--operator-key", envvar="AGENTGUARD_OPERATOR_KEY", help="Key for closing traces and raising limits; else the clients' does."
)
@click.option("--keys", type=click.Path(path_type=Path), help="File of 'agentguard keys'; default: the user's, where there is one.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME", help="Name the gateway answers to without keys.")
@click.option("--tls-cert", help="PEM file with the certificate (and its chain): serve HTTPS.")
@click.option("--tls-key", help="PEM file with the certificate's key.")
@click.option("--tls-clients", help="PEM file with authorities: only clients with a certificate of theirs get in.")
def serve(
    model: str | None, draft: str | None, recipe: Path | None, upstream: str | None, upstream_key: str | None, rule: str | None,
    host: str, port: int, api_key: str | None, operator_key: str | None, keys: Path | None, allowed_hosts: tuple[str, ...],
    tls_cert: str | None, tls_key: str | None, tls_clients: str | None,
) -> None:  # fmt: skip
    """Start vLLM with the plugin and the gateway for a local MODEL, or only the gateway in front of --upstream."""
    from agentguard import policy as policies
    from agentguard.engines.upstream import check_url
    from agentguard.errors import ConfigError
    from agentguard.gateway.access import access_of

    base: dict[str, Any] = policies.read(recipe) if recipe else {}
    base |= {k: v for k, v in {"model": model, "draft": draft, "rule": rule}.items() if v is not None}
    if "model" not in base and not upstream:
        raise ConfigError("MODEL", None, "give a model's path, a recipe with 'model:', or --upstream")
    access = access_of(
        host, api_key=api_key, operator_key=operator_key, keys=keys, allowed_hosts=allowed_hosts, tls_cert=tls_cert,
        tls_key=tls_key, tls_clients=tls_clients,
    )  # fmt: skip
    if upstream:
        root = check_url("upstream", upstream).removesuffix("/v1")
        run(_guard(policies.parse(base) if "model" in base else None, root, upstream_key, host, port, access), serves=True)
    else:
        run(_serve(policies.parse(base), host, port, access), serves=True)


async def _guard(policy: Any, upstream: str, key: str | None, host: str, port: int, access: Any) -> None:
    from agentguard.gateway.server import serve_upstream

    async with serve_upstream(policy, upstream, key=key, host=host, port=port, access=access) as (guard, url):
        how = "exact, in the engine" if guard.engine.facts.plugin else "by the gateway: the engine has no plugin"
        click.echo(f"ready: {url}/v1 guards {guard.info.model} at {upstream}  (closes {how})", err=True)
        counted = "" if guard.exact else "; counted by text, as this server tells no token ids"
        click.echo(f"think markers: {guard.derived}{counted}", err=True)
        await asyncio.Event().wait()


async def _serve(policy: Any, host: str, port: int, access: Any) -> None:
    from agentguard.gateway.server import serve_stack

    click.echo(f"starting {policy.model} …", err=True)
    async with serve_stack(policy, host=host, port=port, access=access) as stack:
        click.echo(f"ready: {stack.url}/v1  (events: {stack.url}/agentguard/events, engine log: {stack.engine.log})", err=True)
        click.echo(f"think markers: {stack.guard.derived}", err=True)
        watching = asyncio.create_task(stack.until_engine_ends(), name="engine watch")
        raise await watching
