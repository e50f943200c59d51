"""A table that formats only the rows in view.

A stock DataTable costs 33 ms for one changed cell at 120×40; this one repaints the lines that differ. The cursor belongs to a row's
key, so it stays on its session while rows are sorted, added and removed. Columns have fixed widths; where the terminal is narrow
the least important ones are left out, and one takes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from agentguard.tui.glyphs import words
from agentguard.tui.lines import Line, Painter, Span, fit, width_of

R = TypeVar("R")
GAP = 1
CURSOR = 2
"""Cells in front of a row, for the cursor's sign: a row must be told apart without colour too."""


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """``cell`` gives text and role, or several spans, for a row and the cells there are. The column with ``grow`` takes what is
    left (at least ``width``). ``need``: 0 is never left out, and the highest goes first. ``sort``: the value to sort by, None for
    unknown; without it the column does not sort."""

    key: str
    title: str
    width: int
    cell: Callable[[R, int], Span | Line]
    need: int = 0
    align: Literal["left", "right"] = "right"
    grow: bool = False
    sort: Callable[[R], Any] | None = None


def choose(columns: Sequence[Column[R]], width: int) -> list[tuple[Column[R], int]]:
    """The columns that fit into ``width`` cells, with their widths; by need, each that still fits."""
    kept = {c.key for c in columns if c.need == 0}
    room = width - CURSOR + GAP - sum(c.width + GAP for c in columns if c.need == 0)
    for column in sorted((c for c in columns if c.need), key=lambda c: c.need):
        if column.width + GAP <= room:
            kept.add(column.key)
            room -= column.width + GAP
    return [(c, c.width + max(0, room) if c.grow else c.width) for c in columns if c.key in kept]


def cell_spans(cell: Span | Line, width: int, align: Literal["left", "right"]) -> Line:
    """A cell in exactly ``width`` cells."""
    if isinstance(cell[0], str):
        return ((fit(cell[0], width, align), cell[1]),)
    spans: Line = cell
    size = width_of(spans)
    if size > width:
        return ((fit("".join(t for t, _ in spans), width), spans[0][1]),)
    pad: Span = (" " * (width - size), "text")
    return (*spans, pad) if align == "left" else (pad, *spans)


