"""Intervals that stay valid while somebody looks at them all the time.

An asymptotic confidence sequence: Robbins' normal mixture on the intrinsic time v = 1/variance of the estimate (Waudby-Smith,
Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", arXiv 2103.06476). With
probability 1 - alpha it covers the truth at *every* moment after the first sessions, so a guard may act the first time it
excludes 1. The price is a width of about 1.5 times that of an interval for one look.
"""

from __future__ import annotations

import functools
import math

from agentguard.economics.ratios import Ratio

ALPHA = 0.05
FINEST = 0.08
"""Standard error of ln ratio at which the sequence is narrowest. With it a loss of 20 % is found after
some 1,100 requests an arm, one of 8 % after some 5,900; with 0.028 the first takes longer (benchmarks/economics_simulation.py)."""


def half_width(variance: float, alpha: float = ALPHA) -> float:
    """Half of the two-sided 1 - alpha sequence's width at this moment, in the estimate's unit. ``variance`` > 0 of the estimate."""
    v = 1 / variance
    scale = 1 / FINEST**2 / _best(alpha)
    return math.sqrt((v + scale) * (math.log((v + scale) / scale) - 2 * math.log(alpha))) / v


@functools.cache
def _best(alpha: float) -> float:
    """v/scale at which the mixture is narrowest: x = 1 + v/scale solves x - ln x = 1 + 2 ln(1/alpha)."""
    x = target = 1 - 2 * math.log(alpha)
    for _ in range(60):
        x = target + math.log(x)
    return x - 1


def ratio(log_value: float, variance: float, n: int, alpha: float = ALPHA) -> Ratio:
    """A ratio with its confidence sequence, from its logarithm and the variance of that. ``n``: sessions of the smaller arm."""
    width = half_width(variance, alpha) if variance > 0 else math.inf
    if width > 700:
        return Ratio(math.exp(log_value), 0.0, math.inf, n)
    return Ratio(math.exp(log_value), math.exp(log_value - width), math.exp(log_value + width), n)
