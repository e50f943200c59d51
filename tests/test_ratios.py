"""Intervals of ratios and shares: what they cover, and what they refuse."""

from __future__ import annotations

import random

import pytest

from agentguard.economics import ratios
from agentguard.economics.ratios import paired_gain, paired_ratio, share


def test_pairing_takes_the_variance_of_the_plans_out() -> None:
    rng = random.Random(1)
    strict = [rng.lognormvariate(5, 1) for _ in range(200)]
    relaxed = [1.2 * v * rng.lognormvariate(0, 0.05) for v in strict]
    ratio = paired_ratio(relaxed, strict)
    assert ratio.low < 1.2 < ratio.high
    assert ratio.high - ratio.low < 0.05
    shuffled = paired_ratio(rng.sample(relaxed, 200), strict)
    assert shuffled.high - shuffled.low > 5 * (ratio.high - ratio.low)


def test_the_interval_covers_the_true_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratios, "RESAMPLES", 200)
    rng = random.Random(2)
    hits = 0
    for _ in range(200):
        strict = [rng.lognormvariate(5, 0.5) for _ in range(60)]
        ratio = paired_ratio([1.1 * v * rng.lognormvariate(-0.045, 0.3) for v in strict], strict)
        hits += ratio.low <= 1.1 <= ratio.high
    assert hits >= 180  # 95 % of 200, less four standard deviations


def test_gain_counts_the_bonus_token() -> None:
    gain = paired_gain([(4, 1), (8, 2)], [(2, 1), (4, 2)])
    assert (gain.value, gain.n) == (5 / 3, 2)
    assert gain.low == gain.high == pytest.approx(5 / 3)


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (10, 10), (95, 100)])
def test_a_share_stays_in_range_and_is_never_certain(hits: int, n: int) -> None:
    ratio = share(hits, n)
    assert 0 <= ratio.low <= hits / n <= ratio.high <= 1
    assert ratio.high - ratio.low > 0.05


def test_wilson_by_hand() -> None:
    ratio = share(8, 10)
    assert (ratio.low, ratio.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_no_ratio_is_made_up() -> None:
    with pytest.raises(ValueError, match="same plans"):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="total is 0"):
        paired_ratio([1.0], [0.0])
    with pytest.raises(ValueError, match="0 trials"):
        share(0, 0)
