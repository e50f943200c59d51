"""Where each request stands in its trace, kept on the device: `engine_plugins.vllm.phase.PhaseTracker` without the host.

Model Runner V2 keeps the committed tokens on the device and the host learns them a step late, so the count is made there. A state
is eight int32: tokens read, inside a think block (1, 0), where the block began, generated think tokens of earlier blocks, tokens
of the block that the prompt brought. A new occupant of a slot starts from zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_plugins.kernels.jit import kernel

WIDTH = 8
SEEN, INSIDE, BEGAN, BEFORE, GIVEN = range(5)
_WIDTH: tl.constexpr = tl.constexpr(WIDTH)
SCAN = 1024


@triton.jit
def _token(tokens, total, drafted, at):
    """Token ``at`` of a sequence whose drafts follow its ``total`` committed tokens; drafted: the row of the last committed one."""
    value = tl.full((), -1, tl.int64)
    if at >= total:
        value = tl.load(drafted + (at - total) + 1).to(tl.int64)
    elif at >= 0:
        value = tl.load(tokens + at).to(tl.int64)
    return value


@triton.jit
def _ends(tokens, total, drafted, stop, marker, LENGTH: tl.constexpr):
    """Does the marker end right before ``stop``?"""
    same = stop >= LENGTH
    for j in tl.static_range(0, LENGTH):
        same = same & (_token(tokens, total, drafted, stop - LENGTH + j) == tl.load(marker + j))
    return same


@triton.jit
def _last(tokens, length, marker, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Where the last occurrence in the first ``length`` tokens ends, -1 for none. Searched from the end, a block at a time."""
    found = -1
    high = length
    while (high > 0) & (found < 0):
        at = high - BLOCK + tl.arange(0, BLOCK)
        same = (at >= 0) & (at + LENGTH <= length)
        for j in tl.static_range(0, LENGTH):
            token = tl.load(tokens + at + j, mask=(at >= 0) & (at + j < length), other=-1)
            same = same & (token == tl.load(marker + j))
        found = tl.max(tl.where(same, at + LENGTH, -1), axis=0)
        high -= BLOCK
    return found


