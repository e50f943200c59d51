"""What a grid runs and in which order, what it refuses, and where a trace first states its answer."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from agentguard.errors import ConfigError
from agentguard.policy import EngineOptions, Policy
from agentguard.reference import reference_model
from agentguard.study import suites
from agentguard.study.grading.text import first_place
from agentguard.study.grid import FIVE, Cell, Grid, _Reply, budget_of, cells_of, fresh_engines, full_cells
from agentguard.study.progress import Pace, progress_of
from agentguard.study.provenance import git_state, provenance
from agentguard.study.records import RoundStats
from agentguard.study.runner import parse_arms
from agentguard.study.suites.chain import Assignment, Problem
from agentguard.study.voids import VoidError, check_policy, judge_probe
from tests.study_sessions import session

STRICT = parse_arms("strict")[0]
FUZZY = parse_arms("fuzzy:0.3")[0]
CHAIN = suites.get("chain")


def grid(arms: str = "strict;cactus:delta=0.5", closes: tuple[Any, ...] = ("off",), n: int = 4, **options: Any) -> Grid:
    return Grid(CHAIN, cells_of(parse_arms(arms), closes, n), 1, **options)


def test_the_whole_grid_is_every_rule_with_and_without_filter_and_close() -> None:
    cells = full_cells()
    assert len(cells) == 17 * 2 * 2
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell.n for cell in cells if cell.rule.name in ("strict", *FIVE)} == {256}
    assert {cell.n for cell in cells if cell.rule.name not in ("strict", *FIVE)} == {96}
    assert ("strict:p_min=0.1,top_k=10", "off") in {cell.key for cell in cells}
    assert Grid(CHAIN, cells, 1).sessions == 64 + 4 * (8 * 256 + 9 * 96)


def test_numbers_come_in_turn_and_each_begins_with_another_arm() -> None:
    plan = Grid(CHAIN, (Cell(STRICT, "off", 3), *cells_of(parse_arms("cactus:delta=0.5;fuzzy:T=0.3"), ("off",), 2)), 1)
    order = [(cell.rule.name, number) for cell, number in plan.todo([])]
    assert order == [
        ("strict", 0), ("cactus", 0), ("fuzzy", 0), ("cactus", 1), ("fuzzy", 1), ("strict", 1), ("strict", 2),
    ]  # fmt: skip


def test_what_is_recorded_is_not_run_again() -> None:
    plan = grid(closes=("off", "adaptive"), n=2)
    done = [session("strict", 0), session("cactus:delta=0.5", 1), session("strict", 1, close="adaptive")]
    left = {(*cell.key, number) for cell, number in plan.todo(done)}
    assert left == {
        ("strict", "off", 1), ("cactus:delta=0.5", "off", 0), ("strict", "adaptive", 0), ("cactus:delta=0.5", "adaptive", 0),
        ("cactus:delta=0.5", "adaptive", 1),
    }  # fmt: skip
    assert list(plan.todo([*done, *(session(rule, n, close=close) for rule, close, n in left)])) == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: grid("cactus:delta=0.5"), "needs 'strict'"),
        (lambda: grid("strict;strict"), "given twice"),
        (lambda: Grid(CHAIN, (Cell(STRICT, "off", 2), Cell(FUZZY, "off", 3)), 1), "more sessions than strict"),
        (lambda: Grid(suites.get("chain-agent"), cells_of([STRICT], ("off", "adaptive"), 2), 1), "sessions have several"),
        (lambda: Grid(suites.get("prose"), cells_of([STRICT], ("off", "fixed"), 2), 1), "grades nothing"),
    ],
)  # fmt: skip
def test_plans_that_compare_nothing_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_the_budget_is_the_median_trace_of_the_pilot() -> None:
    plan = grid(closes=("off", "adaptive"))
    pilot = [session("strict", i, close="pilot", tokens=t + 2, think=t) for i, t in enumerate((10, 300, 90, 100, 80))]
    assert budget_of(plan, [*pilot, session("strict", 0, tokens=999)]) == 90
    assert budget_of(grid(closes=("off", "adaptive"), budget=77), pilot) == 77
    assert budget_of(grid(), pilot) == 0
    assert (plan.pilot, grid(closes=("off", "adaptive"), budget=77).pilot, grid().pilot) == (64, 0, 0)


def test_fresh_engines_run_strict_beside_each_rule() -> None:
    parts = fresh_engines(grid("strict;cactus:delta=0.5;fuzzy:T=0.3", n=2))
    assert [[cell.rule.name for cell in part.cells] for part in parts] == [["strict", "cactus"], ["strict", "fuzzy"]]


def test_a_plan_tells_other_tasks_weights_and_options_apart(tmp_path: Path) -> None:
    policy = Policy(model=str(reference_model("target")), draft=str(reference_model("draft")))
    plan = grid().as_json(policy)
    assert plan == grid(concurrency=3).as_json(policy)  # how fast it runs is no part of the plan
    others = [
        grid(n=5).as_json(policy),
        grid(temperature=0.7).as_json(policy),
        Grid(suites.get("chain", max_tokens=512), grid().cells, 1).as_json(policy),
        grid().as_json(policy.model_copy(update={"draft": str(reference_model("draft-short"))})),
        grid().as_json(policy.model_copy(update={"engine": EngineOptions(draft_tokens=4)})),
    ]
    assert all(other != plan for other in others)
    tasks = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, path in enumerate(tasks):
        path.write_text('{"question": "%d?", "answer": "#### 1"}\n' % number)  # noqa: UP031  # braces
    a, b = (Grid(suites.get("gsm8k", path), grid().cells, 1).as_json(policy) for path in tasks)
    assert {key for key in a if a[key] != b[key]} == {"tasks"}


def test_where_in_the_output_a_trace_got_to() -> None:
    reply = _Reply("", "abcdefghij", [(4, 3), (4, 4), (10, 7)])
    assert reply.place(None) is None
    assert reply.place(4) == 3
    assert reply.place(2) == 2  # half of the first chunk's 3 tokens, rounded up
    assert reply.place(10) == 7
    assert reply.place(5) == 5


def test_the_first_right_derivation_of_a_chain() -> None:
    problem = Problem("a=5;b=a+8;?b", (Assignment("a", None, 0), Assignment("b", 0, 8)), 5, 1, 13)
    trace = "a=5\nb=5+8=23\nno b=5+8=13\ncheck 1"
    assert problem.proved(trace) == trace.index("\ncheck")
    assert problem.proved("a=5\nb=5+8=23") is None
    assert problem.proved("a=5\nb=5+8=130") is None


def test_the_first_place_of_a_number() -> None:
    text = "so 12 and then 1,200 = 1200"
    assert first_place(text, "1200") == text.index(" = ")
    assert first_place(text, "7") is None


POLICY = Policy(model="m", draft="d")
RELAXED = parse_arms("strict;cactus:delta=0.5")


def with_args(*args: str) -> Policy:
    return POLICY.model_copy(update={"engine": EngineOptions(extra_args=args)})


@pytest.mark.parametrize(
    ("policy", "temperature", "says"),
    [
        (Policy(model="m"), 1.0, "need a draft"),
        (POLICY, 0.0, "greedy requests bypass relaxed rules"),
        (with_args("--generation-config", "auto"), 1.0, "override the study's sampling"),
        (with_args("--generation_config=auto"), 1.0, "override the study's sampling"),
        (with_args("--override-generation-config", '{"temperature": 0.6}'), 1.0, "override the study's sampling"),
        (with_args("--speculative-config", '{"method": "ngram"}'), 1.0, "keeps no draft probabilities"),
        (with_args("--speculative-config", "not json"), 1.0, "keeps no draft probabilities"),
    ],
)
def test_void_options_are_refused(policy: Policy, temperature: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_policy(policy, RELAXED, temperature)


def test_options_that_do_no_harm_are_not_refused() -> None:
    check_policy(POLICY, RELAXED, 1.0)
    check_policy(POLICY, [STRICT], 0.0)  # greedy strict is what it says
    probabilistic = '{"method": "eagle3", "draft_sample_method": "probabilistic"}'
    check_policy(with_args("--generation-config", "vllm", "--speculative-config", probabilistic), RELAXED, 1.0)


def probe(drafted: int, accepted: int, **more: Any) -> RoundStats:
    return RoundStats(rounds=drafted // 6, drafted=drafted, accepted=accepted, **({"effective": {"lenience:l=0": 1}} | more))


@pytest.mark.parametrize(
    ("stats", "counted", "says"),
    [
        ([probe(60, 55)], 0, "counted no verification round"),
        ([RoundStats()], 10, "no telemetry"),
        ([probe(60, 55, unjudged=3)], 10, "keeps no probabilities"),
        ([probe(60, 55, effective={"strict": 10})], 10, "ran as strict"),
        ([probe(60, 20), probe(60, 18)], 20, "accepted 32% of 120"),
    ],
)
def test_a_probe_that_did_not_do_what_it_was_asked_stops_the_study(stats: list[RoundStats], counted: int, says: str) -> None:
    with pytest.raises(VoidError, match=says):
        judge_probe(stats, counted)


def test_a_probe_that_did_is_passed() -> None:
    judge_probe([probe(60, 54), probe(60, 60)], 20)


def test_the_pace_is_of_this_run_alone() -> None:
    now = [0.0]
    pace = Pace(100, lambda: now[0])
    pace.found(40)
    assert (pace.rate, pace.left_s, str(pace)) == (None, None, "40 of 100 sessions")
    now[0] = 500.0  # the engine starts
    pace.advance()
    for _ in range(19):
        now[0] += 0.5
        pace.advance()
    assert pace.rate == 2.0
    assert pace.left_s == 20.0
    assert str(pace) == "60 of 100 sessions, 2.0/s, 20 s left"


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of("chain", 3) as progress:
        for _ in range(3):
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "chain: 1 of 3 sessions"
    assert lines[-1].startswith("chain: 3 of 3 sessions")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_is_a_bar() -> None:
    screen = Terminal()
    with progress_of("chain", 4, screen) as progress:
        progress.say("watch it")
        progress.found(1)
        for _ in range(3):
            progress.advance()
    shown = screen.getvalue()
    assert "watch it" in shown
    assert "chain: 4 of 4 sessions" in shown


def test_provenance_says_what_ran_and_names_no_path_of_this_machine() -> None:
    policy = Policy(model=str(reference_model("target")), draft=str(reference_model("draft")))
    found = provenance(policy, {"seed": 1}, ["agentguard", "study", "full"])
    assert found["plan"] == {"seed": 1}
    assert found["engine"] == {"model": "target", "draft": "draft", "K": 6}
    assert found["weights_sha256"]["model"] != found["weights_sha256"]["draft"]
    assert {"agentguard", "started", "packages", "hardware", "git", "python", "recipe", "command"} <= set(found)
    assert str(Path.cwd()) not in repr({k: v for k, v in found.items() if k != "command"})
    assert found["hardware"]["cores"] >= 1


def test_git_state_is_none_where_there_is_no_history(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
