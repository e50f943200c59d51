"""Counting a step's tokens by kind, from the ids the engine streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MarkerIds:
    """The ids of the family's markers and of the tokens that end a turn. ``start`` is None for a family that needs none."""

    start: int | None
    end: int


class Tally:
    """Think, answer and marker tokens of one step; O(1) a token.

    A step may hold several think blocks. The end-of-turn token arrives as a last id without text and is counted by `finish`.
    """

    __slots__ = ("_ids", "answer", "block", "inside", "markers", "think")

    def __init__(self, ids: MarkerIds, *, opened: bool) -> None:
        self._ids = ids
        self.inside = opened
        self.think = 0
        self.block = 0
        """Think tokens of the latest block; each block has the whole budget."""
        self.answer = 0
        self.markers = 0

    def feed(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token == self._ids.end and self.inside:
                self.inside = False
                self.markers += 1
            elif token == self._ids.start and not self.inside:
                self.inside = True
                self.block = 0
                self.markers += 1
            elif self.inside:
                self.think += 1
                self.block += 1
            else:
                self.answer += 1

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
