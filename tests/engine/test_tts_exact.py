"""What TTS must not change: the twin is the served draft row by row, and strict keeps the target's law under any weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
TOKENS = int(os.environ.get("AG_TTS_TOKENS", "25000"))
"""Tokens an arm of the distribution test; docs/log.md has it at 100,000."""


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engine and trainer in one process of its own; see tts_in_process.py."""
    out = tmp_path_factory.mktemp("tts") / "out.json"
    command = [sys.executable, "-m", "tests.engine.tts_in_process", str(out), str(TOKENS)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("state", ["at_the_start", "after_learning", "after_a_pause", "after_a_new_request"])
def test_the_twin_is_the_served_draft(exact: dict[str, Any], state: str) -> None:
    """Every row of q that vLLM stored is the twin's, so loss and rows are aligned and every published weight is in use."""
    found = exact[f"aligned_{state}"]
    assert found["rows"] > 300
    assert found["worst"] < 1e-3
    assert exact["frozen_after_learning"]["worst"] > 0.1, "learning changed nothing, so the comparison says nothing"


def test_a_publish_for_an_earlier_request_is_refused(exact: dict[str, Any]) -> None:
    assert not exact["stale"]["applied"]
    assert "a new request began" in exact["stale"]["reason"]


@pytest.mark.parametrize("arm", ["on", "adversarial", "off"])
def test_strict_keeps_the_targets_law(exact: dict[str, Any], arm: str) -> None:
    """Σ 1[token = v] - p(v) is a martingale whatever the draft's weights did between the rounds."""
    found = exact[arm]
    assert found["tokens"] >= TOKENS
    assert found["symbols"] >= 5
    assert all(abs(z) < 4 for _, z in found["worst"]), found["worst"]
    if arm != "off":
        assert found["updates"] >= 20
    assert (found["broken"] > 100) == (arm == "adversarial"), "rows of q that are no law"


def test_that_test_sees_the_fault_it_is_for(exact: dict[str, Any]) -> None:
    """Verification with the q of the weights that came since, in place of the stored one, is far off."""
    assert max(abs(z) for _, z in exact["mutant"]["worst"]) > 10


def test_a_pause_sends_no_frames(exact: dict[str, Any]) -> None:
    assert exact["frames_when_off"] == 0


@pytest.fixture(scope="module", params=["own", "shared"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An EAGLE-3 head with a vocabulary and output matrix of its own, and one that shares the target's; see tts_head.py."""
    out = tmp_path_factory.mktemp("head") / "out.json"
    command = [sys.executable, "-m", "tests.engine.tts_head", str(out), request.param]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # its trainer is in the engine's process and would spin on all cores
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found | {"kind": request.param}


def test_the_twin_is_the_served_head(head: dict[str, Any]) -> None:
    """Hidden states, chains and vocabulary are those of vLLM's EAGLE-3: before and after learning, and back at the start."""
    for state in ("at_the_start", "after_learning", "after_a_pause"):
        assert head[f"aligned_{state}"]["rows"] > 300
        assert head[f"aligned_{state}"]["worst"] < 1e-3
    assert head["frozen_after_learning"]["worst"] > 0.1, "learning changed nothing, so the comparison says nothing"
    assert head["losses"][-1] < 0.5 * head["losses"][0]


def test_a_learning_head_leaves_the_target_alone(head: dict[str, Any]) -> None:
    assert not head["target_moved"]
    assert ("lm_head.weight" in head["published"]) == (head["kind"] == "own")
    assert "embed_tokens.weight" not in head["published"]
