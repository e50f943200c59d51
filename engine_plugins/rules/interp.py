"""Interpolation: a fixed mixture of draft and target."""

from __future__ import annotations

import torch

from engine_plugins.rules.base import Pair, Rule


class Interp(Rule):
    """pi = w q + (1 - w) p, reducible: the output's law is pi and the acceptance 1 - TV(pi, q).

    ``w`` in [0, 1]: 0 is strict bit for bit, 1 emits the draft alone and accepts every draft token. At temperature 0 the engine's
    greedy kernel decides and the rule does not apply.
    """

    name = "interp"

    def __init__(self, w: float) -> None:
        self.w = w

    def pair(self, p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> Pair:
        if self.w == 0:
            return p, q
        # lerp(w=1) is q itself, so p'(x)/q'(x) is 1 up to the kernel's own softmax
        return torch.lerp(p, q, self.w), q
