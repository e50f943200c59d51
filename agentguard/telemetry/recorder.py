"""Recordings: events as JSON, one a line, and reading them back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentguard.errors import ConfigError
from agentguard.events import Event, VerificationStep, decode_json, encode_json
from agentguard.tasks import owned_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agentguard.telemetry.hub import Hub

FLUSH_S = 0.2
TELEMETRY_BACKLOG = 20_000
"""Lines waiting for the disk above which verification frames are dropped (and counted); accounts are always kept."""


class Recorder:
    """Collects lines on the loop and writes them from a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._lines: list[bytes] = []

    def take(self, event: Event) -> None:
        if isinstance(event, VerificationStep) and len(self._lines) >= TELEMETRY_BACKLOG:
            self.dropped += 1
            return
        self._lines.append(encode_json(event))

    async def flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            await asyncio.to_thread(self._write, lines)

    def _write(self, lines: list[bytes]) -> None:
        with self.path.open("ab") as file:
            file.writelines(line + b"\n" for line in lines)


@asynccontextmanager
async def record(hub: Hub, path: Path) -> AsyncIterator[Recorder]:
    """Record everything published while the block runs into a new file. A write error ends the block."""
    await asyncio.to_thread(path.write_bytes, b"")
    recorder = Recorder(path)

    async def keep_flushing() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await recorder.flush()

    with hub.sink(recorder.take):
        async with owned_task(keep_flushing(), "recorder"):
            yield recorder
    await recorder.flush()


def replay(path: Path) -> Iterator[Event]:
    """The events of a recording. Raises ConfigError naming the line that is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield decode_json(line)
            except ValueError as error:
                raise ConfigError(f"{path.name}:{number}", line[:80], f"is not an event ({error})") from None
