"""LiteLLM as a child process: started with a generated configuration, healthy before anybody is told of it, gone when we are."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

import agentguard
from agentguard.engines.http import http_client
from agentguard.engines.vllm_process import die_with_parent, stop, tail
from agentguard.errors import ConfigError, EngineDiedError, EngineStartError
from agentguard.proxy.config import as_yaml, config, environment
from agentguard.proxy.listeners import held_by_group

START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running LiteLLM at ``url`` that serves ``model``; ``log`` is its output."""

    url: str
    model: str
    log: Path
    process: asyncio.subprocess.Process

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def until_it_ends(self) -> EngineDiedError:
        status = await self.process.wait()
        last = await asyncio.to_thread(tail, self.log)
        return EngineDiedError(f"LiteLLM ended with status {status}; start it again. Last lines of its log:\n{last}")


@asynccontextmanager
async def litellm_process(
    command: Path, *, model: str, gateway: str, master_key: str, gateway_key: str | None = None, host: str = "127.0.0.1",
    port: int = 4000, workers: int = 1,
) -> AsyncIterator[Proxy]:  # fmt: skip
    """Start LiteLLM in front of the gateway, wait until it is healthy, and stop it with all its children at the end.

    ``command``: its `bin/litellm`. Keys go by environment: a command line is everybody's to read. Raises ConfigError for a port in
    use (LiteLLM would silently take another one), EngineStartError with the end of the log when it does not come up.
    """
    _check_free(host, port)
    directory = Path(tempfile.mkdtemp(prefix="agentguard-proxy-"))  # mode 0700
    log, settings, importable = directory / "litellm.log", directory / "config.yaml", directory / "import"
    keep_log = False
    try:
        importable.mkdir()
        # the package alone, so that nothing else of our environment is found before LiteLLM's own
        (importable / "agentguard").symlink_to(Path(agentguard.__file__).parent)
        settings.write_text(as_yaml(config(model, gateway, keyed=gateway_key is not None)))
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                command, "--config", settings, "--host", host, "--port", str(port), "--num_workers", str(workers),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT, cwd=directory,
                env=environment(master_key, gateway_key, directory, importable), start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        local = "127.0.0.1" if host in ("0.0.0.0", "localhost") else "::1" if host == "::" else host  # noqa: S104  # nosec B104  # compared, not bound
        proxy = Proxy(f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}", model, log, process)
        try:
            await _until_healthy(proxy)
            yield proxy
        except EngineStartError:
            keep_log = True
            raise
        finally:
            keep_log = keep_log or process.returncode is not None
            await stop(process)
    finally:
        if keep_log:
            await asyncio.to_thread(_keep_only, directory, log)
        else:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def _keep_only(directory: Path, log: Path) -> None:
    for path in directory.iterdir():
        if path != log:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError("port", port, f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port") from None


async def _until_healthy(proxy: Proxy) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with http_client(proxy.url, timeout=2.0) as client:
        while time.monotonic() < deadline:
            if proxy.process.returncode is not None:
                raise await _not_started(proxy, f"LiteLLM ended with status {proxy.process.returncode} while starting")
            with contextlib.suppress(httpx2.TransportError):
                if (await client.get("/health/liveliness")).status_code == 200:
                    if await asyncio.to_thread(held_by_group, proxy.port, proxy.process.pid):
                        return
                    # the port was free a moment ago; LiteLLM then takes another one without a word
                    raise ConfigError(
                        "port", proxy.port, "another server took it while LiteLLM started; choose another with --port"
                    )
            await asyncio.sleep(0.25)
    raise await _not_started(proxy, f"LiteLLM was not ready after {START_TIMEOUT_S:g} s")


async def _not_started(proxy: Proxy, what: str) -> EngineStartError:
    return EngineStartError(f"{what}; full log: {proxy.log}\n{await asyncio.to_thread(tail, proxy.log)}")
