"""Options that several commands share, and what they mean. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from agentguard.configuration import Configuration
    from agentguard.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])


class RecipeName(click.ParamType[Path]):
    """A file, or the name of a recipe that ships; completes to both."""

    name = "recipe"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "NAME|FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from agentguard.recipes import named

        return value if isinstance(value, Path) else named(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from agentguard.recipes import shipped

        names = [CompletionItem(name) for name in shipped() if name.startswith(incomplete)]
        return [*names, CompletionItem(incomplete, type="file")]


class Rule(click.ParamType[str]):
    """A verification rule; completes to the rules' names with their usual knobs. It is checked where it is used."""

    name = "rule"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "RULE"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from agentguard.rulespec import KNOBS

        rules = (":".join(filter(None, (name, ",".join(f"{k.name}={k.usual:g}" for k in knobs)))) for name, knobs in KNOBS.items())
        return [CompletionItem(rule) for rule in rules if rule.startswith(incomplete)]


RECIPE = click.option("--recipe", type=RecipeName(), help="A recipe that ships (see 'agentguard recipes') or a YAML or TOML file.")
SET = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any key of the policy: cutoff.f_max=0.9. May be repeated.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def policy_options(command: F) -> F:
    """--recipe, --draft, --rule and --set: what a command that needs a policy takes."""
    for option in (
        SET,
        click.option("--rule", type=Rule(), help="Verification rule of requests that ask for none: 'cactus:delta=0.25,p_min=0.1'."),
        RECIPE,
        click.option("--draft", help="Draft model for speculative decoding."),
    ):
        command = option(command)
    return command


def configuration(options: Mapping[str, Any], settings: tuple[str, ...] = (), recipe: Path | None = None) -> Configuration:
    """Command line, environment and files as one; says on stderr which files it is from besides a recipe."""
    from agentguard.configuration import gather

    gathered = gather(options, settings=settings, recipe=recipe)
    others = [layer.origin for layer in gathered.layers if layer.path is not None and layer.path != recipe]
    if others:
        click.echo(f"configuration: {', '.join(others)}  ('agentguard config show' names the source of each value)", err=True)
    return gathered


def warn(policy: Policy) -> None:
    """Say on stderr what is known to go wrong with the policy."""
    from agentguard.cautions import cautions

    for caution in cautions(policy):
        click.echo(f"agentguard: warning: {caution.text}", err=True)
