"""Think and answer apart, from text that comes in pieces.

For streams whose server does not separate them, or does it wrongly. A marker may be split anywhere, a step may hold several
blocks, and the last one may never be closed. What cannot yet be told (the beginning of what may be a marker) is held back,
never more than the longest marker and its neighbours; each character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from agentguard.trace.markers import Markers

Kind = Literal["think", "answer"]
Segment = tuple[Kind, str]
_DEFAULT = Markers()
LONGEST_RUN = 64
"""Backticks taken for one run; a longer row of them is several."""


class Splitter:
    """Feed text deltas, get (kind, text) segments; the concatenation of all texts is the input without its markers.

    markers: a family's pair, or several (start, end) pairs of which any closes a block. opened: the prompt has already opened
    one. special_tokens: the family's markers are special tokens, so a marker in a code span is text that talks about it: in an
    answer one inside backticks, in a trace one with a backtick on either side. (A stray backtick in a trace must not hide the
    real end.)
    """

    def __init__(
        self, markers: Markers | Sequence[tuple[str, str]] | Sequence[Sequence[str]] = _DEFAULT, opened: bool = False,
        special_tokens: bool = False,
    ) -> None:  # fmt: skip
        pairs = [(markers.start, markers.end)] if isinstance(markers, Markers) else [(start, end) for start, end in markers]
        if not pairs or not all(start and end for start, end in pairs):
            raise ValueError(f"markers={markers!r}: needs at least one pair of texts that are not empty")
        # where backticks are markers, no code span can be told from one
        special_tokens = special_tokens and not any("`" in marker for pair in pairs for marker in pair)
        self._next = {
            False: _Finder([start for start, _ in pairs], spans=special_tokens),
            True: _Finder([end for _, end in pairs], spans=False),
        }
        self._quotable = special_tokens
        self.inside = opened
        self._held = ""
        self._before = ""
        self._span = ""

    def feed(self, text: str) -> list[Segment]:
        """The segments that are certain now, neighbours of one kind joined; often one, sometimes none."""
        self._held += text
        return self._drain(final=False)

    def finish(self) -> list[Segment]:
        """What was held back. A block that is still open is thinking to its end."""
        return self._drain(final=True)

    def _drain(self, *, final: bool) -> list[Segment]:
        out: list[tuple[Kind, list[str]]] = []
        text, at = self._held, 0
        while at < len(text):
            finder = self._next[self.inside]
            match = finder.search(text, at, final=final)
            if match is None:
                end = len(text) - (0 if final else min(finder.undecided(text), len(text) - at))
                self._emit(out, text[at:end])
                at = end
                break
            if match.start() > at:
                self._emit(out, text[at : match.start()])
            at, token = match.start(), match.group()
            if token in finder.markers:
                behind = at + len(token)
                if self._quotable and self.inside and self._before == "`" and behind == len(text) and not final:
                    break  # whether a trace's marker behind a backtick is quoted is decided by the next character
                if not self._quoted(text[behind : behind + 1]):
                    at = behind
                    self._before, self._span = "", ""
                    self.inside = not self.inside
                    continue
            self._backticks(token)
            self._emit(out, token)
            at = match.end()
        self._held = text[at:]
        return [(kind, "".join(parts)) for kind, parts in out]

    def _emit(self, out: list[tuple[Kind, list[str]]], text: str) -> None:
        if not text:
            return
        self._before = text[-1]
        kind: Kind = "think" if self.inside else "answer"
        if out and out[-1][0] == kind:
            out[-1][1].append(text)
        else:
            out.append((kind, [text]))

    def _quoted(self, following: str) -> bool:
        if not self._quotable:
            return False
        if self.inside:
            return self._before == "`" and following == "`"
        return bool(self._span)

    def _backticks(self, token: str) -> None:
        """Follow code spans in an answer: a run of backticks opens one, the same run closes it, and a single line's ends with
        its line."""
        if token == "\n":  # noqa: S105  # a piece of text
            if len(self._span) < 3:
                self._span = ""
        elif token.startswith("`"):
            self._span = "" if self._span == token else self._span or token


class _Finder:
    """Finds the next marker, or the next thing a code span turns on."""

    def __init__(self, markers: Sequence[str], *, spans: bool) -> None:
        # the longest first, so that an alias that begins with another is taken whole
        self.markers = sorted(set(markers), key=len, reverse=True)
        self._spans = spans
        others = [f"`{{1,{LONGEST_RUN}}}", "\n"] if spans else []
        self._pattern = re.compile("|".join([*map(re.escape, self.markers), *others]))
        self._prefixes = {marker[:i] for marker in self.markers for i in range(1, len(marker))}
        self._longest = max(map(len, self.markers)) - 1

    def search(self, text: str, at: int, *, final: bool) -> re.Match[str] | None:
        match = self._pattern.search(text, at)
        if match is None or final:
            return match
        # a run of backticks at the end may go on, and a marker at the end may be the beginning of a longer one
        found = match.group()
        grows = self._spans and found.startswith("`") and len(found) < LONGEST_RUN and match.end() == len(text)
        # only at the very end, so that a large delta is not copied for every match
        begins = len(text) - match.start() <= self._longest and text[match.start() :] in self._prefixes
        return None if grows or begins else match

    def undecided(self, text: str) -> int:
        """How many characters at the end may belong to something that is not whole yet."""
        run = (len(text) - len(text.rstrip("`"))) % LONGEST_RUN if self._spans else 0
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return max(length, run)
        whole = next((len(m) for m in self.markers if text.endswith(m)), 0)
        return max(run, whole)
