"""Suites: what a study asks. A suite is a pure function from (seed, session, step, previous answer) to a problem."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agentguard.errors import ConfigError, nearest
from agentguard.study.suites.chain import Problem, make_problem
from agentguard.study.suites.prose import make_prompt


class Gradable(Protocol):
    """What a suite asks, and whether a reply is right."""

    @property
    def text(self) -> str: ...

    def grade(self, reply: str) -> bool: ...


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

    def shortened(self, tokens: int) -> Suite:
        """The suite with at most ``tokens`` a call."""
        sampling = {k: min(v, tokens - 16) if k == "min_tokens" else v for k, v in self.sampling.items()}
        return replace(self, max_tokens=min(tokens, self.max_tokens), sampling=sampling)

    def problem(self, seed: int, session: int, step: int, previous: int | None) -> Gradable:
        """The problem of a step. Equal for every arm, except for what depends on the arm's own previous answer."""
        return self.draw(random.Random(f"{self.name}/{seed}/{session}/{step}"), previous)


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
        Suite("prose", steps=1, max_tokens=1536, draw=lambda rng, _: make_prompt(rng), sampling={"min_tokens": 1500}),
    )
}


def get(name: str) -> Suite:
    if name not in SUITES:
        raise ConfigError("suite", name, nearest(name, SUITES))
    return SUITES[name]
