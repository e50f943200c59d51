"""The engine lock with the hashes of engine-cpu.hashes.txt, for pip: `python locks/hashed.py` prints every pin that has hashes, and
with --rest those that have none: torch, whose CPU build comes from another place on every machine.

Hashes stand in a file of their own, so that the list of what is needed stays one that people read and merge. They are made by
`pip install --dry-run --ignore-installed --no-deps --report FILE -r locks/engine-cpu.txt` and `python -m agentguard.supply hashes
FILE`, once for each Python. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def joined(*, rest: bool) -> Iterator[str]:
    known = dict(
        line.split(" ", 1) for line in (HERE / "engine-cpu.hashes.txt").read_text().splitlines() if line[:1] not in ("", "#")
    )
    for line in (HERE / "engine-cpu.txt").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        hashes = known.get(line.split()[0], "") if "--hash" not in line else ""
        has = bool(hashes) or "--hash" in line
        if has != rest:
            yield line + "".join(f" --hash={held}" for held in hashes.split())


if __name__ == "__main__":
    print("\n".join(joined(rest="--rest" in sys.argv[1:])))
