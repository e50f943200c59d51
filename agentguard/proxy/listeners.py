"""Who listens on a port of this machine, from Linux's /proc. A port that answers is not yet the server that was meant."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket: its owner's user id, and its inode."""

    uid: int
    inode: int


def listeners(port: int, proc: Path = Path("/proc")) -> list[Listener]:
    """Every socket that listens on the port, over IPv4 and IPv6; none where /proc does not tell."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.append(Listener(int(fields[7]), int(fields[9])))
    return found


def held_by_group(port: int, group: int, proc: Path = Path("/proc")) -> bool:
    """Does a process of this process group hold the listening socket? True where the system does not tell."""
    wanted = {f"socket:[{one.inode}]" for one in listeners(port, proc)}
    if not (proc / "net" / "tcp").exists():
        return True
    for pid in (entry.name for entry in proc.iterdir() if entry.name.isdigit()):
        try:
            if os.getpgid(int(pid)) == group and any(os.readlink(fd) in wanted for fd in (proc / pid / "fd").iterdir()):  # noqa: PTH115
                return True
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    return False
