"""The terminal monitor: pages over snapshots of `agentguard.monitor`.

One worker owns the model and posts one message per snapshot; all else here draws the latest one, and is the operator's keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast

from rich.style import Style
from textual import on, work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.events import DeliveryComplete, DeliveryFailed
from textual.filter import Monochrome, NoColor
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.worker import Worker, WorkerState

from agentguard.errors import AgentGuardError
from agentguard.monitor.options import Options
from agentguard.monitor.snapshot import SessionRow, Snapshot, VerdictLine
from agentguard.tui import actions, export
from agentguard.tui.commands import MonitorCommands
from agentguard.tui.dialogs import Ask, Choose
from agentguard.tui.event_log import Events
from agentguard.tui.frame import PAGES, Page, View
from agentguard.tui.glyphs import GLYPHS, say
from agentguard.tui.help import Help
from agentguard.tui.lines import Painter
from agentguard.tui.mini import Mini
from agentguard.tui.overview import Overview
from agentguard.tui.palette import role_styles
from agentguard.tui.sessions import SessionDetail, Sessions
from agentguard.tui.settings import Settings
from agentguard.tui.speculation import SpeculationPage
from agentguard.tui.themes import CYCLE, OURS

Open: TypeAlias = Callable[[], AbstractAsyncContextManager[actions.Operated]]
SAME_S = 60.0
"""Seconds in which the same notice is shown once."""
INTERVALS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
SEEK_S = 10.0
INTERRUPTED = 130
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Snapshotted(Message):
    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class MonitorApp(App[int]):
    """``open_monitor`` yields the model; it is opened again when the operator asks after a failure."""

    TITLE = "agentguard"
    CSS = Path(__file__).with_name("monitor.tcss").read_text()  # read at import, not on the loop
    COMMANDS: ClassVar = App.COMMANDS | {MonitorCommands}
    MODES: ClassVar = {
        "overview": Overview, "sessions": Sessions, "speculation": SpeculationPage, "events": Events, "help": Help, "mini": Mini,
    }  # fmt: skip
    DEFAULT_MODE = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/", id="app.filter"),
        Binding("s", "sort", "Sort", id="app.sort"),
        Binding("c", "close_trace", "Close trace", id="app.close_trace"),
        Binding("l", "limit", "Limit", id="app.limit"),
        Binding("p", "pin", "Pin arm", id="app.pin"),
        Binding("T", "tts", "TTS on/off", id="app.tts"),
        Binding("v", "culprit", "Culprit", id="app.culprit"),
        Binding("left", f"seek(-{SEEK_S:g})", "-10 s", key_display="left", id="app.back"),
        Binding("right", f"seek({SEEK_S:g})", "+10 s", key_display="right", id="app.forward"),
        Binding("shift+left", f"seek(-{6 * SEEK_S:g})", "-60 s", show=False, id="app.back_far"),
        Binding("shift+right", f"seek({6 * SEEK_S:g})", "+60 s", show=False, id="app.forward_far"),
        Binding("less_than_sign", "speed(-1)", "Slower", key_display="<", id="app.slower"),
        Binding("greater_than_sign", "speed(1)", "Faster", key_display=">", id="app.faster"),
        Binding("space", "pause", "Pause", id="app.pause"),
        Binding("question_mark,f1", "page('help')", "Help", key_display="?", id="app.help"),
        Binding("q", "quit", "Quit", id="app.quit"),
        Binding("y", "copy", "Copy", id="app.copy"),
        Binding("x", "export", "Export", id="app.export"),
        Binding("R", "record", "Record", id="app.record"),
        Binding("t", "next_theme", "Theme", id="app.theme"),
        Binding("plus", "interval(1)", "Slower reads", key_display="+", show=False, id="app.interval_up"),
        Binding("minus", "interval(-1)", "Faster reads", key_display="-", show=False, id="app.interval_down"),
        Binding("r", "refresh", "Refresh", show=False, id="app.refresh"),
        Binding("e", "page('events')", "Events", show=False, id="app.events"),
        *(Binding(str(i), f"page('{name}')", title, show=False, id=f"app.page_{name}") for i, (name, title) in enumerate(PAGES, 1)),
    ]  # fmt: skip

    def __init__(self, options: Options, open_monitor: Open, settings: Settings | None = None, *, utc: bool = False) -> None:
        super().__init__()
        self.options = options
        self.settings = settings or Settings()
        self.monitor: actions.Operated | None = None
        self.failure: AgentGuardError | None = None
        """Why the monitor could not be opened; the command reports it."""
        self.interval_s = options.interval_s
        self._open = open_monitor
        self._utc = utc
        self._latest = Snapshot(0, time.time(), VerdictLine("info", "waiting for the first sample"))
        self._shown = self._latest
        self._paused = False
        self._broken = ""
        self._engine: str | None = None
        self._wake = asyncio.Event()
        self._told: dict[str, float] = {}
        self._able: tuple[object, ...] = ()
        self._palette: tuple[str, dict[str, Style]] = ("", {})
        for theme in OURS:
            self.register_theme(theme)
        if self.no_color:
            # Textual turns colours into greys, and with a theme of 16 colours into black on black
            self._filters = [NoColor() if isinstance(f, Monochrome) else f for f in self._filters]
        self.settings.check(self.available_themes, self.binding_ids())
        self.theme = self.settings.theme
        if self.settings.keys:
            self.set_keymap(self.settings.keys)

    @classmethod
    def binding_ids(cls) -> set[str]:
        from agentguard.tui.table import Table

        owners: Iterable[Any] = (cls, Table, Overview, Sessions, SessionDetail, SpeculationPage, Events, Help)
        return {b.id for owner in owners for b in owner.BINDINGS if isinstance(b, Binding) and b.id is not None}

    @property
    def role_styles(self) -> dict[str, Style]:
        if self._palette[0] != self.theme:
            self._palette = (self.theme, role_styles(self.theme_variables, self.native_ansi_color, self.no_color))
        return self._palette[1]

    # the feed

    def on_mount(self) -> None:
        if GLYPHS.ascii:
            self.add_class("-ascii")
            ScrollBar.renderer = _AsciiBars
        if self.options.mini:
            self.switch_mode("mini")
        self.theme_changed_signal.subscribe(self, self._repaint)
        if not self.is_headless:
            # without this a SIGTERM would leave the terminal as the screen had set it up
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, partial(self.exit, return_code=INTERRUPTED))
        self.read()

    def _repaint(self, _: object) -> None:
        for painter in self.screen.query(Painter):
            painter.refresh()

    @work(exclusive=True, group="feed", exit_on_error=False)
    async def read(self) -> None:
        """Own the model and post its snapshots until the app ends."""
        async with self._open() as monitor:
            self.monitor = monitor
            try:
                while True:
                    self.post_message(Snapshotted(monitor.snapshot()))
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), self.interval_s)
            finally:
                self.monitor = None

    @on(Worker.StateChanged)
    def _worker_changed(self, event: Worker.StateChanged) -> None:
        if event.state != WorkerState.ERROR:
            return
        error = event.worker.error
        if event.worker.group != "feed":
            self.tell(str(error), "error")
            return
        if self._latest.number == 0 and isinstance(error, AgentGuardError):
            self.failure = error
            self.exit(return_code=error.exit_code)
            return
        self._broken = str(error) if isinstance(error, AgentGuardError) else repr(error)
        self.redraw()

    @on(Snapshotted)
    def _snapshotted(self, message: Snapshotted) -> None:
        self.apply(message.snapshot)

    def apply(self, snapshot: Snapshot) -> None:
        """Show a snapshot, or keep it for later while the screen stands still."""
        self._latest = snapshot
        self._broken = ""
        if not self._paused:
            self._shown = snapshot
            self.redraw()

    @property
    def latest(self) -> Snapshot:
        """The newest snapshot, also while the screen stands still."""
        return self._latest

    def view(self) -> View:
        page = self.page_in_front
        # what the cursor is on counts most, so that an action never is for another row
        engine = (page.selected_engine if page is not None else None) or self._engine
        return View(
            self._shown,
            page.NAME if page is not None else "",
            self._paused,
            self.options.readonly,
            self.options.content,
            self._broken,
            self._utc,
            engine,
        )

    def redraw(self, rows: bool = True) -> None:
        """Draw the page in front from the latest snapshot, its table only with ``rows``. A dialog over a page leaves it as it is
        until it closes."""
        page = self.screen
        if not isinstance(page, Page) or not page.is_mounted:
            return
        with self.batch_update():
            (page.show if rows else page.show_panels)(self.view())
        shown = self._shown
        able = (
            page.selected_session is not None, shown.playback is not None, any(s.can_act for s in shown.sources),
            bool(shown.verdict.session or shown.verdict.engine),
        )  # fmt: skip
        if able != self._able:
            self._able = able
            self.refresh_bindings()

    # keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """False hides a key where it means nothing, None greys out one that is not allowed."""
        page = self.page_in_front
        name = page.NAME if page is not None else ""
        if action in ("close_trace", "limit"):
            if name not in ("sessions", "session", "events"):
                return False
            return True if page is not None and page.selected_session and self._can_act() else None
        if action in ("pin", "tts"):
            if name not in ("overview", "speculation"):
                return False
            return True if self._can_act() else None
        if action == "culprit":
            return bool(self._shown.verdict.session or self._shown.verdict.engine)
        if action in ("seek", "speed"):
            return self._shown.playback is not None
        if action == "filter":
            return name in ("sessions", "events")
        if action == "sort":
            return name in ("overview", "sessions", "session", "events")
        if action == "record":
            return None if self._shown.playback is not None else True
        return True

    def _can_act(self) -> bool:
        return not self.options.readonly and any(s.can_act for s in self._shown.sources)

    @property
    def page_in_front(self) -> Page | None:
        """The page, also under a dialog or the palette."""
        return next((screen for screen in reversed(self.screen_stack) if isinstance(screen, Page)), None)

    async def action_page(self, name: str) -> None:
        if self.current_mode != name:
            await self.switch_mode(name)
        while isinstance(self.screen, SessionDetail):
            await self.pop_screen()

    def action_pause(self) -> None:
        playback = self._shown.playback
        if playback is not None:
            self._play(lambda monitor: monitor.set_paused(not playback.paused))
            return
        self._paused = not self._paused
        self._shown = self._latest
        self.redraw()

    def action_refresh(self) -> None:
        if self.monitor is None:
            self.read()
        self._wake.set()

    def action_interval(self, by: int) -> None:
        at = min(range(len(INTERVALS)), key=lambda i: abs(INTERVALS[i] - self.interval_s))
        self.read_every(INTERVALS[max(0, min(len(INTERVALS) - 1, at + by))])

    def read_every(self, seconds: float) -> None:
        self.interval_s = seconds
        if self.monitor is not None:
            self.monitor.set_interval(self.interval_s)
        self._wake.set()
        self.tell(f"a sample every {self.interval_s:g} s", again=True)

    def action_next_theme(self) -> None:
        at = CYCLE.index(self.theme) if self.theme in CYCLE else -1
        self.theme = CYCLE[(at + 1) % len(CYCLE)]
        self.tell(f"theme {self.theme}", again=True)
        self._save_theme(self.theme)

    @work(group="settings", exit_on_error=False)
    async def _save_theme(self, theme: str) -> None:
        await asyncio.to_thread(self.settings.save_theme, theme)

    def action_copy(self) -> None:
        page = self.page_in_front
        text = page.copy_text if page is not None else None
        if text:
            self.copy_to_clipboard(text)
            self.tell(f"copied: {text}", again=True)

    def action_sort(self) -> None:
        page = self.page_in_front
        if page is not None and page.main_table is not None:
            name = page.main_table.sort_next()
            self.tell(f"sorted by {name}" if name else "in the order of arrival", again=True)

    def action_filter(self) -> None:
        self.ask(self._ask_for_filter)

    async def _ask_for_filter(self) -> None:
        page = self.page_in_front
        if isinstance(page, Sessions | Events):
            text = await self.push_screen_wait(Ask("show rows that contain", page.needle))
            if text is not None:
                page.needle = text.strip()
            self.redraw()

    @property
    def engine(self) -> str | None:
        """Key of the engine, or of the source without one, that was chosen last."""
        return self._engine

    def action_engine(self, key: str | None) -> None:
        if key != self._engine:
            self._engine = key
            page = self.page_in_front
            if page is not None:
                page.select_engine(key)
            self.redraw(rows=False)

    def action_next_engine(self, by: int) -> None:
        keys = [e.key for e in self._shown.engines]
        if keys:
            at = keys.index(self._engine) if self._engine in keys else 0
            self._engine = keys[(at + by) % len(keys)]
            self.redraw()

    @work(group="play", exit_on_error=False)
    async def action_seek(self, by: float) -> None:
        """From where the latest key has sent the replay, which need not be there yet."""
        playback = self.monitor.snapshot().playback if self.monitor is not None else None
        if self.monitor is None or playback is None:
            return
        await self.monitor.seek_to(playback.at_t + by)
        self.action_refresh()

    def action_speed(self, by: int) -> None:
        playback = self._shown.playback
        if playback is not None:
            at = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - playback.speed))
            speed = SPEEDS[max(0, min(len(SPEEDS) - 1, at + by))]
            self._play(lambda monitor: monitor.set_speed(speed))

    def _play(self, do: Callable[[actions.Operated], None]) -> None:
        """Change how a replay goes on."""
        if self.monitor is not None:
            do(self.monitor)
            self.action_refresh()

    @work(group="record", exclusive=True, exit_on_error=False)
    async def action_record(self) -> None:
        if self.monitor is None:
            return
        if self._shown.recording is not None:
            await self.monitor.stop_recording()
            self.tell(f"recorded in {self._shown.recording}", again=True)
        else:
            path = Path(f"agentguard-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
            self.monitor.start_recording(path)
            self.tell(f"recording to {path}", again=True)
        self.action_refresh()

    @work(group="go", exclusive=True, exit_on_error=False)
    async def action_culprit(self) -> None:
        """Go to what the verdict names: a session's steps, or an engine's speculation."""
        verdict = self._shown.verdict
        if verdict.session:
            self.open_session(verdict.session)
        elif verdict.engine:
            self._engine = verdict.engine
            await self.action_page("speculation")
            self.redraw()

    def open_session(self, key: str) -> None:
        """Go to a session by its key or its id."""
        rows = self._shown.sessions
        row = next((s for s in rows if s.key == key), None) or next((s for s in rows if s.id == key), None)
        if row is None:
            self.tell(f"session {key} is not known any more", "warning", again=True)
            return
        self._go_to_session(row.key)

    @work(group="go", exclusive=True, exit_on_error=False)
    async def _go_to_session(self, key: str) -> None:
        await self.action_page("sessions")
        page = self.screen
        if isinstance(page, Sessions):
            page.show(self.view())
            page.table.move_to(key)
        await self.push_screen(SessionDetail(key))

    # dialogs, and an operator's actions, each confirmed

    @property
    def in_dialog(self) -> bool:
        """Is a question open? The palette is none: what is chosen there may ask one."""
        asked = any(isinstance(s, ModalScreen) and not isinstance(s, CommandPalette) for s in self.screen_stack)
        return asked or any(w.group == "dialog" and not w.is_finished for w in self.workers)

    def ask(self, dialog: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One dialog at a time: a second one would leave the first on the screen with nobody to take its answer."""
        if not self.in_dialog:
            self._converse(dialog)

    @work(group="dialog", exit_on_error=False)
    async def _converse(self, dialog: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await dialog()

    @work(group="act", exit_on_error=False)
    async def act(self, do: Callable[[actions.Operated], Coroutine[Any, Any, str]]) -> None:
        """Do what was confirmed and tell how it went; a worker of its own, so that the next dialog does not end it."""
        if self.monitor is None:
            self.tell("the monitor has stopped; r starts it again", "error", again=True)
            return
        try:
            self.tell(await do(self.monitor), again=True)
        except AgentGuardError as error:
            self.tell(str(error), "error", again=True)
        self.action_refresh()

    def action_close_trace(self) -> None:
        row = self._session()
        if row is not None:
            self.ask(partial(actions.close_trace, self, row))

    def action_limit(self) -> None:
        row = self._session()
        if row is not None:
            self.ask(partial(actions.set_limit, self, row))

    def action_pin(self) -> None:
        self.ask(partial(actions.pin, self, self.view()))

    def action_tts(self) -> None:
        self.ask(partial(actions.set_tts, self, self.view()))

    def _session(self) -> SessionRow | None:
        """The selected one."""
        page = self.page_in_front
        key, rows = None if page is None else page.selected_session, self._shown.sessions
        return next((s for s in rows if s.key == key), None) or next((s for s in rows if s.id == key), None)

    def action_export(self) -> None:
        self.ask(self._ask_for_form)

    async def _ask_for_form(self) -> None:
        chosen = await self.push_screen_wait(Choose("export", [(form, text) for form, text in export.FORMS.items()]))
        if chosen is not None:
            self.export(chosen)

    def export(self, form: str) -> None:
        """Write a file into the working directory, or give it to the browser under --web."""
        name = f"agentguard-{time.strftime('%Y%m%d-%H%M%S')}.{form}"
        page = self.page_in_front
        if form == "svg":
            self.deliver_text(
                export.text_file(self.export_screenshot()), save_directory=".", save_filename=name, mime_type="image/svg+xml"
            )
        elif form == "csv":
            rows = page.rows_for_export() if page is not None else ()
            self.deliver_text(export.text_file(export.to_csv(rows)), save_directory=".", save_filename=name, mime_type="text/csv")
        else:
            text = export.to_json(self._shown)
            self.deliver_text(export.text_file(text), save_directory=".", save_filename=name, mime_type="application/json")

    @on(DeliveryComplete)
    def _delivered(self, event: DeliveryComplete) -> None:
        self.tell(f"written: {event.path.name}" if event.path is not None else "sent to the browser", again=True)

    @on(DeliveryFailed)
    def _not_delivered(self, event: DeliveryFailed) -> None:
        self.tell(f"not written: {event.exception}", "error")

    def tell(self, text: str, severity: Literal["information", "warning", "error"] = "information", again: bool = False) -> None:
        """A notice; the same one once in `SAME_S` unless the operator's own key asks for it."""
        now = time.monotonic()
        if not again and now - self._told.get(text, -SAME_S) < SAME_S:
            return
        self._told = {t: at for t, at in self._told.items() if now - at < SAME_S} | {text: now}
        self.notify(say(text), severity=severity, timeout=4, markup=False)

    def action_command_palette(self) -> None:
        if not self.in_dialog and not CommandPalette.is_open(cast("App[object]", self)):
            self.push_screen(CommandPalette(placeholder="a page, an action, a session, an engine", id="--command-palette"))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for command in super().get_system_commands(screen):
            if command.title not in ("Keys", "Screenshot"):  # Help and Export are ours
                yield command


class _AsciiBars(ScrollBarRender):
    """Scroll bars from blanks only."""

    VERTICAL_BARS: ClassVar[list[str]] = [" "] * 8
    HORIZONTAL_BARS: ClassVar[list[str]] = [" "] * 8
