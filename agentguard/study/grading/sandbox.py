"""Runs code nobody has read: as a user without rights or files, without a network, under limits, and with an end.

Built on util-linux (`unshare`, `setpriv`, `prlimit`), which every Linux has. In there: namespaces of its own for processes,
network, mounts and IPC; all file systems read-only but a `/tmp` of `DISK_MB`; a user id nobody else has, without capabilities;
limits for CPU, memory, processes, file size and output. When its time is over the whole process tree is killed.

What it does not do: code can read what every user of this machine may read (it has no way to send it anywhere but the verdict), the
kernel is shared, and memory is bounded a process (`PROCESSES` x `MEMORY_MB` in all), not together. For code from an enemy use a
virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from agentguard.errors import AgentGuardError

UID = 64_951
"""Above every range that distributions give to people and services; limits of processes count by it."""
CPU_S, MEMORY_MB, PROCESSES, DISK_MB, OUTPUT_BYTES = 10, 768, 8, 16, 256 << 10
TOOLS = ("unshare", "setpriv", "prlimit", "mount", "findmnt", "sh")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Every mount is made read-only, then /tmp is put over it. What cannot be remounted (/proc, /sys and their like) is nothing UID may
# write to; /dev/shm and /dev/mqueue are covered like /tmp. `exec` throughout, so that nothing privileged is left inside.
_SETUP = """set -e
mount --make-rprivate /
findmnt -rno TARGET | while read -r at; do mount -o remount,bind,ro "$at" 2>/dev/null || true; done
for at in /dev/shm /dev/mqueue; do [ ! -d "$at" ] || mount -t tmpfs -o size=64k,nosuid,nodev,noexec tmpfs "$at"; done
mount -t tmpfs -o size={disk}m,mode=1777,nosuid,nodev tmpfs /tmp
cd /tmp
exec setpriv --reuid={uid} --regid={uid} --clear-groups --no-new-privs --inh-caps=-all --ambient-caps=-all --bounding-set=-all -- \\
  prlimit --cpu={cpu} --as={memory} --nproc={processes} --fsize={disk_bytes} --nofile=64 --core=0 -- \\
  "$@"
"""


class SandboxError(AgentGuardError):
    """Code cannot be run safely here."""


@dataclass(frozen=True, slots=True)
class Ran:
    """``status``: the exit status, negative for a signal; None when time was over. output: the end of both streams."""

    status: int | None
    output: str

    @property
    def ok(self) -> bool:
        return self.status == 0


@cache
def why_not() -> str:
    """Why nothing can be run here, "" where it can. Tried once, with a program that checks its own walls."""
    if sys.platform != "linux":
        return "it is built on Linux namespaces"
    if os.getuid() != 0:
        return (
            "only root can drop to a user without rights and make the file systems read-only; run the study as root in a container"
        )
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"{', '.join(missing)} not found; install util-linux"
    try:
        ran = _run(_PROBE, "", 20.0)
    except OSError as error:
        return f"a namespace could not be made: {error}"
    return "" if ran.ok and ran.output.strip() == "walled" else f"a wall is missing here: {ran.output.strip()[-300:]}"


def run(program: str, stdin: str = "", *, timeout_s: float = 10.0) -> Ran:
    """Run a Python program. Blocking: call it in a thread. Raises SandboxError where it cannot be contained."""
    require()
    return _run(program, stdin, timeout_s)


def require() -> None:
    """Raises SandboxError where code cannot be contained."""
    reason = why_not()
    if reason:
        raise SandboxError(f"refusing to run generated code outside a sandbox: {reason}")


def _run(program: str, stdin: str, timeout_s: float) -> Ran:
    setup = _SETUP.format(
        disk=DISK_MB, uid=UID, cpu=CPU_S, memory=MEMORY_MB << 20, processes=PROCESSES, disk_bytes=DISK_MB << 20
    )  # fmt: skip
    # the program comes through an open file: no directory of ours need be readable inside, and standard input is the program's own
    source = os.memfd_create("program")
    os.pwrite(source, program.encode(), 0)
    loader = f"import os; exec(compile(os.fdopen({source}).read(), 'program.py', 'exec'), {{'__name__': '__main__'}})"
    command = [
        "unshare", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--",
        "sh", "-c", setup, "sh", _interpreter(), "-I", "-S", "-c", loader,
    ]  # fmt: skip
    limited = f"{shlex.join(command)} 2>&1 | head -c {OUTPUT_BYTES}; exit ${{PIPESTATUS[0]}}"
    process = subprocess.Popen(  # noqa: S603  # nosec B603 B607  # unshare of the system, as root looks it up
        ["bash", "-c", limited], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": PATH, "LANG": "C.UTF-8"},  # noqa: S607
        start_new_session=True, pass_fds=(source,),
    )  # fmt: skip
    os.close(source)
    try:
        output, _ = process.communicate(stdin.encode(), timeout=timeout_s)
        status: int | None = process.returncode
        if status is not None and status > 128:
            status = 128 - status
    except subprocess.TimeoutExpired:
        status, output = None, b""
    finally:
        # also what the pipe's other end has left: killing `unshare` kills the namespace's first process, and that all others
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return Ran(status, output[-2000:].decode(errors="replace"))


def _interpreter() -> str:
    """The system's Python where there is one: a virtual environment may lie in a home that others cannot enter."""
    return shutil.which("python3", path=PATH) or sys.executable


_PROBE = f"""
import os, socket
wrong = []
if os.getuid() != {UID} or os.getgroups() not in ([], [{UID}]):
    wrong.append(f"user {{os.getuid()}}, groups {{os.getgroups()}}")
for at in ("/", "/etc", "/var/tmp", "/dev/shm", "/home", "/root"):
    try:
        with open(os.path.join(at, "agentguard-probe"), "w"):
            if at != "/dev/shm":
                wrong.append(f"{{at}} can be written")
    except OSError:
        pass
try:
    os.setuid(0)
    wrong.append("root again")
except OSError:
    pass
if [n for _, n in socket.if_nameindex() if n != "lo"]:
    wrong.append("there is a network")
if len([p for p in os.listdir("/proc") if p.isdigit()]) > 4:
    wrong.append("other processes are seen")
print("; ".join(wrong) or "walled")
"""
