"""`agentguard status`: what a running gateway's economics say."""

from __future__ import annotations

import json
from typing import Any

import click

from agentguard.cli.run import run


@click.command()
@click.option("--url", default="http://127.0.0.1:8484", show_default=True, help="The gateway.")
@click.option("--api-key", envvar="AGENTGUARD_API_KEY", help="The gateway's key, if it has one.")
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's answer as it is.")
def status(url: str, api_key: str | None, as_json: bool) -> None:
    """Arms, λ against gain, and the guard's verdicts."""
    answer = run(_fetch(url, api_key))
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{url}, control {answer['control']:.0%} of sessions")
    for heading in ("class", "arm", "sessions / steps", "ℓ", "gain", "λ", "rounds ratio", "TTLT ratio", "verdict"):
        table.add_column(heading)
    for row in answer["rows"]:
        ratios = row["ratios"]
        table.add_row(
            row["workload"], row["arm"], f"{row['sessions']} / {row['steps']}", _number(row["accepted_length"]),
            _number(row["gain"]), _interval(ratios["tokens"]), _interval(ratios["rounds"]), _interval(ratios["ttlt"]),
            _verdict(row),
        )  # fmt: skip
    if not answer["rows"]:
        click.echo("nothing measured yet: no session has finished a step", err=True)
    Console().print(table)


async def _fetch(url: str, api_key: str | None) -> dict[str, Any]:
    import httpx2

    from agentguard.engines.http import http_client
    from agentguard.errors import EngineDiedError, EngineRequestError

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    async with http_client(url, timeout=10, headers=headers) as client:
        try:
            reply = await client.get("/guard/v1/economics")
        except httpx2.TransportError as error:
            raise EngineDiedError(f"no gateway answers at {url} ({type(error).__name__}); start one, or give --url") from None
    if reply.status_code != 200:
        raise EngineRequestError(reply.status_code, f"{url} answered {reply.status_code}: {reply.text[:200]}")
    answer: dict[str, Any] = reply.json()
    return answer


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def _interval(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "—"
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {'∞' if ratio['high'] is None else format(ratio['high'], '.2f')}]"


def _verdict(row: dict[str, Any]) -> str:
    if row["verdict"] == "control":
        return f"control ({row['baseline']})"
    state = "" if row["on"] else "strict now; "
    return f"{state}{row['verdict']}: {row['reason']}"
