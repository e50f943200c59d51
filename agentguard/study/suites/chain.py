"""The `chain` suite: small arithmetic whose thinking trace behaves like a reasoning model's.

A problem is a chain of assignments modulo 100, ``a=47;b=a+8;c=a-3;?c``. The trace that solves it derives every line
(``b=47+8=55``), gets some of them wrong, corrects half of those at once (``no b=47+8=55``) and finds the rest in `check`
passes that derive everything again and mark each line ``ok`` or ``no``. A pass with a ``no`` is followed by another one; after
a clean pass the trace stops with probability 3/4. A wrong token that a relaxed rule lets through therefore costs whole
passes, as it does in real reasoning models (arXiv 2610.23818, section on where the extra tokens fall).

Two more pieces of syntax: in a follow-up question ``a=ans`` refers to the answer of the previous turn, so that each step of an
agent session builds on the one before; ``;!12`` asks for at least 12 check passes, which is how `chain-long` gets outputs of
2,000 tokens and more.

Everything here is pure Python: the trainer, the study and the tests share it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

MODULUS = 100
NAMES = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Assignment:
    """One line of a problem. ``operand`` is the index of the earlier line it reads, None for the first line."""

    name: str
    operand: int | None
    delta: int

    @property
    def suffix(self) -> str:
        return f"{'+' if self.delta >= 0 else '-'}{abs(self.delta)}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its program-checked answer and what a trace needs to derive it."""

    text: str
    lines: tuple[Assignment, ...]
    first: int
    passes: int
    answer: int

    def grade(self, reply: str) -> bool:
        """True when the reply's text is the right number and nothing else."""
        return parse_answer(reply) == self.answer

    def proved(self, trace: str) -> int | None:
        """Characters of ``trace`` up to where it first derives the asked variable rightly; None where it never does."""
        asked = self.lines[-1].name
        for match in _DERIVED.finditer(trace):
            if match[1] == asked and int(match[2]) == self.answer:
                return match.end()
        return None


def parse_answer(reply: str) -> int | None:
    """The number a reply states, or None when it states none (an empty or a garbled answer)."""
    match = re.fullmatch(r"\s*(\d{1,2})\s*", reply)
    return int(match[1]) if match else None


def make_problem(rng: random.Random, variables: int, *, previous: int | None = None, passes: int = 1) -> Problem:
    """Draw a chain of ``variables`` assignments; with ``previous`` the first one reads ``ans``."""
    if not 2 <= variables <= len(NAMES):
        raise ValueError(f"variables={variables}: a chain has 2 to {len(NAMES)}")
    drawn = rng.randrange(MODULUS)  # drawn either way, so that the chain is the same with and without a previous answer
    first = drawn if previous is None else previous
    lines, values = [Assignment(NAMES[0], None, 0)], [first]
    text = [f"{NAMES[0]}={'ans' if previous is not None else first}"]
    for i in range(1, variables):
        delta = rng.choice((1, -1)) * rng.randint(1, 9)
        operand = i - 1 if rng.random() < 0.8 else rng.randrange(i)
        line = Assignment(NAMES[i], operand, delta)
        lines.append(line)
        values.append((values[operand] + delta) % MODULUS)
        text.append(f"{line.name}={NAMES[operand]}{line.suffix}")
    question = f";?{NAMES[variables - 1]}" + (f";!{passes}" if passes > 1 else "")
    return Problem(";".join(text) + question, tuple(lines), first, passes, values[-1])


@dataclass(frozen=True, slots=True)
class Trace:
    """A think block's text and the value the model would answer with after it; ``clean`` when the last pass had no ``no``."""

    text: str
    answer: int
    clean: bool


def make_trace(rng: random.Random, problem: Problem, *, error: float = 0.06, again: float = 0.25, max_passes: int = 60) -> Trace:
    """Write a trace as the suite defines it.

    ``error`` is the share of derived lines that are wrong (half of it in a check pass), ``again`` the probability of another
    pass after a clean one.
    """
    lines = problem.lines
    said = [0] * len(lines)

    def right(i: int) -> int:
        operand = lines[i].operand
        return problem.first if operand is None else (said[operand] + lines[i].delta) % MODULUS

    def write(i: int, value: int) -> str:
        operand = lines[i].operand
        name = lines[i].name
        return f"{name}={value}" if operand is None else f"{name}={said[operand]}{lines[i].suffix}={value}"

    def wrong(value: int) -> int:
        return (value + rng.choice((-10, 10, -1, 1, -2, 2, rng.randint(3, 97)))) % MODULUS

    out: list[str] = []
    for i, line in enumerate(lines):
        value = right(i)
        if line.operand is not None and rng.random() < error:
            slip = wrong(value)
            out.append(write(i, slip))
            if rng.random() < 0.5:
                out.append("no " + write(i, value))
            else:
                value = slip
        else:
            out.append(write(i, value))
        said[i] = value
    for number in range(1, max_passes + 1):
        out.append(f"check {number}")
        clean = True
        for i, line in enumerate(lines):
            value = right(i)
            if line.operand is not None and rng.random() < error / 2:
                value = wrong(value)
            out.append(f"{write(i, value)} {'ok' if value == said[i] else 'no'}")
            clean &= value == said[i]
            said[i] = value
        if clean and number >= problem.passes and rng.random() >= again:
            return Trace("\n".join(out), said[-1], True)
    return Trace("\n".join(out), said[-1], False)


_FIRST = re.compile(r"(?:^|\n)(?:no )?([a-z])=(\d{1,2})(?![\d+-])")
_DERIVED = re.compile(r"(?:^|\n)(?:no )?([a-z])=\d{1,2}[+-]\d=(\d{1,2})(?!\d)")


def best_so_far(problem: Problem, partial: str) -> int:
    """The answer a trace supports when it is closed after ``partial``: the latest value of the furthest variable it reached."""
    reached = {m[1]: int(m[2]) for m in _DERIVED.finditer(partial)}
    for line in reversed(problem.lines[1:]):
        if line.name in reached:
            return reached[line.name]
    stated = [int(m[2]) for m in _FIRST.finditer(partial) if m[1] == problem.lines[0].name]
    return stated[-1] if stated else problem.first
