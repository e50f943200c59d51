"""Strip charts and bars as lines of text.

A braille cell is 2×4 dots. The chart is ours because the kept plotting widgets cost 11 to 25 ms an update at 60×8 to 100×15, and
this one 3. Two series share a chart: the first is a full line, the second a dotted one, so they are told apart without colour; in
ASCII they are `*` and `o`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentguard.tui.glyphs import GLYPHS
from agentguard.tui.lines import Line, Span, merged
from agentguard.tui.palette import Role

Values: TypeAlias = Sequence[float | None]

# dots of a braille cell: bit of (column 0 or 1, row 0 to 3 from the top)
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
AXIS = 6
"""Cells of the labels on the left."""


@dataclass(frozen=True, slots=True)
class Plot:
    values: Values
    role: Role
    dotted: bool = False


def scale(plots: Sequence[Plot], least_span: float = 0.1) -> tuple[float, float]:
    """The range that holds all values, never narrower than ``least_span``, so that noise does not fill the panel."""
    known = [v for plot in plots for v in plot.values if v is not None]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    if high - low < least_span:
        middle = (high + low) / 2
        low, high = middle - least_span / 2, middle + least_span / 2
    return low, high


def resample(values: Values, columns: int) -> list[float | None]:
    """The newest values at the right, the mean of those that share a column; fewer values than columns leave the left empty."""
    n = len(values)
    if n <= columns:
        return [None] * (columns - n) + list(values)
    means: list[float | None] = []
    for column in range(columns):
        part = [v for v in values[column * n // columns : (column + 1) * n // columns] if v is not None]
        means.append(sum(part) / len(part) if part else None)
    return means


def chart(plots: Sequence[Plot], width: int, height: int, low: float, high: float, label: str = "{:.2f}") -> list[Line]:
    """``height`` lines of ``width`` cells: labels of the range at the left, the plots beside them."""
    inner = width - AXIS
    if inner < 4 or height < 1:
        return [()] * max(0, height)
    rows = _ascii(plots, inner, height, low, high) if GLYPHS.ascii else _braille(plots, inner, height, low, high)
    top, bottom = label.format(high), label.format(low)
    lines: list[Line] = []
    for y, row in enumerate(rows):
        text = top if y == 0 else bottom if y == height - 1 else ""
        lines.append(((text.rjust(AXIS - 1)[: AXIS - 1], "dim"), ("┤" if text else "│", "dim"), *row))
    return lines


def _braille(plots: Sequence[Plot], width: int, height: int, low: float, high: float) -> list[list[Span]]:
    dots = height * 4
    cells = [[0] * width for _ in range(height)]
    owner = [[-1] * width for _ in range(height)]
    unit = (dots - 1) / (high - low) if high > low else 0.0
    for index, plot in enumerate(plots):
        before: int | None = None
        for x, value in enumerate(resample(plot.values, width * 2)):
            if value is None:
                before = None
                continue
            at = dots - 1 - max(0, min(dots - 1, round((value - low) * unit)))
            first, last = (at, at) if before is None or plot.dotted else (min(before, at), max(before, at))
            before = at
            if plot.dotted and x % 4 > 1:
                continue
            column, bits = x >> 1, _DOTS[x & 1]
            for y in range(first, last + 1):
                row = y >> 2
                cells[row][column] |= bits[y & 3]
                if owner[row][column] < 0:
                    owner[row][column] = index
    return [
        _runs(
            [(chr(0x2800 + bits) if bits else " ", plots[o].role if o >= 0 else "text") for bits, o in zip(line, own, strict=True)]
        )
        for line, own in zip(cells, owner, strict=True)
    ]


def _ascii(plots: Sequence[Plot], width: int, height: int, low: float, high: float) -> list[list[Span]]:
    grid: list[list[Span]] = [[(" ", "text")] * width for _ in range(height)]
    unit = (height - 1) / (high - low) if high > low else 0.0
    for plot in plots:
        for x, value in enumerate(resample(plot.values, width)):
            if value is not None:
                y = height - 1 - max(0, min(height - 1, round((value - low) * unit)))
                if grid[y][x][0] == " ":
                    grid[y][x] = ("o" if plot.dotted else "*", plot.role)
    return [_runs(line) for line in grid]


def _runs(cells: Sequence[Span]) -> list[Span]:
    """Neighbours of one role as one span."""
    spans: list[Span] = []
    for text, role in cells:
        if spans and (spans[-1][1] == role or text == " "):
            spans[-1] = (spans[-1][0] + text, spans[-1][1])
        else:
            spans.append((text, role))
    return spans


def spark(values: Values, width: int, high: float | None = None) -> str:
    """The newest ``width`` values as blocks; unknown is a gap, the smallest known value is still seen."""
    levels = GLYPHS.blocks
    part = list(values)[-width:]
    top = high if high is not None else max((v for v in part if v is not None), default=0.0)
    text = "".join(" " if v is None else levels[max(1, min(8, round(8 * v / top)))] if top > 0 else levels[1] for v in part)
    return text.rjust(width)


def bar(parts: Sequence[tuple[float, str, Role]], width: int, total: float, mark: float | None = None, sign: str = "┊") -> Line:
    """Parts of ``total`` side by side in ``width`` cells, each with its own sign; ``mark`` is a line across."""
    cells: list[Span] = []
    done = 0.0
    for value, glyph, role in parts:
        upto = round(width * min(1.0, (done + value) / total)) if total > 0 else 0
        if value > 0 and upto <= len(cells) < width:
            upto = len(cells) + 1  # what is there must be seen
        cells += [(glyph, role)] * (upto - len(cells))
        done += value
    cells += [(" ", "text")] * (width - len(cells))
    if mark is not None and total > 0:
        cells[max(0, min(width - 1, round(width * mark / total) - (1 if mark >= total else 0)))] = (sign, "cut")
    return merged(cells)
