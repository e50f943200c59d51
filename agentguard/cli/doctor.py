"""`agentguard doctor`: what works on this machine, and why not what doesn't."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of checks.")
@click.option(
    "--generate",
    is_flag=True,
    help="Also start the reference pair, and say which runner the engine took and what works on it (about 20 s).",
)
def doctor(as_json: bool, generate: bool) -> None:
    """Say what works on this machine, and why not what doesn't. Exit status 1 when something is off."""
    from agentguard.doctor import examine

    checks = examine(generate=generate)
    if as_json:
        click.echo(json.dumps([{"check": c.name, "ok": c.ok, "detail": c.detail} for c in checks], indent=1))
    else:
        for check in checks:
            click.echo(f"{'ok ' if check.ok else 'off'}  {check.name}: {check.detail}")
    if not all(c.ok for c in checks):
        raise SystemExit(1)
