"""The TTS study's numbers, from events made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentguard.errors import ConfigError
from agentguard.events import (
    DraftRows,
    DraftUpdated,
    Event,
    Graded,
    StepFinished,
    StepStarted,
    TtsChanged,
    VerificationStep,
    Verified,
)
from agentguard.policy import Policy
from agentguard.reference import reference_model, weights_hash
from agentguard.study import suites
from agentguard.study.runner import StudyPlan, parse_arms
from agentguard.study.table import render_tts
from agentguard.study.tts import BUCKET, FROZEN, LEARNING, Collector, Run, against, document
from agentguard.tts_settings import TtsSettings

EMPTY = DraftRows(token=[], p=[], q=[], rank=[], strict=[], flags=[])


def events_of(session: str, accepted: list[int], ttlt_s: float = 1.0, lost: int = 0, updates: int = 0) -> list[Event]:
    request = session.replace("/", "-")
    found: list[Event] = [
        StepStarted(
            t=0, session=session, step=1, request=request, model="m", rule="strict", prompt_tokens=5, budget=100, think_cap=80,
            bound_by="budget",
        )
    ]  # fmt: skip
    for i, a in enumerate(accepted):
        verified = Verified(request=request, rule_asked="strict", rule_effective="strict", drafted=6, accepted=a, rows=EMPTY)
        found.append(VerificationStep(t=0, engine="e", step=i, requests=[verified], lost=lost if i == 1 else 0))
        if i < updates:
            found.append(
                DraftUpdated(
                    t=0, engine="e", version=i, epoch=1, rounds=1, rows=1, loss=1, train_ms=10 + i, publish_ms=3, live=0, frozen=0,
                    gain=1, break_even=1,
                )
            )  # fmt: skip
    tokens = 1 + sum(a + 1 for a in accepted)
    found += [
        StepFinished(
            t=0, session=session, step=1, request=request, model="m", rule="strict", prompt_tokens=5, tokens=tokens, think_tokens=0,
            answer_tokens=tokens, marker_tokens=0, ttlt_s=ttlt_s,
        ),
        Graded(t=0, session=session, step=1, arm="x", right=True),
    ]  # fmt: skip
    return found


def collected(*runs: list[Event]) -> Collector:
    collector = Collector("tts/n/")
    for events in runs:
        for event in events:
            collector(event)
    return collector


def test_rounds_are_placed_where_their_first_drafted_token_stands() -> None:
    (run,) = collected(events_of("tts/n/frozen/3", [2, 0, 6])).of("frozen")
    assert (run.number, run.tokens, run.rounds) == (3, 12, 3)
    assert run.places == [(1, 2), (4, 0), (5, 6)]
    assert run.length() == pytest.approx(8 / 3)
    assert [run.third(i) for i in range(3)] == [2, 3, None]
    assert run.length(5, 6) == 6


def test_names_with_odd_characters_come_back() -> None:
    assert collected(events_of("tts/n/S%20%3D%201/0", [1])).of("S = 1")


def test_telemetry_of_others_is_not_counted() -> None:
    collector = collected(events_of("other/frozen/0", [1, 2]), events_of("tts/n/frozen/0", [1]))
    assert list(collector.runs) == ["tts/n/frozen/0"]


def test_an_arm_is_compared_on_the_same_problems() -> None:
    frozen = [events_of(f"tts/n/frozen/{i}", [1] * 300, ttlt_s=6.0) for i in range(4)]
    learning = [events_of(f"tts/n/tts/{i}", [1] * 100 + [3] * 100, ttlt_s=3.0, updates=5, lost=i == 2) for i in range(4)]
    learning[0].insert(3, TtsChanged(t=0, engine="e", state="rolled_back", reason="worse", epoch=1, version=0))
    collector = collected(*frozen, *learning)
    base = {r.number: r for r in collector.of(FROZEN)}
    row = against(LEARNING, collector.of(LEARNING), base)
    assert (row.n, row.updates, row.publish_ms, row.train_ms) == (4, 5, 3, 12)
    assert row.length.value == pytest.approx(2)
    assert [t.value for t in row.thirds] == [1, pytest.approx(3, abs=0.05), 3]
    assert row.gain[-1].value == pytest.approx(3)
    assert row.speed.value == pytest.approx(2)
    assert row.rounds.value == pytest.approx((200 / 601) / (300 / 601))
    assert row.changes == {"rolled_back": 1}
    assert row.lost_frames == 1
    assert [b["from"] for b in row.buckets] == [0, BUCKET]
    assert row.buckets[-1]["gain"]["value"] == pytest.approx(3, abs=0.05)
    itself = against(FROZEN, collector.of(FROZEN), base)
    assert (itself.gain[-1].value, itself.speed.value, itself.updates, itself.publish_ms) == (1, 1, 0, None)
    plan = StudyPlan(suites.get("chain-long"), parse_arms("strict"), 4, 0, concurrency=1)
    policy = Policy(model=str(reference_model("target")), draft=str(reference_model("draft-short")), tts=TtsSettings())
    written = document([itself, row], plan, policy, TtsSettings(), {})
    assert written["last_third_gain"] == pytest.approx(2)
    assert len(written["last_third_gain_ci"]) == 2
    assert written["sha256"]["draft"] == weights_hash(reference_model("draft-short"))
    json.dumps(written)
    assert render_tts([itself, row], "t").row_count == 2


def test_a_third_without_a_round_is_left_out_and_not_zero() -> None:
    runs = [
        Run("tts", 0, tokens=300, ttlt_s=1, places=[(1, 3), (250, 2)]),
        Run("tts", 1, tokens=300, ttlt_s=1, places=[(1, 3), (150, 1), (250, 2)]),
    ]
    row = against("tts", runs, {0: runs[0], 1: runs[1]})
    assert [t.n for t in row.thirds] == [2, 1, 2]


def test_the_committed_weights_are_the_reference_pair(tmp_path: Path) -> None:
    assert all(weights_hash(reference_model(name)) for name in ("target", "draft", "draft-short"))
    other = tmp_path / "target"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"changed")
    assert weights_hash(other)
    (tmp_path / "sha256.json").write_text('{"target": "00"}')
    with pytest.raises(ConfigError, match="not the committed ones"):
        weights_hash(other)
    assert weights_hash(tmp_path / "nothing") is None
