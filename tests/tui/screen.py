"""Running the app without a terminal, and its screen as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

from rich.color import Color
from rich.style import Style
from textual.pilot import Pilot

from agentguard.monitor.options import Options
from agentguard.monitor.snapshot import Snapshot
from agentguard.tui.app import MonitorApp
from agentguard.tui.settings import Settings
from tests.tui.scenes import SceneMonitor

THEMES = {"dark": "agentguard-dark", "light": "agentguard-light", "cb": "agentguard-cb", "ansi-dark": "ansi-dark"}


class Running:
    """An app with a scene in front."""

    def __init__(self, app: MonitorApp, pilot: Pilot[int], monitor: SceneMonitor) -> None:
        self.app = app
        self.pilot = pilot
        self.monitor = monitor

    async def settle(self) -> None:
        """Until nothing is left to do but the feed's next sample and a dialog's answer."""
        for _ in range(500):
            await self.pilot.pause(0)
            busy = [w for w in self.app.workers if w.group not in ("feed", "dialog") and w.is_running]
            if busy:
                await asyncio.gather(*(w.wait() for w in busy))
            elif self.app._latest is self.monitor.scene and not any(n.message_queue_size for n in (self.app, self.app.screen)):
                break
        await self.pilot.pause(0)

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            await self.settle()

    async def type(self, text: str) -> None:
        await self.pilot.press(*text)
        await self.settle()

    async def show(self, scene: Snapshot) -> None:
        """Serve another scene, at once."""
        self.monitor.scene = scene
        self.app.action_refresh()
        await self.settle()

    @property
    def text(self) -> list[str]:
        """The screen's lines, blanks at the end cut."""
        return [text.rstrip() for text in lines(self.app)]

    async def delivered(self) -> None:
        """Until a file that was asked for is written: Textual writes it in a thread, and tells."""
        while not any(n.startswith(("written", "not written")) for n in self.notices):
            await self.pilot.pause(0.01)
        self.app.clear_notifications()
        await self.settle()

    @property
    def notices(self) -> list[str]:
        return [n.message for n in self.app._notifications]


@asynccontextmanager
async def running(
    scene: Snapshot | SceneMonitor, size: tuple[int, int] = (120, 40), theme: str = "agentguard-dark",
    keys: dict[str, str] | None = None, **options: Any,
) -> AsyncIterator[Running]:  # fmt: skip
    """The feed's clock never ticks by itself: an hour lies between two samples, and tests ask for them."""
    monitor = scene if isinstance(scene, SceneMonitor) else SceneMonitor(scene)
    app = MonitorApp(Options(**({"interval_s": 3600.0} | options)), monitor.open, Settings(theme, keys or {}), utc=True)
    # Textual's pilot waits for 20 ms of idle CPU after each key; `settle` waits for what is left to do instead
    with patch("textual.app.wait_for_idle", _at_once), patch("textual.pilot.wait_for_idle", _at_once):
        async with app.run_test(size=size) as pilot:
            run = Running(app, pilot, monitor)
            await run.settle()
            yield run


async def _at_once(*_: float) -> None:
    await asyncio.sleep(0)


def lines(app: MonitorApp) -> list[str]:
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips(app.size)]


def dump(app: MonitorApp) -> str:
    """Text, and below each line that is not plain its styles: a letter a run, explained at the end. The styles are the theme's
    roles as colours, so a golden file shows what changed on the screen and nothing else."""
    names: dict[str, str] = {}
    out: list[str] = []
    for strip in app.screen._compositor.render_strips(app.size):
        text, marks = "", ""
        for segment in strip:
            text += segment.text
            name = _style(segment.style)
            letter = names.setdefault(name, chr(ord("a") + len(names)) if len(names) < 26 else chr(ord("A") + len(names) - 26))
            marks += letter * len(segment.text)
        out.append(f"{text.rstrip()}\n{_runs(marks)}")
    legend = [f"{letter} = {name}" for name, letter in names.items()]
    return "\n".join([*out, "", *legend, ""])


def _runs(marks: str) -> str:
    """aaabb as a3b2."""
    parts: list[tuple[str, int]] = []
    for mark in marks:
        if parts and parts[-1][0] == mark:
            parts[-1] = (mark, parts[-1][1] + 1)
        else:
            parts.append((mark, 1))
    return "  " + "".join(f"{mark}{n if n > 1 else ''}" for mark, n in parts)


def _style(style: Style | None) -> str:
    if style is None:
        return "none"
    flags = [name for name in ("bold", "dim", "reverse", "underline", "italic") if getattr(style, name)]
    return " ".join([_colour(style.color), "on", _colour(style.bgcolor), *flags])


def _colour(colour: Color | None) -> str:
    if colour is None:
        return "default"
    return colour.triplet.hex if colour.triplet is not None else colour.name
