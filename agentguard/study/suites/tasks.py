"""Suites from files: the task sets of the papers, for users who have them, and one's own prompts.

Formats are those in which the sets are published; a file is JSON Lines, or one JSON list (`NAMES` has the fields):

| suite | fields of a task |
|---|---|
| gsm8k | question, answer (ends in "#### 42") |
| aime24 | problem or question, answer (0 to 999) |
| humaneval | prompt, entry_point, test |
| livecodebench | question_content, public_test_cases, and if they have them starter_code, private_test_cases, metadata |
| mt-bench | turns: a session's user messages; nothing is graded |
| longbench-v2 | question, context, choice_A … choice_D, answer (a letter) |
| prompts | prompt, or messages with one of the user at the end; nothing is graded |
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentguard.errors import ConfigError
from agentguard.study.grading import code, sandbox, text

Task = Mapping[str, Any]
BOXED = "\n\nThink step by step, and put the final answer into \\boxed{}."
CHOICE = 'End with "The correct answer is (X)", X being the letter of your choice.'


@dataclass(frozen=True, slots=True)
class Asked:
    """What one step asks; ``judge`` is None where nothing is graded, ``number`` the right answer where it is one."""

    text: str
    judge: Callable[[str], bool] | None = None
    number: str | None = None

    def grade(self, reply: str) -> bool | None:
        return None if self.judge is None else self.judge(reply)

    def proved(self, trace: str) -> int | None:
        """Where the trace first holds the right number. A number of the question may be the same by chance, alike in every arm."""
        return None if self.number is None else text.first_place(trace, self.number)


@dataclass(frozen=True, slots=True)
class TaskSuite:
    """A file of tasks as a suite: session i of a study is task i of a shuffle by the study's seed, the same in every arm; a study
    with more sessions than tasks goes round again, with other sampling seeds."""

    name: str
    tasks: tuple[tuple[Asked, ...], ...]
    steps: int
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def graded(self) -> bool:
        return any(ask.judge is not None for task in self.tasks for ask in task)

    def shortened(self, tokens: int) -> TaskSuite:
        return replace(self, max_tokens=min(tokens, self.max_tokens))

    def problem(self, seed: int, session: int, step: int, previous: int | None) -> Asked:
        order = list(range(len(self.tasks)))
        random.Random(f"{self.name}/{seed}").shuffle(order)  # noqa: S311  # nosec B311  # seeds and jitter, no secret
        return self.tasks[order[session % len(order)]][step - 1]


def load(name: str, path: Path, max_tokens: int | None = None) -> TaskSuite:
    """The suite ``name`` from a file. Raises ConfigError naming the file, the task and the field, and SandboxError where the suite
    runs code and nothing here can contain it: before anything is asked, not after hours of it."""
    if name in RUN_CODE:
        sandbox.require()
    read, tokens = NAMES[name]
    tasks = []
    for number, raw in enumerate(_raw(path), 1):
        try:
            tasks.append(read(raw))
        except (KeyError, TypeError, ValueError) as error:
            what = f"has no field {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
            raise ConfigError(
                "--data", f"{path.name}, task {number}", f"{what}; {name} wants the fields of docs/study.md"
            ) from None
    if not tasks:
        raise ConfigError("--data", path.name, "holds no task")
    steps = min(len(t) for t in tasks)
    return TaskSuite(name, tuple(t[:steps] for t in tasks), steps, max_tokens or tokens)


def _raw(path: Path) -> list[Task]:
    try:
        content = path.read_text(encoding="utf-8")
        if content.lstrip().startswith("["):
            found = json.loads(content)
        else:
            found = [json.loads(line) for line in content.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--data", str(path), f"cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError("--data", path.name, f"is neither JSON Lines nor one JSON list: {error}") from None
    for number, task in enumerate(found, 1):
        if not isinstance(task, dict):
            raise ConfigError("--data", f"{path.name}, task {number}", "is no JSON object")
    return list(found)


def _gsm8k(task: Task) -> tuple[Asked, ...]:
    _, mark, truth = str(task["answer"]).rpartition("####")
    if not mark or text.number(truth) is None:
        raise ValueError(f"answer {str(task['answer'])[-40:]!r} does not end in '#### number'")
    return (Asked(task["question"] + BOXED, lambda reply: text.same_number(reply, truth), truth),)


def _aime(task: Task) -> tuple[Asked, ...]:
    truth = str(int(task["answer"]))
    question = task["problem"] if "problem" in task else task["question"]
    return (Asked(question + BOXED, lambda reply: text.same_number(reply, truth), truth),)


def _humaneval(task: Task) -> tuple[Asked, ...]:
    prompt, test, entry = task["prompt"], task["test"], task["entry_point"]
    ask = f"Complete this function. Reply with the whole function in one ```python block.\n\n```python\n{prompt}```"
    return (Asked(ask, lambda reply: code.passes_humaneval(reply, prompt, test, entry)),)


def _livecodebench(task: Task) -> tuple[Asked, ...]:
    calls = [*_calls(task["public_test_cases"]), *_calls(task.get("private_test_cases") or [], hidden=True)]
    if not calls:
        raise ValueError("no test case can be read")
    metadata = task.get("metadata") or {}
    function = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name", "")
    ask = task["question_content"] + "\n\nReply with a Python program in one ```python block."
    if task.get("starter_code"):
        ask += f" Start from this:\n\n```python\n{task['starter_code']}\n```"
    else:
        ask += " It reads standard input and writes to standard output."
    return (Asked(ask, lambda reply: code.passes_calls(reply, calls, function)),)


def _calls(cases: Any, *, hidden: bool = False) -> list[code.Call]:
    """Test cases. Hidden ones are published compressed and pickled too: a pickle runs code when it is opened, so these are left
    out, and the grade is that of the public ones."""
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except json.JSONDecodeError:
            if hidden:
                return []
            raise
    found = []
    for case in cases:
        if case.get("testtype", "stdin") == "functional":
            given = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
            found.append(code.Call(given, json.loads(case["output"]), stdin=False))
        else:
            found.append(code.Call(case["input"], case["output"], stdin=True))
    return found


def _mt_bench(task: Task) -> tuple[Asked, ...]:
    if not task["turns"]:
        raise ValueError("turns is empty")
    return tuple(Asked(str(turn)) for turn in task["turns"])


def _longbench(task: Task) -> tuple[Asked, ...]:
    truth = str(task["answer"]).strip().upper()
    if truth not in ("A", "B", "C", "D"):
        raise ValueError(f"answer {truth!r} is not one of A, B, C, D")
    choices = "\n".join(f"({x}) {task[f'choice_{x}']}" for x in "ABCD")
    ask = f"{task['context']}\n\nQuestion: {task['question']}\n{choices}\n\n{CHOICE}"
    return (Asked(ask, lambda reply: text.letter(reply) == truth),)


def _prompt(task: Task) -> tuple[Asked, ...]:
    if "messages" not in task:
        return (Asked(str(task["prompt"])),)
    last = task["messages"][-1]
    if last.get("role") != "user" or len(task["messages"]) > 1:
        raise ValueError("messages must be one of the user; give the rest of a conversation in its text")
    return (Asked(str(last["content"])),)


NAMES: dict[str, tuple[Callable[[Task], tuple[Asked, ...]], int]] = {
    "gsm8k": (_gsm8k, 4096),
    "aime24": (_aime, 32768),
    "humaneval": (_humaneval, 8192),
    "livecodebench": (_livecodebench, 32768),
    "mt-bench": (_mt_bench, 4096),
    "longbench-v2": (_longbench, 8192),
    "prompts": (_prompt, 4096),
}
"""Reader and the client's token limit of each set, thinking included."""
RUN_CODE = ("humaneval", "livecodebench")
