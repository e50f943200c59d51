"""Real coding agents through `agentguard wrap`: the tool loop against a scripted model, and a conversation with a real engine.

mini-swe-agent comes with pip, the others with npm; 'make test-clients' installs them, and a test whose agent
is not there is skipped with the reason. The SDKs are in test_protocols.py.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from agentguard.events import StepFinished
from tests.proxy.agent import WRITTEN, agent
from tests.proxy.clients import BIN
from tests.proxy.conftest import Behind, agent_environment
from tests.scripted import Script

pytestmark = [
    pytest.mark.proxy,
    pytest.mark.clients,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]
TASK = "write the file"
COMMANDS = {
    "claude": ["claude", "-p", TASK, "--allowedTools", "Bash"],
    "codex": ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK],
    "opencode": ["opencode", "run", TASK],
    "qwen": ["qwen", "-y", "-p", TASK],
    "mini": ["mini", "-t", TASK, "-y", "--exit-immediately"],
}
UUID, GUESS = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", r"h-[0-9a-f]{16}\.1"
IDS = {"claude": UUID, "codex": UUID, "opencode": r"ses_\w+", "qwen": GUESS, "mini": GUESS}
"""What the session's id looks like: a UUID, opencode's own, and a guess for the two that send none."""


@pytest.fixture(params=list(COMMANDS))
def client(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed; 'make test-clients' does it")
    return name


async def run_agent_in(command: list[str], proxy: str, gateway: str, key: str, home: Path, **env: str) -> tuple[int, str, str]:
    """`agentguard wrap` in a clean home: exit code, stdout, stderr."""
    arguments = [sys.executable, "-m", "agentguard", "wrap", "--proxy", proxy, "--gateway", gateway, "--", *command]
    work = home / "work"
    work.mkdir()
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=agent_environment(home, key) | env, cwd=work,
    )  # fmt: skip
    out, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), said.decode()


async def test_an_agent_finishes_its_tool_loop_though_its_model_runs_away(client: str, behind: Behind, home: Path) -> None:
    target = home / "work" / "made.txt"
    behind.says(Script(chat=agent(str(target)), window=131_072, carrier="reasoning"))
    code, out, said = await run_agent_in(COMMANDS[client], behind.proxy.url, behind.gateway, behind.key, home)
    assert code == 0, out + said
    assert target.read_text() == WRITTEN
    session = one_session(behind.finished, client)
    assert [s.closed for s in session].count("budget") == 1
    assert all(not s.error for s in session)
    assert [s.step for s in session] == list(range(1, len(session) + 1))
    summary = [text for text in said.splitlines() if text.startswith("agentguard: ") and "steps" in text]
    assert len(summary) == 1
    assert f"{len(session)} steps" in summary[0]
    assert "1 close" in summary[0]
    assert behind.key not in out + said


def one_session(steps: list[StepFinished], client: str) -> list[StepFinished]:
    assert len({s.session for s in steps}) == 1
    assert re.fullmatch(IDS[client], steps[0].session.partition("/")[2])
    return steps
