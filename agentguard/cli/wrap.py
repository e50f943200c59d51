"""`agentguard wrap -- claude …`: a coding agent behind the guard, without a change to the agent or to its own settings."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import click

from agentguard.cli.proxy import backend_of, backend_options, litellm_command
from agentguard.cli.run import run

KEPT_S = 7 * 86_400.0
"""How long the log of a run is kept."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--list", "show", is_flag=True, help="Show the agents that are known, and which are installed.")
@click.option("--json", "as_json", is_flag=True, help="JSON: the list on stdout, or the line at the end on stderr.")
@click.option("--model", help="A local model to serve, when nothing runs yet.")
@click.option("--proxy", metavar="URL", help="Use this proxy, in front of --gateway. Default: 'agentguard proxy' at --port.")
@backend_options(gateway_port=0)
def wrap(
    command: tuple[str, ...], show: bool, as_json: bool, model: str | None, proxy: str | None, recipe: Path | None,
    settings: tuple[str, ...], upstream: str | None, gateway: str | None, gateway_port: int, port: int, litellm: Path | None,
    lock: Path | None,
) -> None:  # fmt: skip
    """Run COMMAND, a coding agent or any program with an OpenAI or Anthropic SDK, against the guard.

    The proxy that 'agentguard proxy' runs at --port is used, and the gateway behind it; otherwise one is started for as long as the
    command runs, in front of the running gateway or of --model, --recipe or --upstream. The agent's exit code is passed on; one
    line at the end says what the run cost.
    """
    if show:
        _show(as_json)
        return
    if not command:
        raise click.UsageError("give the agent's command behind '--', for example: agentguard wrap -- claude")
    from agentguard.agents.known import recognise
    from agentguard.agents.run import program_of
    from agentguard.errors import ConfigError
    from agentguard.proxy.running import running_at
    from agentguard.proxy.serving import gateway_url, model_of

    # what costs nothing to look at comes before LiteLLM's environment (90 s the first time) and an engine
    program_of(command)
    backend = backend_of(model, recipe, settings, upstream, gateway, gateway_port)
    starts_gateway = backend.policy is not None or backend.upstream is not None
    if proxy and starts_gateway:
        raise ConfigError(
            "proxy", proxy, "runs already, in front of a gateway of its own; leave out --model, --recipe and --upstream"
        )
    running = None if proxy or starts_gateway else running_at(port)
    if running is not None:
        if backend.gateway is None:
            backend = replace(backend, gateway=running.gateway)
        elif gateway_url(backend) != running.gateway:
            running = None
    if not starts_gateway:
        run(model_of(gateway_url(backend), backend.gateway_key))
    started = None if proxy or running else litellm_command(litellm, lock)
    if recognise(command)[0] is None:
        click.echo(f"agentguard: {command[0]} is no agent that is known; it gets the variables of both SDKs", err=True)
    with _log() as log:  # the terminal is the agent's
        sys.exit(run(_wrap(command, backend, proxy or (running.url if running else None), started, as_json), log=log))


@contextmanager
def _log() -> Iterator[TextIO]:
    """A log of this run's own; it is named at the end if there is something in it, and removed if not."""
    from agentguard.dirs import state_dir

    for old in state_dir().glob("wrap-*.log"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > KEPT_S:
                old.unlink()
    path = state_dir() / f"wrap-{os.getpid()}.log"
    with path.open("w") as file:
        try:
            yield file
        finally:
            file.flush()
            if path.stat().st_size:
                click.echo(f"agentguard: log: {path}", err=True)
            else:
                path.unlink()


def _show(as_json: bool) -> None:
    from agentguard.agents.known import AGENTS

    if as_json:
        names = ("command", "name", "protocol", "tried", "installed", "note")
        click.echo(json.dumps([{name: getattr(agent, name) for name in names} for agent in AGENTS], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("command", "agent", "protocol", "tested with", "here", ""):
        table.add_column(heading)
    for agent in AGENTS:
        table.add_row(
            agent.command, agent.name, agent.protocol, agent.tried or "—", "installed" if agent.installed else "no", agent.note
        )
    table.add_row("…", "any OpenAI or Anthropic SDK program", "all", "openai 3.57.0, anthropic 2.14.0", "—", "")
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a row a line, for whoever greps
    console.print(table)


async def _wrap(command: tuple[str, ...], backend: Any, proxy: str | None, litellm: Path | None, as_json: bool) -> int:
    """``proxy``: the URL of one that runs; None: ``litellm`` is started."""
    import asyncio

    from agentguard.agents.known import Target
    from agentguard.agents.run import prepared, run_agent
    from agentguard.engines.vllm_process import free_port
    from agentguard.errors import ConfigError
    from agentguard.proxy.config import master_key
    from agentguard.proxy.serving import answers, first_end, gateway_for, serve_proxy

    key = os.environ.get("AGENTGUARD_PROXY_KEY", "") or await asyncio.to_thread(master_key)
    async with AsyncExitStack() as stack:
        watching: asyncio.Task[Exception] | None = None
        if proxy is not None:
            if not await answers(proxy, key):
                raise ConfigError("proxy", proxy, "nobody answers there; start it with 'agentguard proxy', or leave --proxy out")
            behind = await stack.enter_async_context(gateway_for(backend))
        else:
            assert litellm is not None
            click.echo("agentguard: starting the proxy …", err=True)
            # of its own, on a port of its own: it ends with this command, and another one must not come to rely on it
            served = serve_proxy(litellm, backend, master_key=key, port=free_port())
            behind, started = await stack.enter_async_context(served)
            proxy = started.url
            watching = asyncio.create_task(first_end(behind, started), name="process watch")
        try:
            arguments, env = await stack.enter_async_context(prepared(command, Target(proxy, key, behind.model, behind.window)))
            before = await _get(behind.url, backend.gateway_key, "/agentguard/sessions")
            status = await run_agent(arguments, env)
            if watching is not None and watching.done():  # not said before: the agent had the terminal
                click.echo(f"agentguard: {watching.result()}", err=True)
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        click.echo(await _summary(behind.url, backend.gateway_key, before["sessions"], as_json), err=True)
    return status


async def _summary(url: str, key: str | None, before: list[dict[str, Any]], as_json: bool) -> str:
    from dataclasses import asdict

    import httpx2

    from agentguard.agents.summary import line, ratio, spent

    try:
        after = await _get(url, key, "/agentguard/sessions")
        economics = await _get(url, key, "/guard/v1/economics")
        cost = spent(before, after["sessions"])
        return json.dumps(asdict(cost)) if as_json else line(cost, ratio(economics))
    except httpx2.HTTPError as error:  # what the agent did and how it ended counts all the same
        if as_json:
            return json.dumps({"error": type(error).__name__, "gateway": url})
        return f"agentguard: no accounts, the gateway at {url} does not answer ({type(error).__name__})"


async def _get(url: str, key: str | None, path: str) -> Any:
    from agentguard.engines.http import http_client

    async with http_client(url, timeout=10, headers={"Authorization": f"Bearer {key}"} if key else None) as client:
        reply = await client.get(path)
        reply.raise_for_status()
        return reply.json()
