"""`agentguard tui`: the live monitor, and `--once` for scripts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentguard.cli.run import run

if TYPE_CHECKING:
    from agentguard.monitor.options import Options

_SCENARIO = "healthy"
_NEEDS = (("port", ("web",)), ("seed", ("demo",)), ("speed", ("demo", "replay")), ("json", ("once",)))
_APART = {
    ("once", "web"): "--once prints and ends, --web serves the screen; give one of them",
    ("once", "mini"): "--once prints and ends, --mini is a screen; give one of them",
    ("once", "theme"): "--once has no colours; leave --theme out",
    ("once", "ascii"): "--once prints text; leave --ascii out, or take --json, where only names may be other than ASCII",
    ("web", "mini"): "--mini is for a terminal; give one of them",
    ("web", "record"): "every visitor's screen would write the file; record with a monitor in a terminal, or press R on the page",
    ("content", "replay"): "a recording holds no words of traces; leave --content out",
}
"""Options of which one would be ignored beside the other, and what to do instead."""


@click.command()
@click.option(
    "--gateway", "gateways", metavar="URL", multiple=True, help="A gateway; may be given again. [default: port 8484 here]"
)
@click.option("--metrics", metavar="URL", multiple=True, help="A vLLM server without agentguard; may be given again.")
@click.option("--api-key", envvar="AGENTGUARD_API_KEY", help="The gateways' key, if they have one.")
@click.option("--operator-key", envvar="AGENTGUARD_OPERATOR_KEY", help="Key for actions, where the gateway has one of its own.")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.25, 10), help="Seconds between two samples.")
@click.option("--window", default=60.0, show_default=True, type=click.FloatRange(5, 3600), help="Seconds rates are taken over.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Write what is watched to this file.")
@click.option("--replay", type=click.Path(path_type=Path, dir_okay=False), help="Play a recording instead of watching.")
@click.option("--speed", default=1.0, show_default=True, type=click.FloatRange(0.1, 100), help="Speed of --replay and --demo.")
@click.option("--demo", metavar="[SCENARIO]", is_flag=False, flag_value=_SCENARIO, help="Play a scenario of the simulator.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the simulator.")
@click.option("--once", is_flag=True, help="Print one snapshot after two samples and end; status 1 for an alarm, 3 for no answer.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON.")
@click.option("--mini", is_flag=True, help="Six lines in the running terminal instead of the whole screen.")
@click.option("--web", is_flag=True, help="Serve the screen to a browser on this machine.")
@click.option("--port", default=8485, show_default=True, type=click.IntRange(1, 65535), help="Port of --web.")
@click.option("--readonly", is_flag=True, help="No actions.")
@click.option("--ascii", is_flag=True, help="Plain ASCII instead of glyphs and braille.")
@click.option("--theme", help="Colours; the screen lists the themes.")
@click.option("--content", is_flag=True, help="Show the live tail of traces, where the gateway allows it.")
def tui(
    gateways: tuple[str, ...], metrics: tuple[str, ...], api_key: str | None, operator_key: str | None, interval: float,
    window: float, record: Path | None, replay: Path | None, speed: float, demo: str | None, seed: int, once: bool, as_json: bool,
    mini: bool, web: bool, port: int, readonly: bool, ascii: bool, theme: str | None, content: bool,
) -> None:  # fmt: skip
    """Watch gateways and vLLM servers: does speculation pay, does a session run away, what did the guard do?"""
    from agentguard.monitor.options import Options

    options = Options(
        gateways=_urls("gateway", gateways), metrics=_urls("metrics", metrics), api_key=api_key, operator_key=operator_key,
        interval_s=interval, window_s=window, record=record, replay=replay, speed=speed, demo=demo, seed=seed, once=once,
        as_json=as_json, mini=mini, web=web, port=port, readonly=readonly, ascii=ascii, theme=theme, content=content,
    )  # fmt: skip
    _check(options, _given())
    raise SystemExit(_once(options) if once else _screen(options))


def _urls(what: str, given: tuple[str, ...]) -> tuple[str, ...]:
    from agentguard.monitor.options import server_url

    return tuple(dict.fromkeys(server_url(what, url) for url in given))


def _given() -> dict[str, object]:
    """What the command line itself says, by the option's name; defaults and the environment are not in it."""
    context = click.get_current_context()
    typed = (name for name in context.params if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE)
    return {"json" if name == "as_json" else name: context.params[name] for name in typed}


def _check(options: Options, given: dict[str, object]) -> None:
    from agentguard.errors import ConfigError
    from agentguard.monitor.simulator import SCENARIOS, unknown

    live = bool(options.gateways or options.metrics)
    if options.demo is not None and options.demo not in SCENARIOS:
        raise unknown(options.demo)
    if (options.replay is not None) + (options.demo is not None) + live > 1:
        raise ConfigError("replay", str(options.replay), "watch servers, or --replay a file, or --demo a scenario; one of them")
    if options.record is not None and not live and (options.replay is not None or options.demo is not None):
        raise ConfigError("record", str(options.record), "what is played is not recorded again; record a live gateway")
    for (one, other), why in _APART.items():
        if one in given and other in given:
            raise ConfigError(f"--{one} --{other}", given[other], why)
    for name, needed in _NEEDS:
        if name in given and not any(one in given for one in needed):
            raise ConfigError(f"--{name}", given[name], f"is for --{' and --'.join(needed)}; give that too, or leave it out")
    if options.window_s < 2 * options.interval_s:
        remedy = f"is too short for rates, which need two samples; give at least twice the interval of {options.interval_s:g} s"
        raise ConfigError("window", options.window_s, remedy)
    for url in set(options.gateways) & set(options.metrics):
        raise ConfigError("metrics", url, "is watched as a gateway already; give the vLLM server's own URL")


def _once(options: Options) -> int:
    from agentguard.monitor import once

    snapshot = run(once.look(options))
    click.echo(once.as_json(snapshot) if options.as_json else once.as_text(snapshot))
    return once.status(snapshot)


def _screen(options: Options) -> int:
    from agentguard.errors import ConfigError

    try:
        screen = importlib.import_module("agentguard.tui")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("textual", "agentguard"):
            raise
        raise ConfigError("tui", error.name, "is not installed; pip install 'agentguard-vllm[tui]', or use --once") from None
    status: int = screen.run(options)
    return status
