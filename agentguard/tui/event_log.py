"""The log of what happened: filtered by severity, searched by text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from agentguard.monitor.snapshot import EventLine, Severity
from agentguard.tui.format import SEVERITIES, clock
from agentguard.tui.frame import Page, Panel, View, fields
from agentguard.tui.glyphs import words
from agentguard.tui.lines import Line, wrap
from agentguard.tui.table import Column, Table

LEVELS: tuple[tuple[str, frozenset[Severity]], ...] = (
    ("all", frozenset({"info", "good", "warning", "alarm"})),
    ("warnings and alarms", frozenset({"warning", "alarm"})),
    ("alarms", frozenset({"alarm"})),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """An event; its time, engine and session as people read them."""

    event: EventLine
    clock: str
    engine: str
    session: str


EVENTS: tuple[Column[Shown], ...] = (
    Column("time", "time", 8, lambda s, _: (s.clock, "dim"), align="left", sort=lambda s: s.event.number),
    Column("severity", "", 9, lambda s, _: SEVERITIES[s.event.severity], align="left",
           sort=lambda s: ("info", "good", "warning", "alarm").index(s.event.severity)),
    Column("kind", "kind", 18, lambda s, _: (s.event.kind.replace("_", " "), "accent"), 2, align="left",
           sort=lambda s: s.event.kind),
    Column("text", "what", 20, lambda s, _: (words(s.event.text), "text"), align="left", grow=True),
    Column("n", "×", 4, lambda s, _: (f"×{s.event.n}" if s.event.n > 1 else "", "dim"), 1, sort=lambda s: s.event.n),
    Column("engine", "engine", 16, lambda s, _: (s.engine or "—", "dim"), 3, align="left", sort=lambda s: s.engine),
    Column("session", "session", 16, lambda s, _: (s.session or "—", "dim"), 3, align="left", sort=lambda s: s.session),
)  # fmt: skip


class Events(Page):
    NAME = "events"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "level", "Severity", id="events.level"),
        Binding("enter", "open", "Session", key_display="Enter", id="events.open"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[Shown] = Table(
            EVENTS, lambda s: str(s.event.number), empty="nothing has happened yet", follow=True, id="events"
        )
        self.needle = ""
        self.level = 0

    def body(self) -> Sequence[Widget]:
        return (
            Panel(self._title, id="table-title", classes="title"),
            self.table,
            Panel(self._whole, id="event"),
        )

    @property
    def main_table(self) -> Table[Any] | None:
        return self.table

    def _title(self, view: View, width: int, height: int) -> list[Line]:
        parts: list[Line] = [
            ((f"{len(self.table.rows)} of {len(view.snapshot.events)} events", "title"),),
            ((LEVELS[self.level][0], "accent"),),
        ]
        if self.needle:
            parts.append(((f"filter: {self.needle}", "accent"),))
        return [fields(parts, width)]

    def _whole(self, view: View, width: int, height: int) -> list[Line]:
        """The selected event in full."""
        row = self.table.cursor_row
        if row is None:
            return [()] * height
        event = row.event
        about = " ".join(
            f"{name} {value}"
            for name, value in (("engine", row.engine), ("session", row.session), ("request", event.request))
            if value
        )
        return wrap(
            ((f"{row.clock} {event.kind.replace('_', ' ')}: ", "dim"), (words(event.text), "text"), (f" {about}", "dim")),
            width,
            height,
        )

    def show(self, view: View) -> None:
        needle, levels = self.needle.lower(), LEVELS[self.level][1]
        engines = view.engine_names
        sessions = {s.key: s.id for s in view.snapshot.sessions}
        rows = [
            Shown(e, clock(e.t, view.utc), engines.get(e.engine, e.engine), sessions.get(e.session, e.session))
            for e in view.snapshot.events
            if e.severity in levels
        ]
        if needle:
            rows = [r for r in rows if needle in f"{r.event.text} {r.event.kind} {r.engine} {r.session} {r.event.request}".lower()]
        self.table.show_rows(rows)
        super().show(view)

    def action_level(self) -> None:
        self.level = (self.level + 1) % len(LEVELS)
        self.monitor_app.redraw()

    def action_open(self) -> None:
        row = self.table.cursor_row
        if row is not None and row.event.session:
            self.monitor_app.open_session(row.event.session)

    def on_table_moved(self) -> None:
        self.monitor_app.redraw(rows=False)

    @property
    def selected_session(self) -> str | None:
        row = self.table.cursor_row
        return None if row is None else row.event.session or None

    @property
    def copy_text(self) -> str | None:
        row = self.table.cursor_row
        return None if row is None else f"{row.clock} {row.event.kind} {row.event.text}"

    def rows_for_export(self) -> Sequence[object]:
        return [row.event for row in self.table.rows]
