"""Several gateway processes on one port: one account a session between them, workers that die, and a small soak of all faults."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from agentguard.engines.vllm_process import free_port
from agentguard.store.sessions import open_sessions
from tests.test_store import redis_server

NO_REDIS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server here")
SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


def soak() -> Any:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@dataclass
class Serving:
    process: psutil.Popen
    url: str
    directory: Path
    engine_port: int

    def workers(self) -> list[psutil.Process]:
        return self.process.children()

    def written(self) -> Counter[str]:
        """Tokens the engine wrote, by session."""
        wrote: Counter[str] = Counter()
        for _, session, tokens, _ in soak().Ledger(self.directory / f"engine-{self.engine_port}.bin", 0).rows():
            wrote[session] += tokens
        return wrote


@asynccontextmanager
async def serving(
    directory: Path, store: str, workers: int, *, status: int = 130, lease_s: float = 1, **recipe: Any
) -> AsyncIterator[Serving]:
    engine_port, port = free_port(), free_port()
    arguments = ["--engine", str(engine_port), "--directory", str(directory), "--steps", "3000", "--plain"]
    whole = {"model": "soak", "serving": {"drain_s": 3}, "store": {"lease_s": lease_s}, **recipe}
    await asyncio.to_thread((directory / "recipe.yaml").write_text, json.dumps(whole))
    serve = ["-m", "agentguard", "serve", "--upstream", f"http://127.0.0.1:{engine_port}", "--port", str(port), "--store", store]
    serve += ["--workers", str(workers), "--recipe", str(directory / "recipe.yaml")]

    def start() -> tuple[psutil.Popen, psutil.Popen]:
        env = os.environ | {"PYTHONPATH": str(SOAK.parents[1])}
        return psutil.Popen([sys.executable, str(SOAK), *arguments]), psutil.Popen([sys.executable, *serve], env=env)

    engine, gateway = await asyncio.to_thread(start)
    try:
        async with httpx2.AsyncClient() as client, asyncio.timeout(90):
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get(f"http://127.0.0.1:{port}/health/ready")).status_code == 200:
                        break
                assert gateway.poll() is None
                await asyncio.sleep(0.1)
        yield Serving(gateway, f"http://127.0.0.1:{port}", directory, engine_port)
    finally:
        if gateway.poll() is None:
            gateway.terminate()
        code = await asyncio.to_thread(gateway.wait, 60)
        engine.kill()
        await asyncio.to_thread(engine.wait)
    assert code == status


@NO_REDIS
async def test_64_clients_and_4_workers_on_redis_settle_what_the_engine_wrote_and_pass_no_limit(tmp_path: Path) -> None:
    limit, sessions = 4000, 16
    async with redis_server() as store, serving(tmp_path, store, 4, lease_s=30, limits={"tokens": limit}) as serve:
        told: Counter[str] = Counter()
        codes: Counter[str] = Counter()

        async def client(number: int) -> None:
            """Asks until its session has no tokens left; three others share the session."""
            name = f"shared-{number % sessions}"
            async with httpx2.AsyncClient(base_url=serve.url, timeout=120) as http:
                while True:
                    body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 256, "temperature": 1.0}
                    reply = await http.post("/v1/chat/completions", json=body, headers={"x-session-id": name})
                    if reply.status_code == 200:
                        told[name] += reply.json()["usage"]["completion_tokens"]
                        codes["200"] += 1
                        continue
                    code = reply.json()["error"]["code"]
                    codes[code] += 1
                    if code == "session_limit":
                        return
                    # a machine that is busy enough may keep the store from answering in time, and then nobody is served unchecked
                    assert code in ("session_busy", "store_away"), reply.text
                    await asyncio.sleep(0.1)

        async with asyncio.timeout(200):
            await asyncio.gather(*(client(number) for number in range(64)))
        used = [p.cpu_times().user for p in serve.workers()]
        async with open_sessions(store) as accounts:
            kept = {key.session: m for key, m in await accounts.sessions()}
        written = serve.written()
    assert {name: m.tokens for name, m in kept.items()} == dict(written) == dict(told)
    assert all(limit - limit // 8 < m.tokens <= limit and m.lost == 0 for m in kept.values())
    assert sum(m.steps for m in kept.values()) == sum(m.seq for m in kept.values()) == codes["200"]
    assert codes["session_busy"] > 0  # the limit was contended
    assert len(used) == 4
    assert min(used) > 0


async def test_a_worker_that_is_killed_is_replaced_and_its_reservations_end(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with serving(tmp_path, store, 2, limits={"tokens": 100_000}) as serve, asyncio.timeout(120):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 512, "stream": True}
        before = {p.pid for p in serve.workers()}
        assert len(before) == 2
        severed = 0

        async def client(number: int) -> None:
            nonlocal severed
            async with httpx2.AsyncClient(base_url=serve.url, timeout=60) as http:
                for _ in range(12):
                    try:
                        reply = await http.post("/v1/chat/completions", json=body, headers={"x-session-id": f"s{number}"})
                        assert reply.status_code == 200, reply.text
                        assert reply.text.rstrip().endswith("[DONE]")
                    except httpx2.TransportError:
                        severed += 1

        clients = [asyncio.create_task(client(n)) for n in range(16)]
        await asyncio.sleep(0.5)
        serve.workers()[0].send_signal(signal.SIGKILL)
        await asyncio.gather(*clients)
        assert severed <= 16
        while len(after := {p.pid for p in serve.workers()}) < 2:
            await asyncio.sleep(0.1)
        assert len(before & after) == 1
        await asyncio.sleep(2.5)  # the lease of what it held
        async with open_sessions(store) as accounts, httpx2.AsyncClient(base_url=serve.url, timeout=60) as http:
            for number in range(16):  # the next step of a session settles what is over
                await http.post("/v1/chat/completions", json=body, headers={"x-session-id": f"s{number}"})
            kept = {key.session: m for key, m in await accounts.sessions()}
        written = serve.written()
        for name, meters in kept.items():
            assert meters.tokens <= written[name] <= meters.tokens + meters.lost


async def test_workers_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path, f"sqlite:{tmp_path / 's.db'}", 2, status=-signal.SIGKILL) as serve:
        workers = serve.workers()
        serve.process.kill()
        gone, alive = await asyncio.to_thread(psutil.wait_procs, workers, 20)
        assert (len(gone), alive) == (2, [])


def test_workers_need_a_store_they_can_share(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "agentguard",
        "serve",
        "--upstream",
        "http://127.0.0.1:9",
        "--workers",
        "2",
        "--store",
        "memory",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, "--store" in ran.stderr) == (2, True)


async def test_sessions_are_listed_and_forgotten_from_the_command_line(tmp_path: Path) -> None:
    from agentguard.store.accounts import Key, Settlement

    url = f"sqlite:{tmp_path / 's.db'}"
    async with open_sessions(url) as store:
        for key in (Key("0123456789ab", "x"), Key("0123456789ab", "y"), Key("", "plain/with/slash")):
            await store.settle([(key, Settlement(f"{key}", tokens=5, record="{}"))])

    async def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        whole = [sys.executable, "-m", "agentguard", "sessions", *arguments, "--store", url]
        return await asyncio.to_thread(subprocess.run, whole, capture_output=True, text=True, timeout=60)

    listed = await command("list", "--json")
    assert {json.loads(line)["session"] for line in listed.stdout.splitlines()} == {
        "0123456789ab/x", "0123456789ab/y", "plain/with/slash",
    }  # fmt: skip
    assert (await command("forget", "0123456789ab/x")).returncode == 0
    missing = await command("forget", "0123456789ab/x")
    assert (missing.returncode, "no such session" in missing.stderr) == (2, True)
    assert (await command("forget", "plain/with/slash")).returncode == 0
    assert (await command("forget", "0123456789ab/")).returncode == 0
    assert (await command("list")).stdout == ""


@pytest.mark.slow
@NO_REDIS
def test_a_small_soak_with_every_fault(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    command = [sys.executable, str(SOAK), "--steps", "500", "--faults", "--every", "1", "--lease", "2", "--clients", "24"]
    ran = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=280)
    assert report.exists(), ran.stdout + ran.stderr
    found = json.loads(report.read_text())
    assert (found["steps"], found["not_served"]) == (500, 0)
    assert found["internal_errors"] == 0
    assert (found["empty_messages"], found["unended_streams"], found["account_errors"]) == (0, 0, 0), ran.stdout
    assert sum(found["faults"].values()) >= 3
    # what stays open on purpose: at most 16 pooled connections to Redis
    assert all(after <= before + 20 for before, after in found["idle_fds"].values()), found["idle_fds"]
    assert found["steps_exact"] > 400
    assert ran.returncode == 0
