"""vLLM's whole engine on Model Runner V2, with the plugin: on a CPU, under Triton's interpreter.

`benchmarks/gpu_engine.py` is what a machine with a GPU runs too; here it runs at a small size, so CUDA graphs, streams and async
scheduling are what these tests do not see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.kernels, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def child(*command: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def engine() -> dict[str, Any]:
    said = child("benchmarks.gpu_engine", "--interpret")
    found: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))
    return found


def test_the_engine_is_v2_and_every_feature_is_on(engine: dict[str, Any]) -> None:
    assert engine["runner"] == "V2"
    assert [name for name, on, _ in engine["features"] if not on] == []
    assert [name for name, _, _ in engine["features"]] == [
        "rules", "support filter", "think budgets", "verification telemetry", "coins in telemetry", "tts", "kernels", "warm-up",
    ]  # fmt: skip


def test_rules_act_on_their_own_requests(engine: dict[str, Any]) -> None:
    found = engine["laws"]
    assert found["strict"] < 1 == found["accept_all"]
    assert found["mixed"] < 1
    assert found["greedy_unchanged"], "at temperature 0 a rule changes nothing"


@pytest.mark.parametrize("heat", ["heat 1", "heat 0"])
def test_limits_hold_to_the_token_through_preemptions(heat: str, engine: dict[str, Any]) -> None:
    found = engine["limits"][heat]
    assert max(found["bound"]) <= 8 < max(found["free"])
    assert found["preempted"] > 0, "the KV cache is too small for the batch"


def test_telemetry_counts_what_the_engine_counts(engine: dict[str, Any]) -> None:
    found = engine["telemetry"]
    assert found["passed"], found
    assert found["relaxed_inside"] > 0 == found["relaxed_outside"], "ag_phase=think ends with the trace"


def test_a_publish_takes_effect_and_goes_away(engine: dict[str, Any]) -> None:
    assert engine["tts"]["passed"], engine["tts"]
