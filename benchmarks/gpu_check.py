"""What `gpu_check.sh` runs: `python -m benchmarks.gpu_check [--interpret] [OUT.json]`. Prints one JSON; exit 1 where a check
failed, 3 where all checks passed and a goal of time was missed.

Needs torch and triton, and nothing else. Rows are logits N(0, 3^2) for the target and N(0, 1.5^2) more for the draft, seed 0; a
drafted token is drawn from the draft; K = 4 drafts a request. Times are medians, measured with CUDA events behind a pause of the
device, so that they are the device's own work and not the gaps between launches; `host_ms` is what the launches cost the host.

The stock path is vLLM's own V2 `rejection_sample` where it is installed. Where it is not, it is what that function has to read,
done in torch (softmax of both rows, the ratio, one race over the residual); the JSON says which it was.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from agentguard.rulespec import RuleSpec
from engine_plugins import kernels, rules
from engine_plugins.kernels import batch as words
from engine_plugins.kernels import launch, phase, table, tuning, twin
from engine_plugins.kernels.batch import Batch, table_of
from engine_plugins.rules.exact import acceptance_of, recovered_of

K = 4
STEP_MS = 10.0
NOISE = 0.02  # of a ratio of two medians
PAUSE_CYCLES = 2_000_000  # about 1 ms
GOALS = {"strict": 1.0, "relaxed_over_stock": 1.5, "share_of_step_to_64_rows": 0.01, "share_of_step_at_512_rows": 0.03}
CHECKED = (
    "strict:p_min=0.1", "cactus:0.25", "lenience:0.3", "mentored-dec:0.5", "interp:0.4", "typical:eps=0.09,delta=0.3", "fuzzy:0.3",
    "r-fuzzy:0.2", "casc-chow:0.6", "casc-diff:0.1", "casc-opt:0.5", "casc-tok-v1:0.2", "casc-tok-v2:0.2", "casc-tok-v3:0.3",
)  # fmt: skip
TIMED = (
    "cactus:delta=0.25",
    "lenience:l=0.63",
    "typical:eps=0.09,delta=0.3",
    "r-fuzzy:T=0.3",
    "casc-tok-v3:alpha=0.3",
    "interp:w=0.3",
)


def rows_of(requests: int, v: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Target logits [requests * (K + 1), V], draft logits [requests, K, V], drafted tokens [requests, K]."""
    generator = torch.Generator(device).manual_seed(0)
    draft = torch.empty(requests, K, v, dtype=dtype, device=device)
    target = torch.empty(requests, K + 1, v, device=device)
    x = torch.empty(requests, K, dtype=torch.int64, device=device)
    for i in range(requests):  # one request at a time: 512 rows of 151,936 in float32 are 0.3 GB
        target[i] = torch.randn(K + 1, v, generator=generator, device=device) * 3
        draft[i] = (target[i, :K] + torch.randn(K, v, generator=generator, device=device) * 1.5).to(dtype)
        x[i] = torch.multinomial(draft[i].float().softmax(-1), 1, generator=generator).squeeze(-1)
    return target.view(-1, v), draft, x


