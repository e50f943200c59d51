"""What the economics' intervals and verdicts are worth: `python -m benchmarks.economics_simulation [--json FILE] [--seed 0]`.

Sessions of 10 steps with log-normal lengths, sigma 0.8 and a correlation of 0.3 within a session (both of the logarithm),
capped at 10 medians; rounds are lengths. The truth is the ratio of the means restricted at the cap. Written out:

- `coverage`: share of 10,000 experiments whose 95 % interval covers the truth at one fixed time (100 sessions an arm, ratio 1.2);
  `naive_coverage`: the same for intervals that take steps as independent;
- `false_switch_off`: share of 1,000 experiments without effect in which the guard ever switches the rule off in 100,000
requests, looking
  after every session;
  `..._95_to_5`: the same with a control of 5 %, with ten steps a session and with one;
- `median_requests_to_loss`: requests an arm until a loss of 20 % or 8 % is called (300 experiments each); - `agreement`: of 100
experiments, in how many the shipped `Cell` and `judge` give the verdict and the ratio of the vectorised estimator.

The vectorised estimator stands in for the shipped one because 10^8 single updates would take an hour.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from agentguard.economics import netwin, sequences
from agentguard.economics.cells import QUANTITIES, Cell, SessionSums

STEPS, SIGMA, WITHIN, CAP = 10, 0.8, 0.3, 10.0
Array = np.ndarray[Any, np.dtype[np.float64]]


def lengths(rng: np.random.Generator, runs: int, sessions: int, ratio: float, steps: int = STEPS) -> Array:
    """[runs, sessions, steps]"""
    session = rng.standard_normal((runs, sessions, 1), dtype=np.float32) * SIGMA * math.sqrt(WITHIN)
    step = rng.standard_normal((runs, sessions, steps), dtype=np.float32) * SIGMA * math.sqrt(1 - WITHIN)
    return np.minimum(np.exp(session + step) * ratio, CAP).astype(np.float64)


def restricted_mean(ratio: float) -> float:
    """E min(ratio exp(N(0, sigma^2)), cap), in closed form."""
    k = math.log(CAP / ratio)

    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    return ratio * math.exp(SIGMA**2 / 2) * below((k - SIGMA**2) / SIGMA) + CAP * (1 - below(k / SIGMA))


def path(sums: Array) -> tuple[Array, Array]:
    """Mean a session and its variance after each session; sums: [runs, sessions]."""
    n = np.arange(1, sums.shape[1] + 1)
    mean = sums.cumsum(1) / n
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = ((sums**2).cumsum(1) / n - mean**2) / (n - 1)
    return mean, np.maximum(variance, 0)


def log_ratio_path(arm: Array, control: Array) -> tuple[Array, Array]:
    """`netwin.difference` after each session of the control, beside which the arm has a fixed number of sessions."""
    times = arm.shape[1] // control.shape[1]
    n = np.arange(1, control.shape[1] + 1)
    (a, va), (c, vc) = path(arm.sum(-1)), path(control.sum(-1))
    a, va = a[:, times - 1 :: times], va[:, times - 1 :: times]
    with np.errstate(divide="ignore", invalid="ignore"):
        own = va * n * times / a**2, vc * n / c**2
        pooled = (own[0] * times + own[1]) / (times + 1)
        return np.log(a / c), np.maximum(own[0], pooled) / (n * times) + np.maximum(own[1], pooled) / n


def half_width(variance: Array, alpha: float) -> Array:
    """`sequences.half_width` on arrays."""
    with np.errstate(divide="ignore", invalid="ignore"):
        v = 1 / variance
        scale = 1 / sequences.FINEST**2 / sequences._best(alpha)
        return np.asarray(np.sqrt((v + scale) * (np.log((v + scale) / scale) - 2 * math.log(alpha))) / v)


def first_loss(arm: Array, control: Array) -> Array:
    """Sessions of the control at the first loss verdict on rounds, [runs]; inf for never."""
    value, variance = log_ratio_path(arm, control)
    lost = value - half_width(variance, 2 * netwin.ALPHA_ROUNDS) > 0
    lost[:, : netwin.MIN_SESSIONS - 1] = False
    return np.where(lost.any(1), lost.argmax(1) + 1.0, math.inf)


def coverage(rng: np.random.Generator, runs: int, sessions: int = 100, ratio: float = 1.2) -> tuple[float, float]:
    truth = math.log(restricted_mean(ratio) / restricted_mean(1.0))
    hits = naive = 0
    for _ in range(runs // 500):
        arm, control = lengths(rng, 500, sessions, ratio), lengths(rng, 500, sessions, 1.0)
        value, variance = (m[:, -1] for m in log_ratio_path(arm, control))
        hits += int((np.abs(value - truth) <= half_width(variance, sequences.ALPHA)).sum())
        steps = [m.reshape(500, -1) for m in (arm, control)]
        independent = sum(m.var(1, ddof=1) / m.shape[1] / m.mean(1) ** 2 for m in steps)
        naive += int((np.abs(value - truth) <= 1.959964 * np.sqrt(independent)).sum())
    return hits / runs, naive / runs


def shipped(steps: Array) -> Cell:
    """The same sessions through the shipped estimator; steps: [sessions, steps]."""
    cell = Cell()
    for row in steps:
        session = SessionSums()
        for value in row:
            cell.add_step(session, dict.fromkeys(QUANTITIES, float(value)) | {"ttlt": 0.0}, censored=bool(value >= CAP))
    return cell


def agreement(rng: np.random.Generator, runs: int = 100) -> int:
    """In how many experiments the shipped estimator says what the vectorised one says."""
    same = 0
    for i in range(runs):
        sessions, ratio = 60 + 5 * (i % 40), (1.0, 1.2, 1.5, 0.7)[i % 4]
        arm, control = lengths(rng, 1, sessions, ratio), lengths(rng, 1, sessions, 1.0)
        cells = shipped(arm[0]), shipped(control[0])
        rounds = netwin.difference(*cells, "rounds")
        verdict = netwin.judge(rounds, netwin.difference(*cells, "ttlt"), sessions)
        value, variance = (float(m[0, -1]) for m in log_ratio_path(arm, control))
        width = float(half_width(np.array(variance), 2 * netwin.ALPHA_ROUNDS))
        word = "loss" if value - width > 0 else "win" if value + width < 0 else "undecided"
        close = verdict.rounds is not None and math.isclose(math.log(verdict.rounds.value), value, abs_tol=1e-9)
        same += word == verdict.word and close and math.isclose(math.log(verdict.rounds.low), value - width, abs_tol=1e-9)
    return same


def simulate(seed: int, *, coverage_runs: int = 10_000, null_runs: int = 1_000, loss_runs: int = 300) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    covered, naive = coverage(rng, coverage_runs)
    wrong = 0
    for _ in range(null_runs // 50):  # 100,000 requests are 5,000 sessions an arm
        wrong += int(np.isfinite(first_loss(lengths(rng, 50, 5_000, 1.0), lengths(rng, 50, 5_000, 1.0))).sum())
    # the default control of 5 %: 100,000 requests have 500 control sessions of ten steps, or 5,000 of one
    unequal = dict.fromkeys((10, 1), 0)
    for steps in unequal:
        for _ in range(null_runs // 10):
            control, arm = (lengths(rng, 10, 5_000 // steps * times, 1.0, steps) for times in (1, 19))
            unequal[steps] += int(np.isfinite(first_loss(arm, control)).sum())
    medians = {}
    for ratio in (1.20, 1.08):
        found = first_loss(lengths(rng, loss_runs, 2_000, ratio), lengths(rng, loss_runs, 2_000, 1.0))
        median = float(np.median(found)) * STEPS
        medians[f"{ratio - 1:.2f}"] = median if math.isfinite(median) else None
    return {
        "seed": seed,
        "coverage": covered, "naive_coverage": naive, "coverage_runs": coverage_runs, "false_switch_off": wrong / null_runs,
        "false_switch_off_95_to_5": unequal[10] / null_runs,
        "false_switch_off_95_to_5_one_step": unequal[1] / null_runs,
        "null_runs": null_runs, "median_requests_to_loss": medians, "loss_runs": loss_runs, "agreement": agreement(rng),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = simulate(arguments.seed)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
