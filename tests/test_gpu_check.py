"""The prepared run for a machine with a GPU, as a dry run: every step of it works before somebody spends GPU time on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine_plugins.kernels import table

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
    whole, cut = found["times"]
    assert (whole["chunks"], cut["chunks"]) == (1, 2)
    # statistics of the target's row alone; of a V2 verification: both rows, and of each fourth one again
    cactus = whole["rules"]["cactus:delta=0.25,p_min=0.1,top_k=10"]
    assert (cactus["bytes_an_entry"], whole["stock_bytes_an_entry"]) == (4.0, 7.5)
    assert cactus["expected_ratio"] == pytest.approx(1 + 4 / 7.5)
    assert found["goals_out_of_reach"] == []
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


def test_what_is_out_of_reach_is_named_by_rule() -> None:
    from benchmarks.gpu_check import out_of_reach

    times = [{"rows": 512, "rules": {"cactus": {"out_of_reach": ["over_stock"]}, "typical": {"out_of_reach": []}}}]
    assert out_of_reach({"times": times}) == ["512 rows: over_stock, cactus"]
    assert out_of_reach({"times": {"passed": False}}) == []


@pytest.mark.parametrize(
    ("ratio", "added", "met"), [(1.01, 1.0, True), (1.2, 0.0019, True), (1.2, 0.003, False), (None, None, None)]
)
def test_strict_is_held_to_a_ratio_or_to_two_microseconds(ratio: float | None, added: float | None, met: bool | None) -> None:
    from benchmarks.gpu_check import strict_met

    assert strict_met({"over_stock": ratio, "added_ms": added}) is met


def test_which_rows_need_the_second_pass_is_what_the_kernel_does() -> None:
    """The bytes are counted by a copy of the kernel's condition."""
    from benchmarks.gpu_check import needs_sums
    from engine_plugins.kernels import batch as words

    stats = torch.zeros(3, words.STATS)
    stats[:, words.PX], stats[:, words.QX] = torch.tensor([0.1, 0.5, 0.1]), torch.tensor([0.5, 0.5, 0.5])
    verdict = torch.tensor([words.INSIDE, words.INSIDE, 0])
    for rule, expected in (("lenience", [True, False, False]), ("interp", [True, False, False]), ("r-fuzzy", [True, True, False]),
                           ("cactus", [False] * 3), ("casc-chow", [False] * 3)):  # fmt: skip
        assert needs_sums(table.CODES[rule], 0.3, stats, verdict).tolist() == expected, rule


CONTAINED = """
import sys
from benchmarks.gpu_check import contained
child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
child += "print(p.pid, flush=True); open(sys.argv[1], 'w').write(str(p.pid)); p.wait()"
print(contained([sys.executable, "-c", child, sys.argv[1]], float(sys.argv[2])))
"""


@pytest.mark.parametrize("how", ["told to end", "limit"])
def test_what_the_run_started_ends_with_it(how: str, tmp_path: Path) -> None:
    """`timeout` ends the run with SIGTERM, and the engine is in a session of its own."""
    note = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", CONTAINED, str(note), "600" if how == "told to end" else "3"], cwd=SCRIPT.parents[1],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
    ) as run:  # fmt: skip
        if how == "told to end":
            while not (note.exists() and note.read_text()):
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=120)
    assert run.returncode == (128 + signal.SIGTERM if how == "told to end" else 0)
    assert how == "told to end" or "not done after 3 s" in said
    if note.exists():
        for _ in range(200):  # killed, and then reaped by init
            if gone(int(note.read_text())):
                break
            time.sleep(0.05)
        assert gone(int(note.read_text())), "the grandchild is still there"


def gone(pid: int) -> bool:
    """Not there, or there as what init has not reaped yet."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_it_needs_torch_and_triton_alone() -> None:
    """Also on a machine that has none of what agentguard and vLLM bring."""
    missing = ("msgspec", "pydantic", "structlog", "zmq", "vllm", "click", "rich", "yaml")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); import benchmarks.gpu_check"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=SCRIPT.parents[1]
    )
    assert done.returncode == 0, done.stderr[-2000:]
