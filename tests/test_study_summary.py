"""Every number of a study against sessions made by hand, or drawn from a law that is known."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from agentguard.errors import AgentGuardError
from agentguard.study import inference
from agentguard.study.comparison import summarise
from agentguard.study.records import Header, RoundStats, SessionRecord
from agentguard.study.summary import Arm, Pairs, Summary
from agentguard.study.verdict import judge
from tests.study_sessions import relaxed, session

RULE, FILTERED, FILTER = "cactus:delta=1", "cactus:delta=1,p_min=0.1,top_k=10", "strict:p_min=0.1,top_k=10"


def study(records: list[SessionRecord], budget: int | None = None) -> Summary:
    cells = list(dict.fromkeys((r.rule, r.close) for r in records if r.close != "pilot"))
    plan: dict[str, Any] = {
        "suite": "chain", "seed": 1, "temperature": 1.0, "steps": 1, "budget": budget,
        "cells": [[rule, close, sum((r.rule, r.close) == (rule, close) for r in records)] for rule, close in cells],
    }  # fmt: skip
    return summarise(Header(plan=plan, provenance={"engine": {"model": "m", "draft": "d", "K": 6}}), records)


def arm(summary: Summary, rule: str = RULE, close: str = "off") -> Arm:
    found = summary.arm(rule, close)
    assert found is not None
    return found


STRICT = [
    session("strict", 0, tokens=100, answer=2, rounds=20, accepted=80, ttlt_s=1.0, right=True, proved=40),
    session("strict", 1, tokens=50, answer=2, rounds=10, accepted=40, ttlt_s=0.5, right=True, proved=20),
    session("strict", 2, tokens=150, answer=4, rounds=30, accepted=120, ttlt_s=1.5, right=False),
    session("strict", 3, tokens=100, answer=2, rounds=20, accepted=60, ttlt_s=1.0, right=True, proved=50),
]
RELAXED = [
    session(RULE, 0, tokens=200, answer=2, rounds=34, accepted=170, ttlt_s=2.0, right=True, proved=60),
    session(RULE, 1, tokens=100, answer=3, rounds=17, accepted=85, ttlt_s=1.0, right=False, proved=20),
    session(RULE, 2, tokens=300, answer=4, rounds=50, accepted=240, ttlt_s=3.0, right=True, finish="length"),
    session(RULE, 3, tokens=200, answer=0, rounds=39, accepted=165, ttlt_s=1.9, right=False, empty=True),
]


def test_sums_and_ratios_by_hand() -> None:
    summary = study([*RELAXED, *STRICT])
    assert [a.rule for a in summary.arms] == ["strict", RULE]
    strict, found = summary.arms
    assert (strict.tokens, strict.think_tokens, strict.rounds, strict.sessions, strict.right) == (400, 390, 80, 4, 3)
    assert (found.tokens, found.think_tokens, found.rounds, found.right) == (800, 791, 140, 2)
    assert (found.length.value, found.think_length.value, found.answer_length.value) == (200, 197.75, 2.25)
    for one in (found.inflation, found.rounds_ratio, found.ttlt_ratio, found.gain, found.accepted_length, found.accuracy):
        assert one is not None
        assert one.low <= one.value <= one.high
    assert found.inflation is not None
    assert (found.inflation.value, found.inflation.low, found.inflation.high) == (2.0, 2.0, 2.0)  # twice as long in every pair
    assert found.rounds_ratio is not None
    assert found.rounds_ratio.value == 140 / 80
    assert found.ttlt_ratio is not None
    assert found.ttlt_ratio.value == pytest.approx(7.9 / 4.0)
    assert found.ttlt_s == pytest.approx(7.9 / 4)
    assert found.accepted_length is not None
    assert found.accepted_length.value == 660 / 140
    assert found.gain is not None
    assert found.gain.value == pytest.approx((660 / 140 + 1) / (300 / 80 + 1))
    assert found.tokens_per_s is not None
    assert found.tokens_per_s.value == pytest.approx(800 / 7.9)
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5
    assert (found.truncated, found.empty_answers, found.closes) == (1, 1, 0)
    assert found.think_share_of_extra is not None
    assert found.think_share_of_extra.value == pytest.approx((791 - 390) / (800 - 400))
    assert found.lengths == [115, 175, 200, 225, 285]
    assert found.telemetry == 1.0
    mean = found.a_step["tokens"]
    assert mean is not None
    assert mean.value == 200


def test_right_answers_are_compared_in_pairs() -> None:
    pairs = arm(study([*STRICT, *RELAXED])).against_strict
    assert pairs is not None
    assert (pairs.gained, pairs.lost, pairs.p) == (1, 2, 1.0)  # McNemar of 1 and 2: 2 * (1 + 3) / 8
    assert pairs.difference.value == -0.25


def test_strict_against_itself_is_one_everywhere() -> None:
    found = arm(study(STRICT), "strict")
    for one in (found.inflation, found.gain, found.rounds_ratio, found.ttlt_ratio):
        assert one is not None
        assert (one.value, one.low, one.high, one.p) == (1, 1, 1, 1)
    assert (found.verdict, found.think_share_of_extra) == ("baseline", None)


def test_where_the_extra_tokens_fall_by_hand() -> None:
    """Two pairs state the answer in both arms: 40 and 20 strict, 60 and 20 relaxed; the texts are 100 and 50 tokens longer."""
    extra = arm(study([*STRICT, *RELAXED])).extra
    assert extra is not None
    assert (extra.pairs, extra.proved, extra.proved_strict) == (2, 2, 3)
    assert extra.before.value == (20 + 0) / 2
    assert extra.after.value == ((140 - 60) + (80 - 30)) / 2
    assert extra.after_share is not None
    assert extra.after_share.value == pytest.approx(130 / 150)
    assert extra.place is not None
    assert extra.place.value == 40
    assert extra.place_strict is not None
    assert extra.place_strict.value == 40


def test_a_suite_that_states_no_answer_has_no_such_place() -> None:
    assert arm(study([session("strict", 0), session(RULE, 0)])).extra is None


def test_nothing_is_graded_is_none_and_not_zero() -> None:
    found = arm(study([session("strict", 0, right=None), session(RULE, 0, right=None)]))
    assert (found.right, found.accuracy, found.against_strict) == (None, None, None)


def tokens(strict: dict[int, int], strict_p: float, let_through: list[tuple[float, int]], **words: dict[str, int]) -> RoundStats:
    n = sum(strict.values())
    return RoundStats(
        rounds=2, drafted=12, accepted=n + len(let_through), strict_n=n, strict_p=strict_p, strict_rank=strict,
        relaxed=relaxed(*let_through), by_position=[2, 1], drafted_at=[2, 2, 1], by_output=[[1, 3], [1, 1]],
        fates={"strict": n, "relaxed": len(let_through)}, **words,
    )  # fmt: skip


def test_which_tokens_are_accepted_by_hand() -> None:
    first = tokens({1: 3, 4: 1}, 3.4, [(0.02, 37), (0.04, 41)], relaxed_words={"wait": 1}, strict_words={"wait": 2})
    second = tokens({1: 2}, 1.8, [(0.06, 100)])
    found = arm(study([
        session("strict", 0), session("strict", 1),
        session(RULE, 0, rounds=2, stats=first), session(RULE, 1, rounds=2, stats=second),
    ]))  # fmt: skip
    assert (found.relaxed_tokens.n, found.strict_tokens.n) == (3, 6)
    assert found.relaxed_tokens.p is not None
    assert found.relaxed_tokens.p.value == pytest.approx(0.04)
    assert found.relaxed_tokens.rank is not None
    assert found.relaxed_tokens.rank.value == 41
    assert found.strict_tokens.p is not None
    assert found.strict_tokens.p.value == pytest.approx(5.2 / 6)
    assert found.strict_tokens.rank is not None
    assert found.strict_tokens.rank.value == 1
    assert found.hesitations == {"wait": 1}
    assert found.hesitation_share is not None
    assert found.hesitation_share.value == pytest.approx(1 / 3)
    assert found.hesitation_share_strict is not None
    assert found.hesitation_share_strict.value == pytest.approx(2 / 6)
    assert found.by_position == [4 / 4, 2 / 4, 0 / 2]
    assert found.by_output == [(0, 2, 3.0), (64, 2, 1.0)]
    assert found.fates == {"relaxed": 3, "strict": 6}
    assert found.telemetry == 1.0
    assert found.relaxed_places == [0, 0, 0, 0, 0]


def test_an_arm_that_lets_nothing_through_knows_no_probability() -> None:
    found = arm(study(STRICT), "strict")
    assert (found.relaxed_tokens.n, found.relaxed_tokens.p, found.relaxed_tokens.rank, found.hesitation_share) == (
        0,
        None,
        None,
        None,
    )


def test_the_filters_effect_is_told_from_the_rules() -> None:
    """With the filter everything is 0.8 times as long, under the rule everything is twice as long."""
    lengths = (100, 150, 200, 50)
    records = [
        session(rule, i, tokens=round(n * factor), rounds=round(n * factor / 5), right=right)
        for rule, factor, right in (("strict", 1.0, True), (FILTER, 0.8, True), (RULE, 2.0, False), (FILTERED, 1.6, True))
        for i, n in enumerate(lengths)
    ]
    found = arm(study(records), FILTERED)
    assert found.filter
    assert found.without_filter is not None
    assert found.without_filter.arm == RULE
    assert found.without_filter.inflation is not None
    assert found.without_filter.inflation.value == pytest.approx(0.8)
    assert found.without_filter.accuracy is not None
    assert (found.without_filter.accuracy.gained, found.without_filter.accuracy.lost) == (4, 0)
    assert found.strict_same_filter is not None
    assert found.strict_same_filter.arm == FILTER
    assert found.strict_same_filter.inflation is not None
    assert found.strict_same_filter.inflation.value == pytest.approx(2.0)
    alone = arm(study(records), FILTER)
    assert alone.without_filter is not None
    assert alone.without_filter.arm == "strict"
    assert alone.strict_same_filter is None
    assert arm(study(records)).without_filter is None


def test_what_a_close_rescues_is_counted_against_free_runs_cut_at_the_budget() -> None:
    #        free: think, tokens, right    closed: right
    table = [(60, 64, True, True), (90, 94, True, False), (86, 140, True, True), (200, 204, True, True), (300, 304, False, True),
             (300, 304, False, False)]  # fmt: skip
    records = [session("strict", i, tokens=n, think=think, right=right) for i, (think, n, right, _) in enumerate(table)]
    records += [
        session("strict", i, close="adaptive", tokens=90, think=82, right=right, closed="budget" if i else "", empty=i == 5)
        for i, (*_, right) in enumerate(table)
    ]
    fixed = [True, True, False, False, False, False]
    records += [session("strict", i, close="fixed", tokens=90, think=85, right=right) for i, right in enumerate(fixed)]
    summary = study(records, budget=100)
    closing = arm(summary, "strict", "adaptive").closing
    assert closing is not None
    # right within 100 tokens when free: runs 0 and 1; right when closed: 0, 2, 3, 4
    assert (closing.right_off, closing.right, closing.rescued, closing.regressed) == (2, 4, 3, 1)
    assert closing.p == pytest.approx(2 * (1 + 4) / 16)
    assert closing.difference.value == pytest.approx(2 / 6)
    # bound: traces of 85 tokens and more, which is all but run 0
    assert (closing.bound, closing.bound_right_off, closing.bound_right) == (5, 1, 3)
    assert (closing.bound_rescued, closing.bound_regressed, closing.empty) == (3, 1, 1)
    assert closing.closed == {"budget": 5, "none": 1}
    assert closing.minus_fixed is not None
    assert closing.minus_fixed.value == pytest.approx((3 - 1) / 5)
    assert arm(summary, "strict").closing is None
    close = summary.as_json()["close"]
    assert (close["mode"], close["budget"], close["n"], close["rescued"], close["regressed"]) == ("adaptive", 100, 5, 3, 1)
    assert close["right_minus_fixed"] == pytest.approx(0.4)
    assert [row["mode"] for row in close["compared"]] == ["fixed"]


def test_the_budget_of_a_study_is_its_pilots() -> None:
    pilot = [session("strict", i, close="pilot", tokens=n + 2, think=n) for i, n in enumerate((10, 20, 90))]
    summary = study([*STRICT, session("strict", 0, close="adaptive"), *pilot])
    assert summary.budget == 20
    assert arm(summary, "strict", "adaptive").closing is not None


def test_closed_arms_are_compared_with_strict_closed_alike() -> None:
    records = [*STRICT, *RELAXED, session("strict", 0, close="fixed", tokens=80), session(RULE, 0, close="fixed", tokens=120)]
    found = arm(study(records, budget=100), RULE, "fixed")
    assert found.inflation is not None
    assert found.inflation.value == 1.5


def test_arms_of_different_n_are_paired_by_number() -> None:
    records = [*STRICT, *RELAXED[1:3]]
    found = arm(study(records))
    assert found.sessions == 2
    assert found.inflation is not None
    assert (found.inflation.value, found.inflation.n) == (400 / 200, 2)


def test_an_unfinished_recording_gives_what_it_holds() -> None:
    summary = study([*STRICT, RELAXED[0]])
    assert arm(summary).sessions == 1
    with pytest.raises(AgentGuardError, match="no session of strict"):
        study([session(RULE, 0)])


def test_steps_without_round_counts_are_refused() -> None:
    broken = session("strict", 0)
    lost = type(broken.steps[0].finished)(
        **{f: getattr(broken.steps[0].finished, f) for f in broken.steps[0].finished.__struct_fields__} | {"rounds": None}
    )
    step = type(broken.steps[0])(finished=lost, right=True)
    with pytest.raises(AgentGuardError, match="round counts"):
        study([SessionRecord(rule="strict", close="off", number=0, steps=[step], stats=RoundStats())])


def drawn(rule: str, n: int, length: float, gain: float, right: float, seed: int) -> list[SessionRecord]:
    """Sessions of a known law: a problem's size and an error of the arm's own; 5 tokens a round under strict."""
    records = []
    for i in range(n):
        size, own = random.Random(i), random.Random(f"{rule}/{seed}/{i}")
        count = max(12, round(100 * size.lognormvariate(0, 0.5) * length * own.lognormvariate(-0.02, 0.2)))
        rounds = max(1, round(count / (5 * gain)))
        records.append(
            session(
                rule, i, tokens=count, rounds=rounds, accepted=count - rounds, right=own.random() < right, ttlt_s=rounds / 100,
                proved=count // 2,
            )
        )  # fmt: skip
    return records


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer resamples than a study takes, for time."""
    monkeypatch.setattr(inference, "RESAMPLES", 200)
    monkeypatch.setattr(inference, "MEDIAN_RESAMPLES", 20)


