"""Suites from files: each format with a sample of our own making, and what is wrong with a file."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from agentguard.errors import ConfigError
from agentguard.study import suites
from agentguard.study.grading import sandbox
from agentguard.study.suites.tasks import NAMES, TaskSuite

needs_sandbox = pytest.mark.skipif(bool(sandbox.why_not()), reason=f"no sandbox here: {sandbox.why_not()}")
CHOICES = {f"choice_{x}": f"it is {x.lower()}" for x in "ABCD"}
DOUBLE = {
    "question_content": "Print twice the number.",
    "public_test_cases": json.dumps([{"input": "3", "output": "6", "testtype": "stdin"}]),
}
ADD = {
    "question_content": "Add.", "starter_code": "class Solution:\n    def add(self, a, b):",
    "metadata": json.dumps({"func_name": "add"}),
    "public_test_cases": json.dumps([{"input": "1\n[2]", "output": "[3]", "testtype": "functional"}]),
}  # fmt: skip
SAMPLES: dict[str, tuple[dict[str, Any], str, str | None, str | None]] = {
    "gsm8k": (
        {"question": "How many legs do 3 cats have?", "answer": "3 * 4 = 12\n#### 12"}, "3 cats", "\\boxed{12}", "\\boxed{11}",
    ),
    "aime24": ({"problem": "Find n.", "answer": "033"}, "Find n.", "so \\boxed{33}", "so \\boxed{330}"),
    "mt-bench": ({"question_id": 81, "turns": ["Write a poem.", "Now shorter."]}, "Write a poem.", None, None),
    "longbench-v2": (
        {"question": "Which?", "context": "Long text.", "answer": "B", **CHOICES}, "(B) it is b", "The correct answer is (B).",
        "The correct answer is (C).",
    ),
    "prompts": ({"prompt": "Hello there"}, "Hello there", None, None),
    "humaneval": (
        {"task_id": "x/0", "prompt": "def one():\n", "entry_point": "one", "test": "def check(f):\n    assert f() == 1\n"},
        "def one():",
        "```python\ndef one():\n    return 1\n```", "```python\ndef one():\n    return 2\n```",
    ),
    "livecodebench": (DOUBLE, "twice", "```python\nprint(2 * int(input()))\n```", "```python\nprint(3 * int(input()))\n```"),
}  # fmt: skip
SETS = [pytest.param(n, marks=needs_sandbox if n in ("humaneval", "livecodebench") else ()) for n in NAMES]


def load(tmp_path: Path, name: str, *tasks: Any, listed: bool = False) -> TaskSuite:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(tasks) if listed else "\n".join(json.dumps(t) for t in tasks) + "\n\n")
    suite = suites.get(name, file)
    assert isinstance(suite, TaskSuite)
    return suite


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("listed", [True, False])
def test_a_set_is_read_asked_and_graded(tmp_path: Path, name: str, listed: bool) -> None:
    task, asked, right, wrong = SAMPLES[name]
    suite = load(tmp_path, name, task, listed=listed)
    problem = suite.problem(0, 0, 1, None)
    assert asked in problem.text
    assert suite.graded == (right is not None)
    if right is None or wrong is None:
        assert problem.grade("anything") is None
    else:
        assert problem.grade(right) is True
        assert problem.grade(wrong) is False
        assert problem.grade("") is False


@needs_sandbox
def test_a_function_of_livecodebench(tmp_path: Path) -> None:
    problem = load(tmp_path, "livecodebench", ADD).problem(0, 0, 1, None)
    assert "class Solution" in problem.text
    assert problem.grade("```python\nclass Solution:\n    def add(self, a, b):\n        return [a + x for x in b]\n```") is True


@needs_sandbox
def test_hidden_tests_are_never_unpickled(tmp_path: Path) -> None:
    class Boom:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "boom",)

    hidden = base64.b64encode(zlib.compress(pickle.dumps(Boom()))).decode()
    problem = load(tmp_path, "livecodebench", DOUBLE | {"private_test_cases": hidden}).problem(0, 0, 1, None)
    assert problem.grade("```python\nprint(2 * int(input()))\n```") is True
    assert not (tmp_path / "boom").exists()
    more = json.dumps([{"input": "5", "output": "11", "testtype": "stdin"}])
    problem = load(tmp_path, "livecodebench", DOUBLE | {"private_test_cases": more}).problem(0, 0, 1, None)
    assert problem.grade("```python\nprint(2 * int(input()))\n```") is False, "hidden tests as plain JSON count"


def test_turns_are_the_steps_of_a_session(tmp_path: Path) -> None:
    suite = load(tmp_path, "mt-bench", {"turns": ["a", "b"]}, {"turns": ["a", "b", "c"]})
    assert suite.steps == 2
    assert [suite.problem(0, 0, step, None).text for step in (1, 2)] == ["a", "b"]


def test_a_shuffle_by_seed_and_round_again(tmp_path: Path) -> None:
    suite = load(tmp_path, "prompts", *({"prompt": str(i)} for i in range(20)))

    def order(seed: int) -> list[str]:
        return [suite.problem(seed, i, 1, None).text for i in range(20)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1), key=int) == [str(i) for i in range(20)]
    assert suite.problem(1, 23, 1, None).text == order(1)[3]


def test_one_message_of_the_user_is_a_prompt(tmp_path: Path) -> None:
    assert load(tmp_path, "prompts", {"messages": [{"role": "user", "content": "hi"}]}).problem(0, 0, 1, None).text == "hi"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gsm8k", '{"question": "q"}', "task 1'.*has no field 'answer'"),
        ("gsm8k", '{"question": "q", "answer": "42"}', "does not end in '#### number'"),
        ("gsm8k", '{"question": "q", "answer": "#### 1"}\n{"question": ', "neither JSON Lines nor one JSON list"),
        ("aime24", '{"problem": "q", "answer": "x"}', "invalid literal"),
        ("mt-bench", '{"turns": []}', "turns is empty"),
        ("longbench-v2", '{"question": "q", "context": "c", "answer": "E"}', "not one of A, B, C, D"),
        ("prompts", "[]", "holds no task"),
        ("prompts", "[1]", "no JSON object"),
        ("prompts", '{"messages": [{"role": "assistant", "content": "x"}]}', "one of the user"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        suites.get(name, file)


def test_a_set_needs_its_file_and_a_suite_takes_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data"):
        suites.get("gsm8k")
    with pytest.raises(ConfigError, match="reads no file"):
        suites.get("chain", tmp_path / "x")
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        suites.get("gsm8")


def test_code_is_not_graded_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said when the study begins."""
    monkeypatch.setattr(sandbox, "why_not", lambda: "no walls")
    with pytest.raises(sandbox.SandboxError, match="no walls"):
        load(tmp_path, "humaneval", SAMPLES["humaneval"][0])
