"""The support filter: a draft token the target finds improbable is never accepted, whatever the rule says.

Relaxed rules let through tokens with a target probability of 0.01-0.09 and a rank of 37-234; the model then rationalises them,
doubts right steps and loops (arXiv 2610.23818). The filter is absolute and judged on the *processed* target row, after
temperature, top-k and top-p.
"""

from __future__ import annotations

import torch

from engine_plugins.rules.base import Pair


def outside_support(p: torch.Tensor, x: torch.Tensor, p_min: float, top_k: int) -> torch.Tensor:
    """[rows] bool: x has p(x) < p_min, or top_k or more tokens are more probable. 0 switches a condition off.

    p: [rows, V]; x: [rows] int64.
    """
    px = p.gather(-1, x.unsqueeze(-1))
    outside = px.squeeze(-1) <= 0  # a token the target forbids is outside any support
    if p_min > 0:
        outside |= px.squeeze(-1) < p_min
    if top_k > 0:
        outside |= (p > px).sum(-1) >= top_k
    return outside


def reject(pair: Pair, p: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> Pair:
    """The pair that never accepts x in the given rows, and never resamples it there.

    p'(x) = 0 alone would still accept when the coin is exactly 0, so q'(x) = 0 as well (V1 reads q' as it is: rules.md, 2.3).
    Where the rule had put all of p' on x, p without x takes its place. rows: [rows] bool.
    """
    accept, draft = pair
    at = x.unsqueeze(-1)
    # only the target's own tokens may take its place: p' may hold mass where p = 0, which its rule would have left to q'
    without = torch.where(p > 0, accept.scatter(-1, at, 0.0), 0.0)
    mass = without.sum(-1, keepdim=True)
    fallback = p.scatter(-1, at, 0.0)
    without = torch.where(mass > 0, without / mass.clamp_min(1e-30), fallback / fallback.sum(-1, keepdim=True).clamp_min(1e-30))
    hit = rows.unsqueeze(-1)
    return torch.where(hit, without, accept), torch.where(hit, draft.scatter(-1, at, 0.0), draft)
