"""Every name of vLLM the plugin binds, and whether a vLLM has it: read from its source files, so nothing of it is imported.

The same list serves the gate at start-up, `agentguard doctor`, and the tests, which hold it against the versions of the support
window. `tests/vllm_signatures/generate.py` writes down what a wheel has.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RUNNERS = ("V1", "V2")
BOTH = "both"


@dataclass(frozen=True, slots=True)
class Name:
    """A function, class, method or constant, by module and qualified name, and what is asked of it.

    runner: whose it is, or BOTH. parameters: it has all of these; first: its parameters begin with these, as a class is called by
    position; attributes: of a class, set anywhere in it.
    """

    runner: str
    module: str
    name: str
    parameters: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Found:
    """What a vLLM has under a name: a function's parameters, or a class's attributes and methods."""

    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()


_GPU = "vllm.v1.worker.gpu"
_RELOAD = "vllm.model_executor.model_loader.reload"
_TRANSFER = "vllm.distributed.weight_transfer"
_SAMPLER = f"{_GPU}.sample.sampler"
_REJECTION = f"{_GPU}.spec_decode.rejection_sampler"
_V2_VERIFIED = (
    "target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping", "expanded_idx_mapping",
    "expanded_local_pos", "temperature", "seed", "num_speculative_steps",
)  # fmt: skip
_V1_VERIFIED = (
    "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_logits", "bonus_token_ids",
    "sampling_metadata",
)  # fmt: skip
NAMES = (
    Name("V1", "vllm.v1.sample.rejection_sampler", "rejection_sample", first=_V1_VERIFIED),
    Name("V1", "vllm.v1.sample.rejection_sampler", "generate_uniform_probs"),
    Name("V1", "vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", first=("x", "cu_num_tokens", "num_tokens")),
    Name(
        "V1",
        "vllm.v1.sample.thinking_budget_state",
        "ThinkingBudgetStateHolder",
        attributes=("sync_batch", "update_state", "apply_to_logits", "has_tracked_requests"),
    ),
    Name("V1", "vllm.v1.worker.gpu_input_batch", "maybe_create_thinking_budget_state_holder"),
    Name(
        "V1",
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        attributes=(
            "input_batch",
            "requests",
            "drafter",
            "rejection_sampler",
            "_sample",
            "_bookkeeping_sync",
            "discard_request_mask",
            "get_model",
            "get_draft_model",
        ),
    ),
    Name(
        "V1",
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        attributes=(
            "req_ids",
            "req_id_to_index",
            "num_reqs",
            "generators",
            "sampling_metadata",
            "_make_sampling_metadata",
            "thinking_budget_state_holder",
        ),
    ),
    Name(
        "V1",
        "vllm.v1.worker.gpu_input_batch",
        "CachedRequestState",
        attributes=("prompt_token_ids", "output_token_ids", "sampling_params"),
    ),
    Name("V1", "vllm.v1.sample.metadata", "SamplingMetadata", attributes=("all_greedy", "all_random", "temperature")),
    Name("V1", "vllm.v1.attention.backend", "CommonAttentionMetadata", attributes=("query_start_loc_cpu",)),
    Name(
        "V1",
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.propose",
        parameters=("target_positions", "target_hidden_states", "common_attn_metadata"),
    ),
    Name("V2", f"{_GPU}.spec_decode.rejection_sampler_utils", "rejection_sample", first=_V2_VERIFIED),
    Name("V2", _REJECTION, "RejectionSampler.__call__", parameters=("logits", "input_batch", "draft_logits", "invalid_drafts")),
    Name("V2", _REJECTION, "RejectionSampler", attributes=("sampler",)),
    Name(
        "V2",
        f"{_GPU}.model_runner",
        "GPUModelRunner",
        attributes=(
            "req_states",
            "sampler",
            "rejection_sampler",
            "speculator",
            "batch_sharder",
            "is_last_pp_rank",
            "vocab_size",
            "num_speculative_steps",
            "get_model",
            "get_draft_model",
        ),
    ),
    Name("V2", _REJECTION, "rejection_sample"),  # imported there by name, and called by it
    Name("V2", f"{_GPU}.spec_decode.speculator", "DraftModelSpeculator", attributes=("draft_logits",)),
    Name(
        "V2",
        f"{_GPU}.spec_decode.target_dependent_ar.speculator",
        "TargetDependentARSpeculator.propose",
        parameters=("input_batch", "aux_hidden_states", "dummy_run"),
    ),
    Name("V2", f"{_GPU}.buffer_utils", "StagedWriteTensor", attributes=("gpu",)),
    Name("V2", f"{_GPU}.buffer_utils", "UvaBackedTensor", attributes=("gpu", "np")),
    Name("V2", "vllm.config.model", "PROCESSED_LOGPROBS_MODES"),
    Name(
        "V2",
        f"{_GPU}.states",
        "RequestState",
        attributes=("all_token_ids", "prompt_len", "total_len", "req_id_to_index", "index_to_req_id", "max_num_reqs", "device"),
    ),
    Name(
        "V2",
        f"{_GPU}.input_batch",
        "InputBatch",
        attributes=("req_ids", "idx_mapping_np", "cu_num_logits_np", "query_start_loc_np", "positions"),
    ),
    Name(
        "V2",
        _SAMPLER,
        "Sampler",
        attributes=(
            "logits_processors",
            "thinking_budget_state",
            "needs_logits_processing",
            "return_sampling_mask",
            "logprobs_mode",
        ),
    ),
    Name(
        "V2", f"{_GPU}.sample.logits_processor.interface", "LogitsProcessor.add_request", parameters=("req_idx", "sampling_params")
    ),
    Name("V2", f"{_GPU}.sample.logits_processor.interface", "LogitsProcessor.apply", parameters=("logits", "ctx")),
    Name("V2", f"{_GPU}.sample.logits_processor.interface", "LogitsProcessor.apply_staged_writes"),
    Name(
        "V2",
        f"{_GPU}.sample.logits_processor.interface",
        "LogitsContext",
        attributes=("idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "input_ids"),
    ),
    Name(
        "V2",
        f"{_GPU}.sample.thinking_budget",
        "ThinkingBudgetState",
        attributes=(
            "enabled",
            "req_states",
            "use_thinking_budget",
            "cached_last_start",
            "cached_last_end",
            "cached_scan_pos",
            "_reset_reqs",
            "reasoning_start_token_ids",
            "natural_reasoning_end_token_ids",
            "reasoning_end_token_ids",
        ),
    ),
    Name("V2", f"{_GPU}.sample.thinking_budget", "ThinkingBudgetState.add_request", first=("self", "req_idx", "sampling_params")),
    Name("V2", f"{_GPU}.sample.thinking_budget", "ThinkingBudgetState.apply_staged_writes", first=("self",)),
    Name("V2", f"{_GPU}.sample.thinking_budget", "ThinkingBudgetState.apply", first=("self", "logits", "ctx")),
    Name(
        "V2",
        f"{_GPU}.sample.thinking_budget",
        "apply_thinking_budget",
        parameters=(
            "logits",
            "req_ids",
            "expanded_idx_mapping",
            "thinking_token_budget",
            "all_token_ids",
            "total_len",
            "input_ids",
            "expanded_local_pos",
            "cached_last_start",
            "cached_last_end",
            "cached_scan_pos",
            "reasoning_start_token_ids",
            "natural_reasoning_end_token_ids",
            "reasoning_end_token_ids",
        ),
    ),
    Name("V2", f"{_GPU}.sample.gumbel", "tl_rand32", first=("seed", "offset", "includes_zero")),
    Name(
        BOTH,
        "vllm.v1.worker.gpu_worker",
        "Worker",
        attributes=(
            "load_model",
            "execute_model",
            "init_weight_transfer_engine",
            "start_draft_weight_update",
            "update_weights",
            "finish_weight_update",
            "weight_transfer_engine",
            "_weight_update_active",
        ),
    ),
    Name(
        BOTH, "vllm.v1.worker.worker_base", "WorkerBase", attributes=("vllm_config", "is_driver_worker", "device", "model_runner")
    ),
    Name(BOTH, "vllm.v1.worker.cpu_worker", "CPUWorker"),
    Name(BOTH, "vllm.v1.core.sched.output", "SchedulerOutput", attributes=("finished_req_ids", "scheduled_new_reqs")),
    Name(BOTH, "vllm.v1.core.sched.output", "NewRequestData", attributes=("req_id", "prefill_token_ids", "prompt_len")),
    Name(BOTH, "vllm.sampling_params", "SamplingParams", attributes=("extra_args", "thinking_token_budget", "temperature")),
    Name(BOTH, "vllm.platforms.interface", "Platform", attributes=("is_cpu", "device_type")),
    Name(
        BOTH,
        "vllm.config.vllm",
        "VllmConfig",
        attributes=(
            "additional_config",
            "model_config",
            "parallel_config",
            "reasoning_config",
            "scheduler_config",
            "speculative_config",
            "use_v2_model_runner",
            "watermark_config",
            "weight_transfer_config",
        ),
    ),
    Name(
        BOTH,
        "vllm.config.speculative",
        "SpeculativeConfig",
        attributes=(
            "method",
            "model",
            "num_speculative_tokens",
            "draft_model_config",
            "draft_sample_method",
            "rejection_sample_method",
            "parallel_drafting",
            "enable_adaptive_verification",
        ),
    ),
    Name(
        BOTH, "vllm.config.model", "ModelConfig", attributes=("uses_mrope", "dtype", "head_dtype", "model", "skip_tokenizer_init")
    ),
    Name(BOTH, "vllm.tokenizers.registry", "cached_tokenizer_from_config", first=("model_config",)),
    Name(BOTH, "vllm.tokenizers.protocol", "TokenizerLike", attributes=("all_special_ids", "get_added_vocab")),
    Name(BOTH, "vllm.config.scheduler", "SchedulerConfig", attributes=("async_scheduling",)),
    Name(
        BOTH,
        "vllm.config.reasoning",
        "ReasoningConfig",
        attributes=("reasoning_start_token_ids", "reasoning_end_token_ids", "natural_reasoning_end_token_ids"),
    ),
    Name(BOTH, "vllm.config.weight_transfer", "WeightTransferConfig", attributes=("backend",)),
    Name(
        BOTH,
        "vllm.config.parallel",
        "ParallelConfig",
        attributes=(
            "world_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "data_parallel_size",
            "data_parallel_rank",
        ),
    ),
    Name(BOTH, "vllm.distributed.parallel_state", "get_pp_group"),
    Name(BOTH, "vllm.distributed.parallel_state", "get_tp_group"),
    Name(BOTH, "vllm.distributed.parallel_state", "GroupCoordinator", attributes=("cpu_group", "is_last_rank")),
    Name(
        BOTH,
        f"{_TRANSFER}.base",
        "WeightTransferEngine",
        attributes=(
            "device",
            "model",
            "model_config",
            "parse_update_info",
            "reset_weight_update_target",
            "init_transfer_engine",
            "start_weight_update",
            "update_weights",
            "receive_weights",
            "finish_weight_update",
            "shutdown",
        ),
    ),
    Name(BOTH, f"{_TRANSFER}.base", "WeightTransferInitInfo"),
    Name(BOTH, f"{_TRANSFER}.base", "WeightTransferUpdateInfo"),
    Name(BOTH, f"{_TRANSFER}.factory", "WeightTransferEngineFactory", attributes=("_registry", "register_engine")),
    Name(BOTH, "vllm.model_executor.layers.linear", "UnquantizedLinearMethod", attributes=("process_weights_after_loading",)),
    Name(
        BOTH,
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod",
        attributes=("process_weights_after_loading",),
    ),
    Name(BOTH, f"{_RELOAD}.layerwise", "initialize_layerwise_reload"),
    Name(BOTH, f"{_RELOAD}.layerwise", "finalize_layerwise_reload"),
    Name(BOTH, f"{_RELOAD}.layerwise", "get_layerwise_info"),
    Name(BOTH, f"{_RELOAD}.layerwise", "_get_original_loader"),
    Name(BOTH, f"{_RELOAD}.layerwise", "_place_kernel_tensors"),
    Name(BOTH, f"{_RELOAD}.types", "LayerReloadingInfo", attributes=("can_load", "reset", "restore_metadata")),
    Name(BOTH, f"{_RELOAD}.meta", "materialize_meta_tensor"),
    Name(BOTH, f"{_RELOAD}.utils", "get_layer_tensors"),
)


def missing(runner: str, lookup: Callable[[str, str], Found | None] | None = None) -> list[str]:
    """What this runner's names lack, a sentence each; none where the plugin fits.

    lookup: module and name -> what a vLLM has there; None: the installed one.
    """
    find = lookup or installed
    out = []
    for name in NAMES:
        if name.runner not in (runner, BOTH):
            continue
        found = find(name.module, name.name)
        if found is None:
            out.append(f"{name.where} is gone")
            continue
        if found.parameters[: len(name.first)] != name.first:
            out.append(f"{name.where} has parameters {found.parameters}, expected them to begin with {name.first}")
        for kind, wanted, there in (
            ("parameter", name.parameters, found.parameters),
            ("attribute", name.attributes, found.attributes),
        ):
            out += [f"{name.where} has no {kind} {one!r} any more" for one in wanted if one not in there]
    return out


def installed(module: str, name: str) -> Found | None:
    """What the installed vLLM has; None: nothing of that name."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return None
    return in_source(Path(package.submodule_search_locations[0]).parent, module, name)


