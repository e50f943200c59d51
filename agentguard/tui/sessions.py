"""The agent sessions, a row each, and one session with a bar per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import chop_cells
from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from agentguard.monitor.snapshot import SessionRow, StepBar
from agentguard.monitor.words import rule
from agentguard.tui.chart import bar, spark
from agentguard.tui.format import PHASES, SESSION_STATES, age, clock, count, number, percent, seconds, whole
from agentguard.tui.frame import Page, Panel, View, fields
from agentguard.tui.glyphs import words
from agentguard.tui.lines import Line, Span, clean, fit, wrap
from agentguard.tui.table import Column, Table

EMPTY = "no session yet; agents send their session id as X-Session-Id"
SPARK = 12
"""Steps of the think sparkline."""
RANK = ("stopped", "failed", "looping", "lost", "growing", "filling", "running", "idle")
"""States by how much they want a look."""


@dataclass(frozen=True, slots=True)
class At:
    """A session at time ``t``, on the engine of that name."""

    row: SessionRow
    t: float
    engine: str

    @property
    def lost(self) -> bool:
        return self.row.state == "lost"


def context_bar(session: SessionRow, width: int) -> Line:
    """The context window: filled, and the band where the cutoff closes a step; then the share."""
    used, limit = session.context_used, session.context_limit
    if used is None or not limit:
        return ((fit("—", width), "dim"),)
    inner = width - 5
    low = limit if session.band_low is None else session.band_low
    high = low if session.band_high is None else session.band_high
    middle = int(inner * (low + high) / 2 / limit)  # a narrow bar must show the band too
    spans: list[Span] = []
    for cell in range(inner):
        at = limit * (cell + 0.5) / inner
        filled = at <= used
        if low <= at < high or (cell == middle and low < limit):
            span: Span = ("▓", "warn") if filled else ("▒", "band")
        elif filled:
            span = ("━", "bad" if at >= high else "bar")
        else:
            span = ("·", "dim")
        spans.append(span)
    share = used / limit
    role = "bad" if used >= high else "warn" if used >= low else "text"
    return (*spans, (percent(share).rjust(5), role))  # type: ignore[arg-type]


def think_spark(session: SessionRow, width: int) -> Span:
    """Think tokens of the latest steps; the running one counts with what it has."""
    return (spark([float(b.think_tokens) for b in session.bars], width), "think")


def _text(at: At, text: str, role: str = "text") -> Span:
    return (text, "stale" if at.lost else role)  # type: ignore[return-value]


def _phase(at: At, width: int) -> Span:
    phase = at.row.phase
    return ("—", "dim") if phase is None else _text(at, *PHASES[phase])


def _think(at: At, width: int) -> Span:
    """Of the running step: thought so far, and its cutoff."""
    row = at.row
    if row.think_tokens is None:
        return ("—", "dim")
    return _text(at, f"{count(row.think_tokens)}/{count(row.think_cap)}")


def arm_words(session: SessionRow) -> str:
    return words(rule(session.arm)) if session.arm else "—"


def _fill(row: SessionRow) -> float | None:
    return None if row.context_used is None or not row.context_limit else row.context_used / row.context_limit


SESSIONS: tuple[Column[At], ...] = (
    Column("state", "state", 9, lambda a, _: SESSION_STATES[a.row.state], align="left", sort=lambda a: -RANK.index(a.row.state)),
    Column("session", "session", 10, lambda a, _: _text(a, a.row.id), align="left", grow=True, sort=lambda a: a.row.id),
    Column("steps", "steps", 5, lambda a, _: _text(a, count(a.row.steps)), sort=lambda a: a.row.steps),
    Column("context", "context", 17, lambda a, w: context_bar(a.row, w), 1, align="left", sort=lambda a: _fill(a.row)),
    Column("growth", "think/step", SPARK, lambda a, w: think_spark(a.row, w), 4, align="left",
           sort=lambda a: a.row.bars[-1].think_tokens if a.row.bars else None),
    Column("phase", "phase", 9, _phase, 2, align="left", sort=lambda a: a.row.phase),
    Column("think", "think/cutoff", 12, _think, 5, sort=lambda a: a.row.think_tokens),
    Column("closes", "closes", 6, lambda a, _: _text(a, count(a.row.closes), "warn" if a.row.closes else "text"), 3,
           sort=lambda a: a.row.closes),
    Column("tokens", "tokens", 6, lambda a, _: _text(a, count(a.row.tokens)), 6, sort=lambda a: a.row.tokens),
    Column("last", "last", 5, lambda a, _: _text(a, age(a.t - a.row.last_t)), 7, sort=lambda a: a.row.last_t),
    Column("arm", "arm", 24, lambda a, _: _text(a, arm_words(a.row)), 9, align="left", sort=lambda a: a.row.arm),
    Column("engine", "engine", 14, lambda a, _: _text(a, a.engine), 8, align="left", sort=lambda a: a.engine),
    Column("caller", "caller", 12, lambda a, _: _text(a, a.row.caller or "—"), 10, align="left", sort=lambda a: a.row.caller),
)  # fmt: skip


def session_lines(session: SessionRow | None, view: View, width: int, height: int) -> list[Line]:
    """About the selected session: why it is not fine, or where it stands."""
    if session is None:
        return [(("no session is selected", "dim"),), *[()] * (height - 1)]
    if session.why:
        role = SESSION_STATES[session.state][1]
        return wrap(((f"{session.id}: ", "text"), (words(session.why), role)), width, height)
    caps = f"{whole(session.think_tokens)} of {whole(session.think_cap)}" if session.think_tokens is not None else "—"
    first = fields([
        ((session.id, "text"),), _field("context", f"{whole(session.context_used)} of {whole(session.context_limit)}"),
        _field("thinks", caps), _field("class", session.workload or "—"),
    ], width)  # fmt: skip
    second = fields([
        _field("band", f"{whole(session.band_low)} to {whole(session.band_high)}"),
        _field("arm", arm_words(session)), _field("engine", view.engine_name(session.engine)),
        _field("model", session.model or "—"),
        _field("generated", whole(session.tokens)), _field("of it think", whole(session.think_tokens_total)),
        _field("since", clock(session.since_t, view.utc)),
    ], width)  # fmt: skip
    return [first, second][:height]


def _field(name: str, value: str) -> Line:
    return ((f"{name} ", "dim"), (value, "text"))


class Sessions(Page):
    NAME = "sessions"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "Steps", key_display="Enter", id="sessions.open")]

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[At] = Table(SESSIONS, lambda a: a.row.key, empty=EMPTY, id="sessions")
        self.needle = ""

    def body(self) -> Sequence[Widget]:
        return (
            Panel(self._title, id="table-title", classes="title"),
            self.table,
            Panel(lambda view, w, h: session_lines(self._selected(view), view, w, h), id="session"),
        )

    @property
    def main_table(self) -> Table[Any] | None:
        return self.table

    def _selected(self, view: View) -> SessionRow | None:
        row = self.table.cursor_row
        return None if row is None else row.row

    def _title(self, view: View, width: int, height: int) -> list[Line]:
        sessions = view.snapshot.sessions
        shown = len(self.table.rows)
        states = [s.state for s in sessions]
        counts = [(state, states.count(state)) for state in RANK if state in states]
        parts: list[Line] = [((f"{shown} of {len(sessions)} sessions", "title"),)]
        if self.needle:
            parts.append(((f"filter: {self.needle}", "accent"),))
        parts += [((SESSION_STATES[state][0].replace(" ", f" {n} ", 1), SESSION_STATES[state][1]),) for state, n in counts]
        if view.snapshot.sessions_hidden:
            parts.append(((f"{view.snapshot.sessions_hidden} forgotten", "dim"),))
        return [fields(parts, width)]

    def show(self, view: View) -> None:
        needle, t, names = self.needle.lower(), view.snapshot.t, view.engine_names
        rows = [
            At(s, t, names.get(s.engine, s.engine))
            for s in view.snapshot.sessions
            if not needle or needle in f"{s.id} {s.state} {s.arm} {names.get(s.engine)} {s.model} {s.caller} {s.workload}".lower()
        ]
        self.table.show_rows(rows)
        super().show(view)

    def action_open(self) -> None:
        self.table.action_open()

    @on(Table.Moved, "#sessions")
    def _moved(self) -> None:
        self.monitor_app.redraw(rows=False)

    @on(Table.Opened, "#sessions")
    def _opened(self, event: Table.Opened) -> None:
        self.app.push_screen(SessionDetail(event.key))

    @property
    def selected_session(self) -> str | None:
        return self.table.cursor_key if self.table.rows else None

    @property
    def copy_text(self) -> str | None:
        row = self.table.cursor_row
        return None if row is None else row.row.id

    def rows_for_export(self) -> Sequence[object]:
        return [at.row for at in self.table.rows]


# one session


def scale_of(bars: Sequence[StepBar]) -> float:
    """Tokens of the longest bar or cutoff."""
    return float(max((max(b.think_tokens + b.answer_tokens, b.cap or 0) for b in bars), default=0) or 1)


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and the tokens of a full bar."""

    bar: StepBar
    total: float


