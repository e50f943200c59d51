"""`agentguard completion`: the script that teaches a shell our commands, options, recipes and rules."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL: put `eval "$(agentguard completion bash)"` into ~/.bashrc."""
    from agentguard.cli import cli

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(cli, {}, "agentguard", "_AGENTGUARD_COMPLETE").source())
