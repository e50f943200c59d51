"""Arms, classes, sums, verdicts and switches: what is counted where, and what the guard does about it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentguard.economics import sequences
from agentguard.economics.arms import STRICT, Arms
from agentguard.economics.baseline import baseline_of
from agentguard.economics.cells import QUANTITIES, Cell, Mean, SessionSums, bin_of, is_censored, strict_expectation
from agentguard.economics.classes import LIMIT, Classes, is_side_call, kind_of, model_of
from agentguard.economics.ledger import Assignment, Ledger, ledger_of, setup_of
from agentguard.economics.netwin import Difference, Switch, Verdict, combined, difference, judge
from agentguard.economics.report import report
from agentguard.errors import ConfigError
from agentguard.events import DraftRows, RuleSwitched, StepFinished, VerificationStep, Verified
from agentguard.policy import Economics, Policy, parse
from agentguard.telemetry import prometheus

RULE = "cactus:delta=1,p_min=0.1,top_k=10"
LEAF = "m/chat/first"


def step_of(rounds: float, **known: Any) -> StepFinished:
    known = {"session": "s", "request": "r", "rule": RULE, "tokens": int(5 * rounds), "think_tokens": int(4 * rounds)} | known
    accounts = {"rounds": int(rounds), "ttlt_s": rounds / 10, "answer_tokens": 2, "marker_tokens": 1}
    return StepFinished(t=0.0, step=1, model="m", prompt_tokens=1, **(accounts | known))


def values(y: float) -> dict[str, float]:
    return dict.fromkeys(QUANTITIES, y)


def cell_of(sessions: list[list[float]]) -> Cell:
    cell = Cell()
    for steps in sessions:
        session = SessionSums()
        for y in steps:
            cell.add_step(session, values(y), censored=False)
    return cell


class TestArms:
    ARMS = Arms(b"key", 0.05, ("a", "b"), (1.0, 3.0))

    def test_shares_are_what_was_asked(self) -> None:
        counts = Counter(self.ARMS.assign(f"session-{i}") for i in range(40_000))
        for arm, share in ((STRICT, 0.05), ("a", 0.2375), ("b", 0.7125)):
            assert counts[arm] / 40_000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 40_000))

    def test_an_arm_is_a_function_of_key_and_identity(self) -> None:
        again = Arms(b"key", 0.05, ("a", "b"), (1.0, 3.0))
        other = Arms(b"other", 0.05, ("a", "b"), (1.0, 3.0))
        names = [f"s{i}" for i in range(500)]
        assert [self.ARMS.assign(n) for n in names] == [again.assign(n) for n in names]
        assert [self.ARMS.assign(n) for n in names] != [other.assign(n) for n in names]

    def test_exploring_says_nothing_about_the_arm(self) -> None:
        explorers = [f"s{i}" for i in range(20_000) if self.ARMS.explores(f"s{i}", 0.1)]
        assert len(explorers) == pytest.approx(2_000, abs=200)
        share = Counter(self.ARMS.assign(n) for n in explorers)["b"] / len(explorers)
        assert share == pytest.approx(0.7125, abs=0.05)

    def test_without_a_relaxed_arm_all_is_control(self) -> None:
        assert {Arms(b"k", 0.05).assign(f"s{i}") for i in range(100)} == {STRICT}


class TestClasses:
    def test_kinds_of_step(self) -> None:
        user, tool = {"role": "user", "content": "hi"}, {"role": "tool", "content": "42", "tool_call_id": "x"}
        assert kind_of([user], 1) == "first"
        assert kind_of([user, {"role": "assistant"}, user], 2) == "follow_up"
        assert kind_of([user, {"role": "assistant"}, tool], 2) == "tool_result"
        anthropic = {"role": "user", "content": [{"type": "tool_result", "content": "42"}]}
        assert kind_of([anthropic], 5) == "tool_result"

    @pytest.mark.parametrize(
        ("body", "limit", "used", "side"),
        [
            ({}, None, False, False),
            ({}, 256, False, False),  # a chat with a short limit is somebody's own work
            ({}, 256, True, True),
            ({}, 4096, True, False),
            ({"tools": [{}]}, 256, True, False),
            ({"reasoning_effort": "low"}, None, False, False),  # a user who always wants little
            ({"reasoning_effort": "low"}, None, True, True),
            ({"reasoning": {"effort": "minimal"}}, None, True, True),
            ({"reasoning_effort": "high"}, 4096, True, False),
        ],
    )
    def test_side_calls(self, body: dict[str, Any], limit: int | None, used: bool, side: bool) -> None:
        assert is_side_call(body, limit, session_used_tools=used) == side
        assert is_side_call(body, limit, session_used_tools=used, marked=True)

    def test_a_session_may_begin_with_its_title(self) -> None:
        assert is_side_call({"reasoning_effort": "low"}, None, session_used_tools=False, first=True)

    def test_their_number_is_bounded(self) -> None:
        classes = Classes()
        names = {classes.name(f"org/model-{i}", "chat", "first") for i in range(LIMIT + 50)}
        assert len({n for n in names if not n.endswith("/other")}) == LIMIT
        assert classes.name("org/model-0", "chat", "first") == "org/model-0/chat/first"
        assert {model_of(n) for n in names} == {f"org/model-{i}" for i in range(LIMIT + 50)}


class TestCells:
    @given(sessions=st.lists(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=6), min_size=2, max_size=12))
    @settings(max_examples=80, deadline=None)
    def test_the_running_sums_give_the_textbook_ratio_estimator(self, sessions: list[list[float]]) -> None:
        cell = Cell()
        running = [SessionSums() for _ in sessions]
        for i in range(6):  # interleaved, as sessions are
            for session, steps in zip(running, sessions, strict=True):
                if i < len(steps):
                    cell.add_step(session, values(steps[i]), censored=False)
        n, groups = sum(map(len, sessions)), len(sessions)
        mean = sum(map(sum, sessions)) / n
        variance = sum((sum(s) - mean * len(s)) ** 2 for s in sessions) / n**2 * groups / (groups - 1)
        found = cell.mean("rounds")
        assert found is not None
        assert (cell.steps, cell.sessions) == (n, groups)
        assert found.value == pytest.approx(mean)
        assert found.variance == pytest.approx(variance, rel=1e-6, abs=1e-6 * mean**2)

    def test_correlated_steps_widen_the_interval(self) -> None:
        """The same 400 numbers as 400 sessions and as 40 sessions of ten alike."""
        rng = random.Random(1)
        alike = [[rng.lognormvariate(5, 0.8)] * 10 for _ in range(40)]
        together, apart = cell_of(alike).mean("tokens"), cell_of([[y] for s in alike for y in s]).mean("tokens")
        assert together is not None
        assert apart is not None
        assert together.value == pytest.approx(apart.value)
        assert together.variance == pytest.approx(10 * apart.variance, rel=0.05)

    def test_a_censored_trace_counts_with_the_mean_of_what_got_further(self) -> None:
        cell, session = Cell(), SessionSums()
        for think in (100.0, 1000.0, 3000.0):
            cell.add_step(session, values(0.0) | {"think": think, "tokens": think + 50}, censored=False)
        step = {"tokens": 500.0, "think": 400.0, "answer": 100.0, "rounds": 50.0, "ttlt": 5.0}
        added = cell.add_step(session, step, censored=True)
        assert (added["think"], added["tokens"], added["answer"]) == (2000.0, 2100.0, 100.0)
        assert (added["rounds"], added["ttlt"]) == (pytest.approx(210.0), pytest.approx(21.0))
        assert cell.get("censored") == 1

    def test_traces_capped_alike_count_as_the_cap_whatever_their_answers(self) -> None:
        cell, session = Cell(), SessionSums()
        for answer in (5.0, 900.0):  # a long answer is no long trace
            cell.add_step(session, values(0.0) | {"think": 300.0, "tokens": 300.0 + answer}, censored=False)
        added = cell.add_step(session, values(0.0) | {"think": 1000.0, "tokens": 1010.0}, censored=True)
        assert (added["think"], added["tokens"]) == (1000.0, 1010.0)

    @pytest.mark.parametrize(
        ("known", "censored"),
        [
            ({}, False), ({"closed": "fraction"}, True), ({"error": "cancelled"}, True),
            ({"finish_reason": "length", "answer_tokens": 0}, True), ({"finish_reason": "length"}, False),
        ],
    )  # fmt: skip
    def test_what_ends_a_trace_that_is_not_the_model(self, known: dict[str, Any], censored: bool) -> None:
        assert is_censored(step_of(10, **known)) == censored

    def test_redistribution_is_the_kaplan_meier_restricted_mean(self) -> None:
        """With censoring at random the estimate is close to the truth, where counting censored runs as short is far below it."""
        rng = random.Random(3)
        truth, naive, cell = [], [], Cell()
        for _ in range(4_000):
            length, censor = rng.lognormvariate(5, 0.8), rng.lognormvariate(5.5, 0.8)
            truth.append(length)
            naive.append(min(length, censor))
            cell.add_step(SessionSums(), values(min(length, censor)) | {"answer": 0.0}, censored=censor < length)
        mean, found = sum(truth) / 4_000, cell.mean("tokens")
        assert found is not None
        assert sum(naive) / 4_000 < 0.75 * mean
        assert found.value == pytest.approx(mean, rel=0.12)

    def test_bins_are_bounded(self) -> None:
        assert bin_of(0) == bin_of(1) == 0
        assert bin_of(1e30) == 63
        assert [bin_of(2.0**i) for i in range(16)] == list(range(0, 64, 4))

    @pytest.mark.parametrize("groups", [0, 1])
    def test_too_little_is_unknown_not_zero(self, groups: int) -> None:
        assert cell_of([[5.0]] * groups).mean("tokens") is None
        assert cell_of([[0.0]] * 5).mean("rounds") is None
        assert Cell().accepted_length is None

    def test_memory_does_not_grow_with_steps(self) -> None:
        rng, cell, session = random.Random(0), Cell(), SessionSums()
        for i in range(20_000):
            cell.add_step(session, values(rng.lognormvariate(5, 2)), censored=i % 7 == 0)
            cell.add_round(i % 7, 2.0)
        assert len(cell.sums) < 200

    def test_strict_expectation(self) -> None:
        """By hand: 0.5 accepts one, 0.5 * 0.5 accepts a second, the third never."""
        assert strict_expectation([0.5, 0.5, 0.0, 1.0]) == pytest.approx(0.75)
        assert strict_expectation([1.0] * 6) == 6

    @pytest.mark.parametrize("spread", [0.0, 0.3])
    def test_rounds_give_accepted_length_by_position(self, spread: float) -> None:
        cell = Cell()
        for accepted in (0, 1, 1, 3):
            cell.add_round(accepted, accepted + spread)
        assert cell.accepted_length == 1.25
        assert cell.strict_accepted_length == pytest.approx(1.25 + spread)
        assert cell.by_position == [0.75, 0.25, 0.25]


class TestSequences:
    def test_is_wider_than_one_look_and_narrows(self) -> None:
        for alpha in (0.02, 0.05, 0.1):
            widths = [sequences.half_width(se**2, alpha) / se for se in (0.3, 0.1, 0.08, 0.02)]
            assert min(widths) > 2.3
            assert widths[2] == min(widths), "narrowest where it was tuned"
        assert sequences.half_width(0.01, 0.02) > sequences.half_width(0.01, 0.05)

    def test_it_covers_at_every_moment(self) -> None:
        """Paths of 400 sessions, looked at after each: at most 5 % ever leave the sequence, over 15 % leave one-look intervals."""
        rng = random.Random(5)
        left = naive = 0
        for _ in range(200):
            total = squares = 0.0
            out = out_naive = False
            for n in range(1, 401):
                y = rng.gauss(0, 1)
                total, squares = total + y, squares + y * y
                if n >= 30:
                    mean = total / n
                    variance = (squares / n - mean * mean) / (n - 1)
                    out |= abs(mean) > sequences.half_width(variance)
                    out_naive |= abs(mean) > 1.96 * math.sqrt(variance)
            left, naive = left + out, naive + out_naive
        assert left / 200 <= 0.05 + 0.03
        assert naive / 200 > 0.15

    def test_nothing_known_is_an_open_interval(self) -> None:
        ratio = sequences.ratio(0.1, 0.0, 5)
        assert (ratio.low, ratio.high) == (0.0, math.inf)


def sample(rng: random.Random, ratio: float, sessions: int) -> Cell:
    return cell_of([[ratio * rng.lognormvariate(4, 0.5) for _ in range(3)] for _ in range(sessions)])


def verdict_of(arm: Cell, control: Cell, minimum: int = 30) -> Verdict:
    return judge(difference(arm, control, "rounds"), difference(arm, control, "ttlt"), min(arm.sessions, control.sessions), minimum)


class TestVerdict:
    def test_loss_win_and_undecided(self) -> None:
        rng = random.Random(0)
        control = sample(rng, 1.0, 300)
        for ratio, word in ((1.6, "loss"), (0.6, "win"), (1.0, "undecided")):
            verdict = verdict_of(sample(rng, ratio, 300), control)
            assert verdict.word == word
            assert verdict.rounds is not None
            assert verdict.rounds.value == pytest.approx(ratio, rel=0.1)
        assert verdict_of(sample(rng, 3.0, 29), control) == Verdict("undecided", "29 of 30 sessions an arm")

    def test_time_can_lose_what_rounds_do_not(self) -> None:
        rng = random.Random(0)
        control, arm = sample(rng, 1.0, 300), sample(rng, 1.0, 300)
        for key, power in (("ttlt", 1), ("ttlt2", 2), ("ttltn", 1)):
            arm.sums[key] *= 2.0**power
        verdict = verdict_of(arm, control)
        assert (verdict.word, verdict.quantity) == ("loss", "ttlt")

    def test_without_rounds_nothing_is_decided(self) -> None:
        cell = cell_of([[1.0, 2.0]] * 50)
        for key in ("rounds", "rounds2", "roundsn", "ttlt", "ttlt2", "ttltn"):
            cell.sums[key] = 0.0
        assert verdict_of(cell, cell).reason.startswith("no rounds to compare")

    def test_a_small_control_borrows_the_relative_variance_of_the_large_arm(self) -> None:
        """The control happens to have drawn no long run: with its own variance alone it would be far too sure of itself."""
        rng = random.Random(1)
        arm = cell_of([[rng.lognormvariate(0, 1.2)] for _ in range(2_000)])
        control = cell_of([[1.0 + i / 1_000] for i in range(60)])
        found = difference(arm, control, "rounds")
        assert found is not None
        mean = arm.mean("rounds")
        assert mean is not None
        relative = mean.variance * mean.n / mean.value**2
        assert found.variance > 0.9 * relative / 60
        assert found.n == 60

    def test_classes_are_combined_within_not_across(self) -> None:
        """Sums across classes would mix them in different shares (Simpson); a weighted mean of the classes' own ratios does not."""
        found = combined([Difference(math.log(0.8), 0.01, 100), Difference(math.log(0.9), 0.04, 50)])
        assert found is not None
        assert math.exp(found.log) == pytest.approx(0.8 ** (4 / 5) * 0.9 ** (1 / 5))
        assert math.sqrt(found.variance) == pytest.approx(0.1 * 0.8 + 0.2 * 0.2), "fully correlated errors"
        assert found.n == 150
        assert combined([]) is None

    def test_a_switch_counts_only_what_came_after_its_last_move(self) -> None:
        rng = random.Random(0)
        switch, control, arm = Switch(), sample(rng, 1.0, 300), sample(rng, 1.6, 300)
        switch.move(verdict_of(arm, control), arm, control, 1.0)
        assert (switch.on, switch.moves, switch.at, switch.verdict.word) == (False, 1, 1.0, "loss")
        recent, beside = switch.since(arm, control)
        assert recent.sessions == 0
        assert isinstance(beside, Cell)
        switch.judged(verdict_of(recent, beside))
        assert "is above 1; since then 0 of 30 sessions" in switch.reason
        assert switch.verdict.word == "loss"
        arm.merge(sample(rng, 0.5, 100).sums)
        control.merge(sample(rng, 1.0, 100).sums)
        recent, beside = switch.since(arm, control)
        assert isinstance(beside, Cell)
        assert verdict_of(recent, beside).word == "win"
        switch.move(verdict_of(recent, beside), arm, control, 2.0)
        assert (switch.on, switch.moves) == (True, 2)
        assert Switch.from_json(json.loads(json.dumps(switch.as_json()))) == switch


