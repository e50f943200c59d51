"""Running an agent as if it had been started by hand: its own terminal, its signals, its exit code."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentguard.agents.known import Target, recognise, setup_for
from agentguard.dirs import cache_dir
from agentguard.errors import ConfigError

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
GRACE_S = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OURS = ("AGENTGUARD_API_KEY", "AGENTGUARD_OPERATOR_KEY", "AGENTGUARD_UPSTREAM_KEY", "AGENTGUARD_PROXY_KEY")
"""Keys of ours that are no business of an agent: with some it could raise its own limits."""


@asynccontextmanager
async def prepared(command: Sequence[str], target: Target) -> AsyncIterator[tuple[list[str], dict[str, str]]]:
    """The command line and environment of a known agent, with its files in a temporary folder that is removed at the end.

    Raises ConfigError for a command that is not there.
    """
    program = await asyncio.to_thread(program_of, command)
    home = await asyncio.to_thread(_home)
    try:
        setup = setup_for(command, target, home)
        for name, text in setup.files.items():
            await asyncio.to_thread(_write, home / name, text)
        for name, (theirs, hidden) in setup.mirrors.items():
            await asyncio.to_thread(_mirror, home / name, theirs, hidden)
        words, place = [program, *command[1:]], recognise(command)[1] + 1
        yield [*words[:place], *setup.arguments, *words[place:]], _direct(_merged(os.environ, setup.env))
    finally:
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)


def program_of(command: Sequence[str]) -> str:
    """Where the command's program is. Raises ConfigError for one that is not there."""
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError("command", command[0], "is not installed or not on PATH; 'agentguard wrap --list' shows what is")
    return program


def _mirror(path: Path, theirs: Path, hidden: Sequence[str]) -> None:
    path.mkdir()
    for entry in theirs.iterdir() if theirs.is_dir() else ():
        if entry.name not in hidden:
            (path / entry.name).symlink_to(entry)


def _home() -> Path:
    """Not below /tmp, where Codex refuses to put its helpers."""
    parent = cache_dir() / "agents"
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=parent))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _merged(base: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**base, **changes}
    return {k: v for k, v in merged.items() if v is not None and (k in changes or k not in OURS)}


def _direct(env: dict[str, str]) -> dict[str, str]:
    """The environment with this machine left out of the shell's HTTP proxy: key and prompts would go there in plain text."""
    named = env.get("NO_PROXY") or env.get("no_proxy") or ""
    hosts = ",".join(filter(None, (named, *(h for h in LOOPBACK if h not in named.split(",")))))
    return env | {"NO_PROXY": hosts, "no_proxy": hosts}


async def run_agent(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Start it in our own process group and on our own terminal, and wait; returns the exit status a shell would see.

    Ctrl-C and Ctrl-\\ reach both of us from the terminal, and what they mean is the agent's decision; other signals, and these two
    where no terminal sends them, are passed on. Raises ConfigError for a program the system cannot run.
    """
    loop = asyncio.get_running_loop()
    try:
        process = await asyncio.create_subprocess_exec(*command, env=dict(env))
    except OSError as error:  # a script without its first line, say
        raise ConfigError("command", command[0], f"cannot be run ({error.strerror}); start it by hand to see") from None

    def pass_on(number: signal.Signals) -> None:
        if process.returncode is None:
            process.send_signal(number)

    before = {number: signal.getsignal(number) for number in (*PASSED_ON, *FROM_TERMINAL)}
    for number in PASSED_ON:
        loop.add_signal_handler(number, pass_on, number)
    for number in FROM_TERMINAL:
        # whoever sends it to us alone, without a terminal that reaches the agent too, means the agent
        loop.add_signal_handler(number, lambda: None) if _in_foreground() else loop.add_signal_handler(number, pass_on, number)
    try:
        status = await process.wait()
    finally:
        for number in (*PASSED_ON, *FROM_TERMINAL):
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])  # the loop leaves the default, and what we have started must still be stopped
        if process.returncode is None:
            await _end(process)
    return status if status >= 0 else 128 - status


def _in_foreground() -> bool:
    """Does a terminal send its signals to our process group, and so to the agent?"""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
