"""The prepared run for a machine with a GPU, as a dry run: every step of it works before somebody spends GPU time on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.sh"


@pytest.mark.kernels
def test_the_dry_run_goes_through(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [str(SCRIPT), "--interpret", str(out)], capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert json.loads(done.stdout) == found
    assert all(one["passed"] for one in (*found["checks"], found["repeatable"], found["trace"]))
    assert found["no_sync"] == {"passed": None, "reason": "needs a CUDA device"}
    assert found["shape"]["setting"] == "AG_BLOCK=8192x8"
    assert found["times"][0]["rows"] == 8
    assert found["times"][0]["strict"]["over_stock"] > 0, "the seam was timed around the stock call"
    assert found["goals_missed"] is None, "times under the interpreter are no times"
    assert set(found["set_up"]["moved"]) == {"V1", "V2"}


def test_a_missed_goal_is_named() -> None:
    from benchmarks.gpu_check import goals_missed

    times = [
        {"rows": 8, "goals": {"over_stock": True, "strict": None}},
        {"rows": 512, "goals": {"over_stock": False, "strict": True}},
    ]
    assert goals_missed({"times": times}) == ["512 rows: over_stock"]
    assert goals_missed({"times": {"passed": False, "error": "x"}}) == []


def test_it_needs_torch_and_triton_alone() -> None:
    """Also on a machine that has none of what agentguard and vLLM bring."""
    missing = ("msgspec", "pydantic", "structlog", "zmq", "vllm", "click", "rich", "yaml")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); import benchmarks.gpu_check"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=SCRIPT.parents[1]
    )
    assert done.returncode == 0, done.stderr[-2000:]