def traffic(ledger: Ledger, ratio: float, sessions: range, seed: int = 0) -> Counter[str]:
    """Sessions of three steps through assign, started and finished; the relaxed rule needs ``ratio`` as many rounds."""
    rng, ran = random.Random(seed), Counter[str]()
    for i in sessions:
        sums: dict[tuple[str, str], SessionSums] = {}
        for _ in range(3):
            assigned = ledger.assign(f"s{i}", LEAF)
            ran[assigned.rule] += 1
            ledger.started(f"s{i}", assigned)
            ledger.finished(step_of(rng.lognormvariate(4, 0.5) * (ratio if assigned.rule == RULE else 1.0)), assigned, sums)
    return ran


def ledger(events: list[RuleSwitched] | None = None, **known: Any) -> Ledger:
    known = {"min_sessions": 30} | known
    return Ledger(Arms(b"k", 0.5, (RULE,), (1.0,)), on_event=(events if events is not None else []).append, **known)


class TestLedger:
    def test_a_losing_rule_is_switched_to_strict_and_a_trickle_explores(self) -> None:
        events: list[RuleSwitched] = []
        book = ledger(events, exploration=0.1)
        traffic(book, 1.6, range(1_000))
        (event,) = events
        assert (event.arm, event.on, event.quantity, event.workload) == (RULE, False, "rounds", LEAF)
        assert event.low > 1
        assert event.sessions >= 30
        later = traffic(book, 1.6, range(1_000, 3_000), seed=1)
        assert later[RULE] / later.total() == pytest.approx(0.05, abs=0.01), "half are the arm's, a tenth of them explore"
        reasons = Counter(book.assign(f"s{i}", LEAF).reason.partition(":")[0] for i in range(300))
        assert set(reasons) == {"control", "exploration", "switched to strict"}

    def test_a_rule_that_wins_later_comes_back(self) -> None:
        events: list[RuleSwitched] = []
        book = ledger(events, exploration=0.5)
        traffic(book, 1.6, range(600))
        assert [e.on for e in events] == [False]
        traffic(book, 0.5, range(600, 2_000), seed=1)
        assert [e.on for e in events] == [False, True]
        assert "below 1" in events[1].reason

    def test_a_winning_rule_is_kept(self) -> None:
        events: list[RuleSwitched] = []
        book = ledger(events)
        traffic(book, 0.7, range(600))
        assert events == []
        (row,) = [r for r in book.rows() if r.arm == RULE]
        assert (row.on, row.verdict) == (True, "win")

    def test_a_rule_that_comes_back_is_not_switched_off_by_what_was_before(self) -> None:
        """A rule that loses at first and then wins moves once each way; it does not flap."""
        events: list[RuleSwitched] = []
        book = ledger(events, exploration=1.0)
        traffic(book, 1.5, range(600))
        traffic(book, 0.6, range(600, 3_000), seed=1)
        assert [e.on for e in events] == [False, True]

    def test_a_small_class_that_has_moved_is_judged_by_itself(self) -> None:
        """A long history of losses, own and in other classes, does not throw a rule out again that has won since."""
        events: list[RuleSwitched] = []
        book = ledger(events, exploration=1.0)
        done = 0
        while not events:
            traffic(book, 8.0, range(done, done + 1), seed=done)
            done += 1
        traffic(book, 0.5, range(done, done + 300), seed=1)
        assert [e.on for e in events] == [False, True]
        (row,) = [r for r in book.rows() if r.arm == RULE]
        assert row.ratios["rounds"] is not None
        assert row.ratios["rounds"].value > 1, "over all time it lost"

    def test_a_step_whose_rounds_are_unknown_gets_the_arms_rounds_a_token(self) -> None:
        book = ledger()
        for step in (step_of(100), msgspec.structs.replace(step_of(50), rounds=None, error="cancelled")):
            book.finished(step, Assignment(RULE, RULE, LEAF, ""), {})
        cell = book.cells[LEAF, RULE]
        assert cell.get("rounds") / cell.get("tokens") == pytest.approx(100 / 500)

    def test_measuring_only_judges_and_switches_nothing(self) -> None:
        events: list[RuleSwitched] = []
        book = ledger(events, guard=False)
        ran = traffic(book, 2.0, range(500))
        assert events == []
        assert ran[RULE] > 600
        (row,) = [r for r in book.rows() if r.arm == RULE]
        assert (row.on, row.verdict) == (True, "loss")
        book.switches[LEAF, RULE].on = False  # as a store may bring it
        assert {book.assign(f"s{i}", LEAF).rule for i in range(50)} == {STRICT, RULE}

    @pytest.mark.parametrize(
        ("known", "reason"), [({"pinned": "interp:w=1"}, "the request names its rule"), ({"side": True}, "side call")]
    )
    def test_what_chose_its_rule_or_is_beside_the_work_is_not_counted(self, known: dict[str, Any], reason: str) -> None:
        book = ledger()
        assigned = book.assign("s", LEAF, **known)
        assert (assigned.arm, assigned.reason, assigned.counted) == ("", reason, False)
        book.started("r", assigned)
        book.finished(step_of(10), assigned, {})
        assert book.cells == {}

    def test_a_failed_step_is_not_counted_and_a_cancelled_one_is_censored(self) -> None:
        book = ledger()
        book.finished(step_of(10, error="gone"), Assignment(RULE, RULE, LEAF, ""), {})
        assert book.cells == {}
        book.finished(step_of(10, error="cancelled"), Assignment(RULE, RULE, LEAF, ""), {})
        assert book.cells[LEAF, RULE].get("censored") == 1

    def test_steps_that_the_guard_ran_strict_are_not_the_arms(self) -> None:
        book = ledger()
        book.finished(step_of(10), Assignment(STRICT, RULE, LEAF, "switched"), {})
        assert book.cells == {}

    def test_a_small_class_is_judged_by_its_models_classes(self) -> None:
        events: list[RuleSwitched] = []
        book = ledger(events)
        rng = random.Random(2)
        for i in range(400):
            for kind in ("first", "follow_up", "tool_result"):
                if kind == "tool_result" and i % 20:
                    continue
                assigned = book.assign(f"s{i}", f"m/chat/{kind}")
                rounds = rng.lognormvariate(4, 0.5) * (1.6 if assigned.rule == RULE else 1)
                book.finished(step_of(rounds), assigned, {})
        evidence = {e.workload: e.evidence for e in events}
        assert evidence["m/chat/tool_result"] == "model"
        assert {e.on for e in events} == {False}
        rows = {r.workload: r.evidence for r in book.rows() if r.arm == RULE}
        assert rows["m/chat/tool_result"] == "model"

    def test_telemetry_gives_the_strict_counterfactual_without_a_control(self) -> None:
        book = ledger()
        book.started("r1", Assignment(RULE, RULE, LEAF, ""))
        rows = DraftRows(token=[1, 2], p=[0.1, 0.2], q=[0.2, 0.2], rank=[0, 0], strict=[0.5, 1.0], flags=[1, 1])
        for request, accepted in (("r1", 2), ("r1-answer", 1), ("unknown", 0)):
            verified = Verified(request=request, rule_asked=RULE, rule_effective=RULE, drafted=2, accepted=accepted, rows=rows)
            book.verified(VerificationStep(t=0.0, engine="e", step=1, requests=[verified]))
        cell = book.cells[LEAF, RULE]
        assert cell.get("spec_rounds") == 2
        assert cell.accepted_length == 1.5
        assert cell.strict_accepted_length == pytest.approx(1.0)

    def test_pressure_is_the_same_for_every_arm_and_comes_from_lambda_above_gain(self) -> None:
        book = ledger(guard=False)
        assert book.pressure(LEAF) == 0
        for arm, scale in ((STRICT, 1.0), (RULE, 2.0)):
            for i in range(200):
                book.finished(step_of(40 * scale + i % 7), Assignment(arm, arm, LEAF, ""), {})
            book.cells[LEAF, arm].add_round(3, 3.0)
        assert 0.5 < book.pressure(LEAF) <= 1.0
        book.cells[LEAF, RULE].add_round(30, 3.0)  # a gain that pays for it
        assert book.pressure(LEAF) == 0

    def test_a_million_steps_need_a_fixed_number_of_sums(self) -> None:
        """The time of it is in benchmarks/economics_updates.py."""
        book = ledger()
        sums: dict[tuple[str, str], SessionSums] = {}
        for i in range(3_000):
            book.finished(step_of(10 + i % 50), Assignment(RULE, RULE, LEAF, ""), sums)
        assert set(book.cells) == {(LEAF, RULE)}
        assert max(len(c.sums) for c in book.cells.values()) < 120
        assert len(sums) == 1

    def test_running_requests_are_forgotten_at_their_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentguard.economics.ledger.RUNNING", 10)
        book = ledger()
        for i in range(100):
            book.started(f"r{i}", Assignment(RULE, RULE, LEAF, ""))
        assert len(book._running) == 10

    def test_the_report_is_json_and_prometheus_shows_what_is_known_only(self) -> None:
        book = ledger(guard=False)
        traffic(book, 1.4, range(100))
        data = json.loads(json.dumps(report(book), allow_nan=False))
        rows = {(r["workload"], r["arm"]): r for r in data["rows"]}
        assert rows[LEAF, STRICT]["verdict"] == "control"
        assert rows[LEAF, RULE]["ratios"]["rounds"]["value"] == pytest.approx(1.4, rel=0.15)
        text = prometheus.render(book).decode()
        assert f'agentguard_rounds_ratio{{arm="{RULE}",workload="{LEAF}"}}' in text
        assert f'agentguard_rounds_ratio{{arm="strict",workload="{LEAF}"}}' not in text
        assert "agentguard_gain{" not in text, "no telemetry came, so the gain is unknown"
        assert f'agentguard_steps_total{{arm="strict",workload="{LEAF}"}} {rows[LEAF, STRICT]["steps"]}.0' in text


