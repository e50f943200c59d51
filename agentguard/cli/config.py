"""`agentguard config`: which values a run would have, where each comes from, and the schema they follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from agentguard.cli.options import JSON, RecipeName, policy_options, warn

TEMPLATE = """\
# What agentguard does here unless the command line, the environment or a recipe says otherwise.
# Every key: 'agentguard config schema'. What a run would have, and from where: 'agentguard config show'.

# model = "Qwen/Qwen3-8B"          # path or name of the target model
# draft = "Qwen/Qwen3-0.6B"        # a standalone draft model; without one there is no speculation
# rule = "strict"                  # strict keeps the target's own law; relaxed rules: docs/rules.md

# [cutoff]
# think_tokens = 4096              # of a step that names no budget of its own
# f_min = 0.80                     # a trace is closed between these shares of what its window and limit leave
# f_max = 0.85

# [limits]
# tokens = 2000000                 # generated tokens of a session, with a warning at 80 %

# [economics]
# control = 0.05                   # share of sessions that stay strict for comparison
"""
_UNSET = "—"


@click.group()
def config() -> None:
    """Show, validate and start a configuration: command line over environment, recipe, project file, user file and default."""


@config.command("show")
@click.argument("model", required=False)
@policy_options
@click.option("--all", "everything", is_flag=True, help="Defaults too.")
@JSON
def show_command(
    model: str | None, draft: str | None, recipe: Path | None, rule: str | None, settings: tuple[str, ...], everything: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Every value a run with these options would have, with its source. Passwords are masked."""
    from agentguard.configuration import DEFAULT, gather

    gathered = gather({"model": model, "draft": draft, "rule": rule}, settings=settings, recipe=recipe)
    rows = gathered.rows(gathered.policy(model=_UNSET))
    shown = [row for row in rows if everything or as_json or row[2] != DEFAULT]
    if as_json:
        values = [{"key": key, "value": None if value == _UNSET else value, "source": source} for key, value, source in shown]
        layers = [{"origin": one.origin, "path": str(one.path) if one.path else None} for one in gathered.layers]
        click.echo(json.dumps({"values": values, "layers": layers}, indent=1, ensure_ascii=False))
        return
    texts = [(key, value if value == _UNSET else json.dumps(value, ensure_ascii=False), source) for key, value, source in shown]
    wide = [max((len(row[column]) for row in texts), default=0) for column in (0, 1)]
    for key, text, source in texts:
        click.echo(f"{key:<{wide[0]}} = {text:<{min(wide[1], 60)}}  # {source}")
    if not texts:
        click.echo("all values are defaults; 'agentguard config show --all' shows them", err=True)


@config.command("validate")
@click.argument("files", nargs=-1, type=RecipeName())
@JSON
def validate_command(files: tuple[Path, ...], as_json: bool) -> None:
    """Validate FILES, by default what a run in this folder would have. Exit status 2 for the first one that is wrong.

    A project or user file need not name a model; a recipe that is started without one on the command line does.
    """
    from agentguard.configuration import from_file, gather, merge
    from agentguard.errors import ConfigError

    told: list[dict[str, Any]] = []
    for path in files or (None,):
        row: dict[str, Any] = {"name": "this folder" if path is None else str(path), "ok": True, "files": [], "error": ""}
        try:
            one = gather() if path is None else merge([from_file(path, "file")])
            row["files"] = [str(file) for file in one.files]
            warn(one.policy(model=_UNSET))
        except ConfigError as error:
            if not as_json:
                raise
            row |= {"ok": False, "error": str(error)}
        told.append(row)
    if as_json:
        click.echo(json.dumps(told, indent=1))
        if not all(row["ok"] for row in told):
            raise SystemExit(2)
        return
    for row in told:
        of = f" ({', '.join(row['files'])})" if row["files"] and row["name"] == "this folder" else ""
        click.echo(f"ok   {row['name']}{of}")


@config.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of recipes, project files and user files, for editors."""
    from agentguard import policy as policies

    click.echo(json.dumps(policies.schema(), indent=1, ensure_ascii=False))


@config.command("init")
@click.option("--user", is_flag=True, help="The user file instead of agentguard.toml in this folder.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@JSON
def init_command(user: bool, force: bool, as_json: bool) -> None:
    """Write a configuration file with the usual keys, all commented out."""
    from agentguard.dirs import config_dir
    from agentguard.errors import ConfigError

    path = config_dir() / "config.toml" if user else Path.cwd() / "agentguard.toml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(TEMPLATE)
    except FileExistsError:
        raise ConfigError("config", str(path), "is there already; edit it, or replace it with --force") from None
    except OSError as error:
        raise ConfigError("config", str(path), f"cannot be written ({error.strerror})") from None
    click.echo(json.dumps({"path": str(path)}) if as_json else str(path))
