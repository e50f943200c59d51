"""A vLLM server as a child process: started with our plugin, watched while it runs, and gone when we are.

The engine gets a process group of its own, so that stopping reaches its workers too, and asks the kernel for SIGTERM when its
parent dies (PR_SET_PDEATHSIG), so that not even `kill -9` of agentguard leaves it behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from agentguard.engines.http import http_client
from agentguard.errors import ConfigError, EngineDiedError, EngineStartError
from agentguard.policy import Policy
from agentguard.trace.markers import of_policy
from agentguard.tts_settings import BACKEND

STOP_GRACE_S = 15.0
LOG_TAIL_LINES = 12
_LOG_PREFIX = re.compile(r"^\([^)]*\)\s*((ERROR|INFO|WARNING) \S+ \S+ \[[^]]*\]\s*)?")
_ERROR_LINE = re.compile(r"^\w*(\.\w+)*(Error|Exception)\b")
_EXIT_NOISE = re.compile(r"^(nanobind: | - (leaked|\.\.\.)|See https://nanobind)")
FALLBACK_PARSER = "qwen3"
"""For <think> without a family. deepseek_r1 splits the same, but reports 0 reasoning tokens where the prompt opened the block."""
OUR_PLUGINS = ("agentguard", "agentguard_http")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class VllmProcess:
    """A running engine. ``telemetry`` is the ZMQ address of its tap, ``log`` its output, ``api_key`` what its routes ask for."""

    url: str
    api_key: str
    telemetry: str
    log: Path
    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self.process.pid

    def died(self) -> EngineDiedError:
        return EngineDiedError(
            f"engine process {self.pid} ended with status {self.process.returncode}; start it again. "
            f"Last lines of its log:\n{tail(self.log)}"
        )


def is_cpu_build() -> bool:
    """Is the installed vLLM the CPU build? Decided from the distribution's name and version, without importing it."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True


def draft_method(policy: Policy) -> str:
    """vLLM's name for how the policy's draft drafts."""
    draft, asked = policy.draft or "", policy.engine.draft_method
    if asked != "auto":
        return asked
    file = Path(draft, "config.json")
    if not file.is_file():
        return "eagle3" if "eagle3" in draft.lower().replace("-", "") else "draft_model"
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError("draft", draft, f"its config.json is not JSON: {error}") from None
    kinds = " ".join(config.get("architectures") or ()).lower()
    # a head's config may name the plain architecture of its one layer
    return "eagle3" if "eagle3" in kinds or "draft_vocab_size" in config or "eagle_config" in config else "draft_model"


