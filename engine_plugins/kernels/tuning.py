"""How many tokens a block of a row has, and how many warps work on it.

Never measured while an engine starts: another block size adds a row up in another order, a decision on the edge falls otherwise,
and a request with a seed would get other tokens after a restart, or on another rank. `benchmarks/gpu_check.sh` measures the
candidates once and names the fastest; `AG_BLOCK` takes it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from agentguard.errors import ConfigError

BLOCK_ENV = "AG_BLOCK"


@dataclass(frozen=True, slots=True)
class Shape:
    """A launch's block size and warps."""

    block: int
    warps: int

    def blocks(self, vocab: int) -> int:
        return -(-vocab // self.block)

    def __str__(self) -> str:
        return f"{self.block}x{self.warps}"


# 16 elements a thread: 4 loads of 16 bytes of a float32 row, and registers for both rows. A row of 151,936 is 38 blocks, so 4 rows
# occupy the 132 multiprocessors of an H200.
FIXED = Shape(4096, 8)
INTERPRETED = Shape(32768, 1)  # an interpreted block costs its number of operations, hardly its size
CANDIDATES = tuple(Shape(block, warps) for block in (2048, 4096, 8192) for warps in (4, 8))
REPEATS = 5


def fastest(measure: Callable[[Shape], float], candidates: tuple[Shape, ...] = CANDIDATES) -> Shape:
    """The candidate whose median of `REPEATS` measurements, in ms, is smallest; the first one of equals."""
    medians = {shape: sorted(measure(shape) for _ in range(REPEATS))[REPEATS // 2] for shape in candidates}
    return min(candidates, key=medians.__getitem__)


def shape_for(device: str) -> Shape:
    """The shape of every launch on this kind of device: `FIXED`, or what `AG_BLOCK` says."""
    return INTERPRETED if device == "cpu" else asked(os.environ.get(BLOCK_ENV, ""))


@functools.cache
def asked(text: str) -> Shape:
    """The shape of `AG_BLOCK`'s value, "" for none. Raises ConfigError."""
    if not text:
        return FIXED
    found = re.fullmatch(r"(1024|2048|4096|8192|16384)x(1|2|4|8|16)", text)
    if found is None:
        raise ConfigError(BLOCK_ENV, text, f"no block size and number of warps; take what gpu_check.sh names, such as {FIXED}")
    return Shape(int(found[1]), int(found[2]))
