"""Typical acceptance: accept what is probable enough for the row's entropy."""

from __future__ import annotations

import torch

from engine_plugins.rules.base import Pair, Rows, Rule


class Typical(Rule):
    """Accept iff p(x) > t = min(eps, delta exp(-H)), H = -sum p log(p + 1e-5), else give argmax p. No coin, and q is not read.

    Sources: arXiv 2401.10774, section 3.3.1; typical_acceptance_sampler.py of vLLM V0. Usual values: eps = 0.09, delta = 0.3.
    No value is strict; eps = 0 accepts every token with p(x) > 0.
    """

    name = "typical"

    def __init__(self, eps: float, delta: float) -> None:
        self.eps = min(eps, 2.0)  # p(x) is never above 1, and float32 cannot hold every float
        self.delta = delta

    def definition(self, rows: Rows) -> Pair:
        p, at = rows.p, rows.x.unsqueeze(-1)
        entropy = -(p * (p + 1e-5).log()).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp_max(self.eps)
        accepted = (rows.at_x(p) > threshold).unsqueeze(-1)
        argmax = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)
        return torch.where(accepted, p, argmax), torch.where(accepted, rows.q.scatter(-1, at, 1e-6 * p.gather(-1, at)), 0.0)