class TestBaseline:
    def test_fixed_means_replace_the_control(self) -> None:
        means, source = baseline_of({"rounds": 40.0})
        assert source == "fixed"
        book = Ledger(Arms(b"k", 0.0, (RULE,), (1.0,)), baseline=means, baseline_source=source)
        traffic(book, 2.0, range(200))
        (row,) = book.rows()
        assert row.baseline == "fixed"
        assert row.ratios["rounds"] is not None
        assert row.ratios["rounds"].value == pytest.approx(2 * math.exp(4 + 0.125) / 40, rel=0.1)
        assert row.ratios["tokens"] is None, "no mean of tokens was given"
        assert not row.on

    def test_a_study_gives_means_with_their_variance(self, tmp_path: Path) -> None:
        strict = {"rule": "strict", "a_step": {"rounds": {"value": 40.0, "variance": 4.0, "n": 50}, "ttlt": None, "tokens": None}}
        path = tmp_path / "study.json"
        path.write_text(json.dumps({"arms": [strict]}))
        means, source = baseline_of(str(path))
        assert means == {"rounds": Mean(40.0, 4.0, 50)}
        assert source == "study study.json"
        found = difference(cell_of([[80.0]] * 9), means, "rounds")
        assert found is not None
        assert (found.log, found.variance, found.n) == (pytest.approx(math.log(2)), pytest.approx(4 / 1600), 9)

    @pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"arms": [{"rule": "cactus:delta=1"}]}'])
    def test_a_file_that_is_no_study_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match="not the JSON of a study"):
            baseline_of(str(path))
        with pytest.raises(ConfigError, match="cannot be read"):
            baseline_of(str(tmp_path / "missing.json"))
        with pytest.raises(ConfigError, match="did you mean 'rounds'"):
            baseline_of({"round": 3.0})


