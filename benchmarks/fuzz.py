"""Fuzzers at length: `python -m benchmarks.fuzz --json FILE`. What is fuzzed and what must hold is in tests/fuzz.

Each target runs in a process of its own, so that its memory is its own; `--only sse --first 4711 --inputs 1` makes one input again.
Exit status 1 when anything was found: a bug, a hang, memory that grows, or a target that only ever accepts or refuses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.fuzz import http
from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS

GROWN_MB = 24.0
"""Memory a run may gain after its first fifth. Caches of compiled patterns and the allocator's slack took up to 9 MB here."""


def one(name: str, inputs: int, seed: int, first: int) -> dict[str, Any]:
    return run(TARGETS[name], inputs, seed=seed, first=first).as_row()


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a target's run, in words."""
    found = [f"{len(row['bugs'])} bugs: {row['bugs'][0]}"] if row["bugs"] else []
    if row["grown_mb"] > GROWN_MB:
        found.append(f"memory grew by {row['grown_mb']} MB")
    if row["target"] in TARGETS and row["inputs"] >= 1000:
        least, refuses = TARGETS[row["target"]].least, TARGETS[row["target"]].refuses
        for kind in ("accepted", "refused") if refuses else ("accepted",):
            if row[kind] < least * row["inputs"]:
                found.append(f"only {row[kind]} of {row['inputs']} were {kind}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="of each target in this process")
    parser.add_argument("--http", type=int, default=20_000, help="requests to a gateway on a socket; 0 leaves it out")
    parser.add_argument("--only", action="append", choices=sorted(TARGETS), help="these targets, and no HTTP")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()

    def told(row: dict[str, Any]) -> None:
        rows.append(row)
        wrong = "; ".join(faults(row)) or "fine"
        print(f"{row['target']}: {row['inputs']} inputs in {row['seconds']} s, {wrong}", file=sys.stderr, flush=True)
        if options.json is not None:
            total = sum(r["inputs"] for r in rows)
            text = json.dumps(
                {"seed": options.seed, "inputs": total, "seconds": round(time.perf_counter() - started), "rows": rows}, indent=1
            )
            options.json.write_text(text + "\n")

    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        names = options.only or [*TARGETS] if options.inputs else []
        for work in [pool.submit(one, name, options.inputs, options.seed, options.first) for name in names]:
            told(work.result())
    if options.http and not options.only:
        told(http.run(options.http, seed=options.seed).as_row())
    return 1 if any(faults(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
