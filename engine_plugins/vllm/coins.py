"""The uniform numbers Model Runner V2 throws in a verification, worked out again for telemetry.

V2's generator is a function of a request's seed and the position (`tl_rand32`, vllm/v1/worker/gpu/sample/gumbel.py), so the very
coin that decided a row can be had without asking the kernel that threw it.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import tl_rand32

from engine_plugins.kernels import batch
from engine_plugins.kernels.jit import kernel

_STATS: tl.constexpr = tl.constexpr(batch.STATS)
_COIN: tl.constexpr = tl.constexpr(batch.COIN)


@kernel
def _coins_kernel(stats_ptr, slot_ptr, position_ptr, seed_ptr, temperature_ptr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    coin = tl_rand32(tl.load(seed_ptr + slot), tl.load(position_ptr + row), includes_zero=False)
    # at temperature 0 no coin is thrown, and strict is 0 or 1
    tl.store(stats_ptr + row * _STATS + _COIN, tl.where(tl.load(temperature_ptr + slot) == 0.0, 0.5, coin))


def note(stats: Tensor, slot: Tensor, position: Tensor, seed: Tensor, temperature: Tensor) -> None:
    """Write each row's coin into its statistics, [rows, 16]. slot, position: [rows]; seed, temperature: [slots]."""
    _coins_kernel[(len(slot),)](stats, slot, position, seed, temperature, num_warps=1)
