"""The rule that keeps the target's law exactly."""

from __future__ import annotations

import torch

from engine_plugins.rules.base import Pair, Rule


class Strict(Rule):
    """p' = p, q' = q: the output's law is p. Source: arXiv 2211.17192, algorithm 1. Greedy: accept iff x = argmax p."""

    name = "strict"

    def pair(self, p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> Pair:
        return p, q
