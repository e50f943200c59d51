"""`agentguard tui --web`: the same app in a browser, on loopback only.

Whoever reaches the page can act as the operator, and a page of anybody's can open a WebSocket to loopback. So a request counts only
with our own Host, and a WebSocket only from our own page.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentguard.errors import ConfigError
from agentguard.monitor.options import Options

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("web_page")


def arguments(options: Options) -> list[str]:
    """The command line of the app that the server starts for each visitor. Keys travel in the environment."""
    words = ["tui"]
    words += [word for url in options.gateways for word in ("--gateway", url)]
    words += [word for url in options.metrics for word in ("--metrics", url)]
    words += ["--interval", f"{options.interval_s:g}", "--window", f"{options.window_s:g}"]
    if options.replay is not None:
        words += ["--replay", str(options.replay), "--speed", f"{options.speed:g}"]
    if options.demo is not None:
        words += ["--demo", options.demo, "--seed", str(options.seed), "--speed", f"{options.speed:g}"]
    if options.theme is not None:
        words += ["--theme", options.theme]
    words += [
        flag for flag, on in (("--readonly", options.readonly), ("--ascii", options.ascii), ("--content", options.content)) if on
    ]
    return words


def foreign(host: str | None, origin: str | None, port: int) -> str | None:
    """Why a request is not from our own page, None when it is. A WebSocket always has an origin, a plain request may have none."""
    ours = {f"{name}:{port}" for name in (HOST, "localhost")}
    if host not in ours:
        return f"this server answers as {HOST}:{port} only"
    if origin is not None and origin.removeprefix("http://") not in ours:
        return f"a page of {origin} may not watch or act here"
    return None


def serve(options: Options) -> int:
    """Serve until interrupted. Raises ConfigError where textual-serve is not installed."""
    if importlib.util.find_spec("textual_serve") is None:
        raise ConfigError("--web", True, 'textual-serve is not installed; pip install "agentguard-vllm[tui-web]"')
    from aiohttp import web
    from textual_serve.server import Server

    @web.middleware
    async def only_ours(request: web.Request, handler: Any) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        reason = foreign(request.headers.get("Host"), origin, options.port)
        if reason is None and request.path == "/ws" and origin is None:
            reason = "a WebSocket needs an Origin"
        if reason is not None:
            raise web.HTTPForbidden(text=reason)
        response: web.StreamResponse = await handler(request)
        return response

    class Ours(Server):
        async def _make_app(self) -> web.Application:
            app = await super()._make_app()
            app.middlewares.append(only_ours)
            return app

        async def on_startup(self, app: web.Application) -> None:
            click.echo(f"agentguard: open {self.public_url} in a browser on this machine; Ctrl+C ends it", err=True)

        def initialize_logging(self) -> None:
            logging.basicConfig(level="WARNING", stream=sys.stderr)

    for name, secret in (("AGENTGUARD_API_KEY", options.api_key), ("AGENTGUARD_OPERATOR_KEY", options.operator_key)):
        if secret is not None:
            os.environ[name] = secret
    command = shlex.join([sys.executable, "-m", "agentguard", *arguments(options)])
    Ours(command, host=HOST, port=options.port, title="agentguard", templates_path=PAGE).serve()
    return 0
