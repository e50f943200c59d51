"""Counting a step's tokens by kind: exactly, from the ids the engine streams, or estimated from its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MarkerIds:
    """The ids of the family's markers, and of the text a forced close writes (transition, end marker, what must follow); blanks:
    what a template may write behind the start marker it opens a block with, a line's end or a label."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    closing: tuple[int, ...]
    blanks: tuple[tuple[int, ...], ...] = ()


class Tally:
    """Think, answer and marker tokens of one step; O(1) a token.

    A step may hold several think blocks. The end-of-turn token arrives as a last id without text and is counted by `finish`. The
    tokens of a longer marker count as what they stand in until the marker is whole.
    """

    __slots__ = ("_ids", "_single", "_tail", "answer", "block", "inside", "markers", "think")
    estimated = False

    def __init__(self, ids: MarkerIds, *, opened: bool) -> None:
        self._ids = ids
        self._single = len(ids.start) == len(ids.end) == 1
        self._tail: list[int] = []
        self.inside = opened
        self.think = 0
        self.block = 0
        """Think tokens of the latest block."""
        self.answer = 0
        self.markers = 0

    def feed(self, tokens: Iterable[int]) -> None:
        start, end = self._ids.start, self._ids.end
        for token in tokens:
            if self._single:
                at_end, at_start = token == end[0], token == start[0]
            else:
                tail = self._tail
                tail.append(token)
                at_end, at_start = tuple(tail[-len(end) :]) == end, tuple(tail[-len(start) :]) == start
                if len(tail) > 8 * max(len(start), len(end)):
                    del tail[: -max(len(start), len(end))]
            if self.inside and at_end:
                self.inside = False
                self.think -= len(end) - 1
                self.block -= len(end) - 1
                self.markers += len(end)
            elif not self.inside and at_start:
                self.inside = True
                self.block = 0
                self.answer -= len(start) - 1
                self.markers += len(start)
            elif self.inside:
                self.think += 1
                self.block += 1
            else:
                self.answer += 1

    def close(self) -> None:
        """The block is closed by us, outside the stream; the marker we write is not a generated token."""
        self.inside = False

    def finish(self, *, stopped: bool) -> None:
        """``stopped``: the engine ended the turn by itself, so its last token was the end of turn, not part of the answer."""
        if not stopped:
            return
        if self.inside and self.think:
            self.think -= 1
            self.block -= 1
            self.markers += 1
        elif self.answer:
            self.answer -= 1
            self.markers += 1

    @property
    def total(self) -> int:
        return self.think + self.answer + self.markers


class TextTally:
    """The same for a server that streams no token ids: at least one token a delta, else characters by the server's usual rate.

    The counts are estimates until `settle` puts the server's usage in their place.
    """

    __slots__ = ("_answer", "_per_token", "_think", "answer", "block", "estimated", "inside", "markers", "think")

    def __init__(self, chars_per_token: float, *, opened: bool) -> None:
        self._per_token = chars_per_token
        self._think = [0, 0]  # deltas, characters
        self._answer = [0, 0]
        self.inside = opened
        self.estimated = True
        self.think = self.block = self.answer = self.markers = 0

    def feed_text(self, think: str, answer: str) -> None:
        """A delta's text of each kind."""
        for text, seen in ((think, self._think), (answer, self._answer)):
            if text:
                seen[0] += 1
                seen[1] += len(text)
        self.think = self.block = max(self._think[0], round(self._think[1] / self._per_token))
        self.answer = max(self._answer[0], round(self._answer[1] / self._per_token))
        if answer:
            self.inside = False
        elif think:
            self.inside = True

    def feed_answer(self, text: str) -> None:
        """A continuation's text; what was thought before it is settled."""
        if text:
            self._answer[0] += 1
            self._answer[1] += len(text)
            self.answer = max(self._answer[0], round(self._answer[1] / self._per_token))

    def close(self) -> None:
        self.inside = False

    def finish(self, *, stopped: bool) -> None:
        self.markers += stopped

    def settle(self, total: int, reasoning: int | None) -> float | None:
        """Take the server's own counts of a stream that was read to its end; returns characters a token as they show it."""
        chars = self._think[1] + self._answer[1]
        if total <= 0:
            return None
        if reasoning is None:  # divide the total as the text is divided
            reasoning = round(total * self._think[1] / chars) if chars else self.think
        else:
            self.estimated = False
        self.markers = 0
        self.think = self.block = min(reasoning, total)
        self.answer = total - self.think
        return chars / total if chars else None

    @property
    def total(self) -> int:
        return self.think + self.answer + self.markers


def find_last(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """Where the last occurrence of a marker begins, -1 for none. Searched from the end, where the deciding one stands."""
    if not wanted:
        return -1
    for i in range(len(ids) - len(wanted), -1, -1):
        if ids[i] == wanted[0] and tuple(ids[i : i + len(wanted)]) == tuple(wanted):
            return i
    return -1
