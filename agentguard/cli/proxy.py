"""`agentguard proxy`: LiteLLM in front of the gateway, for agents that speak Anthropic messages, responses or chat completions."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from agentguard.cli.options import RECIPE, SET, configuration, warn
from agentguard.cli.run import run


def backend_options(gateway_port: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What stands behind the proxy, the same for `agentguard proxy` and `wrap`. ``gateway_port``: where one that starts listens by
    default; 0 is a free one."""
    options = (
        RECIPE,
        SET,
        click.option("--upstream", metavar="URL", help="Guard an OpenAI-compatible server that runs already."),
        click.option("--gateway", metavar="URL", help="Use this gateway. Default: what runs at http://127.0.0.1:8484."),
        click.option(
            "--gateway-port", default=gateway_port, show_default=True, type=int, help="Of one that starts; 0: any that is free."
        ),
        click.option("--port", default=4000, show_default=True, type=click.IntRange(1, 65535), help="Port of the proxy."),
        click.option("--litellm", type=click.Path(path_type=Path), help="An environment with a LiteLLM of your own."),
        click.option("--lock", type=click.Path(path_type=Path), help="Hash lock of LiteLLM for another platform."),
    )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command()
@click.argument("model", required=False)
@backend_options(gateway_port=8484)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the proxy.")
@click.option("--allow-public", is_flag=True, help="Bind to an address that others can reach; needs AGENTGUARD_PROXY_KEY.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Processes of LiteLLM.")
@click.option("--print-config", is_flag=True, help="Print the configuration for a LiteLLM of your own, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout when it is ready.")
def proxy(
    model: str | None, recipe: Path | None, settings: tuple[str, ...], upstream: str | None, gateway: str | None, gateway_port: int,
    port: int, litellm: Path | None, lock: Path | None, host: str, allow_public: bool, workers: int, print_config: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Start a LiteLLM proxy in front of the guard's gateway, and the gateway itself for a local MODEL or an --upstream.

    Keys come by environment: AGENTGUARD_PROXY_KEY is what agents must send (default: one made for this installation),
    AGENTGUARD_API_KEY the gateway's, AGENTGUARD_UPSTREAM_KEY the upstream's.
    """
    import os

    from agentguard.proxy.config import as_yaml, check_address, config, key_file, master_key

    backend = backend_of(model, recipe, settings, upstream, gateway, gateway_port)
    if print_config:
        click.echo(as_yaml(config(*run(_named(backend, model, gateway_port)), keyed=backend.gateway_key is not None)), nl=False)
        return
    given = os.environ.get("AGENTGUARD_PROXY_KEY")
    check_address(host, given, allow_public=allow_public)
    command = litellm_command(litellm, lock)
    key = given or master_key()
    where = "AGENTGUARD_PROXY_KEY" if given else str(key_file())
    run(_serve(command, backend, key, where, host, port, workers, as_json), serves=True)


def backend_of(
    model: str | None, recipe: Path | None, settings: tuple[str, ...], upstream: str | None, gateway: str | None, gateway_port: int
) -> Any:
    """What the options mean. Keys are taken from the environment alone: a command line is everybody's to read.

    Environment and files give values to a model that is served here; they alone do not make one be served.
    """
    import os

    from agentguard.errors import ConfigError
    from agentguard.proxy.serving import Backend

    if gateway and (model or recipe or upstream):
        raise ConfigError("gateway", gateway, "runs already, with a model of its own; leave out MODEL, --recipe and --upstream")
    for name, url in (("upstream", upstream), ("gateway", gateway)):
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError(name, url, "give a URL such as http://127.0.0.1:8000")
    if settings and not (model or recipe):
        raise ConfigError("--set", settings[0], "changes a model that is served here; give a MODEL or --recipe with it")
    policy = configuration({"model": model}, settings, recipe).policy() if model or recipe else None
    if policy is not None:
        warn(policy)

    def key(name: str) -> str | None:
        return os.environ.get(name) or None  # an empty variable is none

    return Backend(
        gateway=gateway, gateway_key=key("AGENTGUARD_API_KEY"),
        upstream=upstream.rstrip("/").removesuffix("/v1") if upstream else None,
        upstream_key=key("AGENTGUARD_UPSTREAM_KEY"), operator_key=key("AGENTGUARD_OPERATOR_KEY"),
        policy=policy, port=gateway_port,
    )  # fmt: skip


def litellm_command(litellm: Path | None, lock: Path | None) -> Path:
    """LiteLLM's command, its environment made if need be, with progress on stderr."""
    from agentguard.proxy.environment import own_litellm, prepare

    if litellm is not None:
        return own_litellm(litellm)
    told = 0.0

    def progress(done: int, of: int) -> None:
        nonlocal told
        if sys.stderr.isatty():
            click.echo(f"\rsetting up LiteLLM: {done} of {of} packages", nl=done == of, err=True)
        elif time.monotonic() - told > 10 or done == of:
            told = time.monotonic()
            click.echo(f"setting up LiteLLM: {done} of {of} packages", err=True)

    def waiting() -> None:
        click.echo("another start is making LiteLLM's environment; waiting for it …", err=True)

    return prepare(lock, progress, waiting)


async def _named(backend: Any, model: str | None, port: int) -> tuple[str, str]:
    """The model and the gateway's URL for a printed configuration; nothing needs to run for it."""
    from agentguard.errors import ConfigError
    from agentguard.proxy.serving import model_of

    url = (backend.gateway or f"http://127.0.0.1:{port}").rstrip("/").removesuffix("/v1")
    if backend.policy is not None:
        return Path(backend.policy.model).name, url
    try:
        return (await model_of(url, backend.gateway_key))[0], url
    except ConfigError as error:
        click.echo(f"agentguard: {error.remedy.partition(';')[0]}: put the model's name in place of MODEL", err=True)
        return model or "MODEL", url


async def _serve(command: Path, backend: Any, key: str, where: str, host: str, port: int, workers: int, as_json: bool) -> None:
    from contextlib import AsyncExitStack

    from agentguard.proxy.running import Running, announced
    from agentguard.proxy.serving import first_end, serve_proxy

    click.echo("starting LiteLLM …", err=True)
    async with AsyncExitStack() as stack:
        served = serve_proxy(command, backend, master_key=key, host=host, port=port, workers=workers)
        gateway, running = await stack.enter_async_context(served)
        announcing = announced(port, Running(running.url, gateway.url, running.process.pid))
        await asyncio.to_thread(announcing.__enter__)
        stack.callback(announcing.__exit__, None, None, None)
        click.echo(f"gateway: {gateway.url}/v1  ({gateway.note})", err=True)
        click.echo(f"ready: {running.url}  (key: {where}; log: {running.log})", err=True)
        click.echo("OpenAI base URL: …/v1, Anthropic base URL: without /v1; or run an agent with 'agentguard wrap -- …'", err=True)
        if as_json:
            told = {"event": "ready", "url": running.url, "gateway": gateway.url, "model": gateway.model, "key": where}
            click.echo(json.dumps(told | {"log": str(running.log)}))
        watching = asyncio.create_task(first_end(gateway, running), name="process watch")
        raise await watching
