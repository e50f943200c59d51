"""One rank of a tensor-parallel engine on V2, on a CPU: `python -m tests.v2_ranks RANK STORE TAP` prints on what they agree."""

from __future__ import annotations

import json
import sys
import warnings

from tests import v2_scenarios  # before vLLM

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

from agentguard.rulespec import RuleSpec
from engine_plugins.kernels import batch as words
from engine_plugins.kernels import launch, table, tuning
from engine_plugins.kernels.batch import Batch, table_of


def rows() -> bytes:
    """What the kernels write for a row of 50,000 tokens; the same rows on every rank."""
    generator = torch.Generator().manual_seed(4)
    target, draft = torch.randn(3, 50_000, generator=generator) * 3, torch.randn(3, 1, 50_000, generator=generator)
    numbers = table_of([table.numbers(RuleSpec.parse("lenience:0.3,p_min=0.0001"))] * 3)
    shape = tuning.FIXED
    batch = Batch.of(target, torch.tensor([5, 6, 7]), draft)
    stats, verdict = launch.statistics(batch, numbers, shape=shape)
    launch.rewrite(batch, numbers, stats, verdict, sums=True, shape=shape)
    known = stats[:, [words.LOG_Z, words.ENTROPY, words.PX, words.QX]]
    return b"".join(one.contiguous().numpy().tobytes() for one in (known, verdict, target))


def main() -> None:
    warnings.simplefilter("ignore")
    rank, store, endpoint = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = v2_scenarios.installed(rank, 2, endpoint)
    mine = (found["digest"], found["bound"], rows())
    all_of_them: list[object] = [None, None]
    dist.all_gather_object(all_of_them, mine)
    same = [a == b for a, b in zip(*all_of_them, strict=True)]  # type: ignore[call-overload]
    print("RESULT" + json.dumps({"same": same, "tap": found["tap"], "heard": found["heard"]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
