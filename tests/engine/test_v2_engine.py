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


@pytest.fixture(scope="module", params=["own"])
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An EAGLE-3 head with an output matrix of its own; see tts_v2.py."""
    out = tmp_path_factory.mktemp("v2") / "out.json"
    child("tests.engine.tts_v2", str(out), request.param, "0")
    found: dict[str, Any] = json.loads(out.read_text())
    return found | {"kind": request.param}


def test_what_is_recorded_is_what_was_drafted_with(learned: dict[str, Any]) -> None:
    """Every row of q that V2 verified with is the twin's: at the start, after learning, and after a pause."""
    for state in ("at_the_start", "after_learning", "after_a_pause"):
        assert learned[f"aligned_{state}"]["rows"] > 50
        assert learned[f"aligned_{state}"]["worst"] < 1e-3
    assert learned["frozen_after_learning"]["worst"] > 0.05, "learning changed nothing, so the comparison says nothing"
    assert learned["failed"] == ""


def test_publishes_leave_tensors_where_they_are(learned: dict[str, Any]) -> None:
    """Captured graphs read the draft's tensors at their addresses."""
    assert learned["addresses"] >= 10
    assert learned["moved"] == []
    assert not learned["target_moved"]


def test_only_the_window_and_the_top_tokens_are_sent(learned: dict[str, Any]) -> None:
    assert learned["narrow"] == {"width": 8, "longest": 16}
