"""The command palette: every page, action, session and engine by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.actions import parse
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.markup import escape
from textual.style import Style
from textual.types import IgnoreReturnCallbackType

from agentguard.tui.export import FORMS
from agentguard.tui.frame import PAGES
from agentguard.tui.glyphs import say
from agentguard.tui.themes import CYCLE

if TYPE_CHECKING:
    from agentguard.tui.app import MonitorApp

ACTIONS = (
    ("app.close_trace", "Close this trace now", "the selected session's running trace; the answer follows"),
    ("app.limit", "Change a session's limit", "steps, tokens, or count again"),
    ("app.pin", "Pin an arm", "hold a rule on or at strict, or let the guard decide"),
    ("app.tts", "Pause TTS, or let it go on", "the draft that learns"),
    ("app.culprit", "Go to the culprit", "the session or engine that the verdict names"),
    ("app.pause", "Pause the screen, or a replay", ""),
    ("app.seek(-10)", "Seek 10 s back", "in a replay"),
    ("app.seek(10)", "Seek 10 s forth", "in a replay"),
    ("app.seek(-60)", "Seek 60 s back", "in a replay"),
    ("app.seek(60)", "Seek 60 s forth", "in a replay"),
    ("app.speed(-1)", "Speed: slower", "of a replay"),
    ("app.speed(1)", "Speed: faster", "of a replay"),
    ("screen.level", "Severity of the events shown", "all, warnings and alarms, alarms"),
    ("app.filter", "Filter the table", ""),
    ("app.sort", "Sort the table by the next column", ""),
    ("app.next_engine(1)", "Next engine", "its speculation"),
    ("app.next_engine(-1)", "Engine before", "its speculation"),
    ("app.copy", "Copy what is selected", "id of a session or request, text of an event"),
    ("app.export", "Export to a file", "a picture, the rows, or everything"),
    ("app.record", "Record to a file, or stop", "every event, for --replay"),
    ("app.next_theme", "Next theme", ""),
    ("app.interval(1)", "Read less often", ""),
    ("app.interval(-1)", "Read more often", ""),
    ("app.refresh", "Read now", ""),
)
"""An action, what it is called, and more about it; those that mean nothing on the page in front are left out."""
ON_PAGES = {"screen.level": ("events",), "app.next_engine(1)": ("speculation",), "app.next_engine(-1)": ("speculation",)}
"""Actions of one page."""


class MonitorCommands(Provider):
    def _commands(self) -> Iterator[tuple[str, IgnoreReturnCallbackType, str, bool]]:
        """Name, what it does, help, and whether it is shown before anything is typed."""
        app = cast("MonitorApp", self.app)
        for name, title in PAGES:
            yield f"Go to {title}", partial(app.action_page, name), "", True
        page = app.page_in_front
        for action, title, text in ACTIONS:
            _, name, parameters = parse(action)
            here = page is not None and page.NAME in ON_PAGES.get(action, (page.NAME,))
            if here and app.check_action(name, parameters):
                yield title, partial(app.run_action, action), text, True
        for form, text in FORMS.items():
            yield f"Export {form.upper()}", partial(app.export, form), text, True
        for theme in CYCLE:
            yield f"Theme {theme}", partial(setattr, app, "theme", theme), "", False
        for seconds in (0.5, 1.0, 2.0, 5.0):
            yield f"Read every {seconds:g} s", partial(app.read_every, seconds), "", False
        snapshot = app.view().snapshot
        for engine in snapshot.engines:
            yield f"Engine {engine.name}", partial(app.action_engine, engine.key), engine.model or "", False
        for session in snapshot.sessions:
            yield f"Session {session.id}", partial(app.open_session, session.key), session.state, False

    async def discover(self) -> Hits:
        for name, run, text, shown in self._commands():
            if shown:
                yield DiscoveryHit(escape(say(name)), run, text=say(name), help=escape(say(text)) or None)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, run, text, _ in self._commands():
            name = say(name)
            score, offsets = matcher.fuzzy_search.match(query, name)
            if score > 0:
                shown = highlighted(name, offsets, matcher.match_style)
                yield Hit(score, shown, run, text=name, help=escape(say(text)) or None)


def highlighted(name: str, offsets: Sequence[int], style: Style) -> Content:
    """The name as it is, with the letters that match; Textual's own takes it for markup, which the name of a session may break."""
    content = Content(name)
    for at in offsets:
        if not name[at].isspace():
            content = content.stylize(style, at, at + 1)
    return content
