"""`agentguard tui --web`: the same app in a browser, on loopback only.

Whoever reaches the page can act as the operator, with the operator's keys. All users of the machine reach loopback, and a page of
any site can open a WebSocket to it. So the address holds a secret of this run, and without it neither the page nor the WebSocket
answers; as a second lock, a request counts only with our own Host, and a WebSocket only from our own page.
"""

from __future__ import annotations

import hmac
import importlib.util
import logging
import os
import secrets
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
VISITORS = 4
"""At most at once: each is a process of its own that reads every source."""


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


def unknown(path: str, secret: str) -> str | None:
    """Why a path is not answered: it does not begin with the secret of this run. A file to download has a random name of its own,
    told only in the visitor's WebSocket."""
    first, _, rest = path.removeprefix("/").partition("/")
    if hmac.compare_digest(first.encode(), secret.encode()) or (first == "download" and rest):
        return None
    return "open the whole address that `agentguard tui --web` printed; its last part is the key"


def serve(options: Options) -> int:
    """Serve until interrupted. Raises ConfigError where textual-serve is not installed."""
    if importlib.util.find_spec("textual_serve") is None:
        raise ConfigError("--web", True, 'textual-serve is not installed; pip install "agentguard-vllm[tui-web]"')
    from aiohttp import web
    from textual_serve.server import Server

    secret = secrets.token_urlsafe(16)
    visitors = 0

    @web.middleware
    async def only_ours(request: web.Request, handler: Any) -> web.StreamResponse:
        nonlocal visitors
        origin = request.headers.get("Origin")
        socket = request.path == f"/{secret}/ws"
        reason = foreign(request.headers.get("Host"), origin, options.port) or unknown(request.path, secret)
        if reason is None and socket and origin is None:
            reason = "a WebSocket needs an Origin"
        if reason is not None:
            raise web.HTTPForbidden(text=reason)
        if socket and visitors >= VISITORS:
            raise web.HTTPServiceUnavailable(text=f"{VISITORS} pages are open already; close one")
        visitors += socket
        try:
            response: web.StreamResponse = await handler(request)
        finally:
            visitors -= socket
        if not response.prepared:
            response.headers["Referrer-Policy"] = "no-referrer"
        return response

    class Ours(Server):
        async def _make_app(self) -> web.Application:
            app = web.Application(middlewares=[only_ours])
            app.add_subapp(f"/{secret}", await super()._make_app())
            app.router.add_get("/download/{key}", self.handle_download)
            return app

        async def on_startup(self, app: web.Application) -> None:
            click.echo(
                f"agentguard: open {self.public_url}/{secret}/ in a browser on this machine; whoever has this address can do here "
                "what you can; Ctrl+C ends it",
                err=True,
            )

        def initialize_logging(self) -> None:
            logging.basicConfig(level="WARNING", stream=sys.stderr)

    for name, key in (("AGENTGUARD_API_KEY", options.api_key), ("AGENTGUARD_OPERATOR_KEY", options.operator_key)):
        if key is not None:
            os.environ[name] = key
    command = shlex.join([sys.executable, "-m", "agentguard", *arguments(options)])
    Ours(command, host=HOST, port=options.port, title="agentguard", templates_path=PAGE).serve()
    return 0
