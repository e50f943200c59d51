"""Intervals that stay valid while somebody looks at them all the time.

An asymptotic confidence sequence: Robbins' normal mixture on intrinsic time v = 1/variance of the estimate (Waudby-Smith,
Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", arXiv 2103.06476,
theorem 2.2, with the mixture's scale chosen for one moment as in its section 2.3). With probability 1 - alpha it covers the
truth at *every* moment after the first sessions, so a guard may act the first time it excludes 1. The price against a 1.96
interval is a factor of about 1.5.
"""

from __future__ import annotations

import math

from agentguard.economics.ratios import Ratio

ALPHA = 0.05
FINEST = 0.028
"""Standard error of ln ratio at which the sequence is narrowest; a change of 8 % is then just found."""


def half_width(variance: float, alpha: float = ALPHA) -> float:
    """Half of the two-sided 1 - alpha sequence's width at this moment, in the estimate's unit. ``variance`` > 0 of the estimate."""
    v = 1 / variance
    scale = 1 / FINEST**2 / _best(alpha)
    return math.sqrt((v + scale) * (math.log((v + scale) / scale) - 2 * math.log(alpha))) / v


def _best(alpha: float) -> float:
    """v/scale at which the mixture is narrowest: x = 1 + v/scale solves x - ln x = 1 + 2 ln(1/alpha)."""
    x = target = 1 - 2 * math.log(alpha)
    for _ in range(60):
        x = target + math.log(x)
    return x - 1


def ratio(log_value: float, variance: float, n: int, alpha: float = ALPHA) -> Ratio:
    """A ratio with its confidence sequence, from the logarithm and its variance. n: sessions of the smaller arm."""
    width = half_width(variance, alpha) if variance > 0 else math.inf
    high = math.inf if width > 700 else math.exp(log_value + width)
    return Ratio(math.exp(log_value), math.exp(log_value - width) if math.isfinite(width) else 0.0, high, n)
