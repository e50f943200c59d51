"""The checks behind `agentguard doctor`. Nothing here imports torch or vLLM into this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from agentguard.errors import AgentGuardError
from agentguard.reference import DRAFTS, reference_model
from agentguard.supply import site_hooks

PROBE_TIMEOUT_S = 180
REMEDY = "set the environment up again with 'make clean install', and see that pip's torch is the build locks/engine-cpu.txt names"
_IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# run in a child, so that a broken engine environment cannot take doctor down, and doctor stays free of torch
_PROBE = """
import json, os, sys
from engine_plugins.vllm import compat
out = [[f.name, f.on, f.reason] for f in compat.gate()]
if out[0][1]:
    import torch, vllm
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    out[0][2] = f"vLLM {compat.vllm_version()} on torch {torch.__version__}, platform {current_platform.device_type}"
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    runner = "V2" if asked == "1" or (HAS_TRITON and not current_platform.is_cpu() and asked != "0") else "V1"
    out.append(["model runner", True, f"{runner} unless a model or a method asks for another; the engine says which it took"])
    for one, more in (("V1", ", tts"), ("V2", "; tts is off, it needs V1")):
        reason = compat.seam_block_reason(one)
        fits = "every name the plugin binds is there: rules, support filter, think budgets, telemetry" + more
        out.append([f"plugin on runner {one}", not reason, reason or fits])
    from engine_plugins import kernels
    out.append(["kernels", True, kernels.choose(current_platform.device_type).reason])
    if current_platform.is_cpu():
        from vllm.v1.sample import rejection_sampler as sampler
        current_platform.register_triton_kernel_overrides()
        x = torch.tensor([1.0, 2.0]); cu = torch.tensor([2, 3], dtype=torch.int32)
        broken = sampler.expand_batch_to_tokens(x, cu, 3).tolist() != [1.0, 1.0, 2.0]
        out.append(["CPU speculative sampling", True, "stock code is broken (vllm#55005); the plugin replaces it" if broken else
        "stock code is right"])
print("PROBE" + json.dumps(out))
"""
_GENERATE = """
import sys
from vllm import LLM, SamplingParams
options = {"max_model_len": 256, "max_num_seqs": 1, "enforce_eager": True, "distributed_executor_backend": "uni"}
llm = LLM(sys.argv[1], disable_log_stats=True, **options)
out = llm.generate([{"prompt_token_ids": [3]}], SamplingParams(max_tokens=1), use_tqdm=False)
print("PROBE" + str(len(out[0].outputs[0].token_ids)))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``detail`` says what was found, or why it is off and what to do."""

    name: str
    ok: bool
    detail: str


def examine(*, generate: bool = False) -> list[Check]:
    """All checks, in the order a reader needs them; ``generate`` adds a one-token generation with the reference target."""
    checks = [Check("python", sys.version_info >= (3, 11), f"{sys.version.split()[0]} (3.11 or newer)")]
    checks.append(_start_up_files())
    checks += _plugin()
    for extra, module, what in (
        ("gateway", "starlette", "gateway"),
        ("gateway", "zmq", "telemetry"),
        ("tui", "textual", "monitor"),
    ):
        found = importlib.util.find_spec(module) is not None
        # the monitor lives in an environment of its own beside a proxy, so its absence is no fault
        checks.append(
            Check(what, found or extra == "tui", "ready" if found else f"not installed: pip install 'agentguard-vllm[{extra}]'")
        )
    for name in ("target", *DRAFTS):
        try:
            checks.append(Check(f"reference pair: {name}", True, str(reference_model(name))))
        except AgentGuardError as error:
            checks.append(Check(f"reference pair: {name}", False, str(error)))
    return [*checks, _generation()] if generate else checks


def _start_up_files() -> Check:
    """Does anything run whenever this Python starts? Two compromised releases of LiteLLM came with such a file."""
    hooks = site_hooks()
    bad = [f"{hook.path} {hook.why}" for hook in hooks if hook.why]
    detail = f"{len(hooks)} .pth files, none unexpected" if not bad else f"{'; '.join(bad)}; see whose it is before you remove it"
    return Check("start-up files", not bad, detail)


def _plugin() -> list[Check]:
    names = {e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins")}
    registered = "engine_plugins.vllm:register" in names
    entry = Check(
        "plugin entry point", registered, "registered" if registered else "agentguard-vllm is not installed: pip install -e ."
    )
    found, failure = _child(_PROBE)
    if found is None:
        return [entry, Check("vLLM", False, f"cannot be imported: {failure}; {REMEDY}")]
    return [entry, *(Check(name, on, detail) for name, on, detail in json.loads(found))]


def _generation() -> Check:
    name = "one-token generation"
    try:
        found, failure = _child(_GENERATE, str(reference_model("target")), env={"HF_HUB_OFFLINE": "1"} | _IN_PROCESS)
    except AgentGuardError as error:
        return Check(name, False, str(error))
    return Check(name, found == "1", "done" if found == "1" else f"failed: {failure}; {REMEDY}")


def _child(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[str | None, str]:
    """Run Python code in a child: what it printed behind PROBE, or None and the last line of its errors."""
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(  # noqa: S603  # nosec B603  # a list of our own, no shell
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False, env={**os.environ, **(env or {})}
        )
    except subprocess.TimeoutExpired:
        return None, f"it took more than {PROBE_TIMEOUT_S} s"
    lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("PROBE")]
    errors = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
    return (lines[-1], "") if lines else (None, errors[-1])
