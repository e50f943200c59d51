"""What counting costs: `python -m benchmarks.economics_updates [--steps 1000000]`.

Steps of 100,000 agent sessions of ten through `Ledger.finished` (two classes' sums, a histogram, a verdict each), with one
verification round a step through `Ledger.verified`. Prints seconds, microseconds a step, and how many sums are held at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from agentguard.economics.arms import STRICT, Arms
from agentguard.economics.cells import SessionSums
from agentguard.economics.ledger import Assignment, Ledger
from agentguard.events import DraftRows, StepFinished, VerificationStep, Verified

RULE = "cactus:delta=1,p_min=0.1,top_k=10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    rng = random.Random(0)
    ledger = Ledger(Arms(b"k", 0.5, (RULE,), (1.0,)))
    k = 6
    rows = DraftRows(token=[1] * k, p=[0.5] * k, q=[0.6] * k, rank=[0] * k, strict=[0.8] * k, flags=[1] * k)
    finished = [
        StepFinished(
            t=0.0, session="s", step=1, request="r", model="m", rule=RULE, prompt_tokens=1, tokens=n, think_tokens=n - 5,
            answer_tokens=4, marker_tokens=1, rounds=n // 4 + 1, ttlt_s=n / 100,
        )
        for n in (int(rng.lognormvariate(5, 0.8)) + 6 for _ in range(1_000))
    ]  # fmt: skip
    rounds = [Verified(request="r", rule_asked=RULE, rule_effective=RULE, drafted=k, accepted=i, rows=rows) for i in range(k + 1)]
    frames = [VerificationStep(t=0.0, engine="e", step=i, requests=[verified]) for i, verified in enumerate(rounds)]
    arms = [Assignment(arm, arm, "m/chat/follow_up", "") for arm in (STRICT, RULE)]
    started = time.perf_counter()
    for i in range(steps):
        if i % 10 == 0:
            sums: dict[tuple[str, str], SessionSums] = {}
            assigned = arms[(i // 10) % 2]
            ledger.started("r", assigned)
        ledger.verified(frames[i % (k + 1)])
        ledger.finished(finished[i % 1_000], assigned, sums)
    spent = time.perf_counter() - started
    held = sum(len(cell.sums) for cell in ledger.cells.values())
    print(json.dumps({"steps": steps, "seconds": round(spent, 1), "us_a_step": round(spent / steps * 1e6, 1), "sums_held": held}))


if __name__ == "__main__":
    main()
