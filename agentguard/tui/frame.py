"""What every page has: the head line, the verdict, the line that says what the numbers are taken over, and the keys.

All of it has fixed places and heights, so rows never move between healthy and alarmed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget

from agentguard.monitor.snapshot import EngineRow, SessionRow, Snapshot, SourceRow
from agentguard.tui.format import SEVERITIES, age, clock, number
from agentguard.tui.glyphs import words
from agentguard.tui.lines import Line, LineView, Span, between, clean, crop, width_of, wrap
from agentguard.tui.palette import Role
from agentguard.tui.table import Table

if TYPE_CHECKING:
    from agentguard.tui.app import MonitorApp

PAGES = (("overview", "Overview"), ("sessions", "Sessions"), ("speculation", "Speculation"), ("events", "Events"), ("help", "Help"))
_SHORT = ("Over", "Sess", "Spec", "Evts", "Help")
VERDICT_LINES = 2


def source_key(source: SourceRow) -> str:
    """Key of the row that stands for a source without engines."""
    return f"source {source.name}"


@dataclass(frozen=True, slots=True)
class View:
    """What a page draws from. ``paused``: the screen stands still while the monitor reads on. ``broken``: why the monitor itself
    stopped, "" while it runs. ``utc``: clocks in UTC, for pictures that are the same everywhere."""

    snapshot: Snapshot
    page: str = "overview"
    paused: bool = False
    readonly: bool = False
    content: bool = False
    broken: str = ""
    utc: bool = False
    engine: str | None = None
    """Key of the engine whose charts and speculation are shown, or `source_key` of a source without any."""

    @property
    def tab(self) -> str:
        """The title that is marked: one session belongs to the sessions."""
        return "sessions" if self.page == "session" else self.page

    @property
    def engine_row(self) -> EngineRow | None:
        """The chosen engine, else the first; None where a source without engines was chosen."""
        engines = self.snapshot.engines
        if self.source_row is not None:
            return None
        return next((e for e in engines if e.key == self.engine), engines[0] if engines else None)

    @property
    def source_row(self) -> SourceRow | None:
        """The chosen source, where it has shown no engine yet."""
        return next((s for s in self.snapshot.sources if source_key(s) == self.engine), None)

    @property
    def engine_names(self) -> dict[str, str]:
        return {e.key: e.name for e in self.snapshot.engines}

    def engine_name(self, key: str) -> str:
        return self.engine_names.get(key, key) or "—"

    def session_row(self, key: str | None) -> SessionRow | None:
        return next((s for s in self.snapshot.sessions if s.key == key), None)


def fields(parts: Sequence[Line], width: int, gap: str = "  ") -> Line:
    """As many of the parts as fit whole, in their order."""
    line: list[Span] = []
    used = 0
    for part in parts:
        part = tuple((clean(text), role) for text, role in part)
        size = width_of(part) + (len(gap) if line else 0)
        if used + size > width:
            continue
        if line:
            line.append((gap, "dim"))
        line += part
        used += size
    return tuple(line)


def source_state(view: View) -> Span:
    """How the sources are, in a few words."""
    sources, t = view.snapshot.sources, view.snapshot.t
    if view.broken:
        return ("✗ stopped", "bad")
    if not sources:
        return ("· no source", "dim")
    worst = max(sources, key=lambda s: ("ok", "slow", "stale", "down").index(s.state))
    if worst.state in ("ok", "slow"):
        return ("✓ live", "good") if worst.kind in ("gateway", "metrics") else (f"✓ {_KINDS[worst.kind]}", "good")
    sign: Span = ("… stale", "stale") if worst.state == "stale" else ("✗ down", "bad")
    bad = sum(s.state == worst.state for s in sources)
    which = f" {bad} of {len(sources)}" if len(sources) > 1 else ""
    return (f"{sign[0]}{which} {age(silence(worst, t))}", sign[1])


_KINDS = {"recording": "replay", "simulator": "simulated"}


def silence(source: SourceRow, t: float) -> float:
    """Seconds without a word of a source."""
    return t - (source.since_t if source.seen_t is None else source.seen_t)


def head_line(view: View, width: int) -> Line:
    snapshot = view.snapshot
    right: list[Line] = []
    playback = snapshot.playback
    if playback is not None:
        sign = "■ end" if playback.ended else "‖" if playback.paused else "▶"
        right.append(((f"{sign} {number(playback.speed, 1).removesuffix('.0')}×", "accent"),))
    elif view.paused:
        right.append((("‖ paused", "accent"),))
    if snapshot.recording is not None:
        right.append((("● rec", "bad"),))
    right.append((source_state(view),))
    right.append(((clock(snapshot.t, view.utc), "dim"),))
    end = fields(right, width)
    room = width - width_of(end) - 2
    full = tuple(_tabs(view, [title for _, title in PAGES], " "))
    short = tuple(_tabs(view, _SHORT, " "))
    least = tuple(_tabs(view, [title if name == view.tab else "" for name, title in PAGES], ""))
    brand: Line = (("agentguard ", "title"),)
    for tabs in ((*brand, *full), full, short, least):
        if width_of(tabs) <= room:
            return between(tabs, end, width)
    return between(crop(least, room), end, width)


def _tabs(view: View, titles: Sequence[str], gap: str) -> list[Span]:
    spans: list[Span] = []
    for i, ((name, _), title) in enumerate(zip(PAGES, titles, strict=True), 1):
        number_of = str(i)
        text = f"{number_of} {title}" if title else number_of
        # brackets, so that the page is told without colour; the others keep the room
        spans.append((f"[{text}]", "tab") if name == view.tab else (f" {text} ", "dim"))
        if gap:
            spans.append((gap, "dim"))
    return spans


def verdict_lines(view: View, width: int, height: int = VERDICT_LINES) -> list[Line]:
    snapshot = view.snapshot
    verdict = snapshot.verdict
    if view.broken:
        return wrap((("✗ monitor stopped ", "bad"), (f"{view.broken}; r starts it again", "text")), width, height)
    sign, role = SEVERITIES[verdict.severity]
    strong: Role = role if verdict.severity != "info" else "text"
    return wrap(((f"{sign}: ", role), (words(verdict.text), strong)), width, height)


def basis_line(view: View, width: int) -> Line:
    """What the numbers on the page are taken over."""
    snapshot = view.snapshot
    row = view.engine_row
    asked = f"{snapshot.window_s:.0f} s"
    got = None if row is None else row.window_s
    window = f"over the last {asked}" if got is None or got > snapshot.window_s - 1 else f"over the last {got:.0f} s of {asked}"
    if snapshot.samples < 2 and view.page in ("overview", "speculation"):
        window = "rates come with the second sample"
    texts: dict[str, tuple[str, ...]] = {
        "overview": (window, "λ, gain, rounds: the arm's whole life"),
        "sessions": ("now, and over each session's whole life", "context band: where the cutoff closes"),
        "session": ("a line per step", "┊ cutoff", "█ think ▒ answer"),
        "speculation": (window, "arms: their whole life", "λ [95 % interval]"),
        "events": (f"{len(snapshot.events)} kept", "the same within 60 s is one line, ×n"),
    }
    parts: list[Line] = [((words(text), "dim"),) for text in texts.get(view.page, ())]
    if view.readonly:
        parts.insert(1, (("read only", "accent"),))
    return fields(parts, width, " · ")


class Panel(LineView):
    """A part of a page: a pure function of the view and a size. It is drawn again when either changes."""

    def __init__(self, build: Callable[[View, int, int], list[Line]], *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._build = build
        self._view: View | None = None

    def update_view(self, view: View) -> None:
        self._view = view
        if self.size.height and self.size.width:
            self.show(self._build(view, self.size.width, self.size.height))

    def on_resize(self) -> None:
        if self._view is not None:
            self.update_view(self._view)


class Head(Panel):
    """A click on a title opens its page."""

    def on_click(self, event: events.Click) -> None:
        line = "".join(text for text, _ in self.lines[0]) if self.lines else ""
        for i, (name, _) in enumerate(PAGES, 1):
            start = line.find(f"{i}")
            following = line.find(f"{i + 1}", start) if i < len(PAGES) else start + 8
            if start >= 0 and start - 1 <= event.x < following - 1:
                self.run_worker(self.app.run_action(f"app.page('{name}')"), name="open a page", exit_on_error=False)
                return


class Keys(LineView):
    """The keys that work here, as many as fit; those that do not work now are dimmed and in parentheses."""

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)
        self._changed(self.screen)

    def on_resize(self) -> None:
        self._changed(self.screen)

    def _changed(self, screen: Screen[object]) -> None:
        if not self.is_attached or screen is not self.screen:
            return
        parts: list[Line] = []
        # what gets one out comes first: in 60 cells not every key has room
        active = sorted(screen.active_bindings.values(), key=lambda b: b.binding.id not in ("app.help", "app.quit"))
        for _, binding, enabled, _ in active:
            if binding.show and not any(text == f" {binding.description}" for part in parts for text, _ in part):
                key = self.app.get_key_display(binding)
                if enabled:
                    parts.append(((key, "key"), (f" {binding.description}", "text")))
                else:
                    parts.append(((f"({key}", "off"), (f" {binding.description})", "off")))
        self.show([fields(parts, self.size.width)])

    def on_click(self, event: events.Click) -> None:
        """A click on a key presses it."""
        line = "".join(text for text, _ in self.lines[0]) if self.lines else ""
        for _, binding, enabled, _ in self.screen.active_bindings.values():
            text = f"{self.app.get_key_display(binding)} {binding.description}"
            at = line.find(text)
            if binding.show and enabled and 0 <= at <= event.x < at + len(text):
                self.app.simulate_key(binding.key)
                return


class Page(Screen[None]):
    """A screen of the monitor. ``show`` gives it the latest view; only the page in front is given any."""

    NAME: ClassVar[str] = ""
    VERTICAL_BREAKPOINTS = [(0, "-short"), (24, "-medium"), (32, "-tall")]  # noqa: RUF012  # Screen declares them for instances
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (150, "-wide")]  # noqa: RUF012

    def compose(self) -> ComposeResult:
        yield Head(lambda view, width, _: [head_line(view, width)], id="head")
        yield Panel(verdict_lines, id="verdict")
        yield from self.body()
        yield Panel(lambda view, width, _: [basis_line(view, width)], id="basis")
        yield Keys(id="keys")

    def body(self) -> Sequence[Widget]:
        raise NotImplementedError

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.monitor_app.redraw)

    def show(self, view: View) -> None:
        self.show_panels(view)

    def show_panels(self, view: View) -> None:
        """All but the table's rows: enough when only the cursor has moved."""
        for panel in self.query(Panel):
            panel.update_view(view)

    @property
    def monitor_app(self) -> MonitorApp:
        return cast("MonitorApp", self.app)

    @property
    def main_table(self) -> Table[Any] | None:
        """The page's table; it is there before the page is composed, as keys are asked about earlier."""
        return None

    @property
    def copy_text(self) -> str | None:
        """What `y` copies."""
        return None

    @property
    def selected_session(self) -> str | None:
        return None

    def rows_for_export(self) -> Sequence[object]:
        """The rows of the page's table, for CSV."""
        return ()
