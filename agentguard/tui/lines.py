"""Text as lines of spans with roles, and the widget that draws them.

Every panel of the monitor is a pure function from data and a size to `Line`s, so tests read panels as text. `LineView` puts lines
on the screen and repaints those that changed. A role is a meaning ("bad", "think"); `palette` gives it a colour, and no
meaning is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeAlias, cast

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from agentguard.monitor.words import clean as clean
from agentguard.tui.glyphs import GLYPHS, plain
from agentguard.tui.palette import Role

Span: TypeAlias = tuple[str, Role]
Line: TypeAlias = tuple[Span, ...]

BLANK: Line = ()


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def width_of(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def fit(text: str, width: int, align: Literal["left", "right"] = "left") -> str:
    """``text`` in exactly ``width`` cells; what does not fit ends in an ellipsis."""
    text = clean(text)
    size = len(text) if text.isascii() else cell_len(text)
    if size == width:
        return text
    if size > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    return text + " " * (width - size) if align == "left" else " " * (width - size) + text


def crop(line: Line, width: int) -> Line:
    """The line in at most ``width`` cells."""
    spans: list[Span] = []
    for text, role in line:
        size = cell_len(text)
        if size > width:
            spans.append((fit(text, width), role))
            break
        spans.append((text, role))
        width -= size
    return tuple(spans)


def between(left: Line, right: Line, width: int) -> Line:
    """``left`` and ``right`` at the two ends of ``width`` cells; the left one gives way."""
    room = max(0, width - width_of(right) - 1)
    left = crop(left, room)
    return (*left, (" " * (width - width_of(left) - width_of(right)), "text"), *right)


def wrap(spans: Line, width: int, height: int) -> list[Line]:
    """Break at spaces into exactly ``height`` lines; what is left over ends in an ellipsis."""
    words: list[Span] = []
    for text, role in spans:
        parts = clean(text).split(" ")
        words += [(word + (" " if i < len(parts) - 1 else ""), role) for i, word in enumerate(parts)]
    lines: list[list[Span]] = [[]]
    used = 0
    for word, role in words:
        size = cell_len(word.rstrip())
        if used and used + size > width:
            if len(lines) == height:
                last = fit("".join(t for t, _ in lines[-1]).rstrip() + " " + word, width)
                lines[-1] = [(last[: width - 1] + "…", lines[-1][0][1])] if not last.endswith("…") else [(last, lines[-1][0][1])]
                break
            lines.append([])
            used = 0
        lines[-1].append((word, role))
        used += cell_len(word)
    done = [crop(_trimmed(line), width) for line in lines]
    return done + [BLANK] * (height - len(done))


def merged(spans: Iterable[Span]) -> Line:
    """Neighbours of one role as one span."""
    done: list[Span] = []
    for text, role in spans:
        if done and done[-1][1] == role:
            done[-1] = (done[-1][0] + text, role)
        else:
            done.append((text, role))
    return tuple(done)


def _trimmed(line: list[Span]) -> Line:
    if line:
        line[-1] = (line[-1][0].rstrip(), line[-1][1])
    return merged(line)


class HasRoles(Protocol):
    """The app."""

    @property
    def role_styles(self) -> dict[str, Style]: ...


class Painter(Widget):
    """A widget that paints `Line`s in the colours of their roles."""

    ALLOW_SELECT = False

    def paint(self, line: Line, over: str | None = None) -> Strip:
        """One line in the widget's width; ``over`` is the component that lies over it, such as the cursor."""
        width = self.size.width
        segments: list[Segment] = []
        used = 0
        ascii_only = GLYPHS.ascii
        styles = cast("HasRoles", self.app).role_styles
        top = None if over is None else styles[over]
        for text, role in line:
            if not text:
                continue
            text = clean(text)
            if ascii_only:
                text = plain(text)
            size = len(text) if text.isascii() else cell_len(text)
            if used + size > width:
                text = set_cell_size(text, width - used)
                size = width - used
            segments.append(Segment(text, styles[role] if top is None else styles[role] + top))
            used += size
            if used >= width:
                break
        if used < width:
            segments.append(Segment(" " * (width - used), styles["text"] if top is None else styles["text"] + top))
        return Strip(segments, width)


class LineView(Painter):
    """Draws `Line`s; ``show`` repaints the lines that differ from those on the screen."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: list[Line] = []

    @property
    def lines(self) -> list[Line]:
        return self._lines

    def show(self, lines: Sequence[Line]) -> None:
        old, self._lines = self._lines, list(lines)
        if old == self._lines:
            return
        width = self.size.width
        changed = [
            Region(0, y, width, 1)
            for y in range(self.size.height)
            if (old[y] if y < len(old) else None) != (self._lines[y] if y < len(self._lines) else None)
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        return self.paint(self._lines[y] if y < len(self._lines) else BLANK)
