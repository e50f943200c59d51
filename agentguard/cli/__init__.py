"""The command line. stdout is data, stderr narration; exit codes: 0 ok, 1 failure, 2 usage or configuration, 3 retryable, 130
interrupted.

Subcommands are imported when they are called, so that `agentguard --version` costs little more than click.
"""

from __future__ import annotations

import importlib
import sys

import click

from agentguard import __version__
from agentguard.errors import AgentGuardError, nearest

COMMANDS = {
    "completion": ("agentguard.cli.completion", "Print the completion script of a shell."),
    "config": ("agentguard.cli.config", "Show, validate and start a configuration."),
    "demo": ("agentguard.cli.study", "Run the reference pair under strict and relaxed rules and print the table."),
    "doctor": ("agentguard.cli.doctor", "Say what works on this machine, and why not what doesn't."),
    "keys": ("agentguard.cli.keys", "Make, list and revoke the keys of a gateway's clients, observers and operators."),
    "proxy": ("agentguard.cli.proxy", "Start a LiteLLM proxy in front of the gateway, for agents of all three protocols."),
    "recipes": ("agentguard.cli.recipes", "List, show and check recipes."),
    "serve": ("agentguard.cli.serve", "Start vLLM with the plugin and the gateway for a local model."),
    "sessions": ("agentguard.cli.sessions", "The accounts of sessions in a gateway's store, and forgetting them."),
    "status": ("agentguard.cli.status", "Arms, λ against gain, and the guard's verdicts of a running gateway."),
    "study": ("agentguard.cli.study", "Length-corrected evaluation of verification rules."),
    "tui": ("agentguard.cli.tui", "The live monitor of gateways and vLLM servers."),
    "wrap": ("agentguard.cli.wrap", "Run a coding agent behind the guard, without touching its own settings."),
}


class LazyGroup(click.Group):
    """Knows its commands by name and help line, and imports a command's module when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[name][0]), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in sorted(COMMANDS.items())])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(f"no command {args[0]!r}; {nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="agentguard")
@click.option("--log-format", type=click.Choice(["console", "json"]), envvar="AGENTGUARD_LOG_FORMAT", help="Of lines on stderr.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), envvar="AGENTGUARD_LOG_LEVEL", help="From here on."
)
def cli(log_format: str | None, log_level: str | None) -> None:
    """agentguard makes self-hosted reasoning models finish.

    Exit status: 0 done, 1 failure or a finding, 2 usage or configuration, 3 try again later, 130 interrupted.
    stdout is data, stderr is narration.
    """
    import os

    for name, value in (("AGENTGUARD_LOG_FORMAT", log_format), ("AGENTGUARD_LOG_LEVEL", log_level)):
        if value is not None:
            os.environ[name] = value  # the gateway's worker processes log alike


def main() -> None:
    """The console script: every deliberate error becomes one message on stderr and its exit code."""
    try:
        # the name also makes `_AGENTGUARD_COMPLETE` the variable of the shell's completion, however the program was started
        status = cli(prog_name="agentguard", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # click turns the second into the first
        click.echo("agentguard: interrupted", err=True)
        status = 130
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except AgentGuardError as error:
        click.echo(f"agentguard: {error}", err=True)
        status = error.exit_code
    sys.exit(status)
