"""The command palette: every page, action, session and engine by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.types import IgnoreReturnCallbackType

from agentguard.tui.export import FORMS
from agentguard.tui.frame import PAGES
from agentguard.tui.themes import CYCLE

if TYPE_CHECKING:
    from agentguard.tui.app import MonitorApp

ACTIONS = (
    ("close_trace", "Close this trace now", "the selected session's running trace; the answer follows"),
    ("limit", "Change a session's limit", "steps, tokens, or count again"),
    ("pin", "Pin an arm", "hold a rule on or at strict, or let the guard decide"),
    ("tts", "Pause TTS, or let it go on", "the draft that learns"),
    ("culprit", "Go to the culprit", "the session or engine that the verdict names"),
    ("pause", "Pause the screen, or a replay", ""),
    ("filter", "Filter the table", ""),
    ("sort", "Sort the table by the next column", ""),
    ("copy", "Copy what is selected", "id of a session or request, text of an event"),
    ("record", "Record to a file, or stop", "every event, for --replay"),
    ("refresh", "Read now", ""),
)


class MonitorCommands(Provider):
    def _commands(self) -> Iterator[tuple[str, IgnoreReturnCallbackType, str, bool]]:
        """Name, what it does, help, and whether it is shown before anything is typed."""
        app = cast("MonitorApp", self.app)
        for name, title in PAGES:
            yield f"Go to {title}", partial(app.action_page, name), "", True
        for action, title, text in ACTIONS:
            if app.check_action(action, ()):
                yield title, partial(app.run_action, f"app.{action}"), text, True
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
                yield DiscoveryHit(name, run, help=text or None)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, run, text, _ in self._commands():
            score = matcher.match(name)
            if score > 0:
                yield Hit(score, matcher.highlight(name), run, help=text or None)
