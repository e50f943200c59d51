"""What the documentation states as numbers is what the kept results hold."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from agentguard.reference import reference_model, weights_hash
from agentguard.rulespec import KNOBS
from agentguard.study.grid import FIVE
from agentguard.tts_settings import TtsSettings

DOCS = Path(__file__).parents[1] / "docs"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rules_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("rules_page", monkeypatch)


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


def test_the_tables_of_the_study_page_are_those_of_the_kept_results(monkeypatch: pytest.MonkeyPatch) -> None:
    study_page = script("study_page", monkeypatch)
    text, kept = study_page.PAGE.read_text(), json.loads(study_page.STUDY.read_text())
    assert text == study_page.page(text, kept)
    assert {(arm["rule"].split(":")[0], arm["filter"], arm["close"]) for arm in kept["arms"]} == {
        (name, filtered, close) for name in KNOBS for filtered in (False, True) for close in ("off", "adaptive")
    }
    assert min(arm["sessions"] for arm in kept["arms"]) >= 96
    assert all(arm["sessions"] >= 256 for arm in kept["arms"] if arm["rule"].split(":")[0] in ("strict", *FIVE))
    assert kept["sessions"]["planned"] == kept["sessions"]["recorded"]
    weights = kept["provenance"]["weights_sha256"]
    assert weights == {"model": weights_hash(reference_model("target")), "draft": weights_hash(reference_model("draft"))}


def test_the_tables_of_the_tts_page_are_those_of_the_kept_results(monkeypatch: pytest.MonkeyPatch) -> None:
    tts_page = script("tts_page", monkeypatch)
    text = tts_page.PAGE.read_text()
    assert text == tts_page.page(text)
    assert text.count("| frozen |") == len(tts_page.STUDIES)


def test_the_kept_tts_study_is_of_the_committed_weights() -> None:
    study = json.loads((DOCS / "tts-study.json").read_text())
    assert study["n"] >= 64
    assert study["sha256"] == {
        "target": weights_hash(reference_model("target")),
        "draft": weights_hash(reference_model("draft-short")),
    }
    low, _ = study["last_third_gain_ci"]
    assert low >= 0.15
    assert all(arm.get("lost_frames", 0) == 0 for arm in study["arms"])


def test_the_tts_page_names_every_setting_with_its_default() -> None:
    text = (DOCS / "tts.md").read_text()
    for field in fields(TtsSettings):
        (written,) = re.findall(rf"^\| `{field.name}` \| (\S+) \|", text, re.MULTILINE)
        default = field.default
        assert written == (str(default).lower() if isinstance(default, bool) else written)
        if isinstance(default, float):
            assert float(written) == default
        elif not isinstance(default, bool):
            assert written == str(default)


def test_the_page_of_the_screen_names_every_key() -> None:
    from agentguard.tui.app import MonitorApp

    text = (DOCS / "tui.md").read_text()
    named = set(re.findall(r"`((?:app|table|overview|sessions|session|speculation|events|help)\.\w+)`", text))
    pages = {f"app.page_{name}" for name in ("sessions", "speculation", "events", "help")}
    assert named | pages == MonitorApp.binding_ids()


def test_the_readme_shows_the_picture_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """As text: a new version of Textual or Rich may write the same screen as another SVG."""
    from html import unescape

    tui_picture = script("tui_picture", monkeypatch)

    def texts(svg: str) -> list[str]:
        return [unescape(t).replace("\xa0", " ") for t in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]

    assert texts(tui_picture.picture()) == texts(tui_picture.PICTURE.read_text())
    assert "](docs/tui.svg)" in (DOCS.parent / "README.md").read_text()


def test_the_reliability_page_states_what_the_soaks_reported() -> None:
    text, kept = (DOCS / "reliability.md").read_text(), json.loads((DOCS / "soak.json").read_text())
    runs = kept["scripted"]
    assert f"{sum(run['steps'] for run in runs):,} steps of {sum(run['sessions'] for run in runs):,} sessions" in text
    for name, key in (
        ("empty messages", "empty_messages"),
        ("**account errors**", "account_errors"),
        ("tokens settled", "tokens_settled"),
    ):
        assert f"| {name} | {' | '.join(format(run[key], ',') for run in runs)} |" in text
    assert all(run["chunks_per_step"] >= 60 and run["steps_exact"] > 0.95 * run["steps"] for run in runs)
    vllm = kept["vllm"]
    assert vllm["tokens_settled"] == vllm["tokens_engines"] == vllm["tokens_told"]
    assert f"{vllm['steps']} steps, {vllm['tokens_settled']:,} tokens settled" in text
