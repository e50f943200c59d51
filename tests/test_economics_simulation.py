"""The benchmark of the economics' error rates, in small."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import economics_simulation


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return economics_simulation.simulate(1, coverage_runs=2_000, null_runs=150, loss_runs=60)


def test_the_interval_covers_where_one_that_takes_steps_as_independent_does_not(result: dict[str, Any]) -> None:
    assert result["coverage"] >= 0.94
    assert 0.65 < result["naive_coverage"] < 0.8


def test_a_rule_without_effect_is_rarely_switched_off_however_often_one_looks(result: dict[str, Any]) -> None:
    for design in ("", "_95_to_5", "_95_to_5_one_step"):
        assert result[f"false_switch_off{design}"] < 0.05 + 0.04  # 150 experiments


def test_losses_are_found_in_time(result: dict[str, Any]) -> None:
    found = result["median_requests_to_loss"]
    assert found["0.20"] <= 2_500
    assert found["0.08"] <= 10_000


def test_the_vectorised_simulator_is_the_shipped_estimator(result: dict[str, Any]) -> None:
    assert result["agreement"] == 100
