"""LiteLLM's own environment: made on first use from the hash lock, and made again when that was interrupted.

LiteLLM cannot share an environment with vLLM or Textual (litellm.md, section 1.4), and it has been compromised three times on the
package index, so nothing is resolved here: the lock names every wheel by its hash, and what an environment holds is read from
its files before anything in it is started.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentguard.dirs import cache_dir
from agentguard.errors import ConfigError, EngineStartError

LOCK = "litellm-1.106.12-cp311-linux_x86_64.txt"
PYTHON = (3, 11)
COMPROMISED = {
    "1.82.7": "it runs foreign code when the proxy is imported (PYSEC-2026-2)",
    "1.82.8": "it runs foreign code whenever its Python starts (PYSEC-2026-2)",
}
SERIES_107 = "1.107 was a compromised release, signed with the project's own key; no version of that series is trusted"
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(\[[^\]]*\])?==([^\s;]+)\s+(?:--hash=sha256:[0-9a-f]{64}\s*)+$")
_PACKAGES = ("lib*/python3*/site-packages", "lib/python3*/dist-packages")
_STARTS_BY_ITSELF = ("*.pth", "sitecustomize*", "usercustomize*")

Progress = Callable[[int, int], None]
"""Called with the packages done and their number."""


def refuse_compromised(version: str, where: str) -> None:
    """Raises ConfigError, naming the version, for a release that is known to be bad."""
    # numbers, as pip compares them: 1.82.07, v1.82.7 and 0!1.107.0 are the same releases
    numbers = [int(n) for n in re.findall(r"\d+", re.sub(r"^\s*v?(\d+!)?", "", version.lower()))]
    why = COMPROMISED.get(".".join(map(str, numbers[:3]))) or (SERIES_107 if numbers[:2] == [1, 107] else None)
    if why is not None:
        raise ConfigError("litellm", f"{version} ({where})", f"{why}; do not start it, and use 1.106.12")


def check_lock(text: str, where: str) -> dict[str, str]:
    """Name and version of everything in a lock. Raises ConfigError for a line without version and hash, and for a bad LiteLLM."""
    found: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        line = line.split(" #", 1)[0].strip()
        if not line or line.startswith("#"):
            continue
        match = _PIN.match(line)
        if match is None:
            raise ConfigError("lock", f"{where}: {line[:80]}", "every line must be NAME==VERSION --hash=sha256:…")
        found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[3]
    if "litellm" not in found:
        raise ConfigError("lock", where, "does not name litellm; give a lock of litellm[proxy]")
    refuse_compromised(found["litellm"], where)
    return found


def installed_versions(prefix: Path) -> set[str]:
    """LiteLLM's versions in an environment, read from its files: starting a compromised one to ask it would be too late."""
    found = (info for pattern in _PACKAGES for packages in prefix.glob(pattern) for info in packages.glob("litellm-*.dist-info"))
    return {info.name.removeprefix("litellm-").removesuffix(".dist-info") for info in found}


def own_litellm(path: Path) -> Path:
    """The `litellm` command of an environment of the user's own. Raises ConfigError if it is none, or one known to be bad."""
    command = path / "bin" / "litellm" if path.is_dir() else path
    if not command.is_file():
        raise ConfigError("litellm", str(path), "give an environment with LiteLLM in it, or its bin/litellm")
    # pipx and uv put links into ~/.local/bin: what is around the link and around the program it leads to
    versions = installed_versions(command.parent.parent) | installed_versions(command.resolve().parent.parent)
    if not versions:
        raise ConfigError("litellm", str(path), "its version cannot be read from the environment around it, so it is not started")
    for version in versions:
        refuse_compromised(version, str(path))
    return command


def lock_file() -> Path:
    here = Path(__file__).parents[1]
    for root in (here / "_locks", here.parent / "locks"):
        if (root / LOCK).is_file():
            return root / LOCK
    raise ConfigError("lock", LOCK, "is not in this installation; install agentguard-vllm again")