@triton.jit
def _first(tokens, at, total, marker, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Where the first occurrence ends that has its last token among tokens ``at`` … ``at`` + BLOCK - 1; a huge number for none."""
    last = at + tl.arange(0, BLOCK)
    same = last < total
    for j in tl.static_range(0, LENGTH):
        place = last - LENGTH + 1 + j
        token = tl.load(tokens + place, mask=(place >= 0) & (last < total), other=-1)
        same = same & (place >= 0) & (token == tl.load(marker + j))
    return tl.min(tl.where(same, last + 1, 2147483647), axis=0)


@kernel
def advance_kernel(
    state_ptr, slots_ptr, tokens_ptr, tokens_stride, prompt_ptr, total_ptr, start_ptr, end_ptr, limits_ptr, close_at_ptr,
    START: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, HAS_LIMITS: tl.constexpr,
):  # fmt: skip
    """Read what was committed since the last call. close_at: [slots] int32, the block length at which the trace is closed, -1 for
    no limit; limits: [slots, 2] int32, of each block and of all blocks together, -1 for none."""
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    state = state_ptr + slot * _WIDTH
    tokens = tokens_ptr + slot * tokens_stride
    total = tl.load(total_ptr + slot)
    prompt = tl.load(prompt_ptr + slot)
    seen = tl.load(state)
    inside = tl.load(state + 1)
    began = tl.load(state + 2)
    before = tl.load(state + 3)
    given = tl.load(state + 4)
    if seen == 0:
        opened = _last(tokens, prompt, start_ptr, START, BLOCK)
        closed = _last(tokens, prompt, end_ptr, END, BLOCK)
        inside = tl.where(opened > closed, 1, 0)
        began = tl.where(opened > closed, opened, 0)
        given = tl.where(opened > closed, prompt - opened, 0)
        before = before * 0
        seen = prompt
    # a block of tokens at a time, from marker to marker: between them nothing changes, and the tokens lie in the host's memory, so
    # that token by token each would be a trip over the bus
    at = seen
    while at < total:
        if inside != 0:
            stop = _first(tokens, at, total, end_ptr, END, BLOCK)
            if stop <= total:
                before += stop - began - END - given
                inside = inside * 0
                given = given * 0
        else:
            stop = _first(tokens, at, total, start_ptr, START, BLOCK)
            if stop <= total:
                inside = inside * 0 + 1
                began = began * 0 + stop
        at = tl.minimum(stop, at + BLOCK)
    tl.store(state, tl.maximum(seen, total))
    tl.store(state + 1, inside)
    tl.store(state + 2, began)
    tl.store(state + 3, before)
    tl.store(state + 4, given)
    if HAS_LIMITS:
        block = tl.load(limits_ptr + slot * 2)
        whole = tl.load(limits_ptr + slot * 2 + 1)
        limit = tl.where(block >= 0, block, 2147483647)
        limit = tl.where(whole >= 0, tl.minimum(limit, whole - before + given), limit)
        limit = tl.where((block >= 0) | (whole >= 0), tl.maximum(limit, given), -1)
        tl.store(close_at_ptr + slot, limit)


@kernel
def ahead_kernel(
    inside_ptr, state_ptr, slots_ptr, ends_ptr, tokens_ptr, tokens_stride, total_ptr, drafted_ptr, start_ptr, end_ptr,
    START: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """For each row: would the request be inside the block when it is verified, its drafts so far taken as committed?"""
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    tokens = tokens_ptr + slot * tokens_stride
    total = tl.load(total_ptr + slot)
    inside = tl.load(state_ptr + slot * _WIDTH + 1)
    first = tl.load(ends_ptr + request)
    last = tl.load(ends_ptr + request + 1)
    for row in range(first, last):
        if row > first:
            stop = total + row - first
            if inside != 0:
                if _ends(tokens, total, drafted_ptr + first, stop, end_ptr, END):
                    inside = inside * 0
            elif _ends(tokens, total, drafted_ptr + first, stop, start_ptr, START):
                inside = inside * 0 + 1
        tl.store(inside_ptr + row, inside)


class Markers:
    """The token sequences that open and close a trace, on the device."""

    def __init__(self, start: tuple[int, ...], end: tuple[int, ...], device: torch.device | str) -> None:
        self.start = torch.tensor(start, dtype=torch.int64, device=device)
        self.end = torch.tensor(end, dtype=torch.int64, device=device)


def advance(
    state: Tensor, slots: Tensor, tokens: Tensor, prompt: Tensor, total: Tensor, markers: Markers, limits: Tensor | None = None,
    close_at: Tensor | None = None,
) -> None:  # fmt: skip
    """state: [slots, 8]; slots: [requests]; tokens: [slots, length]; prompt, total: [slots] lengths, as the runner keeps them."""
    advance_kernel[(len(slots),)](
        state, slots, tokens, tokens.stride(0), prompt, total, markers.start, markers.end, limits if limits is not None else state,
        close_at if close_at is not None else state, START=len(markers.start), END=len(markers.end), BLOCK=SCAN,
        HAS_LIMITS=limits is not None, num_warps=1,
    )  # fmt: skip


def ahead(
    state: Tensor, slots: Tensor, ends: Tensor, tokens: Tensor, total: Tensor, drafted: Tensor, markers: Markers, rows: int
) -> Tensor:
    """[rows] int32, 1 inside a think block. ends: [requests + 1] first rows; drafted: [rows] as `launch.layout` has them."""
    inside = torch.empty(rows, dtype=torch.int32, device=state.device)
    ahead_kernel[(len(slots),)](
        inside, state, slots, ends, tokens, tokens.stride(0), total, drafted, markers.start, markers.end, START=len(markers.start),
        END=len(markers.end), num_warps=1,
    )  # fmt: skip
    return inside