def test_simulated_truths_are_inside_their_intervals(few: None) -> None:
    """λ = 1.3, gain = 1.1, so the rounds ratio is 1.3 / 1.1; half of the extra tokens come after the proof; 20 studies."""
    inside = dict.fromkeys(("inflation", "gain", "rounds_ratio", "ttlt_ratio", "after_share", "accuracy"), 0)
    for seed in range(20):
        records = [*drawn("strict", 80, 1.0, 1.0, 0.9, seed), *drawn(RULE, 80, 1.3, 1.1, 0.6, seed)]
        found = arm(study(records))
        assert found.extra is not None
        truths = {
            "inflation": (found.inflation, 1.3), "gain": (found.gain, 1.1), "rounds_ratio": (found.rounds_ratio, 1.3 / 1.1),
            "ttlt_ratio": (found.ttlt_ratio, 1.3 / 1.1), "after_share": (found.extra.after_share, 0.5),
            "accuracy": (found.accuracy, 0.6),
        }  # fmt: skip
        for name, (estimate, truth) in truths.items():
            assert estimate is not None
            inside[name] += estimate.low - 0.005 <= truth <= estimate.high + 0.005  # tokens are whole
        assert found.verdict == "loss"
        assert "longer although ℓ rises" in found.reason
    assert min(inside.values()) >= 15  # 95 % of 20, less four standard deviations


