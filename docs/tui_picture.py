"""Draws docs/tui.svg, the README's picture: `python docs/tui_picture.py [RECORDING]`.

Without a recording it is the simulator's losing rule, seed 0, 215 s after its start: the same picture on every machine.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentguard.monitor.model import Model
from agentguard.monitor.options import Options
from agentguard.monitor.playback import Player, RecordingScript, SimulatorScript
from agentguard.monitor.snapshot import Snapshot
from agentguard.tui.app import MonitorApp
from agentguard.tui.settings import Settings

PICTURE = Path(__file__).with_name("tui.svg")
SIZE = (112, 30)
START_T = 1_900_000_000.0
PLAYED_S = 215.0


class Still:
    """A monitor that stands at one moment."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Still]:
        yield self

    def snapshot(self) -> Snapshot:
        return self._snapshot


def snapshot_of(recording: Path | None) -> Snapshot:
    """The end of a recording, or the simulator's moment."""
    script = SimulatorScript("losing-rule", 0, START_T) if recording is None else RecordingScript(recording)
    player = Player(script, lambda clock: Model(clock=clock, window_s=60.0, interval_s=1.0), lambda: 0.0)
    player.seek(START_T + PLAYED_S if recording is None else script.end_t)
    return player.model.snapshot()


async def draw(snapshot: Snapshot) -> str:
    """The overview as SVG, without the fonts that Rich would load from elsewhere."""
    app = MonitorApp(Options(interval_s=3600, demo="losing-rule"), Still(snapshot).open, Settings(), utc=True)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        while app.view().snapshot is not snapshot:
            await pilot.pause(0)
        await pilot.pause(0)
        svg = app.export_screenshot(title="agentguard tui")
    return (
        re.sub(r"@font-face \{.*?\}\n?\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace, Menlo, Consolas") + "\n"
    )


def picture(recording: Path | None = None) -> str:
    return asyncio.run(draw(snapshot_of(recording)))


if __name__ == "__main__":
    PICTURE.write_text(picture(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