def prepare(
    lock: Path | None = None, progress: Progress = lambda done, of: None, on_wait: Callable[[], None] = lambda: None
) -> Path:
    """LiteLLM's command in its own environment, which is made if it is not there yet (about 90 s). Blocks.

    ``lock``: another lock than ours, for another platform. Two calls at a time make one environment, and the later one calls
    ``on_wait`` before it waits for the other. Raises ConfigError for a lock
    or a Python that cannot be used, EngineStartError when pip fails.
    """
    lock = lock or lock_file()
    try:
        text = lock.read_text()
    except OSError as error:
        raise ConfigError("lock", str(lock), f"cannot be read ({error.strerror})") from None
    pins = check_lock(text, lock.name)
    python = _python(lock)
    root = cache_dir() / f"litellm-{pins['litellm']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    stamp = root / ".complete"
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "XDG_CACHE_HOME", str(root.parent), f"cannot be made ({error.strerror}); name a folder that can"
        ) from None
    with _only_one(root.parent / f"{root.name}.lock", on_wait) as held:
        if not stamp.is_file():  # the stamp is written last
            shutil.rmtree(root, ignore_errors=True)
            _make(python, root, lock, len(pins), progress, held)
            stamp.touch()
    versions = installed_versions(root)
    if versions != {pins["litellm"]}:
        raise ConfigError(
            "litellm", f"{', '.join(versions)} ({root})", "is not what the lock names; remove the folder and start again"
        )
    return root / "bin" / "litellm"


def _python(lock: Path) -> str:
    """The lock holds wheels of one Python; ours if it is that one."""
    match = re.search(r"-cp(\d)(\d+)-", lock.name)
    wanted = (int(match[1]), int(match[2])) if match else sys.version_info[:2]
    if sys.version_info[:2] == wanted:
        return sys.executable
    name = f"python{wanted[0]}.{wanted[1]}"
    found = shutil.which(name)
    if found is None:
        raise ConfigError(
            "lock",
            lock.name,
            f"needs {name}, which is not on PATH; install it, give --lock for your Python, or --litellm for your own",
        )
    return found


@contextmanager
def _only_one(path: Path, on_wait: Callable[[], None]) -> Iterator[int]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _make(python: str, root: Path, lock: Path, packages: int, progress: Progress, held: int) -> None:
    """``held``: the lock's descriptor, which pip keeps open too: when we are ended, the next start waits until pip is."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    made = subprocess.run([python, "-m", "venv", root], capture_output=True, text=True, env=env, check=False)  # noqa: S603  # nosec B603  # a list of our own, no shell
    if made.returncode:
        raise EngineStartError(
            f"no environment for LiteLLM could be made with {python}: {(made.stderr or made.stdout).strip()[-500:]}"
        )
    before = _self_starting(root)
    pip = [
        str(root / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-deps",
        "--require-hashes", "--only-binary", ":all:", "--progress-bar", "off", "--requirement", str(lock),
    ]  # fmt: skip
    said: list[str] = []
    with subprocess.Popen(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, pass_fds=(held,)) as process:  # noqa: S603  # nosec B603  # a list of our own, no shell
        assert process.stdout is not None
        done = 0
        for line in process.stdout:
            said = [*said[-20:], line]
            if line.startswith("Collecting "):
                done += 1
                progress(min(done, packages), packages)
    if process.returncode:
        raise EngineStartError(f"pip could not install LiteLLM from {lock.name}:\n{''.join(said)[-2000:]}")
    new = _self_starting(root) - before
    if new:
        shutil.rmtree(root)
        raise EngineStartError(
            f"LiteLLM's wheels brought files that run at every start of Python ({', '.join(sorted(new))}); removed"
        )


def _self_starting(root: Path) -> set[str]:
    packages = next(iter(root.glob("lib/python3*/site-packages")))
    return {path.name for pattern in _STARTS_BY_ITSELF for path in packages.glob(pattern)}
