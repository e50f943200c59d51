"""Cactus: raise the drafted token's target probability within a divergence budget."""

from __future__ import annotations

import torch

from engine_plugins.rules.base import Pair, Rule


class Cactus(Rule):
    """h^x = p with x raised to g = min(1, p(x) + sqrt(2 delta p(x)(1 - p(x)))) and the rest scaled by (1 - g)/(1 - p(x)).

    Accepts with min(1, g/q(x)) and resamples from norm(max(h^x - q, 0)): acceptance *and* residual use h^x. Source: arXiv
    2604.04987. ``delta`` >= 0 in nats is the second-order form of a bound on KL(h^x || p); the exact worst case is
    log(1 + 2 delta). delta = 0 is strict, bit for bit. One-hot p (temperature 0, a forced row) gives h = p, hence strict; a token
    with p(x) = 0 is never accepted.
    """

    name = "cactus"

    def __init__(self, delta: float) -> None:
        self.delta = delta

    def pair(self, p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> Pair:
        at = x.unsqueeze(-1)
        px = p.gather(-1, at)
        # the variance can go slightly below 0 in float32; 0 * inf at the ends of the range is no relaxation
        variance = (px * (1 - px)).clamp_min(0)
        raised = torch.where(variance > 0, px + (2 * self.delta * variance).sqrt(), px).clamp_max(1)
        scale = (1 - raised) / (1 - px).clamp_min(1e-6)
        h = torch.where(raised > px, p * scale, p).scatter(-1, at, raised)
        return h, q
