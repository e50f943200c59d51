"""vLLM's `AsyncLLM` in this process, with our plugin: the engine behind ``connect(policy, in_process=True)``.

What answers is vLLM's own server app, called without a socket (agentguard.engines.asgi), so chat templates, parsers, the plugin's
routes and errors are those of `agentguard serve`. Tokens pass through one process less, and `InProcessEngine.llm` is there for a
program's own use. What to know of it:

- The engine's core, which steps the model, is a child process of vLLM's that begins as a fresh interpreter: a program needs
  ``if __name__ == "__main__"``.
- vLLM starts and stops synchronously: the event loop stands still for the time of a start (10 to 40 s on two cores).
- The environment variables of `agentguard.engines.vllm_process.environment` are set while it runs.
- One at a time in a process: vLLM keeps its metrics and its parsers per process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agentguard.engines.asgi import AsgiTransport
from agentguard.engines.base import Stream
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.vllm_process import check_model, command, environment
from agentguard.errors import AgentGuardError, EngineDiedError, EngineRequestError, EngineStartError
from agentguard.policy import Policy

URL = "http://in-process"
_KEY = "VLLM_API_KEY"
"""Not here: nobody else can reach the routes."""


class InProcessEngine(OpenAIEngine):
    """An `agentguard.engines.base.Engine`. ``llm`` is vLLM's AsyncLLM, ``telemetry`` the ZMQ address of the plugin's tap."""

    def __init__(self, llm: Any, transport: AsgiTransport, telemetry: str) -> None:
        super().__init__(URL, transport=transport)
        self.llm = llm
        self.telemetry = telemetry

    async def _stream(self, path: str, body: Mapping[str, Any], headers: dict[str, str]) -> Stream:
        try:
            async with aclosing(super()._stream(path, body, headers)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineRequestError as error:
            if error.status >= 500 and self.llm.errored:
                raise EngineDiedError(f"the engine's core has ended ({error}); connect again") from error
            raise


@asynccontextmanager
async def vllm_inprocess(policy: Policy) -> AsyncIterator[InProcessEngine]:
    """Start an engine for the policy in this process; stop it at the end of the block.

    Raises ConfigError for a model that is not there, EngineStartError when vLLM is not installed or does not come up.
    """
    directory = await asyncio.to_thread(_prepare, policy)
    telemetry = f"ipc://{directory}/tap"
    try:
        with _environment(await asyncio.to_thread(environment, policy, "")):
            flags = (await asyncio.to_thread(command, policy, 1, telemetry))[3:]
            try:
                args, serving = await asyncio.to_thread(_parsed, flags)
                context = serving.build_async_engine_client(args)
                llm = await context.__aenter__()
            except (Exception, SystemExit) as error:
                if isinstance(error, AgentGuardError):
                    raise
                raise EngineStartError(f"vLLM did not start in this process: {error!r}; its log on stderr says more") from error
            try:
                async with _served(llm, args, telemetry) as engine:
                    yield engine
            finally:
                await context.__aexit__(None, None, None)
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


@asynccontextmanager
async def _served(llm: Any, args: Namespace, telemetry: str) -> AsyncIterator[InProcessEngine]:
    """The engine behind vLLM's own app."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    engine = InProcessEngine(llm, AsgiTransport(app, dead=lambda: bool(llm.errored)), telemetry)
    try:
        yield engine
    finally:
        await engine.aclose()
        learning: asyncio.Task[None] | None = getattr(app.state, "ag_tts_task", None)
        if learning is not None:  # the plugin's, which a server ends with its loop
            learning.cancel()
            await asyncio.wait([learning])


def _prepare(policy: Policy) -> Path:
    """The directory of the telemetry socket, which only this user can reach. Raises ConfigError for a model that is not there."""
    check_model("model", policy.model)
    if policy.draft is not None:
        check_model("draft", policy.draft)
    return Path(tempfile.mkdtemp(prefix="agentguard-"))


def _parsed(flags: list[str]) -> tuple[Namespace, Any]:
    """vLLM's own reading of its server's flags, and the module that builds the engine. Takes seconds: vLLM is imported here."""
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    validate_parsed_serve_args(args)
    return args, entry


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """The variables while the block runs; then as they were."""
    # spawn, as vLLM's own server has it: a fork would take this loop's threads and sockets along; and stdout is the program's own
    defaults = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    changed = {
        k: v for k, v in {**defaults, **wanted}.items() if os.environ.get(k) != v and not (k in defaults and k in os.environ)
    }
    changed[_KEY] = ""
    before = {k: os.environ.get(k) for k in changed}
    os.environ.update(changed)
    del os.environ[_KEY]
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
