"""The support filter: a draft token the target finds improbable is never accepted, whatever the rule says.

Relaxed rules let through tokens with a target probability of 0.01-0.09 and a rank of 37-234; the model then rationalises them,
doubts right steps and loops (arXiv 2610.23818). The filter is absolute and judged on the *processed* target row, after
temperature, top-k and top-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_plugins.rules.base import Edit, Rows, Rule


def outside_support(rows: Rows, p_min: float, top_k: int) -> Tensor:
    """[rows] bool: x has p(x) < p_min, or top_k or more tokens are more probable. 0 switches a condition off.

    A token that holds all of the mass is inside.
    """
    px = rows.px
    outside = px < p_min
    if top_k > 0:
        # rank r means r more tokens above p(x), so (r + 1) p(x) < 1: with p_min = 0.1 the default top_k = 10 follows from it
        open_ = (~outside & (px * (top_k + 1) < 1.001)).nonzero().squeeze(-1)
        if open_.numel():
            matrix = rows.p if rows.exact else rows.logits
            some = matrix[open_]
            rank = (some > rows.at_x(matrix)[open_].unsqueeze(-1)).sum(-1)
            outside[open_] = rank >= top_k
    alone = (outside & (px > 0.999)).nonzero().squeeze(-1)
    if alone.numel():  # p_min = 1 and a rounded p(x): nothing could take its place
        outside[alone] = (rows.logits[alone] > -torch.inf).sum(-1) > 1
    return outside


def reject(rule: Rule, rows: Rows) -> Edit:
    """The edit that never accepts x in any of the rows, and never resamples it there: p'(x) = 0, then renormalised.

    Where p' had all of its mass on x, p without x takes its place. Only the target's own tokens may take x's place: p' may hold
    mass where p = 0, which the rule would have left to q'.
    """
    if rule.keeps_target:
        return Edit(lx=torch.full_like(rows.lx, -torch.inf))
    p, q = rule.definition(rows)
    at = rows.x.unsqueeze(-1)
    left = torch.where(rows.logits > -torch.inf, p, 0.0).scatter_(-1, at, 0.0)
    empty = left.sum(-1, keepdim=True) <= 0
    logits = torch.where(empty, rows.logits, left.log_()).scatter_(-1, at, -torch.inf)
    return Edit(rows=torch.arange(len(rows.x), device=rows.x.device), logits=logits, q=None if q is rows.q else q)


def entropy(rows: Rows) -> Tensor:
    """[rows] H(p) in nats."""
    p = rows.p
    return -torch.xlogy(p, p).sum(-1)
