"""Several ranks, one decision: what has to be the same on all of them, and who speaks.

Under tensor parallelism every rank verifies the same rows for itself, and no rank hears of another's outcome: one that decides
differently goes on with other tokens. Equal inputs give equal bits only if the same code runs in the same order on each. What could
differ between ranks, and what keeps it from differing:

* block sizes (`engine_plugins.kernels.tuning`): another size adds up in another order. None is measured at start-up;
* kernels on one rank and twins on another, other versions, other settings: compared at start-up (`agree`);
* limits and rules that change while requests run: they come by collective RPC, which every rank sees between the same two steps;
* atomics and data-dependent launches: the kernels have none.

Under data parallelism the engines are independent. Each has a telemetry address and a name of its own (`address`).
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from agentguard.errors import PluginError


def agree(facts: dict[str, str], group: Any) -> None:
    """Raise PluginError on every rank unless all have the same facts. ``group``: a CPU (gloo) process group, None for one rank."""
    if group is None or dist.get_world_size(group) == 1:
        return
    found: list[dict[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, facts, group=group)
    for name in sorted(facts):
        values = {(one or {}).get(name, "missing") for one in found}
        if len(values) > 1:
            raise PluginError(
                f"the ranks of this engine differ in {name}: {', '.join(sorted(values))}; they would accept different tokens, so "
                "give every rank the same environment"
            )


def speaks(worker: Any, last_stage: bool) -> bool:
    """Does this rank publish telemetry? The first one of the last pipeline stage, where the sampler is. ``last_stage``: is it
    there."""
    return bool(worker.is_driver_worker) and last_stage


def address(endpoint: str, engine: str, parallel: Any) -> tuple[str, str]:
    """The telemetry address and the engine's name of this data parallel rank: the first rank keeps them, others get a suffix.

    An ipc:// path is one socket, and a tcp:// port would be taken.
    """
    rank = int(getattr(parallel, "data_parallel_rank", 0) or 0)
    if rank == 0:
        return endpoint, engine
    if not endpoint.startswith("ipc://"):
        raise PluginError(f"telemetry={endpoint!r} cannot be shared by data parallel engines; use an ipc:// address")
    return f"{endpoint}-dp{rank}", f"{engine}-dp{rank}"


def facts(**more: str) -> dict[str, str]:
    """What decides how rows are added up, as text."""
    import torch

    from engine_plugins.vllm.compat import vllm_version

    asked = {name: os.environ.get(name, "") for name in ("AG_KERNELS", "AG_BLOCK", "TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")}
    return {"vLLM": str(vllm_version()), "torch": str(torch.__version__), **asked, **more}
