"""What each rule costs beside the stock verification: `python -m benchmarks.rules [--json FILE] [--vocab V ...] [--rows N ...]`.

For each size, in one process: the median time of vLLM's own `rejection_sample`, and of what the plugin does before and after it
for one rule, with the default support filter and without (`FilteredRule.rewrite` and `restore`). The ratio is rule over stock.
Peak memory is what a call allocates beyond the rows it is given. Rows are logits N(0, 3^2) for the target and N(0, 1.5^2) more
for the draft, seed 0; a drafted token is drawn from the draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from agentguard.rulespec import KNOBS, RuleSpec
from engine_plugins import rules

VOCABULARIES = (320, 49_152, 151_936)
ROWS = (6, 48, 384)
K = 6


def rows_of(n: int, v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, v, generator=generator) * 3
    q = torch.softmax(logits + torch.randn(n, v, generator=generator) * 1.5, -1)
    return logits, q, torch.multinomial(q, 1, generator=generator).squeeze(-1)


def seconds(call: Callable[[], Any], prepare: Callable[[], Any], repeats: int) -> float:
    prepare()
    call()
    spent = []
    for _ in range(repeats):
        prepare()
        started = time.perf_counter()
        call()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Largest sum of live allocations during the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def measure(v: int, n: int, repeats: int) -> list[dict[str, Any]]:
    logits, q, x = rows_of(n, v)
    draft, size = q.clone(), n // K
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(size), generators={})
    bonus = torch.zeros((size, 1), dtype=torch.int32)
    ends = torch.arange(K, n + 1, K, dtype=torch.int32)

    def stock() -> torch.Tensor:
        return rejection_sampler.rejection_sample(x.int(), [K] * size, K, ends, q, logits, bonus, metadata)

    base = seconds(stock, lambda: None, repeats)
    out = [
        {"rule": "stock", "filter": False, "V": v, "rows": n, "ms": base * 1e3, "ratio": 1.0, "peak_mib": peak_bytes(stock) / 2**20}
    ]
    for name, knobs in KNOBS.items():
        text = str(RuleSpec(name, {k.name: float(k.usual) for k in knobs}))
        for filtered in (True, False):
            rule = rules.get(RuleSpec.parse(text).for_request() if filtered else text)

            def call(rule: rules.FilteredRule = rule) -> None:
                rule.rewrite(logits, draft, x).restore(logits)

            spent = seconds(call, lambda: draft.copy_(q), repeats)
            draft.copy_(q)
            row = {
                "rule": str(rule.spec),
                "filter": rule.spec.filtered,
                "V": v,
                "rows": n,
                "ms": spent * 1e3,
                "ratio": spent / base,
            }
            out.append(row | {"peak_mib": peak_bytes(call) / 2**20})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--vocab", type=int, nargs="*", default=list(VOCABULARIES))
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    current_platform.register_triton_kernel_overrides()  # type: ignore[attr-defined]
    results = []
    for v in arguments.vocab:
        for n in arguments.rows:
            for row in measure(v, n, arguments.repeats):
                figures = f"{row['ms']:>9.2f} ms {row['ratio']:>7.3f} {row['peak_mib']:>7.1f} MiB"
                print(f"{row['V']:>7} {row['rows']:>4} {figures}  {row['rule']}")
                results.append(row)
    if arguments.json:
        document = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