def laid_out(target: torch.Tensor, draft: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> Callable[[], Batch]:
    """The layout of a V2 step, as the seam calls for it."""
    n, device = len(x), target.device
    arguments = (
        torch.arange(0, n * (K + 1) + 1, K + 1, dtype=torch.int32, device=device), torch.arange(n, device=device),
        torch.arange(n, device=device).repeat_interleave(K + 1), torch.arange(K + 1, device=device).repeat(n),
        torch.cat([x.new_zeros(n, 1), x], 1).flatten(), torch.ones(n, device=device), numbers,
        torch.full((n * (K + 1),), 1, dtype=torch.int32, device=device), target, draft,
    )  # fmt: skip
    return lambda: launch.layout(*arguments, listened=False)


def check(v: int, device: str, dtype: torch.dtype, requests: int, checked: tuple[str, ...]) -> dict[str, Any]:
    """Kernel and twin on the same rows, every rule with and without the filter: the largest differences."""
    worst = {"px": 0.0, "acceptance": 0.0, "residual": 0.0}
    exact = True
    for text in checked:
        for extra in ("", "p_min=0.1,top_k=3"):
            spec = RuleSpec.parse(text if not extra or "p_min" in text else f"{text},{extra}")
            numbers = table_of([table.numbers(spec)] * requests, device)
            target, draft, x = rows_of(requests, v, device, dtype)
            target[0], target[K + 1, 5:] = 0.5, -torch.inf  # all equal; nearly everything forbidden
            mine = laid_out(target.clone(), draft.clone(), x, numbers)()
            other = laid_out(target.clone(), draft.clone(), x, numbers)()
            stats, verdict = launch.statistics(mine, numbers)
            launch.rewrite(mine, numbers, stats, verdict, sums=table.passes({int(numbers[0, 0])}, filtered=spec.filtered))
            expected, judged = twin.statistics(other, numbers)
            twin.rewrite(other, judged, [rules.get(spec)] * requests)
            wanted = mine.want != 0
            for column in (words.RANK, words.ARGMAX, words.FLAGS):
                exact &= bool(torch.equal(stats[wanted, column], expected[wanted, column]))
            exact &= bool(torch.equal(verdict, judged))
            worst["px"] = max(worst["px"], float((stats[wanted, words.PX] - expected[wanted, words.PX]).abs().max()))
            drafted = (mine.x >= 0).nonzero().squeeze(-1)
            at = mine.x[drafted]
            pairs = [
                (one.target[drafted].double().softmax(-1), one.draft.view(-1, v).double().softmax(-1))
                for one in (mine, other)
                if one.draft is not None
            ]
            accepted = [acceptance_of(pair, at) for pair in pairs]
            worst["acceptance"] = max(worst["acceptance"], float((accepted[0] - accepted[1]).abs().max()))
            rejects = accepted[1] < 1 - 1e-6
            if bool(rejects.any()):
                left = [recovered_of(pair)[rejects] for pair in pairs]
                worst["residual"] = max(worst["residual"], float((left[0] - left[1]).abs().max()))
    return {
        "V": v,
        "dtype": str(dtype),
        **worst,
        "exact": exact,
        "passed": exact and worst["px"] <= 1e-6 and max(worst.values()) <= 2e-6,
    }


def repeatable(v: int, device: str, requests: int) -> dict[str, Any]:
    """Equal inputs, equal bits."""
    numbers = table_of([table.numbers(RuleSpec.parse("lenience:0.3,p_min=0.05"))] * requests, device)
    outcomes = []
    for _ in range(3):
        target, draft, x = rows_of(requests, v, device, torch.bfloat16)
        one = laid_out(target, draft, x, numbers)()
        stats, verdict = launch.statistics(one, numbers)
        launch.rewrite(one, numbers, stats, verdict, sums=True)
        outcomes.append((target, draft, stats[one.want != 0]))
    same = all(bool((a == b).all()) for other in outcomes[1:] for a, b in zip(outcomes[0][:2], other[:2], strict=True))
    return {"passed": same}


def traced(device: str) -> dict[str, Any]:
    """The phase kernels: inside after the start marker, outside behind the end marker, also among drafts."""
    tokens = torch.tensor([[1, 4, 8, 8, 5, 9, 0, 0]], dtype=torch.int32, device=device)
    state = torch.zeros(1, phase.WIDTH, dtype=torch.int32, device=device)
    markers, slots = phase.Markers((4,), (5,), device), torch.zeros(1, dtype=torch.int64, device=device)
    lengths = [torch.tensor([n], dtype=torch.int32, device=device) for n in (2, 4, 6)]
    limits = torch.tensor([[-1, 5]], dtype=torch.int32, device=device)
    close_at = torch.zeros(1, dtype=torch.int32, device=device)
    phase.advance(state, slots, tokens, lengths[0], lengths[1], markers, limits, close_at)
    ends = torch.tensor([0, 3], dtype=torch.int32, device=device)
    drafted = torch.tensor([8, 5, 9], device=device)
    inside = phase.ahead(state, slots, ends, tokens, lengths[1], drafted, markers, 3).tolist()
    phase.advance(state, slots, tokens, lengths[0], lengths[2], markers, limits, close_at)
    found = {
        "inside": inside,
        "think": int(state[0, phase.BEFORE]),
        "after": int(state[0, phase.INSIDE]),
        "close_at": int(close_at[0]),
    }
    return {**found, "passed": found == {"inside": [1, 0, 0], "think": 2, "after": 0, "close_at": 3}}


def milliseconds(
    call: Callable[[], Any], device: str, repeats: int, prepare: Callable[[], Any] = lambda: None
) -> tuple[float, float]:  # fmt: skip
    """Median times of a call on the device and on the host, the same where there is no device. ``prepare`` runs before each call
    and is not timed."""
    prepare()
    call()
    spent, launched = [], []
    for _ in range(repeats):
        prepare()
        if device == "cpu":
            started = time.perf_counter()
            call()
            launched.append((time.perf_counter() - started) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(PAUSE_CYCLES)  # the host gets ahead, as it is under async scheduling
        begin.record()
        started = time.perf_counter()
        call()
        launched.append((time.perf_counter() - started) * 1e3)
        end.record()
        end.synchronize()
        spent.append(float(begin.elapsed_time(end)))
    return statistics.median(spent or launched), statistics.median(launched)


def shapes(v: int, requests: int, device: str, candidates: tuple[tuning.Shape, ...]) -> dict[str, Any]:
    """Statistics and a rewriting of two passes with each block size, and the fastest one; a start of an engine measures nothing."""
    target, draft, x = rows_of(requests, v, device, torch.bfloat16)
    numbers = table_of([table.numbers(RuleSpec.parse("casc-tok-v3:0.3"))] * requests, device)
    one, kept = laid_out(target, draft, x, numbers)(), target.clone()
    spent: dict[tuning.Shape, list[float]] = {}

    def measure(shape: tuning.Shape) -> float:
        def call() -> None:
            stats, verdict = launch.statistics(one, numbers, shape=shape)
            launch.rewrite(one, numbers, stats, verdict, sums=True, shape=shape)

        spent.setdefault(shape, []).append(milliseconds(call, device, 1 if device == "cpu" else 10, lambda: target.copy_(kept))[0])
        return spent[shape][-1]

    best = tuning.fastest(measure, candidates)
    return {
        "taken": str(tuning.shape_for(device)), "fastest": str(best), "setting": f"{tuning.BLOCK_ENV}={best}",
        "ms": {str(shape): statistics.median(times) for shape, times in spent.items()},
    }  # fmt: skip


def stock_call(target: torch.Tensor, draft: torch.Tensor, x: torch.Tensor) -> tuple[str, Callable[[], Any]]:
    """vLLM's verification of these rows, or in torch what it has to do."""
    n, device = len(x), target.device
    if importlib.util.find_spec("vllm") is not None and device.type == "cuda":
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

        slots = torch.arange(n, dtype=torch.int32, device=device)
        arguments = (
            target, draft, torch.cat([x.new_zeros(n, 1), x], 1).flatten(),
            torch.arange(0, n * (K + 1) + 1, K + 1, dtype=torch.int32, device=device), torch.arange(n * (K + 1), device=device),
            slots, slots.repeat_interleave(K + 1), torch.arange(K + 1, dtype=torch.int32, device=device).repeat(n),
            torch.ones(n, device=device), torch.arange(n, device=device), K,
        )  # fmt: skip
        return "vLLM's V2 rejection_sample", lambda: rejection_sample(*arguments)
    rows, at = target.view(n, K + 1, -1)[:, :K], x.unsqueeze(-1)

    def verify() -> torch.Tensor:
        p, q = rows.softmax(-1), draft.float().softmax(-1)
        accepted = torch.rand(n, K, device=device) < (p.gather(-1, at) / q.gather(-1, at)).squeeze(-1)
        first = accepted.long().cumprod(-1).sum(-1).clamp_max(K - 1)
        left = (p - q).clamp_min_(0)[torch.arange(n, device=device), first]
        return (left / torch.empty_like(left).exponential_()).argmax(-1)

    return "the same work in torch, as vLLM is not installed", verify


def timed(v: int, rows: int, device: str, repeats: int) -> dict[str, Any]:
    """Times at ``rows`` draft rows, in ms: the stock verification, and what the seam does before it under each rule."""
    requests = max(1, rows // K)
    target, draft, x = rows_of(requests, v, device, torch.bfloat16)
    name, call = stock_call(target, draft, x)
    stock, _ = milliseconds(call, device, repeats)
    out: dict[str, Any] = {"V": v, "rows": requests * K, "stock": name, "stock_ms": stock, "rules": {}}
    nothing = table_of([table.numbers(RuleSpec("strict"))] * requests, device)
    statistics_only = laid_out(target, draft, x, nothing)()
    statistics_only.want.fill_(words.WANT_TARGET | words.WANT_DRAFT)
    out["telemetry_ms"], _ = milliseconds(lambda: launch.statistics(statistics_only), device, repeats)
    out["strict"] = strict(call, requests, target, repeats, device)
    kept = target.clone(), draft.clone()
    for text in TIMED:
        spec = RuleSpec.parse(text).for_request()
        numbers = table_of([table.numbers(spec)] * requests, device)
        sums = table.passes({int(numbers[0, 0])}, filtered=spec.filtered)
        lay = laid_out(target, draft, x, numbers)

        def rewritten(lay: Callable[[], Batch] = lay, numbers: torch.Tensor = numbers, sums: bool = sums) -> None:
            one = lay()
            stats, verdict = launch.statistics(one, numbers)
            launch.rewrite(one, numbers, stats, verdict, sums=sums)

        spent, host = milliseconds(rewritten, device, repeats, lambda: (target.copy_(kept[0]), draft.copy_(kept[1])))
        out["rules"][str(spec)] = {
            "ms": spent, "host_ms": host, "over_stock": (stock + spent) / stock, "share_of_step": spent / STEP_MS,
        }  # fmt: skip
    allowed = GOALS["share_of_step_to_64_rows"] if rows <= 64 else GOALS["share_of_step_at_512_rows"]
    worst = max(out["rules"].values(), key=lambda one: one["ms"])
    out["goals"] = {
        "over_stock": worst["over_stock"] <= GOALS["relaxed_over_stock"],
        "share_of_step": worst["share_of_step"] <= allowed if rows in (*range(65), 512) else None,
        "strict": None if out["strict"]["over_stock"] is None else out["strict"]["over_stock"] <= GOALS["strict"] + NOISE,
    }
    return out


def strict(call: Callable[[], Any], requests: int, target: torch.Tensor, repeats: int, device: str) -> dict[str, Any]:
    """The seam around the stock call when every request is strict and nobody listens: what it adds to the call, device and host."""
    if importlib.util.find_spec("vllm") is None:
        return {"over_stock": None, "reason": "the seam needs vLLM, which is not installed"}
    import numpy as np

    from engine_plugins.vllm.seam_v2 import SeamV2

    def stock(target_logits: Any, draft_logits: Any, cu_num_logits: Any) -> Any:
        return call()

    slots: Any = SimpleNamespace(acting=np.zeros(requests, dtype=bool))
    seam = SeamV2(stock, slots, tap=None, choice=kernels.Choice(False, ""), reported=False)
    batch = SimpleNamespace(idx_mapping_np=np.arange(requests), req_ids=[str(i) for i in range(requests)])
    ends = torch.zeros(requests + 1, dtype=torch.int32, device=target.device)

    def through() -> None:
        seam.begin(batch)
        seam(target_logits=target, draft_logits=target, cu_num_logits=ends)
        seam.end()

    alone, behind = milliseconds(call, device, repeats), milliseconds(through, device, repeats)
    return {"over_stock": behind[0] / alone[0], "host_ms": behind[1], "host_ms_stock": alone[1]}


def no_sync(v: int, device: str) -> dict[str, Any]:
    """The seam's work under torch's synchronisation guard, which raises where the host would wait."""
    if device == "cpu":
        return {"passed": None, "reason": "needs a CUDA device"}
    target, draft, x = rows_of(4, v, device, torch.bfloat16)
    numbers = table_of([table.numbers(RuleSpec.parse("r-fuzzy:0.3,p_min=0.1"))] * 4, device)
    lay = laid_out(target, draft, x, numbers)
    for guarded in (False, True):  # compiled first
        torch.cuda.set_sync_debug_mode("error" if guarded else "default")
        try:
            one = lay()
            stats, verdict = launch.statistics(one, numbers)
            launch.rewrite(one, numbers, stats, verdict, sums=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"passed": True}


def set_up() -> dict[str, Any]:
    """Does the plugin fit the installed vLLM?"""
    if importlib.util.find_spec("vllm") is None:
        return {"passed": None, "reason": "vLLM is not installed"}
    from engine_plugins.vllm import compat, signatures

    moved = {runner: signatures.missing(runner) for runner in signatures.RUNNERS}
    return {"passed": not any(moved.values()), "vllm": compat.vllm_version(), "moved": moved}


def engine() -> dict[str, Any]:
    """The reference pair with the plugin in vLLM's own choice of runner, in a child so that it cannot take this run down."""
    points = {e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if importlib.util.find_spec("vllm") is None or "engine_plugins.vllm:register" not in points:
        return {"passed": None, "reason": "vLLM and agentguard-vllm are not both installed (pip install --no-deps -e .)"}
    command = [sys.executable, "-m", "benchmarks.gpu_engine"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:  # fmt: skip
        try:
            said, errors = child.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # vLLM's own children too: they would keep the device
            said, errors = child.communicate()
            errors += "\nnot done after 300 s"
    found = [line.removeprefix("RESULT") for line in said.splitlines() if line.startswith("RESULT")]
    if not found:
        return {"passed": False, "error": errors[-3000:]}
    result: dict[str, Any] = json.loads(found[-1])
    return result


def guarded(name: str, call: Callable[[], Any], out: dict[str, Any]) -> None:
    """One part of the run; what fails is in the result and does not end the others."""
    started = time.perf_counter()
    try:
        out[name] = call()
    except Exception as error:
        traceback.print_exc()
        out[name] = {"passed": False, "error": repr(error)}
    print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


def failed(part: Any) -> bool:
    if isinstance(part, list):
        return any(failed(one) for one in part)
    return isinstance(part, dict) and part.get("passed") is False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--interpret", action="store_true", help="a dry run on the CPU, at small sizes")
    arguments = parser.parse_args()
    device = "cpu" if arguments.interpret else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --interpret makes a dry run", file=sys.stderr)
        return 2
    small = arguments.interpret
    sizes = (64,) if small else (320, 49_152, 151_936)
    large, counts, repeats = (64, (8,), 1) if small else (151_936, (8, 16, 32, 64, 128, 256, 512), 30)
    checked = ("cactus:0.25", "r-fuzzy:0.2") if small else CHECKED
    choice = kernels.choose(device)
    out: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted", "torch": str(torch.__version__),
        "kernels": choice.reason, "goals": GOALS, "step_ms": STEP_MS,
    }  # fmt: skip
    if not choice.kernels:
        print(choice.reason, file=sys.stderr)
        return 2
    parts: dict[str, Callable[[], Any]] = {
        "shape": lambda: shapes(large, 2 if small else 64, device, tuning.CANDIDATES[-1:] if small else tuning.CANDIDATES),
        "checks": lambda: [check(v, device, t, 2 if small else 4, checked) for v in sizes for t in dtypes(small)],
        "repeatable": lambda: repeatable(large, device, 2),
        "trace": lambda: traced(device),
        "no_sync": lambda: no_sync(large, device),
        "set_up": set_up,
        "times": lambda: [timed(large, n, device, repeats) for n in counts],
    }
    if not small:
        parts["engine"] = engine
    for name, part in parts.items():
        guarded(name, part, out)
        if arguments.out:  # after each, as the run may be ended from outside
            arguments.out.write_text(json.dumps(out, indent=1) + "\n")
    missed = goals_missed(out)
    out["goals_missed"] = missed if device == "cuda" else None  # the interpreter's times say nothing
    text = json.dumps(out, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    if any(failed(part) for part in out.values()):
        return 1
    return 3 if out["goals_missed"] else 0


def goals_missed(out: dict[str, Any]) -> list[str]:
    """Goals of time that were not reached, as "rows: goal"."""
    times = out.get("times")
    rows = times if isinstance(times, list) else []
    return [f"{one['rows']} rows: {goal}" for one in rows for goal, met in one["goals"].items() if met is False]


def dtypes(small: bool) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if small else (torch.float32, torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