class Table(ScrollView, Painter, Generic[R], can_focus=True):
    """Rows of type R, each with a key that does not change."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False, id="table.up"),
        Binding("down,j", "move(1)", "Down", show=False, id="table.down"),
        Binding("pageup", "page(-1)", "Page up", show=False, id="table.page_up"),
        Binding("pagedown", "page(1)", "Page down", show=False, id="table.page_down"),
        Binding("home,g", "edge(0)", "First", show=False, id="table.first"),
        Binding("end,G", "edge(-1)", "Last", show=False, id="table.last"),
    ]

    class Moved(Message):
        """The cursor stands on another row."""

        def __init__(self, table: Table[Any], key: str | None) -> None:
            super().__init__()
            self.table = table
            self.key = key

        @property
        def control(self) -> Table[Any]:
            return self.table

    class Opened(Message):
        """A row was asked for: Enter, or a second click."""

        def __init__(self, table: Table[Any], key: str) -> None:
            super().__init__()
            self.table = table
            self.key = key

        @property
        def control(self) -> Table[Any]:
            return self.table

    def __init__(
        self, columns: Sequence[Column[R]], key: Callable[[R], str], *, empty: str = "", follow: bool = False, id: str | None = None
    ) -> None:
        """``empty``: what stands there without rows. ``follow``: the cursor goes along with the last row while it is on it."""
        super().__init__(id=id)
        self._columns = tuple(columns)
        self._key = key
        self._rows: list[R] = []
        self._keys: list[str] = []
        self._given: Sequence[R] = ()
        self._cursor: str | None = None
        self._at = 0
        self._follow = follow
        self._painted: dict[int, Line] = {}
        self._fitted: tuple[int, list[tuple[Column[R], int]]] = (-1, [])
        self.empty: Line = ((empty, "dim"),)
        self.sort_by: str | None = None
        self.descending = False

    # what it shows

    @property
    def rows(self) -> Sequence[R]:
        return self._rows

    @property
    def cursor_key(self) -> str | None:
        return self._cursor

    @property
    def cursor_row(self) -> R | None:
        return self._rows[self._at] if self._rows else None

    def show_rows(self, rows: Sequence[R]) -> None:
        """Take these rows; the cursor stays on its key, or where it was when that row has gone."""
        self._given = rows
        at_end = self._follow and (not self._rows or self._at == len(self._rows) - 1)
        self._rows = self._sorted(rows)
        self._keys = [self._key(row) for row in self._rows]
        before = self._cursor
        if not self._rows:
            self._at, self._cursor = 0, self._cursor
        elif at_end and self.sort_by is None:
            self._at = len(self._rows) - 1
            self._cursor = self._keys[-1]
        else:
            self._at = self._where(self._cursor)
            self._cursor = self._keys[self._at]
        self._measure()
        if at_end and self._rows:
            self._bring_into_view()
        self._repaint()
        if self._cursor != before:
            self.post_message(self.Moved(self, self._cursor))

    def _measure(self) -> None:
        size = Size(self.size.width - 1, len(self._rows) + 1)
        if size != self.virtual_size:
            self.virtual_size = size
            self._scroll_update(size)  # shows or hides the scroll bar, as Textual's OptionList does it

    def _where(self, key: str | None) -> int:
        if self._at < len(self._keys) and self._keys[self._at] == key:
            return self._at
        try:
            return self._keys.index(key) if key is not None else 0
        except ValueError:
            return min(self._at, len(self._keys) - 1)

    def _sorted(self, rows: Sequence[R]) -> list[R]:
        column = next((c for c in self._columns if c.key == self.sort_by and c.sort is not None), None)
        if column is None or column.sort is None:
            return list(rows)
        value = column.sort
        known = [row for row in rows if value(row) is not None]
        unknown = [row for row in rows if value(row) is None]
        return sorted(known, key=value, reverse=self.descending) + unknown

    def sort(self, key: str | None) -> None:
        """Sort by a column, the other way round at the second call, as given at the third."""
        if key is not None and key == self.sort_by:
            if self.descending:
                self.descending = False
            else:
                key = None
        else:
            self.descending = True
        self.sort_by = key
        self.show_rows(self._given)
        self._bring_into_view()

    def sort_next(self) -> str | None:
        """Sort by the next column that is shown and sorts; the name of the column, None for the given order."""
        names: list[str | None] = [None, *(c.key for c, _ in self.fitted() if c.sort is not None)]
        at = names.index(self.sort_by) if self.sort_by in names else 0
        name = names[(at + 1) % len(names)]
        self.sort_by, self.descending = name, True
        self.show_rows(self._given)
        self._bring_into_view()
        return name

    # painting

    def fitted(self) -> list[tuple[Column[R], int]]:
        """The columns in view. The last cell is the scroll bar's, also while there is none, so that nothing moves."""
        width = self.size.width - 1
        if self._fitted[0] != width:
            self._fitted = (width, choose(self._columns, width))
        return self._fitted[1]

    def head(self) -> Line:
        spans: list[Span] = [(" " * CURSOR, "title")]
        for column, width in self.fitted():
            sign = "" if column.key != self.sort_by else ("▼" if self.descending else "▲")
            title = fit(words(column.title)[: width - len(sign)] + sign, width, column.align)
            spans += [(title, "title"), (" " * GAP, "title")]
        return tuple(spans[:-1])

    def line(self, row: int) -> Line:
        """A row as it is painted, without the cursor."""
        if row >= len(self._rows):
            return self.empty if row == 0 and not self._rows else ()
        data = self._rows[row]
        spans: list[Span] = [("▶ " if row == self._at else "  ", "accent")]
        for column, width in self.fitted():
            for text, role in cell_spans(column.cell(data, width), width, column.align):
                # one span per role: with one per cell and gap a frame of 500 sessions cost the terminal's side twice as much
                if spans[-1][1] == role:
                    spans[-1] = (spans[-1][0] + text, role)
                else:
                    spans.append((text, role))
            spans[-1] = (spans[-1][0] + " " * GAP, spans[-1][1])
        return tuple(spans)

    def _at_line(self, y: int) -> Line:
        return self.head() if y == 0 else self.line(self.scroll_offset.y + y - 1)

    def _repaint(self, *lines: int) -> None:
        """Repaint those of the lines (all in view by default) whose text or place of the cursor has changed."""
        height, width = self.size.height, self.size.width
        changed: list[Region] = []
        for y in lines or range(height):
            if 0 <= y < height:
                line = self._at_line(y)
                if self._painted.get(y) != line:
                    self._painted[y] = line
                    changed.append(Region(0, y, width, 1))
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        line = self._painted.get(y)
        if line is None:
            line = self._painted[y] = self._at_line(y)
        on_cursor = y > 0 and self._rows and self.scroll_offset.y + y - 1 == self._at
        return self.paint(line, "cursor" if on_cursor else None)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        if round(old_value) != round(new_value):
            self._painted.clear()
        super().watch_scroll_y(old_value, new_value)

    def text_lines(self) -> list[Line]:
        """What is in view."""
        return [self.head(), *(self.line(self.scroll_offset.y + y) for y in range(self.size.height - 1))]

    def on_resize(self) -> None:
        self._measure()
        self._painted.clear()
        self._bring_into_view()

    # moving

    def move_to(self, key: str) -> bool:
        """Put the cursor on a row; False where there is none of that key."""
        if key not in self._keys:
            return False
        self._go(self._keys.index(key))
        return True

    def _go(self, row: int) -> None:
        if not self._rows:
            return
        before, top = self._at, self.scroll_offset.y
        self._at = max(0, min(row, len(self._rows) - 1))
        moved = self._keys[self._at] != self._cursor
        self._cursor = self._keys[self._at]
        self._bring_into_view()
        if self.scroll_offset.y == top:
            self._repaint(before - top + 1, self._at - top + 1)
        else:
            self._repaint()
        if moved:
            self.post_message(self.Moved(self, self._cursor))

    def _bring_into_view(self) -> None:
        room, top = max(1, self.size.height - 1), self.scroll_offset.y
        if self._at < top:
            self.scroll_to(y=self._at, animate=False, force=True)
        elif self._at >= top + room:
            self.scroll_to(y=self._at - room + 1, animate=False, force=True)

    def action_move(self, by: int) -> None:
        self._go(self._at + by)

    def action_page(self, by: int) -> None:
        self._go(self._at + by * max(1, self.size.height - 2))

    def action_edge(self, row: int) -> None:
        self._go(row if row >= 0 else len(self._rows) - 1)

    def action_open(self) -> None:
        if self._rows:
            self.post_message(self.Opened(self, self._keys[self._at]))

    def on_click(self, event: events.Click) -> None:
        y = event.y
        if y == 0:
            column = self.column_at(event.x)
            if column is not None and column.sort is not None:
                self.sort(column.key)
            return
        row = self.scroll_offset.y + y - 1
        if row >= len(self._rows):
            return
        if row == self._at and event.chain > 1:
            self.action_open()
        else:
            self._go(row)

    def column_at(self, x: int) -> Column[R] | None:
        left = CURSOR
        for column, width in self.fitted():
            if left <= x < left + width:
                return column
            left += width + GAP
        return None
