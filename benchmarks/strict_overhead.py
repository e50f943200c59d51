"""What the plugin costs under strict: `python -m benchmarks.strict_overhead [--repeats 3]`.

Generates the exactness test's requests (64 of 220 tokens, float32, K = 6) in one process a kind: stock vLLM with only the CPU
correction, the plugin with nobody listening, and the plugin with a telemetry subscriber. Prints seconds and ratios to stock;
the kinds alternate, so that a slow spell of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ("stock", "plugin-idle", "plugin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(repeats):
            for kind in KINDS:
                out = Path(scratch, "out.json")
                subprocess.run([sys.executable, "-m", "tests.engine.in_process", kind, str(out)], check=True, capture_output=True)
                seconds[kind].append(json.loads(out.read_text())["seconds"])
    stock = statistics.median(seconds["stock"])
    rows = {
        kind: {"seconds": [round(s, 2) for s in values], "ratio_to_stock": round(statistics.median(values) / stock, 3)}
        for kind, values in seconds.items()
    }
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
