"""The commands as a user runs them, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentguard.study.results import summarise
from agentguard.telemetry.recorder import replay

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
AGENTGUARD = [sys.executable, "-m", "agentguard"]


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


def test_the_demo_prints_its_table_and_writes_the_same_numbers(tmp_path: Path) -> None:
    numbers, events = tmp_path / "demo.json", tmp_path / "events.jsonl"
    command = [*AGENTGUARD, "demo", "--n", "2", "--seed", "3", "--json", str(numbers), "--events", str(events)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    arms = json.loads(numbers.read_text())["arms"]
    assert [a["rule"].split(":")[0] for a in arms] == ["strict", "cactus", "cactus"]
    assert [a["filter"] for a in arms] == [False, False, True]
    for arm, row in zip(arms, summarise(replay(events)), strict=True):
        assert arm == json.loads(json.dumps(row.as_json()))
        assert (arm["steps"], arm["empty_answers"]) == (12, 0)
    assert (arms[0]["lambda"], arms[0]["gain"]) == (1, 1)
    printed = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in done.stdout.splitlines() if line.count("│") > 3
    }  # fmt: skip
    assert printed["tokens"] == [str(a["tokens"]) for a in arms]
    assert printed["accepted length ℓ"] == [f"{a['accepted_length']:.2f}" for a in arms]
    assert [c.split()[0] for c in printed["λ"][1:]] == [f"{a['lambda']:.2f}" for a in arms[1:]]
    assert [c.split()[0] for c in printed["answers right"]] == [str(a["right"]) for a in arms]


@pytest.mark.parametrize("victim", ["server", "engine core"])
def test_killing_the_engine_makes_the_demo_fail_clearly_and_leaves_nothing(victim: str, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    demo = subprocess.Popen(
        [*AGENTGUARD, "demo", "--events", str(events)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while not (events.exists() and b"step_finished" in events.read_bytes()):
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < deadline, "no step was ever finished"
        time.sleep(0.2)
    processes = psutil.Process(demo.pid).children(recursive=True)
    wanted = "api_server" if victim == "server" else "EngineCore"
    (chosen,) = [p for p in processes if wanted in " ".join(p.cmdline())]
    chosen.send_signal(signal.SIGKILL)
    out, err = demo.communicate(timeout=90)
    assert demo.returncode == 3, (out, err)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err)
    assert "agentguard: engine process" in last
    assert "start it again" in last
    assert "Traceback (most recent call last)" not in last.split("Last lines of its log")[0]
    assert_gone(processes)


def test_sigterm_ends_a_starting_server_with_all_its_processes(reference_policy: object) -> None:
    from agentguard.reference import reference_model

    serve = subprocess.Popen(
        [*AGENTGUARD, "serve", str(reference_model("target")), "--port", str(free_port())], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (processes := psutil.Process(serve.pid).children(recursive=True)):
        time.sleep(0.2)
    time.sleep(3)
    processes = psutil.Process(serve.pid).children(recursive=True)
    serve.send_signal(signal.SIGTERM)
    _, err = serve.communicate(timeout=60)
    assert serve.returncode == 130
    assert "interrupted" in err
    assert processes
    assert_gone(processes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    from agentguard.reference import reference_model

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {reference_model('target')}\nengine:\n  max_model_len: 999999\n")
    done = subprocess.run(
        [*AGENTGUARD, "serve", "--recipe", str(recipe), "--port", str(free_port())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "the engine ended with status" in done.stderr
    assert "max_model_len (999999) is greater than" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "./no-such-model"], "model='./no-such-model': does not exist"),
        (["serve"], "MODEL=None: give a model's path"),
        (["serve", "TARGET", "--rule", "cactuz:1"], "did you mean 'cactus'"),
        (["serve", "TARGET", "--host", "0.0.0.0"], "is reachable from outside"),
        (["study", "run", "--arms", "cactus:0.5"], "needs 'strict' among the arms"),
        (["study", "run", "--arms", "strict;strict"], "given twice"),
        (["study", "run", "--suite", "chian"], "did you mean 'chain'"),
        (["study", "run", "--temperature", "0"], "greedy requests bypass relaxed rules"),
        (["serv"], "did you mean 'serve'"),
    ],
)
def test_bad_usage_exits_2_with_field_and_remedy(arguments: list[str], named: str) -> None:
    from agentguard.reference import reference_model

    arguments = [str(reference_model("target")) if a == "TARGET" else a for a in arguments]
    done = subprocess.run([*AGENTGUARD, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named_before_an_engine_starts() -> None:
    from agentguard.reference import reference_model

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        done = subprocess.run(
            [*AGENTGUARD, "serve", str(reference_model("target")), "--port", str(port)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another port" in done.stderr
    assert time.monotonic() - started < 60


def test_doctor_finds_this_environment_whole() -> None:
    done = subprocess.run([*AGENTGUARD, "doctor", "--json"], capture_output=True, text=True, check=False)
    checks = {c["check"]: c for c in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert checks["model runner"]["ok"]
    assert all("every name the plugin binds is there" in checks[f"plugin on runner {r}"]["detail"] for r in ("V1", "V2"))
    runner = checks["model runner"]["detail"][:2]
    assert "need a CUDA device" in checks[f"runner {runner}: kernels"]["detail"]
    features = ("rules", "support filter", "think budgets", "verification telemetry", "coins in telemetry", "tts")
    assert all(checks[f"runner {runner}: {name}"]["detail"].startswith("on") for name in features)
    assert "reference pair: target" in checks


def test_doctor_says_why_a_disabled_plugin_is_off() -> None:
    done = subprocess.run(
        [*AGENTGUARD, "doctor"], capture_output=True, text=True, check=False, env={**os.environ, "AG_DISABLE": "1"}
    )
    assert done.returncode == 1
    assert "off  plugin: switched off by AG_DISABLE=1" in done.stdout
