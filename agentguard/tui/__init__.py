"""The terminal monitor. `run` is what `agentguard tui` calls; nothing else of agentguard imports a terminal library."""

from __future__ import annotations

import os
import sys

from agentguard.errors import ConfigError
from agentguard.monitor.options import Options


def run(options: Options) -> int:
    """Show the monitor until the operator quits; the exit status. Raises AgentGuardError for options that cannot be used."""
    if options.web:
        from agentguard.tui.web import serve

        return serve(options)
    from agentguard import logs
    from agentguard.monitor.live import open_monitor
    from agentguard.tui.app import MonitorApp
    from agentguard.tui.glyphs import GLYPHS
    from agentguard.tui.settings import load

    logs.silence()  # a line would tear the screen
    GLYPHS.ascii = options.ascii
    app = MonitorApp(options, lambda: open_monitor(options), load(options.theme))
    # Textual reads keys from stdin and draws on stderr; under --web its driver is another one
    if "TEXTUAL_DRIVER" not in os.environ and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError("tui", "no terminal", "stdin and stderr must be one; for scripts there is --once, with --json")
    app.run(inline=options.mini, inline_no_clear=options.mini)
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0
