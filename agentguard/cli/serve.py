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
@click.option(
    "--upstream",
    metavar="URL",
    multiple=True,
    help="Guard an OpenAI-compatible server that runs already, instead of starting vLLM; again for more of one model.",
)
@click.option("--upstream-key", envvar="AGENTGUARD_UPSTREAM_KEY", help="Key the guard sends to the upstream.")
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
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Gateway processes on the port.")
@click.option(
    "--store",
    metavar="URL",
    help="Where sessions outlive the gateway: sqlite:PATH, redis://HOST:PORT/DB, or memory.  "
    "[default: the recipe's, else a SQLite file of this port in the state folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout when it is ready.")
def serve(
    model: str | None, draft: str | None, recipe: Path | None, rule: str | None, settings: tuple[str, ...],
    upstream: tuple[str, ...], upstream_key: str | None, host: str, port: int, api_key: str | None, operator_key: str | None,
    keys: Path | None, allowed_hosts: tuple[str, ...], tls_cert: str | None, tls_key: str | None, tls_clients: str | None,
    workers: int, store: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Start vLLM with the plugin and the gateway for a local MODEL, or only the gateway in front of --upstream."""
    from agentguard.configuration import for_upstream
    from agentguard.engines.upstream import check_url
    from agentguard.errors import ConfigError
    from agentguard.gateway.access import access_of
    from agentguard.policy import parse

    gathered = configuration({"model": model, "draft": draft, "rule": rule}, settings, recipe)
    if "model" not in gathered.values and not upstream:
        raise ConfigError("MODEL", None, "give a model's path, a recipe with 'model:', or --upstream")
    access = access_of(
        host, api_key=api_key, operator_key=operator_key, keys=keys, allowed_hosts=allowed_hosts, tls_cert=tls_cert,
        tls_key=tls_key, tls_clients=tls_clients,
    )  # fmt: skip
    roots = [check_url("upstream", url).removesuffix("/v1") for url in upstream]
    if upstream:
        gathered = for_upstream(gathered)
    store = _store(store, gathered.values, port)
    if workers > 1 and store is None:
        raise ConfigError("workers", workers, "several share their sessions, which memory cannot; give --store")
    checked = gathered.policy(model="of the upstream")  # what is wrong is said before anybody is asked
    values = (
        gathered.values if store is None else gathered.values | {"store": {**(gathered.values.get("store") or {}), "url": store}}
    )
    if not upstream:
        warn(checked)
    if workers > 1:
        run(_workers(values, roots, upstream_key, host, port, access, workers, as_json))
    elif upstream:
        run(_guard(values, roots, upstream_key, host, port, access, as_json), serves=True)
    else:
        run(_serve(parse(values), host, port, access, as_json), serves=True)


def _store(given: str | None, base: dict[str, Any], port: int) -> str | None:
    """The store's URL, None for memory."""
    from agentguard.dirs import state_dir

    if given is None and isinstance(base.get("store"), dict):
        given = base["store"].get("url")
    if given == "memory":
        return None
    return given or f"sqlite:{state_dir() / f'gateway-{port}.db'}"


async def _guard(
    values: dict[str, Any], upstream: list[str], key: str | None, host: str, port: int, access: Any, as_json: bool
) -> None:
    from agentguard.gateway.server import serve_upstream

    served = serve_upstream(values, upstream, key=key, host=host, port=port, access=access)
    async with served as (guard, url):
        how = "exact, in the engine" if guard.engine.facts.plugin else "by the gateway: the engine has no plugin"
        click.echo(f"ready: {url}/v1 guards {guard.info.model} at {', '.join(upstream)}  (closes {how})", err=True)
        counted = "" if guard.exact else "; counted by text, as this server tells no token ids"
        click.echo(f"think markers: {guard.derived}{counted}", err=True)
        if as_json:
            _ready(url, guard.info, upstream=upstream, closes="engine" if guard.engine.facts.plugin else "gateway")
        await asyncio.Event().wait()


def _ready(url: str, info: Any, **more: Any) -> None:
    told = {"event": "ready", "url": url, "base_url": f"{url}/v1", "model": info.model, "max_model_len": info.max_model_len}
    click.echo(json.dumps(told | more))


async def _workers(
    values: dict[str, Any], upstream: list[str], key: str | None, host: str, port: int, access: Any, count: int, as_json: bool
) -> None:
    from contextlib import AsyncExitStack

    from agentguard.engines.openai_http import OpenAIEngine
    from agentguard.engines.vllm_process import vllm_process
    from agentguard.gateway.server import bind
    from agentguard.gateway.workers import serve_workers
    from agentguard.policy import parse

    async with AsyncExitStack() as stack:
        listener, telemetry, ends = stack.enter_context(bind(host, port)), "", None
        if not upstream:
            click.echo(f"starting {values['model']} …", err=True)
            engine = await stack.enter_async_context(vllm_process(parse(values)))
            upstream, key, telemetry, ends = [engine.url], engine.api_key, engine.telemetry, engine
        if "model" not in values:
            client = OpenAIEngine(upstream[0], api_key=key)
            try:
                values = {"model": (await client.info()).model, **values}
            finally:
                await client.aclose()
        policy = parse(values)
        running = await stack.enter_async_context(
            serve_workers(policy, upstream, listener, count, key=key, access=access, telemetry=telemetry)
        )
        click.echo(f"ready: {running.url}/v1 guards {policy.model} with {count} workers", err=True)
        click.echo(f"one worker each: {', '.join(worker.url for worker in running.workers)}", err=True)
        if as_json:
            told = {"event": "ready", "url": running.url, "base_url": f"{running.url}/v1", "model": policy.model}
            click.echo(json.dumps(told | {"workers": [worker.url for worker in running.workers]}))
        if ends is None:
            await asyncio.Event().wait()
        else:
            await ends.process.wait()
            raise await asyncio.to_thread(ends.died)


async def _serve(policy: Any, host: str, port: int, access: Any, as_json: bool) -> None:
    from agentguard.gateway.server import serve_stack

    click.echo(f"starting {policy.model} …", err=True)
    async with serve_stack(policy, host=host, port=port, access=access) as stack:
        click.echo(f"ready: {stack.url}/v1  (events: {stack.url}/agentguard/events, engine log: {stack.engine.log})", err=True)
        click.echo(f"think markers: {stack.guard.derived}", err=True)
        if as_json:
            _ready(stack.url, stack.guard.info, engine_log=str(stack.engine.log))
        watching = asyncio.create_task(stack.until_engine_ends(), name="engine watch")
        raise await watching
