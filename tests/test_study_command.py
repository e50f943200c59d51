"""What `agentguard study` refuses before an engine is started, and what it hands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentguard.cli import study as cli
from agentguard.errors import ConfigError
from agentguard.policy import Policy
from agentguard.study.grid import Grid


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Grid, Policy]]:
    """What would be run."""
    found: list[tuple[Grid, Policy]] = []
    monkeypatch.setattr(cli, "_run_cells", lambda grid, policy, *_: found.append((grid, policy)))
    return found


def call(*arguments: str) -> Any:
    return CliRunner().invoke(cli.study, arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--resume"), "name it with --out"),
        (("run", "--guard", "on", "--close", "fixed"), "--close='fixed': is not for --guard on"),
        (("run", "--guard", "on", "--resume"), "--resume='True': is not for --guard on"),
        (("run", "--events", "e.jsonl", "--fresh-engine"), "--fresh-engine='True': is not for --events"),
        (("run", "--close", "adaptive", "--suite", "chain-agent"), "sessions have several"),
        (("run", "--json", "no-such-folder/x.json"), "cannot be written"),
        (("full", "--suite", "gsm8k", "--out", "x"), "comes from a file"),
    ],
)
def test_refusals_name_the_option(arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [
        ((), [("strict", "off"), ("cactus:delta=0.5", "off")]),
        (("--close", "off", "--arms", "strict"), [("strict", "off")]),
        (("--close", "adaptive"), [("strict", "off"), ("strict", "fixed"), ("strict", "adaptive")]),
        (
            ("--close", "fixed", "--arms", "strict;cactus:delta=0.5,p_min=0.1,top_k=10"),
            [(rule, close) for close in ("off", "fixed") for rule in ("strict", "cactus:delta=0.5,p_min=0.1,top_k=10")],
        ),
    ],
)
def test_the_cells_of_a_run(handed: list[tuple[Grid, Policy]], arguments: tuple[str, ...], cells: list[tuple[str, str]]) -> None:
    assert call("run", "--n", "3", "--seed", "9", *arguments).exit_code == 0
    ((grid, policy),) = handed
    assert [cell.key for cell in grid.cells] == cells
    assert ({cell.n for cell in grid.cells}, grid.seed) == ({3}, 9)
    assert policy.model.endswith("target")


def test_a_recipe_goes_behind_the_options(handed: list[tuple[Grid, Policy]]) -> None:
    recipe = Path(__file__).parents[1] / "recipes" / "qwen3-8b-eagle3.yaml"
    assert call("run", "--recipe", str(recipe), "--draft", "draft", "--n", "2").exit_code == 0
    ((_, policy),) = handed
    assert policy.model == "Qwen/Qwen3-8B"
    assert policy.draft is not None
    assert policy.draft.endswith("weights/draft")
    assert policy.engine.max_model_len == 40960


def test_the_whole_grid_keeps_its_rest_no_larger_than_the_others(handed: list[tuple[Grid, Policy]], tmp_path: Path) -> None:
    assert call("full", "--n", "10", "--out", str(tmp_path / "out")).exit_code == 0
    ((grid, _),) = handed
    assert {cell.n for cell in grid.cells} == {10}
    assert len(grid.cells) == 68
