"""What the loop detector costs: `python -m benchmarks.loops [--tokens 300000] [--repeats 3]`.

The standard library's sources and this project's documents as a stream of tokens (words and marks of up to six characters, about
3.5 on average), fed in pieces of 1 to 6 as a server streams them, and one at a time; a new trace every 8,000 tokens. Prints
microseconds of process time a token, the best of the repeats, and the memory that a detector holds after a trace.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sysconfig
import time
import tracemalloc
from pathlib import Path

from agentguard.trace.loops import LoopDetector

TRACE = 8_000
Piece = tuple[list[int], str]


def tokens(count: int) -> list[str]:
    here = Path(__file__).parent.parent
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(here.glob("**/docs/*.md"))
    random.Random(0).shuffle(paths)
    out: list[str] = []
    for path in paths:
        out += re.findall(r" ?[A-Za-z]{1,6}|\d|\s+| ?[^\w\s]{1,3}|_|\w", path.read_text(encoding="utf-8"))
        if len(out) >= count:
            break
    return out[:count]


def traces(stream: list[str], most: int) -> list[list[Piece]]:
    rng = random.Random(0)
    ids: dict[str, int] = {}
    numbers = [ids.setdefault(token, len(ids)) for token in stream]
    out = []
    for start in range(0, len(stream), TRACE):
        at, end = start, min(start + TRACE, len(stream))
        trace: list[Piece] = []
        while at < end:
            step = min(rng.randint(1, most), end - at)
            trace.append((numbers[at : at + step], "".join(stream[at : at + step])))
            at += step
        out.append(trace)
    return out


def seconds(streams: list[list[Piece]], *, ids: bool, text: bool) -> float:
    detector = LoopDetector()
    nothing: list[int] = []
    started = time.process_time()
    for trace in streams:
        detector.reset()
        for numbers, characters in trace:
            detector.feed(numbers if ids else nothing, characters if text else "")
            detector.score  # noqa: B018  # the controller reads it with every piece
    return time.process_time() - started


def kib_held(trace: list[Piece]) -> float:
    tracemalloc.start()
    detector = LoopDetector()
    for numbers, characters in trace:
        detector.feed(numbers, characters)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    stream = tokens(arguments.tokens)
    result: dict[str, float] = {"tokens": len(stream), "characters_a_token": round(len("".join(stream)) / len(stream), 2)}
    for pieces, most in (("1 to 6", 6), ("1", 1)):
        streams = traces(stream, most)
        for fed, ids, text in (("ids and text", True, True), ("ids", True, False), ("text", False, True)):
            best = min(seconds(streams, ids=ids, text=text) for _ in range(arguments.repeats))
            result[f"us a token, {fed}, pieces of {pieces}"] = round(best / len(stream) * 1e6, 2)
    result["KiB held"] = round(max(kib_held(trace) for trace in traces(stream, 6)[:8]))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
