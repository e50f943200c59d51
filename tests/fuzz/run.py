"""Runs a target: counts, times, memory, and the first bugs with what makes them again."""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

import psutil

from tests.fuzz.targets import Target

HANG_S = 10.0
"""An input that takes longer is a hang; the slowest of 10^6 took 0.1 s here."""
BUGS = 5
"""A run ends with so many."""
BATCHES = 10


class HangError(Exception):
    pass


@dataclass
class Outcome:
    """``slowest_ms``: one input, in CPU time. ``grown_mb``: memory from the end of the second tenth of the run to its end, the less
    of the last two tenths."""

    target: str
    seed: int
    inputs: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest_ms: float = 0.0
    grown_mb: float = 0.0
    bugs: list[dict[str, Any]] = field(default_factory=list)

    def as_row(self) -> dict[str, Any]:
        seen = {name: self.seen[name] for name in ("accepted", "refused")}
        row = {"target": self.target, "seed": self.seed, "inputs": self.inputs, **seen, "seconds": round(self.seconds, 1)}
        return row | {"slowest_ms": round(self.slowest_ms, 1), "grown_mb": round(self.grown_mb, 1), "bugs": self.bugs}


def _hang(_: int, __: FrameType | None) -> None:
    raise HangError(f"more than {HANG_S:g} s")


def run(target: Target, inputs: int, *, seed: int = 1, first: int = 0, modules: dict[str, ModuleType] | None = None) -> Outcome:
    """In the main thread: a hang is ended by a timer's signal."""
    modules = modules or target.modules()
    outcome = Outcome(target.name, seed)
    process, memory = psutil.Process(), []
    before = signal.signal(signal.SIGALRM, _hang)
    started = time.perf_counter()
    try:
        for number in range(first, first + inputs):
            given = target.input(seed, number)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_REAL, HANG_S)
            try:
                outcome.seen[target.check(modules, given)] += 1
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                bug = {
                    "number": number,
                    "error": f"{type(error).__name__}: {str(error)[:200]}",
                    "at": f"{where.name}:{where.lineno}",
                }
                outcome.bugs.append(bug | {"input": repr(given)[:300]})
                if len(outcome.bugs) >= BUGS:
                    break
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            outcome.inputs += 1
            outcome.slowest_ms = max(outcome.slowest_ms, 1000 * (time.process_time() - began))
            if inputs >= 1000 and (number - first + 1) % (inputs // BATCHES) == 0:
                gc.collect()
                memory.append(process.memory_info().rss / 2**20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    outcome.seconds = time.perf_counter() - started
    if len(memory) >= 4:
        outcome.grown_mb = min(memory[-2:]) - memory[1]
    return outcome
