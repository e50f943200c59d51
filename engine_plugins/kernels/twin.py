"""The kernels' twins in torch: the definitions. They run where the kernels do not, and for rules that have no kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentguard.row_flags import RowFlag
from engine_plugins.kernels.batch import (
    FLAGS,
    FORCED_LOGIT,
    INSIDE,
    ONE_HOT,
    OUTSIDE,
    RELAX,
    STATS,
    TOKEN,
    WANT_DRAFT,
    WANT_TARGET,
    Batch,
)
from engine_plugins.rules.exact import one_hot
from engine_plugins.rules.filtered import FilteredRule

CHUNK = 1 << 22  # elements of one float64 matrix: 32 MiB


def layout(
    ends: Tensor, slots: Tensor, slot: Tensor, step: Tensor, drafted: Tensor, temperature: Tensor, rules: Tensor, inside: Tensor,
    target: Tensor, draft: Tensor | None, *, listened: bool,
) -> Batch:  # fmt: skip
    """See `launch.layout`."""
    slot_of = slot.long()
    last = torch.zeros(len(drafted), dtype=torch.bool, device=drafted.device)
    last[ends[1:].long() - 1] = True
    x = torch.where(last, -1, drafted.roll(-1).long())
    greedy, masked = temperature[slot_of] == 0, x < 0
    flags = torch.where(last, 0, greedy.int() * int(RowFlag.GREEDY) + masked.int() * int(RowFlag.MASKED)).int()
    code, phase, reads = (rules[slot_of, column] for column in (0, 6, 7))
    asked = (phase == 0) | ((phase == 1) & (inside == 1)) | ((phase == 2) & (inside == 0))
    relax = (code > 0) & asked & (flags == 0) & ~last & (draft is not None)
    want = relax.int() * (RELAX | WANT_TARGET) | (relax & (reads > 0)).int() * WANT_DRAFT
    if listened:
        want = torch.where(last, 0, want | WANT_TARGET | (WANT_DRAFT if draft is not None else 0))
    return Batch(target, draft, x, want.int(), flags, slot, step, temperature)


def broken(draft: Tensor, slot: Tensor, step: Tensor) -> Tensor:
    """See `launch.broken`."""
    top = torch.zeros(len(slot), device=draft.device)
    size = max(1, CHUNK // draft.shape[-1])
    for start in range(0, len(slot), size):
        part = slice(start, start + size)
        top[part] = draft[slot[part].long(), (step[part].long() - 1).clamp_min(0)].amax(-1).float()
    return (step > 0) & ~top.isfinite()


def statistics(batch: Batch, rules: Tensor | None = None, *, end: int = -1) -> tuple[Tensor, Tensor]:
    """See `launch.statistics`; rows nobody wants are worked out as well."""
    stats = torch.empty(len(batch.x), STATS, device=batch.target.device)
    verdict = torch.empty(len(batch.x), dtype=torch.int32, device=batch.target.device)
    for part in _chunks(batch):
        stats[part], verdict[part] = _statistics(batch, part, rules, end)
    return stats, verdict


def _statistics(batch: Batch, part: slice, rules: Tensor | None, end: int) -> tuple[Tensor, Tensor]:
    target = batch.target[part, : batch.vocab].float()
    x, flags, want = batch.x[part], batch.flags[part].clone(), batch.want[part]
    slot = batch.slot[part].long()
    at = x.clamp_min(0).unsqueeze(-1)
    top = target.amax(-1)
    relative = target - top.unsqueeze(-1)
    weights = relative.exp()
    z = weights.sum(-1)
    entropy = z.log() - torch.where(weights > 0, weights * relative, 0.0).sum(-1) / z
    lx = target.gather(-1, at).squeeze(-1)
    rank = (target > lx.unsqueeze(-1)).sum(-1)
    allowed = (target > -torch.inf).sum(-1)
    px = torch.where(x >= 0, (lx - top - z.log()).exp(), 0.0)
    closing = target[:, end] if end >= 0 else torch.full_like(top, -torch.inf)
    ending = (closing - top - z.log()).exp() if end >= 0 else torch.full_like(top, -1.0)
    qx, d_top, d_log_z, strict = torch.full_like(top, -1.0), torch.zeros_like(top), torch.zeros_like(top), px
    if batch.draft is not None:
        draft = _draft(batch, part)
        d_top = draft.amax(-1)
        d_log_z = (draft - d_top.unsqueeze(-1)).exp().sum(-1).log()
        qx = (draft.gather(-1, at).squeeze(-1) - d_top - d_log_z).exp()
        strict = torch.where(qx > 0, px / qx, 0.0).clamp_max(1)
    greedy = (flags & int(RowFlag.GREEDY)) != 0
    strict = torch.where(x >= 0, torch.where(greedy, (rank == 0).float(), strict), 0.0)
    forced = top >= FORCED_LOGIT
    masked = (x < 0) | (lx == -torch.inf)
    flags |= forced.int() * int(RowFlag.FORCED) | masked.int() * int(RowFlag.MASKED)
    if end >= 0:
        flags |= ((closing >= top) & ~forced).int() * int(RowFlag.END_OF_THINK)
    verdict = torch.zeros_like(flags)
    if rules is not None:
        p_min, top_k, h_max = (rules[slot, column] for column in (3, 4, 5))
        judged = ((want & RELAX) != 0) & (flags == 0)
        unsure = judged & (entropy > h_max)
        outside = (px < p_min) | ((top_k > 0) & (rank >= top_k))
        outside &= (px <= 0.999) | (allowed > 1)
        judged &= ~unsure
        verdict = torch.where(judged, torch.where(outside, OUTSIDE, INSIDE), 0).int()
        flags |= unsure.int() * int(RowFlag.UNSURE) | judged.int() * int(RowFlag.RELAXED)
        flags |= (judged & outside).int() * int(RowFlag.LOW_SUPPORT)
    columns = [
        top,
        z.log(),
        lx,
        rank,
        target.argmax(-1),
        entropy,
        allowed,
        px,
        d_top,
        d_log_z,
        qx,
        ending,
        strict,
        strict,
        x,
        flags,
    ]
    assert columns[TOKEN] is x
    assert columns[FLAGS] is flags
    return torch.stack([column.float() for column in columns], -1), verdict


def rewrite(batch: Batch, verdict: Tensor, rules: Sequence[FilteredRule | None], *, only: frozenset[str] | None = None) -> None:
    """Write the definitions' pairs over the judged rows, in the one-hot form of `engine_plugins.rules.exact`, in place.

    rules: by slot; only: the names of the rules that are written, None for all. Waits for the device.
    """
    slot_of = batch.slot.tolist()
    members: dict[str, tuple[FilteredRule, list[int]]] = {}
    for row, judged in enumerate(verdict.tolist()):
        rule = rules[slot_of[row]]
        if judged and rule is not None and (only is None or rule.spec.name in only):
            members.setdefault(str(rule.spec), (rule, []))[1].append(row)
    size = max(1, CHUNK // batch.vocab)
    for rule, mine in members.values():
        for start in range(0, len(mine), size):
            _write(batch, rule, torch.tensor(mine[start : start + size], device=batch.target.device))


def _write(batch: Batch, rule: FilteredRule, index: Tensor) -> None:
    v, x = batch.vocab, batch.x[index]
    p = batch.target[index, :v].double().softmax(-1)
    q = _draft(batch, index).double().softmax(-1)
    pair = rule.pair(p, q, x)
    touched = ((pair[0] != p) | (pair[1] != q)).any(-1)
    target, _ = one_hot(pair, x)
    row = index[touched]
    batch.target[row, :v] = target[touched].log().to(batch.target.dtype)
    assert batch.draft is not None
    batch.draft[batch.slot[row].long(), batch.step[row].long(), x[touched]] = ONE_HOT


def _draft(batch: Batch, index: slice | Tensor) -> Tensor:
    """[rows, V] the draft's logits after temperature."""
    assert batch.draft is not None
    slot, step = batch.slot[index].long(), batch.step[index].long()
    heat = batch.temperature[slot].unsqueeze(-1)
    # the step of a bonus row lies behind the draft's last one, and nobody reads it
    step = step.clamp_max(batch.draft.shape[1] - 1)
    return batch.draft[slot, step, : batch.vocab].float() / torch.where(heat == 0, 1.0, heat)


def _chunks(batch: Batch) -> list[slice]:
    size = max(1, CHUNK // batch.vocab)
    return [slice(start, min(start + size, len(batch.x))) for start in range(0, len(batch.x), size)]
