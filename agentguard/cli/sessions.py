"""`agentguard sessions`: the accounts a store keeps, and forgetting them."""

from __future__ import annotations

import json
from typing import Any

import click

from agentguard.cli.run import run

STORE = click.option(
    "--store",
    required=True,
    envvar="AGENTGUARD_STORE",
    metavar="URL",
    help="sqlite:PATH or redis://HOST:PORT/DB, as the gateway's.",
)


@click.group()
def sessions() -> None:
    """The accounts of sessions in a gateway's store."""


@sessions.command(name="list")
@STORE
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="The latest so many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_(store: str, limit: int, as_json: bool) -> None:
    """Sessions, the latest first: steps, tokens, and tokens lost with workers that died."""
    for row in run(_list(store, limit)):
        if as_json:
            click.echo(json.dumps(row))
        else:
            lost = f", {row['lost']} lost" if row["lost"] else ""
            click.echo(f"{row['session']}  {row['steps']} steps, {row['tokens']} tokens{lost}")


@sessions.command()
@STORE
@click.argument("session", metavar="CALLER/SESSION")
@click.option("--json", "as_json", is_flag=True, help="Print how many were forgotten, on stdout.")
def forget(store: str, session: str, as_json: bool) -> None:
    """Delete a session, or with CALLER/ all of a caller's. What runs now is counted as the beginning of a new one.

    Its records hold counts, hashes and no content; recordings and logs are files of their own.
    """
    from agentguard.errors import ConfigError

    gone = run(_forget(store, session))
    if not gone:
        raise ConfigError("CALLER/SESSION", session, "no such session; see 'agentguard sessions list'")
    if as_json:
        click.echo(json.dumps({"forgotten": gone}))
    else:
        click.echo(f"forgot {gone} session{'s' * (gone != 1)}", err=True)


async def _list(url: str, limit: int) -> list[dict[str, Any]]:
    from agentguard.store.sessions import open_sessions

    async with open_sessions(url) as store:
        return [
            {"session": str(key), "steps": m.steps, "tokens": m.tokens, "think_tokens": m.think, "closes": m.closes, "lost": m.lost}
            for key, m in await store.sessions(limit)
        ]


async def _forget(url: str, session: str) -> int:
    from agentguard.store.accounts import keys_of
    from agentguard.store.sessions import open_sessions

    async with open_sessions(url) as store:
        if session.endswith("/") and len(session) > 1:
            return await store.forget(session[:-1])
        return sum([await store.forget(*key) for key in keys_of(session)])
