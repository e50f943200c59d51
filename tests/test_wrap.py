"""`agentguard wrap`: what an agent sees, and what its caller sees of it."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentguard.agents import run as agents_run
from agentguard.agents.known import AGENTS, Target, recognise, setup_for
from agentguard.agents.run import prepared, run_agent
from agentguard.agents.summary import Spent, line, ratio, spent
from agentguard.cli import cli
from agentguard.errors import ConfigError
from agentguard.proxy.running import Running, announced, running_at

TARGET = Target("http://127.0.0.1:4000", "sk-secret", "org/model", 8192)


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("", 0)])
async def test_the_exit_code_is_passed_on(code: str, status: int) -> None:
    assert await run_agent(script(code), os.environ) == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_is_passed_on_and_the_agent_decides(tmp_path: Path, number: signal.Signals) -> None:
    ready = tmp_path / "ready"
    code = (
        f"import signal,time,pathlib; signal.signal({int(number)}, lambda *_: exit(5)); "
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    )
    running = asyncio.create_task(run_agent(script(code), os.environ))
    while not ready.exists():
        await asyncio.sleep(0.02)
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(running, 20) == 5


@pytest.mark.parametrize(("terminal", "status"), [(True, 3), (False, 5)])
async def test_ctrl_c_is_the_agent_s_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, status: int
) -> None:
    """The terminal sends it to both; here only we get it, and go on waiting. Without a terminal it was meant for the agent."""
    monkeypatch.setattr(agents_run, "_in_foreground", lambda: terminal)
    ready = tmp_path / "ready"
    code = (
        f"import signal,time,pathlib; signal.signal(signal.SIGINT, lambda *_: exit(5)); "
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(0.5 if {terminal} else 60); exit(3)"
    )
    running = asyncio.create_task(run_agent(script(code), os.environ))
    while not ready.exists():
        await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, 20) == status


async def test_a_program_the_system_cannot_run_is_named(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text("exit 0\n")
    agent.chmod(0o700)
    with pytest.raises(ConfigError, match=r"agent.*cannot be run"):
        await run_agent([str(agent)], os.environ)


async def test_when_we_are_cancelled_the_agent_ends_too(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os,time,pathlib; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    running = asyncio.create_task(run_agent(script(code), os.environ))
    while not pid.exists() or not pid.read_text():
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_stdin_and_the_terminal_are_the_agent_s_own() -> None:
    ours, theirs = pty.openpty()
    code = (
        "import sys,asyncio,os; from agentguard.agents.run import run_agent; "
        "sys.exit(asyncio.run(run_agent(sys.argv[1:], os.environ)))"
    )
    inner = script("import sys; print(sys.stdin.isatty(), sys.stdout.isatty(), input()[::-1])")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *inner, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"olleh\n")
    async with asyncio.timeout(30):
        assert await process.wait() == 0
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert "True True hello" in said


def known(command: str, home: Path, *arguments: str) -> Any:
    return setup_for([command, *arguments], TARGET, home)


@pytest.mark.parametrize(
    ("command", "agent", "place"),
    [
        ("claude -p hi", "claude", 0),
        ("/opt/bin/codex exec", "codex", 0),
        ("mini-swe-agent -t x", "mini", 0),
        ("npx -y @anthropic-ai/claude-code -p hi", "claude", 2),
        ("npx @openai/codex@0.171.0 exec", "codex", 1),
        ("env FOO=1 opencode run", "opencode", 2),
        ("timeout 60 qwen -y", "qwen", 2),
        ("npx some-linter claude", None, 0),
        ("npx -y", None, 0),
        ("python agent.py", None, 0),
    ],
)
def test_an_agent_is_recognised_by_its_names_and_behind_a_launcher(command: str, agent: str | None, place: int) -> None:
    found, where = recognise(command.split())
    assert (found.command if found else None, where) == (agent, place)


async def test_a_launcher_s_own_words_stay_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with prepared(["env", "FOO=1", "qwen", "-y"], TARGET) as (command, env):
        assert command[1:] == ["FOO=1", "qwen", "--auth-type", "openai", "-y"]
        assert env["OPENAI_MODEL"] == TARGET.model


async def test_opencode_s_tools_find_the_user_s_settings_and_opencode_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    for name in ("git", "opencode"):
        (theirs / name).mkdir(parents=True)
    (theirs / "git" / "config").write_text("[user]")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(theirs))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "opencode").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    async with prepared(["opencode", "run"], TARGET) as (_, env):
        seen = Path(env["XDG_CONFIG_HOME"])
        assert (seen / "git" / "config").read_text() == "[user]"
        assert not (seen / "opencode").exists()
        assert os.path.isdir(env["XDG_DATA_HOME"])  # noqa: PTH112, ASYNC240
    assert (theirs / "git" / "config").exists()  # what is removed is the link


def test_a_proxy_is_ours_only_while_its_own_processes_hold_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert running_at(port) is None
        ours = Running(f"http://127.0.0.1:{port}", "http://127.0.0.1:1", os.getpgrp())
        with announced(port, ours):
            assert running_at(port) == ours
        assert running_at(port) is None
        with announced(port, replace(ours, group=1)):
            assert running_at(port) is None  # another server has the port by now
        with announced(port, ours):
            (tmp_path / "agentguard" / f"proxy-{port}.json").write_text("[")
            assert running_at(port) is None


def test_what_cannot_go_together_or_is_not_there_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("API", "OPERATOR", "UPSTREAM"):
        monkeypatch.setenv(f"AGENTGUARD_{name}_KEY", "")
    invoke = CliRunner().invoke
    together = invoke(cli, ["wrap", "--proxy", "http://127.0.0.1:1", "--upstream", "http://127.0.0.1:2", "--", sys.executable])
    assert isinstance(together.exception, ConfigError)
    assert "leave out" in str(together.exception)
    missing = invoke(cli, ["wrap", "--", "cluade"])
    assert "wrap --list" in str(missing.exception)
    nobody = invoke(cli, ["wrap", "--gateway", "http://127.0.0.1:1", "--", sys.executable])
    assert "nobody answers there" in str(nobody.exception)
    mistyped = invoke(cli, ["wrap", "--upstrem", "http://127.0.0.1:1", "--", sys.executable])
    assert (mistyped.exit_code, "--upstream" in mistyped.output) == (2, True)


def test_every_known_agent_is_pointed_at_the_proxy_and_no_file_holds_the_key(tmp_path: Path) -> None:
    for agent in AGENTS:
        setup = known(agent.command, tmp_path)
        values = [v for v in setup.env.values() if v]
        assert TARGET.key in values, agent
        assert any(v.startswith(TARGET.url) for v in values) or any(TARGET.url in text for text in setup.files.values()), agent
        assert not any(TARGET.key in text for text in setup.files.values()), agent
        assert not any(TARGET.key in argument for argument in setup.arguments), agent


def test_the_agents_files_are_what_they_read(tmp_path: Path) -> None:
    codex = tomllib.loads(known("codex", tmp_path).files["config.toml"])
    assert codex["model_providers"]["agentguard"]["wire_api"] == "responses"
    assert codex["model_context_window"] == 8192
    opencode = json.loads(known("opencode", tmp_path).files["opencode.json"])
    assert opencode["model"] == "agentguard/org/model"
    assert opencode["provider"]["agentguard"]["models"]["org/model"]["limit"]["context"] == 8192
    assert known("/usr/local/bin/claude", tmp_path).env["CLAUDE_CONFIG_DIR"] == str(tmp_path)
    assert known("qwen", tmp_path).arguments == ("--auth-type", "openai")
    assert known("qwen", tmp_path, "--auth-type", "openai").arguments == ()


async def test_an_agent_s_files_are_gone_afterwards_and_the_user_s_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    for name in ("API", "OPERATOR", "UPSTREAM", "PROXY"):
        monkeypatch.setenv(f"AGENTGUARD_{name}_KEY", "the operator's")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "claude").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NO_PROXY", "intranet,localhost")
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    async with prepared(["claude", "-p", "hi"], TARGET) as (command, env):
        assert env["NO_PROXY"] == env["no_proxy"] == "intranet,localhost,127.0.0.1,::1"
        assert "CLAUDE_CODE_USE_BEDROCK" not in env  # it would not ask the guard
        assert command == [str(tmp_path / "bin" / "claude"), "-p", "hi"]
        assert "ANTHROPIC_API_KEY" not in env
        assert "the operator's" not in env.values()  # with the gateway's key it could raise its own limits
        home = Path(env["CLAUDE_CONFIG_DIR"])
        assert (home / ".claude.json").is_file()
        assert home.is_relative_to(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / "agentguard" / "agents") == []  # noqa: PTH208
    with pytest.raises(ConfigError, match="wrap --list"):
        async with prepared(["no-such-agent"], TARGET):
            pass


def row(session: str, steps: int, tokens: int, think: int, closes: int) -> dict[str, Any]:
    return {"session": session, "steps": steps, "tokens": tokens, "think_tokens": think, "closes": closes}


def test_the_summary_counts_what_came_meanwhile() -> None:
    before = [row("a", 2, 100, 50, 1), row("b", 1, 10, 5, 0)]
    after = [row("a", 5, 400, 250, 2), row("b", 1, 10, 5, 0)]
    assert spent(before, after) == Spent(1, 3, 300, 200, 1)
    assert line(spent(before, after), "—") == "agentguard: 3 steps, 300 tokens (67% thinking), 1 close, λ —"
    assert spent(before, [*after, row("c", 1, 1, 0, 0)]).sessions == 2
    assert "no step came through the guard" in line(Spent(0, 0, 0, 0, 0), "—")
    assert (
        line(spent([row("a", 9, 900, 600, 3)], [row("a", 2, 100, 50, 1)]), "—")
        == "agentguard: 2 steps, 100 tokens (50% thinking), 1 close, λ —"
    ), "a gateway that was started anew counts from there"


def test_the_length_ratio_is_that_of_the_arm_with_most_sessions() -> None:
    def arm(sessions: int, value: float, high: float | None) -> dict[str, Any]:
        return {"sessions": sessions, "ratios": {"tokens": {"value": value, "low": 0.9, "high": high}}}

    assert (
        ratio({"rows": [arm(5, 1.5, None), arm(9, 1.1, 1.2), {"sessions": 99, "ratios": {"tokens": None}}]}) == "1.10 [0.90, 1.20]"
    )
    assert ratio({"rows": [arm(5, 1.5, None)]}) == "1.50 [0.90, ∞]"
    assert ratio({"rows": []}) == "—"


def test_the_list_names_every_agent_and_says_which_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "codex"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(cli, ["wrap", "--list"])
    assert result.exit_code == 0
    rows = {text.split()[0]: text for text in result.stdout.splitlines()}
    assert set(rows) >= {agent.command for agent in AGENTS}
    assert {name for name, text in rows.items() if "installed" in text} == {"codex"}
    assert "Python 3.12; not run here" in rows["openhands"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ignored", [False, True])
async def test_a_command_ends_cleanly_by_a_signal_it_does_not_ignore(number: signal.Signals, ignored: bool) -> None:
    """A closed terminal hangs up: what a command started (engine, proxy) must not outlive it; nohup means it should."""
    code = f"""
import asyncio, signal
from agentguard.cli.run import run
signal.signal({int(number)}, signal.SIG_IGN if {ignored} else signal.SIG_DFL)
async def work():
    print("up", flush=True)
    try:
        await asyncio.sleep(2 if {ignored} else 60)
    finally:
        print("cleaned", flush=True)
try:
    run(work())
except KeyboardInterrupt:
    raise SystemExit(130)
"""
    process = await asyncio.create_subprocess_exec(*script(code), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    process.send_signal(number)
    rest, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (rest, process.returncode) == (b"cleaned\n", 0 if ignored else 130)
