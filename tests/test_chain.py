from __future__ import annotations

import random
import re

import pytest

from agentguard.errors import ConfigError
from agentguard.study import suites
from agentguard.study.suites import chain


def solve(text: str, previous: int | None = None) -> int:
    """An independent solver: evaluates the assignments of a problem's text."""
    values: dict[str, int] = {}
    for part in text.split(";"):
        if match := re.fullmatch(r"([a-z])=(?:(\d+)|ans|([a-z])([+-]\d+))", part):
            name, number, operand, delta = match.groups()
            if number is not None:
                values[name] = int(number)
            elif operand is not None:
                values[name] = (values[operand] + int(delta)) % 100
            else:
                assert previous is not None
                values[name] = previous
    (asked,) = re.findall(r"\?([a-z])", text)
    return values[asked]


@pytest.mark.parametrize("previous", [None, 0, 77])
def test_answers_equal_an_independent_solver(previous: int | None) -> None:
    rng = random.Random(4)
    for _ in range(300):
        problem = chain.make_problem(rng, rng.randint(2, 16), previous=previous)
        assert problem.answer == solve(problem.text, previous)
        assert ("ans" in problem.text) == (previous is not None)


def test_a_trace_without_errors_ends_after_a_clean_pass_with_the_answer() -> None:
    rng = random.Random(5)
    for _ in range(100):
        problem = chain.make_problem(rng, rng.randint(2, 8))
        trace = chain.make_trace(rng, problem, error=0.0, again=0.0)
        assert trace.clean
        assert trace.answer == problem.answer
        assert trace.text.count("check") == 1
        assert " no" not in trace.text
        assert trace.text.count(" ok") == len(problem.lines)


def test_errors_are_found_before_a_trace_stops() -> None:
    """Of 2,000 traces with 6 % wrong lines nearly all end right: a pass with a `no` is followed by another one."""
    rng = random.Random(6)
    drawn = [(p, chain.make_trace(rng, p)) for p in (chain.make_problem(rng, rng.randint(2, 8)) for _ in range(2000))]
    assert sum(t.clean and t.answer == p.answer for p, t in drawn) >= 1990
    wrong = sum("no" in t.text for _, t in drawn) / len(drawn)
    assert 0.2 < wrong < 0.6


def test_asked_passes_are_written() -> None:
    rng = random.Random(7)
    problem = chain.make_problem(rng, 10, passes=12)
    assert problem.text.endswith(";!12")
    assert chain.make_trace(rng, problem).text.count("check") >= 12


@pytest.mark.parametrize(
    ("partial", "best"),
    [
        ("", 47),
        ("a=47\nb=47+8=", 47),
        ("a=47\nb=47+8=55", 55),
        ("a=47\nb=47+8=56\nno b=47+8=55\nc=55", 55),
        ("a=47\nb=47+8=55\nc=55-3=52\ncheck 1\na=47 ok\nb=47+8=54 no", 52),
        ("a=47\nb=47+8=55\nc=55-3=52\ncheck 1\na=47 ok\nb=47+8=55 ok\nc=55-3=51 no", 51),
    ],
)
def test_best_so_far_is_the_latest_value_of_the_furthest_variable(partial: str, best: int) -> None:
    lines = (chain.Assignment("a", None, 0), chain.Assignment("b", 0, 8), chain.Assignment("c", 1, -3))
    problem = chain.Problem("a=47;b=a+8;c=b-3;?c", lines, 47, 1, 52)
    assert chain.best_so_far(problem, partial) == best


@pytest.mark.parametrize(
    ("reply", "answer"), [("55", 55), ("\n7\n", 7), ("", None), ("055", None), ("55.", None), ("b=55", None), ("100", None)]
)
def test_only_a_number_is_an_answer(reply: str, answer: int | None) -> None:
    assert chain.parse_answer(reply) == answer


def test_a_suite_is_a_function_of_its_seed() -> None:
    suite = suites.get("chain-agent")
    same = [suite.problem(3, 1, 2, 40) for _ in range(2)]
    assert same[0] == same[1]
    assert suite.problem(4, 1, 2, 40) != same[0]
    with_other_answer = suite.problem(3, 1, 2, 41)
    assert with_other_answer.text == same[0].text
    assert with_other_answer.answer == (same[0].answer + 1) % 100


def test_an_unknown_suite_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chain'"):
        suites.get("chian")
