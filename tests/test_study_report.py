"""The report: made from a study's numbers alone, complete in itself, and no kinder than they are."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agentguard.errors import ConfigError
from agentguard.study import inference, report
from agentguard.study.comparison import summarise
from agentguard.study.records import Header, RoundStats, SessionRecord
from agentguard.study.report import RECORDING, check_report, markdown, page, plots, write_report
from agentguard.study.report.papers import compare
from agentguard.study.report.tables import sheets
from agentguard.study.report.words import verdict
from tests.study_sessions import relaxed, session
from tests.test_study_records import write

LONG, WRONG, FILTERED, FILTER = "fuzzy:T=0.3", "casc-chow:alpha=0.3", "fuzzy:T=0.3,p_min=0.1,top_k=10", "strict:p_min=0.1,top_k=10"
N = 60


def records() -> list[SessionRecord]:
    """fuzzy twice as long and wrong, behind the filter like strict; casc-chow with a longer ℓ and wrong answers; closes rescue."""
    made = []
    for rule, length, right, gain in (
        ("strict", 1.0, 0.95, 1.0), (FILTER, 0.95, 0.95, 1.0), (LONG, 2.0, 0.2, 1.0), (FILTERED, 0.97, 0.95, 1.0),
        (WRONG, 1.0, 0.4, 1.2),
    ):  # fmt: skip
        for i in range(N):
            rng = random.Random(f"{rule}/{i}")
            tokens = round(random.Random(i).randint(60, 140) * length * rng.uniform(0.95, 1.05))
            rounds = round(tokens / 5 / gain)
            bad = rule in (LONG, WRONG)
            stats = RoundStats(
                rounds=rounds, drafted=6 * rounds, accepted=tokens - rounds, strict_n=40, strict_p=34.0, strict_rank={1: 40},
                relaxed=relaxed((0.02, 50), (0.03, 60), place=i) if bad else [], relaxed_words={"wait": 1} if bad else {},
                by_position=[rounds, rounds // 2], drafted_at=[rounds, rounds], by_output=[[rounds, tokens - rounds]],
            )  # fmt: skip
            proved = 40 if rng.random() < (0.6 if rule == LONG else 1.0) else None
            ok = rng.random() < right
            made.append(
                session(rule, i, tokens=tokens, rounds=rounds, accepted=tokens - rounds, right=ok, proved=proved, stats=stats)
            )
            closed = session(rule, i, close="adaptive", tokens=70, rounds=14, accepted=56, right=ok, closed="budget", stats=stats)
            made.append(closed)
    return made


def plan(found: list[SessionRecord], missing: int = 0) -> dict[str, Any]:
    cells = dict.fromkeys((r.rule, r.close) for r in found)
    return {
        "suite": "chain", "seed": 1, "temperature": 1.0, "steps": 1, "budget": 80,
        "cells": [[rule, close, N + missing] for rule, close in cells],
    }  # fmt: skip


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "RESAMPLES", 400)
        patch.setattr(inference, "MEDIAN_RESAMPLES", 50)
        found = records()
        header = Header(plan=plan(found), provenance={"engine": {"model": "target", "draft": "draft", "K": 6}})
        return json.loads(summarise(header, found).to_json())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def rendered(document: dict[str, Any]) -> str:
    return page(document)


class Page(HTMLParser):
    """What a page refers to, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.references += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_without_scripts(rendered: str) -> None:
    parsed = Page()
    parsed.feed(rendered)
    assert parsed.open == []
    assert parsed.references == []
    assert {"script", "link", "iframe", "img"}.isdisjoint(parsed.tags)
    assert re.search(r"url\((?!#)", rendered) is None
    assert rendered.count("<svg") == 7
    assert "λ against gain" in rendered


def test_names_from_a_study_cannot_break_the_page(document: dict[str, Any]) -> None:
    broken = document | {"suite": "<script>alert(1)</script>", "provenance": {"x": "</pre><script>"}}
    assert "<script" not in page(broken)


def test_tables_are_whole_and_hold_the_numbers(document: dict[str, Any]) -> None:
    made = {sheet.title: sheet for sheet in sheets(document)}
    assert list(made) == [
        "Which rules pay", "Lengths", "What the support filter changes", "What closing rescues", "Where the extra tokens are",
        "Which tokens are let through", "Acceptance by draft position", "Verdicts", "Beside the paper",
    ]  # fmt: skip
    for sheet in made.values():
        assert {len(row) for row in sheet.rows} == {len(sheet.head)}
        assert all(line.count(" | ") == len(sheet.head) - 1 for line in sheet.lines() if not line.startswith("|---"))
    pays = {(row[0], row[1]): row for row in made["Which rules pay"].rows}
    arm = next(a for a in document["arms"] if (a["rule"], a["close"]) == (LONG, "off"))
    row = dict(zip(made["Which rules pay"].head, pays["`fuzzy:T=0.3`", ""], strict=True))
    assert row["λ"] == f"{arm['lambda']:.2f} [{arm['lambda_ci'][0]:.2f}, {arm['lambda_ci'][1]:.2f}]"
    assert (row["n"], row["verdict"]) == (str(N), "loss")
    assert ("`strict`", "0.1, 10") in pays
    assert len(made["What the support filter changes"].rows) == 2
    assert len(made["What closing rescues"].rows) == 5


