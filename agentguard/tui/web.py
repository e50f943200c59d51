"""`agentguard tui --web`: the same app in a browser, on loopback only."""

from __future__ import annotations

import importlib.util
import shlex
import sys

from agentguard.errors import ConfigError
from agentguard.monitor.options import Options

HOST = "127.0.0.1"


def arguments(options: Options) -> list[str]:
    """The command line of the app that the server starts for each visitor."""
    words = ["tui"]
    words += [word for url in options.gateways for word in ("--gateway", url)]
    words += [word for url in options.metrics for word in ("--metrics", url)]
    words += ["--interval", f"{options.interval_s:g}", "--window", f"{options.window_s:g}"]
    if options.replay is not None:
        words += ["--replay", str(options.replay), "--speed", f"{options.speed:g}"]
    if options.demo is not None:
        words += ["--demo", options.demo, "--seed", str(options.seed)]
    if options.theme is not None:
        words += ["--theme", options.theme]
    words += [
        flag for flag, on in (("--readonly", options.readonly), ("--ascii", options.ascii), ("--content", options.content)) if on
    ]
    return words


def serve(options: Options) -> int:
    """Serve until interrupted. Raises ConfigError where textual-serve is not installed."""
    if importlib.util.find_spec("textual_serve") is None:
        raise ConfigError("--web", True, 'textual-serve is not installed; pip install "agentguard-vllm[tui-web]"')
    from textual_serve.server import Server

    command = shlex.join([sys.executable, "-m", "agentguard", *arguments(options)])
    Server(command, host=HOST, port=options.port, title="agentguard").serve()
    return 0
