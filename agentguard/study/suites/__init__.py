"""Suites: what a study asks. A suite is a pure function from (seed, session, step, previous answer) to a problem."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from agentguard.errors import ConfigError, nearest
from agentguard.study.suites.chain import Problem, make_problem


@dataclass(frozen=True, slots=True)
class Suite:
    """``steps`` model calls a session; ``max_tokens`` is the client's limit of each call."""

    name: str
    steps: int
    max_tokens: int
    draw: Callable[[random.Random, int | None], Problem]

    def problem(self, seed: int, session: int, step: int, previous: int | None) -> Problem:
        """The problem of a step. Equal for every arm, except for what depends on the arm's own previous answer."""
        return self.draw(random.Random(f"{self.name}/{seed}/{session}/{step}"), previous)


def _chain(rng: random.Random, previous: int | None) -> Problem:
    return make_problem(rng, rng.randint(2, 8), previous=previous)


def _long(rng: random.Random, previous: int | None) -> Problem:
    variables = rng.randint(10, 16)
    # a check line is 9 to 10 tokens: this many passes write 2,000 of them before the trace may stop
    return make_problem(rng, variables, previous=previous, passes=2200 // (10 * variables) + 1)


SUITES = {
    suite.name: suite
    for suite in (
        Suite("chain", steps=1, max_tokens=1024, draw=_chain),
        Suite("chain-long", steps=1, max_tokens=3800, draw=_long),
        Suite("chain-agent", steps=6, max_tokens=1024, draw=_chain),
    )
}


def get(name: str) -> Suite:
    if name not in SUITES:
        raise ConfigError("suite", name, nearest(name, SUITES))
    return SUITES[name]
