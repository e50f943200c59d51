"""The checks behind `agentguard doctor`. Nothing here imports torch or vLLM into this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentguard.cautions import cautions
from agentguard.errors import AgentGuardError
from agentguard.policy import Policy
from agentguard.reference import DRAFTS, reference_model
from agentguard.supply import site_hooks

PROBE_TIMEOUT_S = 180
UNAVOIDABLE = ("kernels", "warm-up")  # off on a CPU and on runner V1, with the reason
REMEDY = "set the environment up again with 'make clean install', and see that pip's torch is the build locks/engine-cpu.txt names"
_IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# the reference pair with everything the plugin can do: MODELS are its two directories, HERE a directory for sockets
_OPTIONS = """
import os, sys
HERE, *MODELS = sys.argv[1:]
OPTIONS = {
    "model": MODELS[0], "max_model_len": 256, "max_num_seqs": 1, "enforce_eager": True, "reasoning_parser": "qwen3",
    "worker_cls": "engine_plugins.vllm.worker.Worker", "weight_transfer_config": {"backend": "agentguard_shm"},
    "speculative_config": {
        "method": "draft_model", "model": MODELS[1], "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"},
    "additional_config": {"agentguard": {
        "telemetry": f"ipc://{HERE}/tap", "tts": {}, "frames": f"ipc://{HERE}/frames"}},
}
"""
# run in a child, so that a broken engine environment cannot take doctor down, and doctor stays free of torch
_PROBE = (
    _OPTIONS
    + """
import json
from engine_plugins.vllm import compat
out = [[f.name, f.on, f.reason] for f in compat.gate()]
if out[0][1]:
    import torch, vllm
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    out[0][2] = f"vLLM {compat.vllm_version()} on torch {torch.__version__}, platform {current_platform.device_type}"
    for one in ("V1", "V2"):
        reason = compat.seam_block_reason(one)
        out.append([f"plugin on runner {one}", not reason, reason or "every name the plugin binds is there"])
    if current_platform.is_cpu():
        from vllm.v1.sample import rejection_sampler as sampler
        current_platform.register_triton_kernel_overrides()
        x = torch.tensor([1.0, 2.0]); cu = torch.tensor([2, 3], dtype=torch.int32)
        broken = sampler.expand_batch_to_tokens(x, cu, 3).tolist() != [1.0, 1.0, 2.0]
        out.append(["CPU speculative sampling", True, "stock code is broken (vllm#55005); the plugin replaces it" if broken else
        "stock code is right"])
    from vllm import EngineArgs
    from engine_plugins.vllm import register
    from engine_plugins.vllm.worker import foreseen
    register()
    engine = foreseen(EngineArgs(**OPTIONS).create_engine_config())
else:
    engine = None
print("PROBE" + json.dumps([out, engine]))
"""
)
_GENERATE = (
    _OPTIONS
    + """
import json
from vllm import LLM, SamplingParams
llm = LLM(**OPTIONS, distributed_executor_backend="uni", disable_log_stats=True, gpu_memory_utilization=0.3)
out = llm.generate([{"prompt_token_ids": [3]}], SamplingParams(max_tokens=1), use_tqdm=False)
print("PROBE" + json.dumps([len(out[0].outputs[0].token_ids), llm.collective_rpc("ag_features")[0]]))
"""
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``detail`` says what was found, or why it is off and what to do. ``warning``: it works, and is known
    to go wrong."""

    name: str
    ok: bool
    detail: str
    warning: bool = False


def examine(*, generate: bool = False, policy: Policy | None = None) -> list[Check]:
    """All checks, in the order a reader needs them; ``generate`` adds a one-token generation with the reference pair, and what that
    engine says of itself: its runner, and each feature; ``policy`` what is known to go wrong with it."""
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
    if policy is not None:
        known = cautions(policy)
        checks += [Check(f"policy: {caution.key}", True, caution.text, warning=True) for caution in known]
        checks += [] if known else [Check("policy", True, f"rule {policy.rule}, draft {policy.draft or '—'}: nothing to warn of")]
    return [*checks, *_generation()] if generate else checks


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
    checks, engine = json.loads(found)
    foreseen = [] if engine is None else _features(engine, "vLLM would take it for the reference pair; --generate asks an engine")
    return [entry, *(Check(name, on, detail) for name, on, detail in checks), *foreseen]


def _generation() -> list[Check]:
    name = "one-token generation"
    found, failure = _child(_GENERATE, env=_IN_PROCESS)
    if found is None:
        return [Check(name, False, f"failed: {failure}; {REMEDY}")]
    tokens, engine = json.loads(found)
    done = Check(name, tokens == 1, "done" if tokens == 1 else f"{tokens} tokens came; {REMEDY}")
    return [done, *_features(engine, "the engine that was started says so")]


def _features(engine: Mapping[str, Any], who: str) -> list[Check]:
    """What works on a runner. Where nothing can be done about a feature that is off, it is no fault (`UNAVOIDABLE`)."""
    runner = engine["runner"]
    lines = [Check("model runner", True, f"{runner}: {who}")]
    for name, on, reason in engine["features"]:
        state = ("on" if on else "off") + (f": {reason}" if reason else "")
        lines.append(Check(f"runner {runner}: {name}", on or name in UNAVOIDABLE, state))
    return lines


def _child(code: str, *, env: Mapping[str, str] | None = None) -> tuple[str | None, str]:
    """Run Python code on the reference pair in a child: what it printed behind PROBE, or None and the last line of its errors."""
    with tempfile.TemporaryDirectory(prefix="agentguard-") as here:
        try:
            command = [sys.executable, "-c", code, here, *(str(reference_model(one)) for one in ("target", "draft"))]
            done = subprocess.run(  # noqa: S603  # nosec B603  # a list of our own, no shell
                command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
            )  # fmt: skip
        except AgentGuardError as error:
            return None, str(error)
        except subprocess.TimeoutExpired:
            return None, f"it took more than {PROBE_TIMEOUT_S} s"
    lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("PROBE")]
    errors = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
    return (lines[-1], "") if lines else (None, errors[-1])