def test_a_rule_without_effect_is_undecided_and_one_that_helps_wins(few: None) -> None:
    same = study([*drawn("strict", 120, 1.0, 1.0, 0.9, 1), *drawn(RULE, 120, 1.0, 1.0, 0.9, 2)])
    assert arm(same).verdict == "undecided"
    better = study([*drawn("strict", 120, 1.0, 1.0, 0.9, 1), *drawn(RULE, 120, 1.0, 1.2, 0.9, 2)])
    assert arm(better).verdict == "win"
    wrong = study([*drawn("strict", 120, 1.0, 1.0, 0.9, 1), *drawn(RULE, 120, 1.0, 1.2, 0.4, 2)])
    assert arm(wrong).verdict == "loss"
    assert arm(wrong).reason.startswith("wrong more often though shorter")


def test_a_rule_that_is_slower_by_the_clock_does_not_win(few: None) -> None:
    fast = study([*drawn("strict", 120, 1.0, 1.0, 0.9, 1), *drawn(RULE, 120, 1.0, 1.2, 0.9, 2)])
    found = arm(fast)
    assert found.ttlt_ratio is not None
    slow = inference.Estimate(1.2, 1.1, 1.3, 120)
    judged = judge(replace(found, ttlt_ratio=slow))
    assert (judged.verdict, "slower to the last token" in judged.reason) == ("loss", True)


