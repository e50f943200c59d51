"""Suites: what a study asks. A suite is a pure function from (seed, session, step, previous answer) to a problem.

Four are built in, the others come from files (tasks.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from agentguard.errors import ConfigError, nearest
from agentguard.study.suites import tasks
from agentguard.study.suites.chain import Problem, make_problem
from agentguard.study.suites.prose import make_prompt


class Gradable(Protocol):
    """What a suite asks, and whether a reply is right; None where nothing is graded. Grading may block: code is run."""

    @property
    def text(self) -> str: ...

    def grade(self, reply: str) -> bool | None: ...

    def proved(self, trace: str) -> int | None:
        """Characters of a trace up to its first right answer; None where it has none, or the suite cannot tell."""
        ...


@dataclass(frozen=True, slots=True)
class Suite:
    """``steps`` model calls a session; ``max_tokens`` is the client's limit of each call.

    ``sampling`` is sent with every request of the suite.
    """

    name: str
    steps: int
    max_tokens: int
    draw: Callable[[random.Random, int | None], Gradable]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    graded: bool = True

    def shortened(self, tokens: int) -> Suite:
        """The suite with at most ``tokens`` a call."""
        sampling = {k: min(v, tokens - 16) if k == "min_tokens" else v for k, v in self.sampling.items()}
        return replace(self, max_tokens=min(tokens, self.max_tokens), sampling=sampling)

    def problem(self, seed: int, session: int, step: int, previous: int | None) -> Gradable:
        """The problem of a step. Equal for every arm, except for what depends on the arm's own previous answer."""
        return self.draw(random.Random(f"{self.name}/{seed}/{session}/{step}"), previous)  # noqa: S311  # nosec B311  # seeds and jitter, no secret


def _chain(rng: random.Random, previous: int | None) -> Problem:
    return make_problem(rng, rng.randint(2, 8), previous=previous)


def _long(rng: random.Random, previous: int | None) -> Problem:
    variables = rng.randint(10, 16)
    return make_problem(rng, variables, previous=previous, passes=2200 // (10 * variables) + 1)


SUITES = {
    suite.name: suite
    for suite in (
        Suite("chain", steps=1, max_tokens=1024, draw=_chain),
        # The reference target miscounts asked passes and stops at 350 to 3,200 tokens (n = 24), so `chain-long` does not let it
        # stop: where it would close the trace it writes another pass, and the guard's cutoff ends every trace near 3,200 tokens.
        Suite("chain-long", steps=1, max_tokens=3800, draw=_long, sampling={"bad_words": ["</think>"]}),
        Suite("chain-agent", steps=6, max_tokens=1024, draw=_chain),
        Suite("prose", steps=1, max_tokens=1536, draw=lambda rng, _: make_prompt(rng), sampling={"min_tokens": 1500}, graded=False),
    )
}


AnySuite: TypeAlias = Suite | tasks.TaskSuite


def get(name: str, data: Path | None = None, max_tokens: int | None = None) -> AnySuite:
    """A suite by its name; ``data``: the file of one that comes from a file. Raises ConfigError."""
    if name in tasks.NAMES:
        if data is None:
            raise ConfigError("suite", name, "comes from a file; give it with --data (docs/study.md has the formats)")
        return tasks.load(name, data, max_tokens)
    if name not in SUITES:
        raise ConfigError("suite", name, nearest(name, [*SUITES, *tasks.NAMES]))
    if data is not None:
        raise ConfigError("--data", data.name, f"{name} is built in and reads no file")
    suite = SUITES[name]
    return suite if max_tokens is None else suite.shortened(max_tokens)
