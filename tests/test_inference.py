"""The study's intervals and tests against truths worked out by hand, by counting all cases, or by simulation."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from agentguard.study import inference
from agentguard.study.inference import bootstrap, difference, holm, mcnemar, median, quantiles, ratio


def test_a_ratio_is_of_sums_and_certain_where_all_sessions_are_alike() -> None:
    found = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found is not None
    assert (found.value, found.low, found.high, found.n) == (2.0, 2.0, 2.0, 3)
    # no resample reaches 1, so the tail counts the one that is always added: 2 * 1 / 2001
    assert found.p == pytest.approx(2 / (inference.RESAMPLES + 1))


def test_two_sessions_are_resampled_as_they_should() -> None:
    """Of two sessions a resample is (a, a), (a, b), (b, a) or (b, b), each with probability 1/4: the mean is 0, 1/2 or 1."""
    draws: list[float] = []

    def mean(sums: list[float]) -> float:
        draws.append(sums[0] / 2)
        return draws[-1]

    found = bootstrap([[0.0, 1.0]], mean)  # type: ignore[arg-type]
    assert found is not None
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)
    counts = {value: draws[1:].count(value) / inference.RESAMPLES for value in (0.0, 0.5, 1.0)}
    assert counts == {0.0: pytest.approx(0.25, abs=0.04), 0.5: pytest.approx(0.5, abs=0.045), 1.0: pytest.approx(0.25, abs=0.04)}


def test_pairs_are_resampled_together() -> None:
    """Sessions of very different lengths under a rule that takes 1.2 times as long in each: the ratio is known exactly."""
    rng = random.Random(1)
    strict = [rng.lognormvariate(5, 1.5) for _ in range(50)]
    found = ratio([1.2 * v for v in strict], strict)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(1.2), pytest.approx(1.2))


def test_the_interval_covers_the_true_ratio_and_p_is_no_smaller_than_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "RESAMPLES", 200)
    rng = random.Random(2)
    covered = called = 0
    for i in range(300):
        strict = [rng.lognormvariate(5, 0.5) for _ in range(60)]
        noise = [rng.lognormvariate(-0.045, 0.3) for _ in strict]
        found = ratio([1.1 * v * e for v, e in zip(strict, noise, strict=True)], strict, seed=i % 7)
        null = ratio([v * e for v, e in zip(strict, noise, strict=True)], strict, seed=i % 7)
        assert found is not None
        assert null is not None
        assert null.p is not None
        covered += found.low <= 1.1 <= found.high
        called += null.p < 0.05
    assert covered >= 268  # 95 % of 300, less four standard deviations (3.8 each)
    assert called <= 32  # 5 % of 300, and as many


def test_p_falls_with_the_effect() -> None:
    rng = random.Random(3)
    strict = [rng.lognormvariate(4, 0.4) for _ in range(80)]
    ps = []
    for factor in (1.0, 1.1, 1.3):
        found = ratio([factor * v * random.Random(i).lognormvariate(-0.045, 0.3) for i, v in enumerate(strict)], strict)
        assert found is not None
        assert found.p is not None
        ps.append(found.p)
    assert ps[0] > ps[1] > ps[2]
    assert ps[2] == pytest.approx(2 / 2001)


def test_a_statistic_without_a_value_is_none_and_wrong_columns_are_refused() -> None:
    assert ratio([1.0, 2.0], [0.0, 0.0]) is None
    assert ratio([1.0, 1.0], [0.0, 1.0]) is not None  # a quarter of the resamples has no strict token, no more
    assert ratio([1.0] * 3, [0.0, 0.0, 1.0]) is None  # (2/3)^3 = 30 % have none
    with pytest.raises(ValueError, match="same sessions"):
        ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="same sessions"):
        ratio([], [])


def test_a_difference_of_means_by_hand() -> None:
    found = difference([1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0])
    assert found.value == 0.5
    assert found.low == 0.0
    assert found.high == 1.0


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([[3, 1, 2]], 2), ([[1, 2], [3, 10]], 2.5), ([[5], [5], [7]], 5), ([[1], [], [9]], 5), ([[4]], 4)],
)
def test_medians_by_hand(values: list[list[float]], wanted: float) -> None:
    found = median([Counter(session) for session in values])
    assert found is not None
    assert found.value == wanted
    assert found.low <= wanted <= found.high


def test_a_median_of_nothing_is_none() -> None:
    assert median([{}, {}]) is None


def test_a_weighted_median_is_that_of_the_values_written_out() -> None:
    rng = random.Random(4)
    for _ in range(200):
        values = sorted(rng.randrange(6) for _ in range(rng.randint(1, 7)))
        weights = [rng.randrange(4) for _ in values]
        written = [v for v, w in zip(values, weights, strict=True) for _ in range(w)]
        middle = len(written) // 2
        wanted = None if not written else (written[middle] if len(written) % 2 else (written[middle - 1] + written[middle]) / 2)
        ordered = [(v, [(i, 1) for i, w in enumerate(values) if w == v]) for v in sorted(set(values))]
        assert inference._weighted_median(ordered, weights, sum(weights)) == wanted


def test_the_medians_interval_covers_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "MEDIAN_RESAMPLES", 200)
    rng = random.Random(5)
    covered = 0
    for i in range(200):
        found = median([{rng.gauss(10, 3): 1} for _ in range(80)], seed=i % 5)
        assert found is not None
        covered += found.low <= 10 <= found.high
    assert covered >= 178  # 95 % of 200, less four standard deviations


def test_sessions_are_resampled_whole() -> None:
    """All variance is between sessions: 40 values in two sessions say no more than two values."""
    found = median([{0.0: 20}, {1.0: 20}])
    assert found is not None
    assert (found.low, found.high) == (0.0, 1.0)


@pytest.mark.parametrize(("gained", "lost"), list(itertools.product(range(5), repeat=2)))
def test_mcnemar_counts_all_ways_the_pairs_could_have_fallen(gained: int, lost: int) -> None:
    n = gained + lost
    ways = [sum(way) for way in itertools.product((0, 1), repeat=n)]
    extreme = sum(min(k, n - k) <= min(gained, lost) for k in ways)
    assert mcnemar(gained, lost) == pytest.approx(extreme / 2**n)


def test_mcnemar_by_hand_and_with_many_pairs() -> None:
    assert mcnemar(1, 5) == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(900, 1100) < 1e-5


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": pytest.approx(0.03), "c": pytest.approx(0.06), "b": pytest.approx(0.06)}
    assert holm({"a": 0.5, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_holm_keeps_the_chance_of_any_wrong_call() -> None:
    """20 tests without an effect, 1,000 times: at 5 % any is called in about 5 % of the families."""
    rng = random.Random(6)
    called = sum(min(holm({i: rng.random() for i in range(20)}).values()) < 0.05 for _ in range(1000))
    assert called <= 50 + 4 * 7


def test_quantiles_by_hand() -> None:
    assert quantiles([3, 1, 2], (0, 0.5, 1)) == [1, 2, 3]
    assert quantiles([0, 10], (0.25,)) == [2.5]
    assert quantiles([], (0.5,)) == []
