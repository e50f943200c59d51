"""Pearson's test, for counts of drawn tokens against a law."""

from __future__ import annotations

import torch


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """What cannot happen must not have happened."""
    possible = expected > 0
    assert observed[~possible].sum() == 0
    observed, expected = observed[possible], expected[possible]
    if len(observed) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2), statistic.float() / 2))
