"""Fuzzy speculative decoding: trust a draft row that is close to the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_plugins.rules.base import Edit, Pair, Rows, Rule, Trusting


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """[rows] the true Jensen-Shannon divergence in nats, 0 to ln 2.

    The reference code of FSD (maxholsman/fsd) computes .5 KL(m||p) + .5 KL(m||q), which is unbounded; its published thresholds
    are in that unit and do not carry over.
    """
    m = (p + q) / 2
    terms = (_x_log_x(p) + _x_log_x(q)) / 2 - _x_log_x(m)
    return terms.sum(-1).clamp_min(0)


def _x_log_x(x: Tensor) -> Tensor:
    # four times as fast as torch.xlogy on CPU (34 ms against 130 ms for 384 rows of 151,936); 0 log(tiny) is 0 as well
    return x.clamp_min(torch.finfo(x.dtype).tiny).log_().mul_(x)


class Fuzzy(Rule):
    """Accept every x where JSD(p, q) <= T; elsewhere reject and draw afresh from p (not from p - q, so x may come again). No coin.

    Source: arXiv 2502.20704, on the processed rows instead of raw logits at temperature 1. ``T`` in nats: ln 2 or more emits
    the draft alone. No value is strict: below 0 the law is p but nothing is accepted. A forced row would not be safe, and stays
    strict in the engine.
    """

    name = "fuzzy"

    def __init__(self, T: float) -> None:
        self.threshold = T

    def definition(self, rows: Rows) -> Pair:
        near = self._near(rows).unsqueeze(-1)
        return torch.where(near, rows.q, rows.p), torch.where(near, rows.q, 0.0)

    def edit(self, rows: Rows) -> Edit | None:
        near = self._near(rows)
        accepted = rows.accept(torch.ones_like(rows.qx), near)
        assert accepted.qx is not None
        far = (~near).nonzero().squeeze(-1)
        return Edit(lx=accepted.lx, qx=torch.where(near, accepted.qx, 0.0), rows=far, q=rows.q.new_zeros(1, 1))

    def _near(self, rows: Rows) -> Tensor:
        return jensen_shannon(rows.p, rows.q) <= self.threshold


class RFuzzy(Trusting):
    """pi = q where JSD(p, q) < T, else p: fuzzy's law with strict verification where the rows are far apart.

    Source: arXiv 2607.08690, equation 10 and result 1 of appendix C. ``T`` in nats: T <= 0 is strict bit for bit, above ln 2 it
    emits the draft alone.
    """

    name = "r-fuzzy"

    def __init__(self, T: float) -> None:
        self.threshold = T

    def trusted(self, rows: Rows) -> Tensor:
        return jensen_shannon(rows.p, rows.q) < self.threshold

    def edit(self, rows: Rows) -> Edit | None:
        return None if self.threshold <= 0 else super().edit(rows)
