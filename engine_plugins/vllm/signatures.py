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


@dataclass(frozen=True, slots=True)
class Name:
    """A function, class or method, by module and qualified name, and what is asked of it.

    parameters: it has all of these; first: its parameters begin with these, as a class is called by position; attributes: of a
    class, set anywhere in it.
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
        attributes=("input_batch", "requests", "drafter", "rejection_sampler"),
    ),
    Name("V2", f"{_GPU}.spec_decode.rejection_sampler_utils", "rejection_sample", first=_V2_VERIFIED),
    Name("V2", _REJECTION, "RejectionSampler.__call__", parameters=("logits", "input_batch", "draft_logits", "invalid_drafts")),
    Name("V2", _REJECTION, "RejectionSampler", attributes=("sampler",)),
    Name(
        "V2",
        f"{_GPU}.model_runner",
        "GPUModelRunner",
        attributes=("req_states", "sampler", "rejection_sampler", "speculator", "batch_sharder"),
    ),
    Name(
        "V2",
        f"{_GPU}.states",
        "RequestState",
        attributes=("all_token_ids", "prompt_len", "total_len", "req_id_to_index", "index_to_req_id", "max_num_reqs", "device"),
    ),
    Name("V2", f"{_GPU}.input_batch", "InputBatch", attributes=("req_ids", "idx_mapping_np")),
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
    Name("V2", "vllm.v1.worker.gpu_worker", "Worker.load_model"),
    Name("V2", "vllm.v1.worker.gpu_worker", "Worker.start_draft_weight_update"),
)


def missing(runner: str, lookup: Callable[[str, str], Found | None] | None = None) -> list[str]:
    """What this runner's names lack, a sentence each; none where the plugin fits.

    lookup: module and name -> what a vLLM has there; None: the installed one.
    """
    find = lookup or installed
    out = []
    for name in NAMES:
        if name.runner != runner:
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
    assert isinstance(scope, ast.ClassDef)
    return Found(attributes=tuple(sorted(_attributes(scope))))


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(tree: ast.Module) -> set[str]:
    return {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def _definitions(scope: ast.AST | None) -> list[ast.AST]:
    body = getattr(scope, "body", [])
    return [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]


def _attributes(scope: ast.ClassDef) -> set[str]:
    """Methods, annotated fields, and what any method sets on self."""
    out = {node.name for node in _definitions(scope)}  # type: ignore[attr-defined]
    out |= {node.target.id for node in scope.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self":
            out.add(node.attr)
    return out