def command(policy: Policy, port: int, telemetry: str) -> list[str]:
    """The command line that serves the policy's model with the plugin."""
    options, family = policy.engine, of_policy(policy).family
    settings: dict[str, Any] = {"rule": policy.rule, "telemetry": telemetry}
    if policy.tts is not None:
        settings |= {"tts": asdict(policy.tts), "frames": f"{telemetry}-frames"}
    args: dict[str, str | None] = {
        "--model": policy.model,
        "--served-model-name": Path(policy.model).name,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": options.dtype,
        "--max-num-seqs": str(options.max_num_seqs),
        "--reasoning-parser": options.reasoning_parser or family.parser or FALLBACK_PARSER,
        # a model's generation_config.json must not override sampling behind the client's back (rules.md, 1.3)
        "--generation-config": "vllm",
        "--worker-cls": "engine_plugins.vllm.worker.Worker",
        "--additional-config": json.dumps({"agentguard": settings}),
        "--disable-uvicorn-access-log": None,
    }
    if options.tool_parser is not None:
        args |= {"--enable-auto-tool-choice": None, "--tool-call-parser": options.tool_parser}
    if options.max_model_len is not None:
        args["--max-model-len"] = str(options.max_model_len)
    if family.transition or family.lead:
        # the forced text; vLLM takes the natural end from the parser, and our budget holder tells the two apart
        reasoning = {"reasoning_start_str": family.markers.start, "reasoning_end_str": family.closing}
        args["--reasoning-config"] = json.dumps(reasoning)
    if policy.draft is not None:
        speculative = {
            "method": draft_method(policy),
            "model": policy.draft,
            "num_speculative_tokens": options.draft_tokens,
            "draft_sample_method": "probabilistic",
        }
        args["--speculative-config"] = json.dumps(speculative)
        args["--per-request-spec-decode-metrics"] = "summary"
    if policy.tts is not None:
        args["--weight-transfer-config"] = json.dumps({"backend": BACKEND})
    if is_cpu_build():
        # compiling a small model costs more than it brings here, and inductor's freezing would bake the draft's weights in
        args["--enforce-eager"] = None
    elif _v1_is_asked_for():
        # for the phase of a request; V1 on CPU has it off by itself, V2 keeps the phase on the device
        args["--no-async-scheduling"] = None
    flags = [part for name, value in args.items() for part in ((name,) if value is None else (name, value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *options.extra_args]


def environment(policy: Policy, api_key: str) -> dict[str, str]:
    """The engine's environment. Its port gets a key of its own: on loopback any user of the machine could go round the gateway."""
    env = dict(os.environ)
    # far above every client's own limit, so that no idle connection is closed under a request
    env.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_API_KEY": api_key}
    # no pickle between its processes, whatever the shell says; and a host of media_hosts must not send the engine on to another
    env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0", "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
    # an allow-list of all plugins: what is installed beside ours is named too, as without the variable vLLM would load it
    env.setdefault("VLLM_PLUGINS", ",".join(sorted({*_installed_plugins(), *OUR_PLUGINS})))
    if is_cpu_build():
        env["VLLM_CPU_KVCACHE_SPACE"] = f"{policy.engine.kv_cache_gb:g}"
        # V2 needs a Triton back end the CPU wheel lacks; saying so avoids its probe
        env.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        preload_openmp(env)
    if all(Path(model).exists() for model in (policy.model, policy.draft) if model is not None):
        env["HF_HUB_OFFLINE"] = "1"
    return env


def _v1_is_asked_for() -> bool:
    """Model Runner V1 on a GPU: the environment asks for it; vLLM takes V2 otherwise, and so do we."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"


def _installed_plugins() -> set[str]:
    """Names of the plugins vLLM loads by itself; endpoint plugins of others stay off, as they are without being asked for."""
    groups = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")
    return {point.name for group in groups for point in importlib.metadata.entry_points(group=group)}


def preload_openmp(env: dict[str, str]) -> None:
    """Preload Intel's OpenMP where pip installed it: vLLM warns that speculative decoding on CPU loses much without it."""
    for library in Path(sys.prefix, "lib").glob("libiomp5.so"):
        env["LD_PRELOAD"] = ":".join(filter(None, (str(library), env.get("LD_PRELOAD"))))


@dataclass(frozen=True, slots=True)
class _Launch:
    url: str
    api_key: str
    telemetry: str
    log: Path
    output: int
    arguments: list[str]
    env: dict[str, str]


def _prepare(policy: Policy, port: int) -> _Launch:
    """Everything before the process that touches files. ``output``: the open log, which the caller closes."""
    check_model("model", policy.model)
    if policy.draft is not None:
        check_model("draft", policy.draft)
    directory = Path(tempfile.mkdtemp(prefix="agentguard-"))  # mode 0700: only this user can reach the telemetry socket
    telemetry, log, api_key = f"ipc://{directory}/tap", directory / "engine.log", secrets.token_urlsafe(24)
    try:
        arguments, env = command(policy, port, telemetry), environment(policy, api_key)
        # vLLM's own ZMQ sockets lie in /tmp otherwise, where only the umask keeps other users from them
        env.setdefault("VLLM_RPC_BASE_PATH", str(directory))
        output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return _Launch(f"http://127.0.0.1:{port}", api_key, telemetry, log, output, arguments, env)


@asynccontextmanager
async def vllm_process(policy: Policy, *, port: int | None = None) -> AsyncIterator[VllmProcess]:
    """Start an engine, wait until it is healthy, and stop it with all its children at the end.

    Raises ConfigError for a model that is not there, EngineStartError with the end of the log when it does not come up.
    """
    preparing = asyncio.ensure_future(asyncio.to_thread(_prepare, policy, port or free_port()))
    try:
        launch = await asyncio.shield(preparing)
    except asyncio.CancelledError:  # the thread goes on, and what it has made would stay
        launch = await preparing
        os.close(launch.output)
        shutil.rmtree(launch.log.parent, ignore_errors=True)
        raise
    keep_log = False
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=launch.output, stderr=asyncio.subprocess.STDOUT,
                env=launch.env, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        finally:
            os.close(launch.output)
        engine = VllmProcess(launch.url, launch.api_key, launch.telemetry, launch.log, process)
        try:
            await _until_healthy(engine, policy.engine.start_timeout_s)
            yield engine
        except EngineStartError:
            keep_log = True
            raise
        finally:
            keep_log = keep_log or process.returncode is not None  # it ended by itself, and its log says why
            await stop(process)
    finally:
        if not keep_log:
            await asyncio.to_thread(shutil.rmtree, launch.log.parent, ignore_errors=True)


async def stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to the whole group, SIGKILL to what is left after the grace period, or at once when cancelled meanwhile."""
    _signal_group(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
    await process.wait()
    for _ in range(50):  # the children are reaped by init, a moment later
        if not _signal_group(process.pid, 0):
            return
        await asyncio.sleep(0.1)


def check_model(field: str, model: str) -> None:
    """A path must exist and hold a config.json; a name without a slash at its front is left to the hub."""
    path = Path(model)
    looks_like_path = path.is_absolute() or model.startswith((".", "~")) or path.exists() or model.count("/") > 1
    if looks_like_path and not (path / "config.json").is_file():
        why = "has no config.json" if path.exists() else "does not exist"
        raise ConfigError(field, model, f"{why}; give a directory with a Hugging Face model, or a model's name")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path) -> str:
    """The lines of the log that say why: the first error of its last part, and its last lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (256 << 10)))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    clean = [_LOG_PREFIX.sub("", line) for line in lines if line.strip() and not _EXIT_NOISE.match(line)]
    errors = [line for line in clean if _ERROR_LINE.match(line)]
    return "\n".join(errors[:1] + clean[-LOG_TAIL_LINES:])


async def _until_healthy(engine: VllmProcess, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    async with http_client(engine.url, timeout=2.0) as client:
        while time.monotonic() < deadline:
            if engine.process.returncode is not None:
                status = engine.process.returncode
                raise await _not_started(engine, f"the engine ended with status {status} while starting")
            with contextlib.suppress(httpx2.TransportError):
                if (await client.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(0.25)
    raise await _not_started(engine, f"the engine was not ready after {timeout_s:g} s (engine.start_timeout_s)")


async def _not_started(engine: VllmProcess, what: str) -> EngineStartError:
    return EngineStartError(f"{what}; full log: {engine.log}\n{await asyncio.to_thread(tail, engine.log)}")


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group; False when it is empty."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def describe(policy: Policy) -> dict[str, Any]:
    """What a reader of results needs to know about the engine's set-up."""
    return {
        "model": Path(policy.model).name,
        "draft": Path(policy.draft).name if policy.draft else None,
        "K": policy.engine.draft_tokens,
    }
