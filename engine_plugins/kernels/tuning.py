"""How many tokens a block of a row has, and how many warps work on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """A launch's block size and warps."""

    block: int
    warps: int

    def blocks(self, vocab: int) -> int:
        return -(-vocab // self.block)


FIXED = Shape(4096, 8)
INTERPRETED = Shape(32768, 1)  # an interpreted block costs its number of operations, hardly its size
CANDIDATES = tuple(Shape(block, warps) for block in (2048, 4096, 8192) for warps in (4, 8))
ROWS = 32  # tuned at a middling step; fewer rows are a matter of launches, more of bandwidth
REPEATS = 5


def fastest(measure: Callable[[Shape], float], candidates: tuple[Shape, ...] = CANDIDATES) -> Shape:
    """The candidate whose median of `REPEATS` measurements, in ms, is smallest; the first one of equals."""
    medians = {shape: sorted(measure(shape) for _ in range(REPEATS))[REPEATS // 2] for shape in candidates}
    return min(candidates, key=medians.__getitem__)


@functools.cache
def shape_for(vocab: int, device: str, tuned: bool) -> Shape:
    """The shape for rows of this vocabulary; measured once a process where ``tuned``, which waits for the device.

    Ranks that must decide alike must not measure: another block size adds a row up in another order, and a decision on the edge
    falls otherwise. `engine_plugins.vllm.ranks` keeps tuning to engines of one rank.
    """
    if device == "cpu":
        return INTERPRETED
    if not tuned:
        return FIXED
    from engine_plugins.kernels.batch import Batch
    from engine_plugins.kernels.launch import statistics

    generator = torch.Generator(device).manual_seed(0)
    target = torch.randn(ROWS, vocab, device=device, generator=generator)
    draft = torch.randn(ROWS, 1, vocab, device=device, generator=generator).bfloat16()
    batch = Batch.of(target, torch.arange(ROWS, device=device) % vocab, draft)

    def measure(shape: Shape) -> float:
        statistics(batch, shape=shape)  # compiles
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(10):
            statistics(batch, shape=shape)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return fastest(measure)
