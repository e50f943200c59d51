"""`agentguard wrap -- claude …`: a coding agent behind the guard, without a change to the agent or to its own settings."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click

from agentguard.cli.proxy import backend_of, backend_options, litellm_command
from agentguard.cli.run import run


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--list", "show", is_flag=True, help="Show the agents that are known, and which are installed.")
@click.option("--model", help="A local model to serve, when nothing runs yet.")
@click.option("--proxy", metavar="URL", help="Use this proxy, in front of --gateway. Default: what runs at --port.")
@backend_options
def wrap(
    command: tuple[str, ...], show: bool, model: str | None, proxy: str | None, recipe: Path | None, upstream: str | None,
    gateway: str | None, gateway_port: int, port: int, litellm: Path | None, lock: Path | None,
) -> None:  # fmt: skip
    """Run COMMAND, a coding agent or any program with an OpenAI or Anthropic SDK, against the guard.

    A proxy that runs at --port is used; otherwise one is started for as long as the command runs, in front of the running gateway
    or of --model, --recipe or --upstream. The agent's exit code is passed on; one line at the end says what the run cost.
    """
    if show:
        _show()
        return
    if not command:
        raise click.UsageError("give the agent's command behind '--', for example: agentguard wrap -- claude")
    backend = backend_of(model, recipe, upstream, gateway, gateway_port)
    from agentguard.dirs import state_dir

    with (state_dir() / "wrap.log").open("w") as log:  # the terminal is the agent's
        sys.exit(run(_wrap(command, backend, proxy, port, litellm, lock), log=log))


def _show() -> None:
    from rich.console import Console
    from rich.table import Table

    from agentguard.agents.known import AGENTS

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


async def _wrap(
    command: tuple[str, ...], backend: Any, proxy: str | None, port: int, litellm: Path | None, lock: Path | None
) -> int:
    import asyncio
    import os

    from agentguard.agents.known import Target
    from agentguard.agents.run import prepared, run_agent
    from agentguard.engines.vllm_process import free_port
    from agentguard.errors import ConfigError
    from agentguard.proxy.config import master_key
    from agentguard.proxy.listeners import listeners
    from agentguard.proxy.serving import answers, gateway_for, serve_proxy

    key = os.environ.get("AGENTGUARD_PROXY_KEY", "") or await asyncio.to_thread(master_key)
    # a proxy that runs is in front of the gateway that runs; with another one in mind, one is started
    elsewhere = backend.policy is not None or backend.upstream is not None or backend.gateway is not None
    async with AsyncExitStack() as stack:
        url = proxy or (None if elsewhere else f"http://127.0.0.1:{port}")
        ours = proxy is not None or {one.uid for one in await asyncio.to_thread(listeners, port)} == {os.getuid()}
        if url is not None and ours and await answers(url, key):  # another user's server must not be sent the key
            behind = await stack.enter_async_context(gateway_for(backend))
        elif proxy is not None:
            raise ConfigError("proxy", proxy, "nobody answers there; start it with 'agentguard proxy', or leave --proxy out")
        else:
            program = await asyncio.to_thread(litellm_command, litellm, lock)
            click.echo("agentguard: starting the proxy …", err=True)
            # of its own, on a port of its own: it ends with this command, and another one must not come to rely on it
            served = serve_proxy(program, backend, master_key=key, port=free_port())
            behind, started = await stack.enter_async_context(served)
            url = started.url
        target = Target(url, key, behind.model, behind.window)
        arguments, env = await stack.enter_async_context(prepared(command, target))
        before = await _get(behind.url, backend.gateway_key, "/agentguard/sessions")
        status = await run_agent(arguments, env)
        click.echo(await _summary(behind.url, backend.gateway_key, before["sessions"]), err=True)
    return status


async def _summary(url: str, key: str | None, before: list[dict[str, Any]]) -> str:
    import httpx2

    from agentguard.agents.summary import line, ratio, spent

    try:
        after = await _get(url, key, "/agentguard/sessions")
        return line(spent(before, after["sessions"]), ratio(await _get(url, key, "/guard/v1/economics")))
    except httpx2.HTTPError as error:  # what the agent did and how it ended counts all the same
        return f"agentguard: no accounts, the gateway at {url} does not answer ({type(error).__name__})"


async def _get(url: str, key: str | None, path: str) -> Any:
    from agentguard.engines.http import http_client

    async with http_client(url, timeout=10, headers={"Authorization": f"Bearer {key}"} if key else None) as client:
        reply = await client.get(path)
        reply.raise_for_status()
        return reply.json()
