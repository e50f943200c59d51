"""Is a request inside its think block, and how far? Counted from token ids, for relaxed rules and for the think budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkMarkers:
    """The token sequences that open and close a trace, for example ([5], [6]).

    turns: the tokens a chat template begins and ends turns with. Behind what a client said there is always one, so a start marker
    in front of one is a quotation and opens nothing; a generation prompt, and a client's own beginning, stand behind the last.
    Empty where the tokenizer is not known: then a quoted marker cannot be told from the template's.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    turns: frozenset[int] = frozenset()

    def given(self, prompt: Sequence[int]) -> int:
        """Tokens since the start marker of a block the prompt leaves open, -1 where it leaves none open. Searched from the end:
        what decides stands close to it, and a prompt can have 100,000 tokens."""
        start, end, turns = self.start, self.end, self.turns
        for stop in range(len(prompt), 0, -1):
            token = prompt[stop - 1]
            if token in turns:
                return -1
            if token == end[-1] and tuple(prompt[max(0, stop - len(end)) : stop]) == end:
                return -1
            if token == start[-1] and tuple(prompt[max(0, stop - len(start)) : stop]) == start:
                return len(prompt) - stop
        return -1


class PhaseTracker:
    """Follows one request: reads each committed token once, O(1) amortised.

    `inside` is true after a start marker and until an end marker; a prompt that already opened the block counts. `block` are the
    tokens since the start marker, those in the prompt included, `given` how many of them the prompt brought, and `before` the
    generated think tokens of earlier blocks. A marker of several tokens counts as thinking until it is whole.
    """

    __slots__ = ("_single", "_tail", "before", "block", "given", "inside", "markers", "seen")

    def __init__(self, markers: ThinkMarkers, prompt: Sequence[int]) -> None:
        self.markers = markers
        self._single = len(markers.start) == len(markers.end) == 1
        self.seen = 0
        self.before = 0
        self.given = markers.given(prompt)
        self.inside = self.given >= 0
        self.given = self.block = max(0, self.given)
        self._tail = list(prompt[-8 * max(len(markers.start), len(markers.end)) :])

    @property
    def think(self) -> int:
        """Generated think tokens of all blocks so far, markers not counted."""
        return self.before + self.block - self.given

    def update(self, output: Sequence[int]) -> bool:
        """Read what was committed since the last call; returns `inside`."""
        new = self.unread(output)
        # without the last token of the marker that could come next, nothing changes
        if (self.markers.end if self.inside else self.markers.start)[-1] not in new:
            self.block += len(new) if self.inside else 0
            if not self._single:
                self._tail = [*self._tail, *new][-8 * max(len(self.markers.start), len(self.markers.end)) :]
        else:
            for token in new:
                self.read(token)
        return self.inside

    def unread(self, output: Sequence[int]) -> Sequence[int]:
        """What was committed since the last call; the caller reads it."""
        new = output[self.seen :]
        self.seen = len(output)
        return new

    def read(self, token: int) -> None:
        """Take one token."""
        start, end = self.markers.start, self.markers.end
        if self._single:
            if self.inside:
                if token == end[0]:
                    self._leave(0)
                else:
                    self.block += 1
            elif token == start[0]:
                self._enter()
            return
        tail = self._tail
        tail.append(token)
        self.block += self.inside
        if self.inside and tuple(tail[-len(end) :]) == end:
            self._leave(len(end))
        elif not self.inside and tuple(tail[-len(start) :]) == start:
            self._enter()
        if len(tail) > 8 * max(len(start), len(end)):
            del tail[: -max(len(start), len(end))]

    def fork(self) -> PhaseTracker:
        """A copy to run ahead with."""
        other = object.__new__(PhaseTracker)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        if not self._single:
            other._tail = list(self._tail)
        return other

    def ahead(self, drafts: Sequence[int]) -> list[bool]:
        """For each drafted token: would the request be inside the block when this token is verified?"""
        if self._single:
            (start,), (end,) = self.markers.start, self.markers.end
            inside, out = self.inside, []
            for token in drafts:
                out.append(inside)
                inside = True if token == start else False if token == end else inside
            return out
        copy, out = self.fork(), []
        for token in drafts:
            out.append(copy.inside)
            copy.read(token)
        return out

    def _enter(self) -> None:
        self.inside = True
        self.block = self.given = 0

    def _leave(self, marker: int) -> None:
        """``marker``: tokens of the end marker that were counted as thinking before it was whole."""
        self.before += self.block - self.given - marker
        self.inside = False
        self.block = self.given = 0
