"""Cactus: raise the drafted token's target probability within a divergence budget."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from engine_plugins.rules.base import Edit, Pair, Rows, Rule

BISECTIONS = 60  # of an interval of length 1: below the last bit of a float64


class _Raised(Rule):
    """h^x = p with x raised to g >= p(x) and the rest scaled by (1 - g)/(1 - p(x)).

    Accept with min(1, g/q(x)), residual norm(max(h^x - q, 0)): acceptance *and* residual use h^x. In logits it is one entry:
    softmax scales the rest by itself.
    """

    keeps_target = True

    @abstractmethod
    def raised(self, px: Tensor) -> Tensor:
        """g, [rows], at least px."""

    def definition(self, rows: Rows) -> Pair:
        g, px = self.raised(rows.px).unsqueeze(-1), rows.px.unsqueeze(-1)
        scale = (1 - g) / (1 - px).clamp_min(1e-30)
        return torch.where(g > px, rows.p * scale, rows.p).scatter(-1, rows.x.unsqueeze(-1), g), rows.q

    def edit(self, rows: Rows) -> Edit | None:
        px = rows.px
        g = self.raised(px)
        certain = g >= 1
        # odds of x against the others, whose mass is exp(lse) (1 - p(x))
        lx = g.log() - (-g).log1p() + rows.lse + (-px).log1p()
        accepted = rows.accept(torch.ones_like(px), certain & (g > px))
        assert accepted.lx is not None
        return Edit(lx=torch.where((g > px) & ~certain, lx, accepted.lx), qx=accepted.qx)


class Cactus(_Raised):
    """g = min(1, p(x) + sqrt(2 delta p(x)(1 - p(x)))). Source: arXiv 2604.04987.

    ``delta`` >= 0 in nats is the second-order form of a bound on KL(h^x || p), not the bound: the exact worst case of a drafted
    token is log(1 + 2 delta), and the law of the position, a mixture over x, may drift further. delta = 0 is strict, bit for
    bit. A one-hot p (temperature 0, a forced row) leaves it strict.
    """

    name = "cactus"

    def __init__(self, delta: float) -> None:
        self.delta = delta

    def raised(self, px: Tensor) -> Tensor:
        # the variance can go slightly below 0 in float32; 0 * inf at the ends of the range is no relaxation
        variance = (px * (1 - px)).clamp_min(0)
        return torch.where(variance > 0, px + (2 * self.delta * variance).sqrt(), px).clamp_max(1)


class CactusExact(_Raised):
    """g is the largest with KL(Ber(g) || Ber(p(x))) <= delta, so that KL(h^x || p) <= delta holds exactly.

    Derived from the constraint of arXiv 2604.04987 without its Taylor step. ``delta`` >= 0 in nats; 0 is strict bit for bit.
    """

    name = "cactus-exact"

    def __init__(self, delta: float) -> None:
        self.delta = delta

    def raised(self, px: Tensor) -> Tensor:
        if self.delta == 0:
            return px
        p = px.double().clamp(0, 1)
        low, high = p.clone(), torch.ones_like(p)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            within = _binary_kl(middle, p) <= self.delta
            low, high = torch.where(within, middle, low), torch.where(within, high, middle)
        reaches_one = -p.log() <= self.delta
        g = torch.where(reaches_one & (p < 1), 1.0, low)
        return torch.where(p > 0, torch.maximum(g.to(px.dtype), px), px)


def _binary_kl(g: Tensor, p: Tensor) -> Tensor:
    return torch.xlogy(g, g / p) + torch.xlogy(1 - g, (1 - g) / (1 - p))