def step_bar(step: Step, width: int) -> Line:
    b = step.bar
    return bar(((b.think_tokens, "█", "think"), (b.answer_tokens, "▒", "answer")), width, step.total, b.cap)


def _end(step: Step, width: int) -> Span:
    b = step.bar
    if b.error:
        return (f"✗ {b.error}", "bad")
    if not b.done:
        return ("▶ runs now", "accent")
    if b.closed:
        return (f"● closed: {b.closed}", "warn")
    return ("✓ ended itself", "dim")


STEPS: tuple[Column[Step], ...] = (
    Column("step", "step", 4, lambda s, _: (str(s.bar.step), "text"), sort=lambda s: s.bar.step),
    Column("bar", "think + answer", 14, step_bar, align="left", grow=True),
    Column("think", "think", 6, lambda s, _: (whole(s.bar.think_tokens), "think"), sort=lambda s: s.bar.think_tokens),
    Column("answer", "answer", 6, lambda s, _: (whole(s.bar.answer_tokens), "answer"), sort=lambda s: s.bar.answer_tokens),
    Column("cap", "cutoff", 6, lambda s, _: (whole(s.bar.cap), "cut"), 3, sort=lambda s: s.bar.cap),
    Column("end", "how it ended", 17, _end, align="left", sort=lambda s: s.bar.closed),
    Column("bound", "bound by", 10, lambda s, _: (s.bar.bound_by or "—", "dim"), 5, align="left"),
    Column("prompt", "prompt", 7, lambda s, _: (whole(s.bar.prompt_tokens), "text"), 4, sort=lambda s: s.bar.prompt_tokens),
    Column("accepted", "ℓ", 4, lambda s, _: (number(s.bar.accepted_length), "text"), 6, sort=lambda s: s.bar.accepted_length),
    Column("ttlt", "TTLT", 5, lambda s, _: (seconds(s.bar.ttlt_s), "text"), 2, sort=lambda s: s.bar.ttlt_s),
    Column("rule", "rule", 22, lambda s, _: (words(rule(s.bar.rule)), "dim"), 8, align="left"),
    Column("notes", "notes", 20, lambda s, _: (", ".join(s.bar.notes) or "—", "dim"), 7, align="left"),
)  # fmt: skip


