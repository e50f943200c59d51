"""Makes machine code of every kernel for compute capability 9.0, with ptxas, as serving launches it: `python -m
tests.compile_kernels` prints the name of each. The interpreter accepts what the compiler does not.

Run by tests/test_kernels.py in a process of its own, as Triton decides once whether it interprets.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# vLLM's CPU build turns Triton off unless a backend of that name is there, and the coins are its generator's
backends["cpu"] = SimpleNamespace(  # type: ignore[assignment]
    driver=SimpleNamespace(is_active=lambda: True), compiler=SimpleNamespace(supports_target=lambda _: False)
)

from engine_plugins.kernels import phase, rows  # noqa: E402
from engine_plugins.vllm import coins  # noqa: E402

# the dtypes of Model Runner V2: slots int64, steps and drafted tokens int32; what is not named is an int32 scalar
TYPES = {
    "part_ptr": "*fp32", "top_ptr": "*fp32", "target_ptr": "*fp32", "draft_ptr": "*bf16", "x_ptr": "*i64", "want_ptr": "*i32",
    "slot_ptr": "*i64", "step_ptr": "*i32", "temperature_ptr": "*fp32", "stats_ptr": "*fp32", "verdict_ptr": "*i32",
    "flags_ptr": "*i32", "rule_ptr": "*fp32", "sums_ptr": "*fp32", "ends_ptr": "*i32", "slots_ptr": "*i64", "drafted_ptr": "*i32",
    "inside_ptr": "*i32", "state_ptr": "*i32", "tokens_ptr": "*i32", "prompt_ptr": "*i32", "total_ptr": "*i32", "start_ptr": "*i64",
    "end_ptr": "*i64", "limits_ptr": "*i32", "close_at_ptr": "*i32", "position_ptr": "*i64", "seed_ptr": "*i64",
}  # fmt: skip
ROW = {"BLOCK": 4096}
WRITE = {**ROW, "BLOCKS": 64}
# a scalar argument that is 1 is a constant for Triton: rows of one block, the flags of the layout, an end marker with the id 1
VARIANTS: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    (rows.partials_kernel, {**ROW, "HAS_DRAFT": True}, {}),
    (rows.partials_kernel, {**ROW, "HAS_DRAFT": False}, {"target_ptr": "*bf16"}),
    (rows.partials_kernel, {**ROW, "HAS_DRAFT": True, "blocks": 1}, {"target_ptr": "*fp16", "draft_ptr": "*fp16"}),
    (rows.tops_kernel, ROW, {}),
    (rows.tops_kernel, {**ROW, "blocks": 1}, {"draft_ptr": "*fp32"}),
    (rows.decide_kernel, {"BLOCKS": 64, "HAS_DRAFT": True, "HAS_RULES": True}, {}),
    (rows.decide_kernel, {"BLOCKS": 64, "HAS_DRAFT": False, "HAS_RULES": True}, {"target_ptr": "*bf16"}),
    (rows.decide_kernel, {"BLOCKS": 1, "HAS_DRAFT": False, "HAS_RULES": False, "blocks": 1, "end": 1}, {}),
    (rows.sums_kernel, ROW, {}),
    (rows.sums_kernel, {**ROW, "blocks": 1}, {"draft_ptr": "*fp32"}),
    (rows.write_kernel, {**WRITE, "HAS_SUMS": True}, {}),
    (rows.write_kernel, {**WRITE, "HAS_SUMS": False}, {"draft_ptr": "*fp16"}),
    (rows.write_kernel, {**ROW, "BLOCKS": 1, "HAS_SUMS": True, "blocks": 1}, {"draft_ptr": "*fp32"}),
    (rows.layout_kernel, {}, {}),
    (rows.layout_kernel, {"listened": 1, "has_draft": 1}, {}),
    (phase.advance_kernel, {"START": 1, "END": 1, "BLOCK": phase.SCAN, "HAS_LIMITS": True}, {}),
    (phase.advance_kernel, {"START": 2, "END": 3, "BLOCK": phase.SCAN, "HAS_LIMITS": False}, {"slots_ptr": "*i32"}),
    (phase.ahead_kernel, {"START": 1, "END": 1}, {}),
    (phase.ahead_kernel, {"START": 2, "END": 3}, {"slots_ptr": "*i32"}),
    (coins._coins_kernel, {}, {}),
]
SMALL = (rows.decide_kernel, rows.layout_kernel, phase.advance_kernel, phase.ahead_kernel, coins._coins_kernel)


def main() -> None:
    for kernel, fixed, other in VARIANTS:
        names, types = kernel.arg_names, TYPES | other
        signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in fixed.items()})
        warps = 1 if kernel in SMALL else 8
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert len(built.asm["cubin"]) > 1000
        print(kernel.__name__)


if __name__ == "__main__":
    main()
