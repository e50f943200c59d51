"""Is a request inside its think block? Counted from token ids, for the rows a relaxed rule may touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkMarkers:
    """The token sequences that open and close a trace, for example ([5], [6])."""

    start: tuple[int, ...]
    end: tuple[int, ...]


class PhaseTracker:
    """Follows one request: reads each committed token once, O(1) amortised.

    `inside` is true after a start marker and until an end marker; a prompt that already opened the block counts.
    """

    __slots__ = ("_markers", "_seen", "_tail", "inside")

    def __init__(self, markers: ThinkMarkers, prompt: Sequence[int]) -> None:
        self._markers = markers
        self._seen = 0
        self.inside = self._opened(prompt)
        self._tail = list(prompt[-8 * max(len(markers.start), len(markers.end)) :])

    def update(self, output: Sequence[int]) -> bool:
        """Read what was committed since the last call; returns `inside`."""
        self._read(output[self._seen :])
        self._seen = len(output)
        return self.inside

    def ahead(self, drafts: Sequence[int]) -> list[bool]:
        """For each drafted token: would the request be inside the block when this token is verified?"""
        if len(self._markers.start) == len(self._markers.end) == 1:
            (start,), (end,) = self._markers.start, self._markers.end
            inside, out = self.inside, []
            for token in drafts:
                out.append(inside)
                inside = True if token == start else False if token == end else inside
            return out
        inside, tail, out = self.inside, list(self._tail), []
        for token in drafts:
            out.append(self.inside)
            self._read((token,))
        self.inside, self._tail = inside, tail
        return out

    def _opened(self, prompt: Sequence[int]) -> bool:
        """Searched from the end: the marker that decides stands close to it, and a prompt can have 100,000 tokens."""
        start, end = self._markers.start, self._markers.end
        for stop in range(len(prompt), 0, -1):
            if prompt[stop - 1] == end[-1] and tuple(prompt[max(0, stop - len(end)) : stop]) == end:
                return False
            if prompt[stop - 1] == start[-1] and tuple(prompt[max(0, stop - len(start)) : stop]) == start:
                return True
        return False

    def _read(self, tokens: Sequence[int]) -> None:
        start, end, tail = self._markers.start, self._markers.end, self._tail
        keep = max(len(start), len(end))
        for token in tokens:
            tail.append(token)
            if tuple(tail[-len(end) :]) == end:
                self.inside = False
            elif tuple(tail[-len(start) :]) == start:
                self.inside = True
            if len(tail) > 8 * keep:
                del tail[:-keep]
