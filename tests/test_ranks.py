"""Several ranks: what is compared between them, and who publishes."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from agentguard.errors import PluginError
from engine_plugins.vllm import ranks


def _rank(number: int, store: str, kernels: str, found: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    try:
        ranks.agree({"kernels": kernels, "torch": "1"}, dist.group.WORLD)
        found.put("")
    except PluginError as error:
        found.put(str(error))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("other", "said"), [("triton", ""), ("torch twins", "differ in kernels: torch twins, triton")])
def test_ranks_that_would_decide_differently_do_not_start(other: str, said: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    both = [context.Process(target=_rank, args=(i, str(tmp_path / "store"), k, found)) for i, k in enumerate(("triton", other))]
    for process in both:
        process.start()
    answers = [found.get(timeout=120) for _ in both]
    for process in both:
        process.join(timeout=60)
    assert all((said in answer) if said else answer == "" for answer in answers)


def test_one_rank_has_nobody_to_agree_with() -> None:
    ranks.agree({"kernels": "any"}, None)


@pytest.mark.parametrize(("driver", "last", "speaks"), [(True, True, True), (True, False, False), (False, True, False)])
def test_the_first_rank_of_the_last_stage_speaks(driver: bool, last: bool, speaks: bool) -> None:
    assert ranks.speaks(SimpleNamespace(is_driver_worker=driver), last) is speaks


def test_data_parallel_engines_have_addresses_of_their_own() -> None:
    assert ranks.address("ipc:///a", "engine-0", SimpleNamespace(data_parallel_rank=0)) == ("ipc:///a", "engine-0")
    assert ranks.address("ipc:///a", "engine-0", SimpleNamespace(data_parallel_rank=2)) == ("ipc:///a-dp2", "engine-0-dp2")
    assert ranks.address("tcp://127.0.0.1:1", "e", None) == ("tcp://127.0.0.1:1", "e")
    with pytest.raises(PluginError, match="use an ipc:// address"):
        ranks.address("tcp://127.0.0.1:1", "e", SimpleNamespace(data_parallel_rank=1))


@pytest.mark.kernels
def test_two_ranks_come_to_the_same_bits_and_one_of_them_speaks(tmp_path: Path) -> None:
    """The worker's installation in two processes over gloo: rules, a limit that comes in between, vLLM's own sampler; and rows of
    50,000 tokens."""
    endpoint = f"ipc://{tmp_path}/tap"
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.v2_ranks", str(rank), str(tmp_path / "store"), endpoint],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    answers = []
    for process in both:
        said, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-2000:]
        answers.append(json.loads(next(line for line in said.splitlines() if line.startswith("RESULT")).removeprefix("RESULT")))
    assert answers[0]["same"] == [True, True, True]
    assert [answer["tap"] for answer in answers] == [True, False]
    assert answers[0]["heard"] == 5, "a frame for each step"