class TestPolicy:
    def test_the_recipes_rule_is_the_arm_when_none_is_named(self) -> None:
        book = ledger_of(Policy(model="m", rule="cactus:1"))
        assert book.arms.rules == (RULE,)
        assert book.arms.control == 0.05
        named = Policy(model="m", economics=Economics(control=0.2, arms={"interp:0.5,p_min=0.2": 2.0}))
        assert ledger_of(named).arms.rules == ("interp:w=0.5,p_min=0.2,top_k=10",)

    def test_a_strict_recipe_runs_as_it_is_written(self) -> None:
        book = ledger_of(Policy(model="m", rule="strict:p_min=0.1"))
        assert book.assign("s", LEAF).rule == "strict:p_min=0.1"
        assert ledger_of(Policy(model="m")).assign("s", LEAF) == Assignment(STRICT, STRICT, LEAF, "no relaxed arm")

    @pytest.mark.parametrize(
        ("raw", "named"),
        [
            ({"control": 1.0}, "economics.control"),
            ({"arms": {"strict": 1}}, "name relaxed rules"),
            ({"arms": {"cactuz:1": 1}}, "did you mean 'cactus'"),
            ({"arms": {"cactus:1": 0}}, "greater than 0"),
            ({"contrl": 0.1}, "did you mean 'control'"),
            ({"baseline": {"rounds": -1}}, "greater than 0"),
            ({"baseline": {"rounds": math.inf}}, "finite number"),
            ({"baseline": {"tokens": 9}}, "needs at least 'rounds'"),
            ({"arms": {"cactus:1": 1, "cactus:delta=1,p_min=0.1,top_k=10": 1}}, "are the same rule"),
            ({"arms": {"cactus:1": 1}, "control": 0}, "nothing to compare"),
        ],
    )
    def test_bad_economics_name_field_value_and_remedy(self, raw: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            parse({"model": "m", "economics": raw})

    def test_a_rule_beside_arms_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="name the rule among the arms"):
            parse({"model": "m", "rule": "cactus:1", "economics": {"arms": {"interp:0.5": 1}}})

    def test_another_setup_has_another_name(self) -> None:
        base = parse({"model": "m", "draft": "d"})
        assert setup_of(base) == setup_of(parse({"model": "m", "draft": "d", "max_sessions": 5}))
        for other in ({"draft": "e"}, {"model": "n"}, {"phase": "both"}, {"engine": {"draft_tokens": 3}}):
            assert setup_of(parse({"model": "m", "draft": "d"} | other)) != setup_of(base)
