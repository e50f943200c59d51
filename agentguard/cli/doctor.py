"""`agentguard doctor`: what works on this machine, and why not what doesn't."""

from __future__ import annotations

import json
from pathlib import Path

import click

from agentguard.cli.options import configuration, policy_options


@click.command()
@click.argument("model", required=False)
@policy_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of checks.")
@click.option(
    "--generate",
    is_flag=True,
    help="Also start the reference pair, and say which runner the engine took and what works on it (about 20 s).",
)
def doctor(
    model: str | None, draft: str | None, recipe: Path | None, rule: str | None, settings: tuple[str, ...], as_json: bool,
    generate: bool,
) -> None:  # fmt: skip
    """Say what works on this machine, and why not what doesn't. Exit status 1 when something is off.

    With a MODEL, a recipe or a configuration file also what is known to go wrong with that policy, which is a warning alone.
    """
    from agentguard.doctor import examine

    gathered = configuration({"model": model, "draft": draft, "rule": rule}, settings, recipe)
    checks = examine(generate=generate, policy=gathered.policy(model="—") if gathered.values else None)
    if as_json:
        click.echo(json.dumps([{"check": c.name, "ok": c.ok, "warning": c.warning, "detail": c.detail} for c in checks], indent=1))
    else:
        for check in checks:
            click.echo(f"{'off ' if not check.ok else 'warn' if check.warning else 'ok  '} {check.name}: {check.detail}")
    if not all(c.ok for c in checks):
        raise SystemExit(1)
