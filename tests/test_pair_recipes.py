"""The recipes of the papers' pairs: each loads, starts what it names, would be studied, and says what was not verified."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from agentguard.engines.vllm_process import command
from agentguard.policy import load
from agentguard.study.runner import parse_arms
from agentguard.study.voids import check_policy

RECIPES = Path(__file__).parents[1] / "recipes"
PAIRS = {
    "gpt-oss-20b-eagle3": ("gpt-oss-20b", "eagle3", 6),
    "qwen3-8b-eagle3": ("Qwen3-8B", "eagle3", 6),
    "llama31-70b-8b": ("Llama-3.1-70B-Instruct", "draft_model", 6),
    "qwen3-8b-dflash": ("Qwen3-8B", "dflash", 15),
    "qwen35-dflash": ("Qwen3.5-9B", "dflash", 15),
    "qwen3-8b-pard": ("Qwen3-8B", "draft_model", 12),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pairs_recipe_loads_and_would_start_what_it_names(name: str) -> None:
    policy = load(RECIPES / f"{name}.yaml")
    target, method, tokens = PAIRS[name]
    assert policy.model.endswith(target)
    assert policy.draft
    check_policy(policy, parse_arms("strict;cactus:delta=0.25"), 1.0)
    line = command(policy, 1, "ipc:///x")
    # where an option stands twice, vLLM takes the last one
    place = max(i for i, arg in enumerate(line) if arg == "--speculative-config")
    config = json.loads(line[place + 1])
    assert (config["method"], config["model"], config["num_speculative_tokens"]) == (method, policy.draft, tokens)
    assert (config["draft_sample_method"], policy.engine.draft_tokens) == ("probabilistic", tokens)
    assert config.get("parallel_drafting", False) == (name == "qwen3-8b-pard")


@pytest.mark.parametrize("name", PAIRS)
def test_a_pairs_recipe_says_what_was_not_verified_and_how_to_run_it(name: str) -> None:
    head = [line for line in (RECIPES / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    text = "\n".join(head)
    assert "# Verified: " in text
    assert "never run here" in text
    assert f"agentguard study full --recipe recipes/{name}.yaml" in text


def test_the_page_lists_every_pair() -> None:
    page = (RECIPES.parent / "docs" / "study.md").read_text()
    assert all(f"`{name}.yaml`" in page for name in PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_vllm_knows_the_method(name: str) -> None:
    """Of the installed vLLM: its own list of draft methods."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    config = Path(spec.submodule_search_locations[0], "config", "speculative.py").read_text()
    assert f'"{PAIRS[name][1]}"' in config
    assert "parallel_drafting: bool" in config
