"""The kernels' launches: statistics of rows, and the rewriting of rows by a table of rules. No host sync, no allocation of rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine_plugins.kernels import rows, table
from engine_plugins.kernels.batch import STATS, Batch
from engine_plugins.kernels.tuning import Shape, shape_for


def statistics(batch: Batch, rules: Tensor | None = None, *, end: int = -1, shape: Shape | None = None) -> tuple[Tensor, Tensor]:
    """[rows, 16] float32 statistics (`batch.TOP` …; undefined where want is 0), and [rows] int32 verdicts.

    rules: [slots, 8] (`table.numbers`), None for statistics alone; end: the end-of-think marker's (first) token, -1: unknown.
    """
    shape = shape or shape_for(batch.target.device.type)
    n, blocks, device = len(batch.x), shape.blocks(batch.vocab), batch.target.device
    part = torch.empty(n, blocks, rows.PARTIALS, device=device)
    stats = torch.empty(n, STATS, device=device)
    verdict = torch.empty(n, dtype=torch.int32, device=device)
    draft, stride_0, stride_1 = batch.at_draft()
    has_draft = batch.draft is not None
    rows.partials_kernel[(n, blocks)](
        part, batch.target, batch.target.stride(0), draft, stride_0, stride_1, batch.x, batch.want, batch.slot, batch.step,
        batch.temperature, batch.vocab, blocks, BLOCK=shape.block, HAS_DRAFT=has_draft, num_warps=shape.warps,
    )  # fmt: skip
    rows.decide_kernel[(n,)](
        stats, verdict, part, batch.target, batch.target.stride(0), draft, stride_0, stride_1, batch.x, batch.want, batch.flags,
        batch.slot, batch.step, batch.temperature, stats if rules is None else rules, end, blocks, BLOCKS=_padded(blocks),
        HAS_DRAFT=has_draft, HAS_RULES=rules is not None, num_warps=1,
    )  # fmt: skip
    return stats, verdict


def rewrite(batch: Batch, rules: Tensor, stats: Tensor, verdict: Tensor, *, sums: bool, shape: Shape | None = None) -> None:
    """Write the pairs of all judged rows over target and draft, in place. sums: `table.passes` of the rules in the batch.

    The draft's logits are this step's own and are made anew before the next verification; the target's must be a copy that nobody
    reports from.
    """
    shape = shape or shape_for(batch.target.device.type)
    n, blocks = len(batch.x), shape.blocks(batch.vocab)
    part = torch.empty(n, blocks, rows.SUMS, device=batch.target.device) if sums else stats
    draft, stride_0, stride_1 = batch.at_draft()
    if sums:
        rows.sums_kernel[(n, blocks)](
            part, verdict, stats, batch.target, batch.target.stride(0), draft, stride_0, stride_1, batch.x, batch.slot, batch.step,
            batch.temperature, rules, batch.vocab, blocks, BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    rows.write_kernel[(n, blocks)](
        part, verdict, stats, batch.target, batch.target.stride(0), draft, stride_0, stride_1, batch.x, batch.slot, batch.step,
        batch.temperature, rules, batch.vocab, blocks, BLOCK=shape.block, BLOCKS=_padded(blocks), HAS_SUMS=sums,
        num_warps=shape.warps,
    )  # fmt: skip


def broken(draft: Tensor, slot: Tensor, step: Tensor, *, shape: Shape | None = None) -> Tensor:
    """[rows] bool: is the draft row that a row's own token was drawn from no law? A law has a largest logit that is finite: NaN,
    +inf and a row of -inf alone have not. draft: [slots, K, Vd]; slot, step: [rows], a token of step j + 1 coming from row j."""
    shape = shape or shape_for(draft.device.type)
    v = draft.shape[-1]
    top = torch.empty(len(slot), shape.blocks(v), device=draft.device)
    rows.tops_kernel[tuple(top.shape)](
        top, draft, draft.stride(0), draft.stride(1), slot, step, v, top.shape[1], BLOCK=shape.block, num_warps=shape.warps
    )
    return ~top.amax(-1).isfinite()


def layout(
    ends: Tensor, slots: Tensor, slot: Tensor, step: Tensor, drafted: Tensor, temperature: Tensor, rules: Tensor, inside: Tensor,
    target: Tensor, draft: Tensor | None, *, listened: bool,
) -> Batch:  # fmt: skip
    """The batch of a Model Runner V2 step. ends: [requests + 1] first rows; slots: [requests]; slot, step, drafted, inside: [rows]
    (inside: 1 in a think block, 0 outside, -1 unknown)."""
    n, device = target.shape[0], target.device
    x = torch.empty(n, dtype=torch.int64, device=device)
    want, flags = (torch.empty(n, dtype=torch.int32, device=device) for _ in range(2))
    rows.layout_kernel[(len(slots),)](
        x, want, flags, ends, slots, drafted, temperature, rules, inside, int(listened), int(draft is not None), num_warps=1
    )
    return Batch(target, draft, x, want, flags, slot, step, temperature)


def _padded(blocks: int) -> int:
    return 1 << max(0, blocks - 1).bit_length()


def warm_up(
    vocab: int, draft: Tensor | None, steps: int, device: torch.device, dtypes: Iterable[torch.dtype], *, end: int, learns: bool
) -> None:
    """Compile what a step launches, before a request waits for it.

    draft: the draft's logits the engine will hand over, [slots, K, Vd], None where it keeps none; nothing is written to it. dtypes:
    in which the engine may hand over the target's logits; rows are rewritten in float32 only. learns: the draft's weights change.
    Index types are those of Model Runner V2.
    """
    slot = torch.zeros(steps + 1, dtype=torch.int64, device=device)
    token = torch.zeros(steps + 1, dtype=torch.int32, device=device)
    ends = torch.tensor([0, steps + 1], dtype=torch.int32, device=device)
    step = torch.arange(steps + 1, dtype=torch.int32, device=device)
    heat, rules = torch.ones(1, device=device), torch.zeros(1, table.WIDTH, device=device)
    inside = torch.full((steps + 1,), -1, dtype=torch.int32, device=device)
    if learns and draft is not None:
        broken(draft, slot, step)
    for dtype in sorted({torch.float32, *dtypes}, key=str):
        rows = torch.zeros(steps + 2, vocab, device=device, dtype=dtype)
        # a chunk's logits begin at any row, which is where a row is no multiple of 16 bytes long another kernel for Triton
        for target in {part.data_ptr() % 16 == 0: part for part in (rows[1:], rows[:-1])}.values():
            for listened in (False, True):
                batch = layout(ends, slot[:1], slot, step, token, heat, rules, inside, target, draft, listened=listened)
                stats, verdict = statistics(batch, rules, end=end)
                for sums in (False, True) if draft is not None and dtype == torch.float32 else ():
                    rewrite(batch, rules, stats, verdict, sums=sums)
