"""`agentguard recipes`: the recipes that ship, what was measured of each, and whether one is sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentguard.cli.options import JSON, RecipeName

if TYPE_CHECKING:
    from agentguard.recipes import Finding


@click.group()
def recipes() -> None:
    """List, show and check recipes: a model pair, its rule and its limits in one file."""


@recipes.command("list")
@JSON
def list_command(as_json: bool) -> None:
    """The recipes that ship, and what was measured of each."""
    from agentguard.recipes import check, shipped

    found = [check(name, path) for name, path in shipped().items()]
    if as_json:
        click.echo(json.dumps([_row(one) for one in found], indent=1, ensure_ascii=False))
        return
    for one in found:
        about = one.policy.about if one.policy is not None else None
        click.echo(f"{one.name}\n  {about.summary if about else one.error or '—'}")
        if about is not None:
            click.echo(f"  measured: {about.measured}{f' ({about.source})' if about.source else ''}")


@recipes.command("show")
@click.argument("recipe", type=RecipeName())
@JSON
def show_command(recipe: Path, as_json: bool) -> None:
    """Print a recipe as it is written; with --json as it is understood, defaults included."""
    from agentguard import policy as policies
    from agentguard.recipes import text_of

    if as_json:
        click.echo(json.dumps(policies.load(recipe).model_dump(mode="json"), indent=1, ensure_ascii=False))
    else:
        click.echo(text_of(recipe), nl=False)


@recipes.command("check")
@click.argument("recipes", nargs=-1, type=RecipeName())
@click.option("--strict", is_flag=True, help="A warning is a finding too.")
@JSON
def check_command(recipes: tuple[Path, ...], strict: bool, as_json: bool) -> None:
    """Validate RECIPES, by default all that ship. Exit status 1 when one is wrong."""
    from agentguard.recipes import check, shipped

    found = [check(str(path), path) for path in recipes] or [check(name, path) for name, path in shipped().items()]
    if as_json:
        click.echo(json.dumps([_row(one) for one in found], indent=1, ensure_ascii=False))
    else:
        for one in found:
            click.echo(f"{'ok ' if not one.error else 'off'}  {one.name}{f': {one.error}' if one.error else ''}")
            for warning in one.warnings:
                click.echo(f"     warning: {warning}")
    if any(one.error or (strict and one.warnings) for one in found):
        raise SystemExit(1)


def _row(one: Finding) -> dict[str, Any]:
    about = one.policy.about if one.policy is not None else None
    return {
        "name": one.name,
        "path": str(one.path),
        "ok": not one.error,
        "error": one.error,
        "warnings": one.warnings,
        "summary": about.summary if about else None,
        "measured": about.measured if about else None,
        "source": about.source if about else None,
    }
