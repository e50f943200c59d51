"""Who else on the machine could reach a running engine: its sockets, ours and vLLM's own."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import psutil
import pytest

from tests.conftest import RunningStack

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]


def _bound(process: psutil.Process) -> set[Path]:
    """Paths of the UNIX sockets that a process and its children have open."""
    paths = {
        line.split()[6]: line.split()[7] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7
    }
    found: set[Path] = set()
    for one in (process, *process.children(recursive=True)):
        for link in Path("/proc", str(one.pid), "fd").iterdir():
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))  # noqa: PTH115
            except OSError:
                continue
            if match and paths.get(match[1], "").startswith("/"):
                found.add(Path(paths[match[1]]))
    return found


async def test_its_sockets_lie_where_only_this_user_may_look(running: RunningStack) -> None:
    directory = running.stack.engine.log.parent
    bound = _bound(psutil.Process(running.stack.engine.pid))
    assert Path(running.stack.engine.telemetry.removeprefix("ipc://")) in bound
    assert len(bound) >= 2  # vLLM's own between front end and core
    assert {path.parent for path in bound} == {directory}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


async def test_it_listens_on_loopback_alone(running: RunningStack) -> None:
    process = psutil.Process(running.stack.engine.pid)
    listening = [
        c.laddr.ip
        for one in (process, *process.children(recursive=True))
        for c in one.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}
