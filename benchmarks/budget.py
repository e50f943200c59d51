"""What the think budget costs a step of the engine: milliseconds for 64 requests, six drafts each.

python -m benchmarks.budget [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine_plugins.vllm.budget import BudgetHolder, Closing
from engine_plugins.vllm.phase import ThinkMarkers

REQUESTS, DRAFTS, STEPS = 64, 6, 400
FAMILIES = {
    "single-token markers": (ThinkMarkers((1,), (2,)), Closing((), (2,), ())),
    "markers of three tokens": (ThinkMarkers((1, 3, 4), (2, 3, 4)), Closing((), (2, 3, 4), ())),
    "a lead behind the marker": (ThinkMarkers((1,), (2,)), Closing((), (2,), (5, 6, 7))),
}


def cost(markers: ThinkMarkers, closing: Closing, *, thinking: bool) -> float:
    """Milliseconds a step, all requests inside their traces or all behind them."""
    prompt = [9, *markers.start] if thinking else [9, *markers.start, *markers.end]
    params = SimpleNamespace(thinking_token_budget=None, extra_args={"ag_think_tokens": 1 << 20})
    names = [f"chatcmpl-{i:08}-0123abcd" for i in range(REQUESTS)]
    runner: Any = SimpleNamespace(
        requests={n: SimpleNamespace(prompt_token_ids=prompt, output_token_ids=[], sampling_params=params) for n in names},
        input_batch=SimpleNamespace(req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}),
    )
    holder = BudgetHolder(runner, markers, closing)
    holder.sync_batch(SimpleNamespace(added=[object()], removed=[], moved=[]))
    drafts = [[20 + j for j in range(DRAFTS)] for _ in range(REQUESTS)]
    logits = torch.zeros(REQUESTS * DRAFTS, 64)
    started = time.process_time()
    for _ in range(STEPS):
        holder.update_state([], drafts)
        holder.apply_to_logits(logits, True, drafts)
        holder.apply_to_logits(logits, False, drafts)
        for request in runner.requests.values():
            request.output_token_ids.extend((20, 21, 22, 23))
    return (time.process_time() - started) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = {
        f"ms a step, {name}, {'thinking' if thinking else 'answering'}": round(cost(*family, thinking=thinking), 3)
        for name, family in FAMILIES.items()
        for thinking in (True, False)
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