def in_source(root: Path, module: str, name: str) -> Found | None:
    """What a source tree has; ``root`` holds the directory vllm."""
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    tree = _parsed(path) if path.exists() else None
    if tree is not None and name in _imported(tree):
        return Found()  # a name of this module, though made elsewhere: bound here all the same
    scope: ast.AST | None = tree
    for part in name.split("."):
        scope = next((node for node in _definitions(scope) if getattr(node, "name", None) == part), None)
        if scope is None:
            return None
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        given = scope.args
        return Found(parameters=tuple(a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)))
    if not isinstance(scope, ast.ClassDef):
        return Found()  # a constant
    return Found(attributes=tuple(sorted(_attributes(scope))))


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(tree: ast.Module) -> set[str]:
    return {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def _definitions(scope: ast.AST | None) -> list[ast.AST]:
    """Functions, classes and constants of a module or class, each with a name."""
    found: list[ast.AST] = []
    for node in getattr(scope, "body", []):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    target.name = target.id  # type: ignore[attr-defined]
                    found.append(target)
    return found


def _attributes(scope: ast.ClassDef) -> set[str]:
    """Methods, fields, and what any method sets on self."""
    out = {node.name for node in _definitions(scope)}  # type: ignore[attr-defined]
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self":
            out.add(node.attr)
    return out
