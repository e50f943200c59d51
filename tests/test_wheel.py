"""A wheel of this tree in three fresh environments: engine, gateway and user, each running its part from outside of the tree.

Gateway and user get what their extras ask for, from the index, in the versions of the lock. The engine's environment would be some
gigabytes: there the wheel is new and the packages beside it are those of the environment that runs the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentguard import __version__
from agentguard.engines.vllm_process import free_port
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, upstream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel, and an empty home."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        home = self.folder.parent / f"{self.folder.name}-home"
        home.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XDG_", "AGENTGUARD_", "VIRTUAL_ENV"))}
        return kept | {"HOME": str(home), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def run(self, *arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [str(self.folder / "bin" / arguments[0]), *arguments[1:]], capture_output=True, text=True, check=False, env=self.env,
            cwd=self.env["HOME"],
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done.stdout

    def python(self, code: str) -> str:
        return self.run("python", "-c", code).strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    lines = (ROOT / "locks" / "engine-cpu.txt").read_text().splitlines()
    file.write_text("\n".join(line for line in lines if "==" in line and not line.startswith("#")) + "\n")
    return file


@pytest.fixture(scope="module")
def environments(wheel: Path, constraints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Environment]:
    """All three, made at the same time: most of it is waiting for the index."""
    folder = tmp_path_factory.mktemp("environments")
    wanted = {
        "gateway": [f"{wheel}[gateway]", "-c", str(constraints)],
        "user": [f"{wheel}[tui,sdk]", "-c", str(constraints)],
        "engine": ["--no-deps", str(wheel)],
    }
    running = {}
    for name, requirements in wanted.items():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / name)], check=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(folder / name / "bin" / "python"),
            "install",
            "--quiet",
            *requirements,
        ]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for name, process in running.items():
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{name}: {said}"
    made = {name: Environment(folder / name) for name in wanted}
    # a line of a .pth file is one more folder on the path; .pth files inside of that one, the tree's own among them, are not read
    (made["engine"].packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return made


@pytest.fixture
def gateway(environments: dict[str, Environment]) -> Environment:
    return environments["gateway"]


@pytest.fixture
def user(environments: dict[str, Environment]) -> Environment:
    return environments["user"]


@pytest.fixture
def engine(environments: dict[str, Environment]) -> Environment:
    return environments["engine"]


def test_the_wheel_holds_what_runs_and_nothing_of_the_workshop(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"agentguard_vllm-{__version__}-py3-none-any.whl"
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"agentguard", "engine_plugins", f"agentguard_vllm-{__version__}.dist-info"}
    for needed in (
        "agentguard/py.typed", "agentguard/tui/monitor.tcss", "agentguard/_recipes/balanced.yaml",
        "agentguard/_recipes/grafana/agentguard.json",
        "agentguard/_recipes/reference_pair/weights/target/model.safetensors",
    ):  # fmt: skip
        assert needed in names
    assert any(name.startswith("agentguard/_locks/litellm") for name in names)
    assert not [name for name in names if name.endswith(".pyc") or "/tests/" in name]
    declared = zipfile.ZipFile(wheel).read(f"agentguard_vllm-{__version__}.dist-info/METADATA").decode()
    extras = set(re.findall(r"^Provides-Extra: (.*)$", declared, re.MULTILINE))
    assert {"engine", "gateway", "tui", "sdk", "otel", "docs", "dev"} <= extras


def inside(environment: Environment, path: str) -> bool:
    return Path(path).is_relative_to(environment.folder)


SDK = """
import asyncio, sys, agentguard

async def main(url):
    async with agentguard.connect(url) as guard, guard.session("wheel") as s:
        reply = await s.complete("hi")
        print(reply.content, s.budget.steps)