TAILS = 128
"""A gateway gives out the words of that many running traces, the latest ones (`gateway.app.TAILS`)."""


def why_no_words(view: View, session: SessionRow | None) -> str:
    """Why there is nothing of the running trace to show, although the operator turned content on."""
    if session is None or session.running_request is None:
        return "no step runs now"
    # the monitor's one line about it; there is no other word of a gateway that refuses
    refused = f"{session.source} gives no content"
    if any(e.kind == "source" and e.text.startswith(refused) for e in view.snapshot.events):
        return "content is off: this gateway gives none out"
    if session.phase == "queued":
        return "queued: it has no words yet"
    told = view.snapshot.content
    others = sum(s.running_request in told for s in view.snapshot.sessions if s.source == session.source)
    if others >= TAILS:
        return f"this gateway tells the words of its latest {TAILS} running traces only"
    return "no words of it yet; they are asked for once a second"


def rows_of(text: str, width: int) -> list[str]:
    """The text in rows of at most ``width`` cells; wide characters take two."""
    rows: list[str] = []
    for line in text.splitlines():
        rows += [part for part in chop_cells(clean(line), width) if part] or [""]
    return rows


class SessionDetail(Page):
    NAME = "session"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace", "back", "Back", key_display="Esc", id="session.back")]

    def __init__(self, key: str) -> None:
        super().__init__()
        self.table: Table[Step] = Table(STEPS, lambda s: str(s.bar.step), empty="no step yet", follow=True, id="steps")
        self.key = key

    def body(self) -> Sequence[Widget]:
        return (
            Panel(lambda view, w, h: session_lines(view.session_row(self.key), view, w, h), id="session"),
            Panel(self._context_line, id="context", classes="title"),
            self.table,
            Panel(self._tail, id="tail"),
        )

    @property
    def main_table(self) -> Table[Any] | None:
        return self.table

    def _context_line(self, view: View, width: int, height: int) -> list[Line]:
        session = view.session_row(self.key)
        if session is None:
            return [(("this session is not known any more", "warn"),)]
        left = f"context {whole(session.context_used)}/{whole(session.context_limit)} "
        room = max(10, min(width - len(left) - 2, 80))
        return [((left, "dim"), *context_bar(session, room))]

    def _tail(self, view: View, width: int, height: int) -> list[Line]:
        """The end of the running trace, only where the operator turned content on."""
        session = view.session_row(self.key)
        title: Line = (("the trace now", "title"),)
        if not view.content:
            return [title, (("content is off; start with --content to see it", "dim"),), *[()] * max(0, height - 2)][:height]
        text = view.snapshot.content.get(session.running_request or "", "") if session is not None else ""
        if not text:
            return [title, ((why_no_words(view, session), "dim"),), *[()] * max(0, height - 2)][:height]
        lines: list[Line] = [((part, "think"),) for part in rows_of(text[-width * height * 2 :], width)]
        lines = lines[-(height - 1) :] if height > 1 else []
        return [title, *lines, *[()] * (height - 1 - len(lines))]

    def show(self, view: View) -> None:
        session = view.session_row(self.key)
        bars = session.bars if session is not None else ()
        total = scale_of(bars)
        self.table.show_rows([Step(b, total) for b in bars])
        super().show(view)

    def action_back(self) -> None:
        self.app.pop_screen()

    @property
    def selected_session(self) -> str | None:
        return self.key

    @property
    def copy_text(self) -> str | None:
        step = self.table.cursor_row
        return self.key if step is None else step.bar.request or self.key

    def rows_for_export(self) -> Sequence[object]:
        return [step.bar for step in self.table.rows]
