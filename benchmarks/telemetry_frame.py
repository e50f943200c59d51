"""What a telemetry frame of Model Runner V2 costs: `python -m benchmarks.telemetry_frame`. Prints one JSON.

CPU time of one thread (`time.thread_time`), in ms, medians of 31: `step` is what the step itself pays, `deliver` what the worker's
outbox pays behind it, under the GIL that the next step needs; `read` is what the gateway pays to make the event of it. K = 4 drafts
a request, random statistics, seed 0. Times depend on the machine; what counts is `deliver` over `read`, from one run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from agentguard.events import decode_msgpack, encode_msgpack
from engine_plugins.kernels import Choice, batch
from engine_plugins.vllm.observe import Rounds
from engine_plugins.vllm.seam_v2 import SeamV2

K, REPEATS = 4, 31


class Tap:
    """Keeps the last frame as it would go out."""

    def publish(self, t: float, step: int, rounds: Rounds) -> None:
        self.raw = encode_msgpack(rounds.packed(t, "engine", step))


def milliseconds(call: Callable[[], Any]) -> float:
    started = time.thread_time()
    call()
    return (time.thread_time() - started) * 1e3


def frame(requests: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    rows = requests * (K + 1)
    stats = torch.rand(rows, batch.STATS, generator=generator)
    stats[:, batch.FLAGS] = 0
    stats[:, batch.TOKEN] = torch.randint(150_000, (rows,), generator=generator).float()
    stats[:, batch.RANK] = 1
    ends = torch.arange(0, rows + 1, K + 1, dtype=torch.int32)
    number = torch.full((requests,), 3, dtype=torch.int32)
    names, tap = [f"chatcmpl-{i:032x}" for i in range(requests)], Tap()
    slots: Any = SimpleNamespace(admitted=[SimpleNamespace(asked="cactus:delta=0.25,p_min=0.1,top_k=10")] * requests)
    given: Any = tap
    seam = SeamV2(lambda: None, slots, tap=given, choice=Choice(False, ""), reported=False)  # type: ignore[arg-type, return-value]
    sent: list[tuple[Any, Any]] = []
    outbox: Any = SimpleNamespace(send=lambda tensors, deliver: sent.append((tensors, deliver)))
    seam.outbox = outbox
    spent: dict[str, list[float]] = {"step": [], "deliver": [], "read": []}
    for _ in range(REPEATS):
        spent["step"].append(milliseconds(lambda: seam._publish(stats, ends, number, names, np.arange(requests))))
        tensors, deliver = sent.pop()
        spent["deliver"].append(milliseconds(lambda deliver=deliver, tensors=tensors: deliver(tensors)))  # type: ignore[misc]
        spent["read"].append(milliseconds(lambda: decode_msgpack(tap.raw)))
    medians = {name: round(statistics.median(values), 3) for name, values in spent.items()}
    return {"requests": requests, **medians, "bytes": len(tap.raw)}


if __name__ == "__main__":
    print(json.dumps([frame(requests) for requests in (64, 256, 512)], indent=1))
