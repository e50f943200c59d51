"""Top-k acceptance: accept what is among the target's k most probable tokens."""

from __future__ import annotations

import torch

from engine_plugins.rules.base import Pair, Rows, Rule


class TopK(Rule):
    """Accept iff p(x) is at least the k-th largest probability (ties count), else draw from norm(max(1[top k] - q, 0)).

    Source: MANGA-UOFA/Cactus, cactus/topk.py. ``k`` >= 1, a whole number. No value is strict; k = V accepts every token the
    target allows. A token of probability 0 is never among the k.
    """

    name = "top-k"

    def __init__(self, k: float) -> None:
        self.k = k

    def definition(self, rows: Rows) -> Pair:
        p, at = rows.p, rows.x.unsqueeze(-1)
        k = int(min(self.k, p.shape[-1]))
        top = (p >= p.topk(k, dim=-1).values[:, -1:]) & (p > 0)
        accepted = top.gather(-1, at)
        weights = torch.where(top, (1 - rows.q).clamp_min(0), 0.0)
        total = weights.sum(-1, keepdim=True)
        # a draft that is one-hot inside the k leaves no weight, and is never rejected
        weights = torch.where(total > 0, weights / total.clamp_min(1e-30), p)
        return torch.where(accepted, p, weights), torch.where(accepted, rows.q.scatter(-1, at, 1e-6 * p.gather(-1, at)), 0.0)