def test_the_verdict_in_words_answers_what_a_report_owes(document: dict[str, Any]) -> None:
    said = "\n".join(verdict(document))
    assert f"Of 4 arms beside strict 2 lose: `{LONG}`, `{WRONG}`." in said
    assert f"ℓ rises significantly and the arm loses all the same: `{WRONG}` (wrong answers)." in said
    assert f"The longest is `{LONG}`" in said
    assert "The filter alone, strict behind it" in said
    assert "1 of 1 relaxed rules significantly shorter and 1 significantly more often right" in said
    assert re.search(r"In 80 tokens closing rescues \d+ of 300 runs, and \d+ regress", said)
    assert "is thinking" in said
    assert re.search(rf"Some never state it: `{LONG}` \d+ of {N} \(strict {N}\)", said)
    assert "Not finished" not in said


def test_the_break_even_line_is_where_gain_and_inflation_are_equal(document: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._gains(axes, [a for a in document["arms"] if a["close"] == "off" and a["rule"] != "strict"])
    (line,) = (one for one in axes.lines if str(one.get_label()).startswith("break even"))
    xs, ys = (list(map(float, values)) for values in line.get_data())
    assert xs == ys
    assert len(xs) > 50  # a chord of two points would not be the curve it is on a logarithmic axis
    assert min(xs) < 1 < max(xs)


def test_an_unfinished_study_says_so_first() -> None:
    found = [r for r in records() if r.rule == "strict"]
    header = Header(plan=plan(found, missing=5), provenance={"engine": {"model": "m", "draft": "d", "K": 6}})
    said = verdict(json.loads(summarise(header, found).to_json()))
    assert said[0] == "Not finished: 10 of 130 sessions are missing; go on with --resume."
    assert any("No arm" in s for s in said) is False  # there was none to judge


def test_nothing_is_concluded_from_a_handful_of_sessions() -> None:
    found = [r for r in records() if r.number < 3]
    header = Header(plan=plan(found) | {"cells": [[r, c, 3] for r, c, _ in plan(found)["cells"]]},
                    provenance={"engine": {"model": "m", "draft": "d", "K": 6}})  # fmt: skip
    document = json.loads(summarise(header, found).to_json())
    assert verdict(document) == ["10 of 10 arms have fewer than 20 sessions: nothing is concluded from them."]
    assert compare(document) == []


def test_lost_telemetry_is_said(document: dict[str, Any]) -> None:
    arms = [a | {"telemetry": 0.9} if a["rule"] == LONG else a for a in document["arms"]]
    assert any("lost more than 1 %" in s and f"`{LONG}` (10.0%)" in s for s in verdict(document | {"arms": arms}))


def test_agreement_with_the_paper_is_decided_by_the_numbers(document: dict[str, Any]) -> None:
    found = {c.what: c for c in compare(document)}
    assert found["the extra tokens are inside the think block"].agrees == "yes"
    assert found["what strict accepts is probable"].agrees == "yes"  # p 0.85, rank 1
    assert found["what only relaxation lets through is not"].agrees == "yes"  # p 0.025, rank 55
    assert found["closing a trace at 80-85 % of the budget rescues answers"].agrees == "yes"
    assert found["the support filter keeps relaxation harmless"].agrees == "yes"
    assert "casc-opt is longer and answers wrongly more often" not in found  # it was not run
    arms = [a | {"strict_tokens": a["strict_tokens"] | {"p": 0.99}} for a in document["arms"]]
    assert {c.what: c for c in compare(document | {"arms": arms})}["what strict accepts is probable"].agrees == "partly"


def test_the_folder_holds_all_forms_and_the_rows_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    monkeypatch.setattr(inference, "RESAMPLES", 100)
    monkeypatch.setattr(inference, "MEDIAN_RESAMPLES", 20)
    found = records()
    path = tmp_path / RECORDING
    write(path, found)
    lines = path.read_bytes().splitlines(keepends=True)
    header = Header(plan=plan(found), provenance={"engine": {"model": "m", "draft": "d", "K": 6}})
    from msgspec.json import encode

    path.write_bytes(encode(header) + b"\n" + b"".join(lines[1:]))
    names = [p.name for p in write_report(tmp_path)]
    assert names == ["summary.json", "provenance.json", "report.md", "report.html", "steps.parquet", "tokens.parquet"]
    steps = parquet.read_table(tmp_path / "steps.parquet").to_pylist()
    assert len(steps) == len(found)
    by_key = {(r["rule"], r["close"], r["number"]): r for r in steps}
    for record in found:
        row, finished = by_key[record.key], record.steps[0].finished
        assert (row["tokens"], row["rounds"], row["right"], row["proved"], row["closed"]) == (
            finished.tokens, finished.rounds, record.steps[0].right, record.steps[0].proved, finished.closed,
        )  # fmt: skip
    tokens = parquet.read_table(tmp_path / "tokens.parquet").to_pylist()
    assert len(tokens) == sum(len(r.stats.relaxed) for r in found)
    assert {(t["p"], t["rank"]) for t in tokens} == {(0.02, 50), (0.03, 60)}
    assert (tmp_path / "report.md").read_text().startswith("# Study of chain")


def test_a_report_without_its_libraries_is_refused_before_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "NEEDS", ("json", "no_such_library"))
    with pytest.raises(ConfigError, match="no_such_library"):
        check_report()


def test_the_report_is_the_same_every_time(document: dict[str, Any], rendered: str) -> None:
    assert markdown(document) == markdown(document)
    assert page(document) == rendered
