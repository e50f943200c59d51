"""A study on the real engine: its sessions, its telemetry, its probe, and how it goes on after it was killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentguard.study import suites
from agentguard.study.comparison import summarise_records
from agentguard.study.grid import Grid, cells_of, run_grid
from agentguard.study.records import Header, Recording, load
from agentguard.study.runner import parse_arms
from tests.conftest import RunningStack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
ARMS = "strict;fuzzy:T=0.3;strict:p_min=0.1,top_k=10"
FULL = [sys.executable, "-m", "agentguard", "study", "full", "--n", "2", "--n-rest", "1", "--seed", "5", "--close", "off"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_small_grid_through_the_running_engine(running: RunningStack, tmp_path: Path) -> None:
    grid = Grid(suites.get("chain"), cells_of(parse_arms(ARMS), ("off", "adaptive"), 3), 4, budget=90)
    plan = await asyncio.to_thread(grid.as_json, running.stack.guard.policy)
    header = Header(plan=plan, provenance={"engine": {}})
    recording = await asyncio.to_thread(Recording.new, tmp_path / "sessions.jsonl", header)
    before = len(running.events)
    done: list[int] = []
    await run_grid(grid, running.stack, recording, lambda: done.append(1))
    assert len(done) == len(recording.records) == grid.sessions == 18
    for record in recording.records:
        (step,) = record.steps
        finished = step.finished
        # what the telemetry told of a session is what the engine counted
        assert (record.stats.rounds, record.stats.drafted, record.stats.accepted) == (
            finished.rounds, finished.drafted, finished.accepted,
        )  # fmt: skip
        assert finished.rule == record.rule.replace("fuzzy:T=0.3", "fuzzy:T=0.3,p_min=0,top_k=0")
        assert step.right is not None
        assert step.proved is None or 0 < step.proved <= finished.tokens
        assert bool(finished.closed) <= (record.close == "adaptive")
        assert finished.tokens <= (1024 if record.close == "off" else 90)
        if record.rule.startswith("strict"):
            assert record.stats.relaxed == []
    assert any(record.stats.relaxed for record in recording.records if record.rule.startswith("fuzzy"))
    assert len(running.events) > before
    again: list[int] = []
    await run_grid(grid, running.stack, recording, lambda: again.append(1))
    assert again == []  # nothing is run twice


def test_a_killed_study_goes_on_where_it_was_and_its_report_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sessions = out / "sessions.jsonl"
    study = subprocess.Popen([*FULL, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (sessions.exists() and sessions.read_bytes().count(b"\n") > 5):
        assert study.poll() is None, study.communicate()
        assert time.monotonic() < deadline, "no session was ever recorded"
        time.sleep(0.1)
    processes = psutil.Process(study.pid).children(recursive=True)
    os.kill(study.pid, signal.SIGKILL)
    study.communicate()
    _, alive = psutil.wait_procs(processes, timeout=40)
    assert alive == []  # the engine does not outlive it
    with sessions.open("ab") as file:
        file.write(b'{"rule":"strict","clo')
    kept = {record.key: record for record in load(sessions)[1]}
    assert kept

    other = subprocess.run([*FULL, "--out", str(out), "--resume", "--seed", "6"], capture_output=True, text=True, check=False)
    assert (other.returncode, "seed is 5 there and 6 now" in other.stderr) == (2, True), other.stderr
    fresh = subprocess.run([*FULL, "--out", str(out)], capture_output=True, text=True, check=False)
    assert (fresh.returncode, "--resume" in fresh.stderr) == (2, True), fresh.stderr

    done = subprocess.run([*FULL, "--out", str(out), "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {record.key: record for record in load(sessions)[1]}
    assert kept.items() <= found.items()  # what was there stayed as it was
    assert len(found) == 2 * (8 * 2 + 9)
    document = json.loads((out / "summary.json").read_text())
    assert document["sessions"] == {"planned": 50, "recorded": 50}
    assert document == json.loads(summarise_records(sessions).to_json())
    assert min(a["telemetry"] for a in document["arms"]) > 0.9  # frames may be dropped on a machine under load
    assert (out / "report.html").read_text().count("<svg") >= 5
    assert "50 sessions" in done.stderr
