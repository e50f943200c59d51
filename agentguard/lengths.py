"""The lengths of a session's latest steps, for the cutoff: 9 bytes a step, where the steps' events would be 750."""

from __future__ import annotations

from array import array

from agentguard.events import StepFinished
from agentguard.trace.cutoff import percentile

KEPT = 128
"""Steps of a session whose lengths are remembered; its sums go on for its whole life."""
_NONE = -1
_MOST = 2**31 - 1
"""What a place holds; a server may report any number."""


class Lengths:
    """Think and answer tokens of the latest ``kept`` steps, failed ones among them."""

    __slots__ = ("_answer", "_closed", "_kept", "_think")

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._think = array("i")
        self._answer = array("i")
        self._closed = bytearray()

    def add(self, step: StepFinished) -> None:
        """A failed step has no lengths, and one without an answer no answer's."""
        failed = bool(step.error)
        self._think.append(_NONE if failed else bounded(step.think_tokens))
        self._answer.append(_NONE if failed or step.empty_answer else bounded(step.answer_tokens))
        self._closed.append(bool(step.closed))
        for row in (self._think, self._answer, self._closed):
            del row[: -self._kept]

    @property
    def traces(self) -> list[int]:
        """Think tokens a step, in order."""
        return [think for think in self._think if think != _NONE]

    @property
    def answers(self) -> list[int]:
        """Answer tokens of the steps that have one."""
        return [answer for answer in self._answer if answer != _NONE]

    @property
    def usual_answer(self) -> int:
        """p90 of the answers behind traces that were not closed by force; 0 for none."""
        free = [answer for answer, closed in zip(self._answer, self._closed, strict=True) if answer != _NONE and not closed]
        return percentile(free, 0.9)


def bounded(tokens: int) -> int:
    """Within what a place of an array holds."""
    return min(max(0, tokens), _MOST)