def test_a_handful_of_sessions_gets_no_verdict() -> None:
    found = arm(study([*STRICT, *RELAXED]))
    assert found.rounds_ratio is not None
    assert found.rounds_ratio.low > 1
    assert (found.verdict, found.reason[:40]) == ("undecided", "4 sessions are too few for a verdict, ta")


def test_many_arms_cost_certainty(few: None) -> None:
    """The same rule beside 15 others without an effect: its p is adjusted, and theirs call nothing."""
    records = [*drawn("strict", 60, 1.0, 1.0, 0.9, 1)]
    records += [r for i in range(15) for r in drawn(f"lenience:l={(i + 1) / 100}", 60, 1.0, 1.0, 0.9, 100 + i)]
    summary = study(records)
    assert all(a.verdict in ("baseline", "undecided") for a in summary.arms)
    for one in summary.arms[1:]:
        assert one.p_rounds is not None
        assert one.rounds_ratio is not None
        assert one.rounds_ratio.p is not None
        assert one.p_rounds >= one.rounds_ratio.p


def test_the_json_keeps_its_contract_and_is_json() -> None:
    document = json.loads(study([*STRICT, *RELAXED]).to_json())
    wanted = {"rule", "accuracy", "lambda", "lambda_ci", "gain", "rounds_ratio", "ttlt_ratio", "verdict", "close", "a_step"}
    for row in document["arms"]:
        assert wanted <= set(row)
    row = document["arms"][1]
    assert (row["lambda"], row["lambda_ci"], row["accuracy"]) == (2.0, [2.0, 2.0], 0.5)
    assert row["rounds_ratio"] == 1.75
    assert document["sessions"] == {"planned": 8, "recorded": 8}
    assert "close" not in document


def test_the_json_can_be_a_gateways_baseline() -> None:
    """`economics.baseline` takes strict's means a step from a study's file."""
    document = json.loads(study([*STRICT, *RELAXED]).to_json())
    assert document["arms"][0]["rule"] == "strict"
    assert document["arms"][0]["a_step"]["rounds"]["value"] == 20


def test_pairs_are_plain_data() -> None:
    pairs = Pairs(1, 2, 0.5, inference.Estimate(0.1, 0.0, 0.2, 3))
    assert (pairs.gained, pairs.difference.n) == (1, 3)
