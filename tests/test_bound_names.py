"""Every name of vLLM this code binds is probed (`signatures.NAMES`): the list of what is bound is read from the source, so neither
a new import nor a new attribute can be forgotten.

Imports speak for themselves. An attribute belongs to somebody whom the code has from vLLM, untyped; whose it is stands in `WHOSE`,
and a parameter annotated Any that is not there fails the test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_plugins.vllm import signatures

ROOT = Path(__file__).parents[1] / "engine_plugins"
FILES = sorted(p for folder in ("vllm", "tts") for p in (ROOT / folder).glob("*.py"))
GPU = "vllm.v1.worker.gpu"
OURS = ""  # nothing of vLLM's
RUNNER_V1, RUNNER_V2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", f"{GPU}.model_runner:GPUModelRunner"
STATES, SAMPLER, BATCH_V2 = f"{GPU}.states:RequestState", f"{GPU}.sample.sampler:Sampler", f"{GPU}.input_batch:InputBatch"
BATCH_V1, RECORD_V1 = "vllm.v1.worker.gpu_input_batch:InputBatch", "vllm.v1.worker.gpu_input_batch:CachedRequestState"
WORKER = ("vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.worker_base:WorkerBase")
CONFIG, PARALLEL = "vllm.config.vllm:VllmConfig", "vllm.config.parallel:ParallelConfig"
SPECULATIVE, PARAMS = "vllm.config.speculative:SpeculativeConfig", "vllm.sampling_params:SamplingParams"
BUFFERS = (f"{GPU}.buffer_utils:StagedWriteTensor", f"{GPU}.buffer_utils:UvaBackedTensor")
TRANSFER = "vllm.distributed.weight_transfer.base:WeightTransferEngine"
STEP = "vllm.v1.core.sched.output:SchedulerOutput"
REASONING = "vllm.config.reasoning:ReasoningConfig"
WHOSE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "vllm/seam_v1.py": {
        "self._runner": RUNNER_V1, "self._runner.input_batch": BATCH_V1, "self._runner.requests[req_id]": RECORD_V1,
        "state": RECORD_V1,
        "state.sampling_params": PARAMS, "metadata": "vllm.v1.sample.metadata:SamplingMetadata",
        "sampler_module": "module:vllm.v1.sample.rejection_sampler",
    },
    "vllm/seam_v2.py": {
        "runner": RUNNER_V2, "sampler": SAMPLER, "self._input_batch": BATCH_V2,
        "module": f"module:{GPU}.spec_decode.rejection_sampler", "inner": OURS, "self.stock": OURS, "stock": OURS,
    },
    "vllm/lessons.py": {
        "input_batch": BATCH_V2, "self._states": STATES, "states": STATES, "states.all_token_ids": BUFFERS,
        "states.total_len": BUFFERS,
        "self._states.prompt_len": BUFFERS,
    },
    "vllm/request_slots.py": {
        "req_states": STATES, "self._states": STATES, "states": STATES, "states.all_token_ids": BUFFERS,
        "states.prompt_len": BUFFERS,
        "states.total_len": BUFFERS, "self._states.total_len": BUFFERS, "sampling_params": PARAMS,
        "request": "vllm.v1.core.sched.output:NewRequestData",
    },
    "vllm/budget.py": {
        "runner": RUNNER_V1, "self._runner": RUNNER_V1, "self._runner.input_batch": BATCH_V1, "batch": BATCH_V1, "state": RECORD_V1,
        "live[req_id]": RECORD_V1, "params": PARAMS,
        "module": "module:vllm.v1.worker.gpu_input_batch", "batch_update": OURS,
    },
    "vllm/budget_v2.py": {
        "sampler": SAMPLER, "self._sampler": SAMPLER, "self.req_states": STATES, "self.req_states.all_token_ids": BUFFERS,
        "self.req_states.total_len": BUFFERS, "stock": f"{GPU}.sample.thinking_budget:ThinkingBudgetState",
        "ctx": f"{GPU}.sample.logits_processor.interface:LogitsContext",
    },
    "vllm/cpu_fixes.py": {
        "runner": RUNNER_V1, "batch": BATCH_V1, "runner.discard_request_mask": BUFFERS,
        "sampler_module": "module:vllm.v1.sample.rejection_sampler",
    },
    "vllm/observe.py": {"sampler_module": "module:vllm.v1.sample.rejection_sampler"},
    "vllm/processor.py": {"sampling_params": PARAMS},
    "vllm/ranks.py": {"worker": WORKER, "parallel": PARALLEL},
    "vllm/worker.py": {
        "worker": WORKER, "self.model_runner": RUNNER_V1, "model_runner": (RUNNER_V1, RUNNER_V2), "worker.model_runner": RUNNER_V2,
        "runner": RUNNER_V2, "runner.sampler": SAMPLER, "runner.speculator": f"{GPU}.spec_decode.speculator:DraftModelSpeculator",
        "worker.vllm_config": CONFIG, "config": CONFIG, "self.vllm_config": CONFIG, "speculative": SPECULATIVE,
        "parallel": PARALLEL,
        "config.speculative_config": SPECULATIVE, "config.parallel_config": PARALLEL, "reasoning": REASONING,
        "config.reasoning_config": REASONING, "config.scheduler_config": "vllm.config.scheduler:SchedulerConfig",
        "config.model_config": "vllm.config.model:ModelConfig", "scheduler_output": STEP,
        "tokenizer": "vllm.tokenizers.protocol:TokenizerLike",
        "worker.vllm_config.weight_transfer_config": "vllm.config.weight_transfer:WeightTransferConfig",
        "get_pp_group()": "vllm.distributed.parallel_state:GroupCoordinator",
        "get_tp_group()": "vllm.distributed.parallel_state:GroupCoordinator",
        "current_platform": "vllm.platforms.interface:Platform", "setting": OURS, "settings": OURS,
    },
    "vllm/routes.py": {
        "engine_client": OURS, "config": CONFIG, "config.parallel_config": PARALLEL, "speculative": SPECULATIVE,
        "config.model_config": "vllm.config.model:ModelConfig", "speculative.draft_model_config": "vllm.config.model:ModelConfig",
        "state": OURS,
    },
    "tts/states.py": {
        "runner": (RUNNER_V1, RUNNER_V2), "runner.input_batch": BATCH_V1, "batch": BATCH_V2, "drafter": OURS,
        "metadata": "vllm.v1.attention.backend:CommonAttentionMetadata",
    },
    "tts/serving.py": {
        "self._worker": WORKER, "self._worker.weight_transfer_engine": TRANSFER, "scheduled": STEP,
        "new": "vllm.v1.core.sched.output:NewRequestData",
    },
    "tts/capture.py": {"seen.state": RECORD_V1, "seen.state.sampling_params": PARAMS},
    "tts/transfer.py": {
        "info": "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
        "get_layerwise_info(layer)": "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
        "WeightTransferEngineFactory": "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory",
        "layer.quant_method": "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
        "head.quant_method": "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
        "model": OURS, "layer": OURS, "loader": OURS, "head": OURS,  # torch's modules; what vLLM hangs on a layer has no class
    },
}  # fmt: skip
PROBED: dict[str, set[str]] = {}
for name in signatures.NAMES:
    outer, _, inner = name.name.partition(".")
    known = PROBED.setdefault(f"{name.module}:{outer}", set())
    known.update(name.attributes, (inner,) if inner else ())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)
        assert not (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "vllm" for a in node.names)), "from … import …"


def accesses(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Receiver and attribute, getattr and hasattr with a constant included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield from ((ast.unparse(node.args[0]), str(one.value)) for one in node.args[1:2] if isinstance(one, ast.Constant))


def ours(attribute: str) -> bool:
    return attribute.startswith(("ag_", "__"))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_each_import_is_probed(path: Path) -> None:
    for module, name in imports(path):
        if (module, name) == ("vllm.platforms", "current_platform"):
            continue  # made when it is asked for; what it is, is in WHOSE
        is_module = any(probed.startswith(f"{module}.{name}:") for probed in PROBED)
        assert f"{module}:{name}" in PROBED or is_module, (
            f"{module}.{name} is bound in {relative(path)} and not in signatures.NAMES"
        )


@pytest.mark.parametrize("path", [ROOT / name for name in WHOSE], ids=relative)
def test_each_attribute_is_probed(path: Path) -> None:
    whose, met = WHOSE[relative(path)], set()
    for receiver, attribute in accesses(ast.parse(path.read_text())):
        if receiver not in whose:
            continue
        met.add(receiver)
        owners = whose[receiver]
        owners = (owners,) if isinstance(owners, str) else owners
        if OURS in owners or ours(attribute):
            continue
        probed = set()
        for owner in owners:
            kind, _, module = owner.partition(":")
            if kind == "module":
                probed |= {key.partition(":")[2] for key in PROBED if key.startswith(f"{module}:")}
            else:
                assert owner in PROBED, f"{owner} is in WHOSE and not in signatures.NAMES"
                probed |= PROBED[owner]
        assert attribute in probed, f"{receiver}.{attribute} is read in {relative(path)} and not in signatures.NAMES"
    unmet = {receiver for receiver, owner in whose.items() if owner != OURS} - met
    assert not unmet, f"nobody reads {unmet} in {relative(path)} any more; take them out of WHOSE"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_it_is_known_whose_an_untyped_argument_is(path: Path) -> None:
    """In the files that deal with vLLM; what is annotated Any elsewhere is a plain value."""
    if relative(path) not in WHOSE:
        assert not list(imports(path)) or relative(path) in ("vllm/coins.py",), "imports vLLM and is not in WHOSE"
        return
    whose = WHOSE[relative(path)]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        untyped = {
            a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if isinstance(a.annotation, ast.Name) and a.annotation.id == "Any"
        }  # fmt: skip
        for receiver, attribute in accesses(node):
            assert receiver not in untyped or receiver in whose, (
                f"{relative(path)}, {node.name}: whose is {receiver}, of which .{attribute} is read? Say so in WHOSE"
            )


def test_each_argument_the_seams_take_by_name_is_probed() -> None:
    """`given["…"]` and `bound["…"]` are arguments of vLLM's `rejection_sample`."""
    of = {"seam_v1.py": ("V1", {"bound"}), "seam_v2.py": ("V2", {"given"}), "lessons.py": ("V2", {"given"})}
    for file, (runner, names) in of.items():
        probed = {
            p for n in signatures.NAMES if n.runner == runner and n.name == "rejection_sample" for p in (*n.first, *n.parameters)
        }
        taken = set()
        for node in ast.walk(ast.parse((ROOT / "vllm" / file).read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) in names and isinstance(node.slice, ast.Constant):
                taken.add(node.slice.value)
        assert taken, file
        assert taken <= probed, f"{file}: {taken - probed}"


def test_a_name_that_is_taken_out_of_the_list_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail."""
    without = {
        k: v - {"is_last_pp_rank", "draft_logits"} for k, v in PROBED.items() if k != "vllm.config.model:PROCESSED_LOGPROBS_MODES"
    }
    monkeypatch.setattr(f"{__name__}.PROBED", without)
    with pytest.raises(AssertionError, match="PROCESSED_LOGPROBS_MODES is bound"):
        test_each_import_is_probed(ROOT / "vllm" / "worker.py")
    with pytest.raises(AssertionError, match=r"is_last_pp_rank is read|draft_logits is read"):
        test_each_attribute_is_probed(ROOT / "vllm" / "worker.py")
