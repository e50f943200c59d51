"""Interpolation: a fixed mixture of draft and target."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_plugins.rules.base import Edit, Reducible, Rows


class Interp(Reducible):
    """pi = w q + (1 - w) p, so TV(pi, p) = w TV(p, q). Source: MANGA-UOFA/Cactus, cactus/interp.py.

    a(x) = min(1, w + (1 - w) p(x)/q(x)), and the residual max(pi - q, 0) = (1 - w) max(p - q, 0) is the stock one. ``w`` in [0,
    1]: 0 is strict bit for bit, 1 emits the draft alone and accepts every draft token.
    """

    name = "interp"

    def __init__(self, w: float) -> None:
        self.w = w

    def pi(self, rows: Rows) -> Tensor:
        return torch.lerp(rows.p, rows.q, self.w)

    def edit(self, rows: Rows) -> Edit | None:
        if self.w == 0:
            return None
        # where p(x) >= q(x) strict accepts as well, and a draft token of probability 0 is not drafted
        where = rows.px < rows.qx
        ratio = torch.where(where, rows.px / rows.qx, 1.0)
        return rows.accept(self.w + (1 - self.w) * ratio, where)
