"""Each attack of SECURITY.md fails, and succeeds once its defence is taken away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.security.attacks import ATTACKS, Attack

PAGE = Path(__file__).parents[2] / "SECURITY.md"


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
async def test_it_fails(attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await attack.attempt(tmp_path, monkeypatch) == ""


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
async def test_it_succeeds_without_its_defence(attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack.disarm(monkeypatch)
    assert await attack.attempt(tmp_path, monkeypatch) != ""


def test_the_threat_model_names_them_all() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(attack.name for attack in ATTACKS)
