"""What the documentation states as numbers is what the kept results hold."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentguard.rulespec import KNOBS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def rules_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rules_page", DOCS / "rules_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rules_page", module)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_rules_page_are_those_of_the_kept_results(rules_page: ModuleType) -> None:
    text = rules_page.PAGE.read_text()
    assert text == rules_page.page(text, json.loads(rules_page.STUDY.read_text()), json.loads(rules_page.BENCHMARK.read_text()))


def test_the_rules_page_names_every_rule_with_its_knobs_and_measured_it_twice(rules_page: ModuleType) -> None:
    text = rules_page.PAGE.read_text()
    arms = json.loads(rules_page.STUDY.read_text())["arms"]
    for name, knobs in KNOBS.items():
        written = name + (":" if knobs else "") + ",".join(k.name for k in knobs)
        assert re.search(rf"^\| `{re.escape(written)}` \|", text, re.MULTILINE), written
        mine = [arm for arm in arms if arm["rule"].split(":")[0] == name]
        assert {arm["filter"] for arm in mine} == {False, True}
        assert all(arm["sessions"] >= 96 for arm in mine)