asyncio.run(main(sys.argv[1]))
"""


async def test_the_gateways_environment_guards_a_server_and_the_users_reaches_it(gateway: Environment, user: Environment) -> None:
    assert await asyncio.to_thread(gateway.run, "agentguard", "--version") == f"agentguard, version {__version__}\n"
    found = json.loads(await asyncio.to_thread(gateway.run, "agentguard", "recipes", "check", "--json"))
    assert len(found) > 8
    assert all(one["ok"] and inside(gateway, one["path"]) for one in found)
    lock = await asyncio.to_thread(gateway.python, "from agentguard.proxy.environment import lock_file; print(lock_file())")
    assert inside(gateway, lock)
    heavy = (
        "import importlib.util as u; print([m for m in ('torch', 'vllm', 'textual', 'litellm', 'opentelemetry') if u.find_spec(m)])"
    )
    assert await asyncio.to_thread(gateway.python, heavy) == "[]"
    checks = json.loads(await asyncio.to_thread(gateway.run, "agentguard", "doctor", "--json", status=1))
    by_name = {check["check"]: check for check in checks}
    assert by_name["gateway"]["ok"]
    assert not by_name["plugin"]["ok"]
    script = Script(chat=[chunk([A, END, B], reasoning="a", content="b"), chunk([STOP], finish="stop"), USAGE])
    async with upstream(script) as url:
        process = await asyncio.create_subprocess_exec(
            str(gateway.folder / "bin" / "agentguard"), "--log-format", "json", "serve", "--upstream", url,
            "--port", str(free_port()), "--json",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=gateway.env, cwd=gateway.env["HOME"],
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                ready: dict[str, Any] = json.loads(await process.stdout.readline())
            assert (ready["event"], ready["model"], ready["closes"]) == ("ready", "scripted", "gateway")
            async with httpx2.AsyncClient(base_url=ready["url"]) as client:
                reply = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
                assert reply.json()["choices"][0]["message"]["content"] == "b"
                assert 'agentguard_requests_total{outcome="answered"} 1.0' in (await client.get("/metrics")).text
            assert await asyncio.to_thread(user.run, "python", "-c", SDK, ready["url"]) == "b 1\n"
            watched = await asyncio.to_thread(user.run, "agentguard", "tui", "--gateway", ready["url"], "--once", "--json")
            assert len(json.loads(watched)["sessions"]) == 2
        finally:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                _, err = await process.communicate()
        assert process.returncode == 130, err
        assert b"Traceback" not in err


def test_the_users_environment_watches_and_has_the_sdk(user: Environment) -> None:
    seen = json.loads(user.run("agentguard", "tui", "--demo", "healthy", "--speed", "100", "--once", "--json"))
    assert {source["state"] for source in seen["sources"]} == {"ok"}
    assert seen["samples"] >= 2
    assert inside(user, user.python("import agentguard.tui.app as app; print(app.__file__)"))
    assert user.python("import httpx2, agentguard.engines.openai_http; print(1)") == "1"
    absent = "import importlib.util as u; print([m for m in ('torch', 'vllm', 'litellm', 'uvicorn') if u.find_spec(m)])"
    assert user.python(absent) == "[]"


def test_the_engines_environment_loads_the_plugin_from_the_wheel(engine: Environment) -> None:
    where = "import agentguard, engine_plugins; print(agentguard.__file__, engine_plugins.__file__)"
    assert all(inside(engine, path) for path in engine.python(where).split())
    points = (
        "import importlib.metadata as m\n"
        "print([e.value for e in m.entry_points(group='vllm.general_plugins') if e.name == 'agentguard'], end=' ')\n"
        "print(m.distribution('agentguard-vllm').locate_file(''))"
    )
    value, _, place = engine.python(points).partition(" ")
    assert value == "['engine_plugins.vllm:register']"
    assert inside(engine, place)


@pytest.mark.engine
def test_the_engines_environment_generates_with_the_plugin(engine: Environment) -> None:
    said = engine.run("agentguard", "doctor", "--generate", "--json", status=1)
    checks = {check["check"]: check for check in json.loads(said)}
    # the one thing it finds is how this test lends the environment vLLM
    assert [name for name, check in checks.items() if not check["ok"]] == ["start-up files"]
    assert "beside.pth" in checks["start-up files"]["detail"]
    assert checks["plugin on runner V1"]["ok"]
    assert checks["one-token generation"]["ok"]
    assert inside(engine, checks["reference pair: target"]["detail"])


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_tree() -> Iterator[None]:
    before = set(ROOT.iterdir())
    yield
    assert {
        path for path in ROOT.iterdir() if path.name not in (".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")
    } <= before
