"""Recordings: events as JSON, one a line, and reading them back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentguard.errors import ConfigError, loggable
from agentguard.events import Event, VerificationStep, decode_json, encode_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agentguard.telemetry.hub import Hub

logger = logging.getLogger(__name__)
FLUSH_S = 0.2
TELEMETRY_BACKLOG = 20_000
"""Lines waiting for the disk above which verification frames are dropped (and counted); accounts are always kept."""


class Recorder:
    """Collects lines on the loop and writes them from a thread. After a failed write it keeps nothing more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self.failure: Exception | None = None
        self._lines: list[bytes] = []

    def take(self, event: Event) -> None:
        """The sink: keeps the event for the next write; telemetry beyond the backlog is dropped and counted."""
        if self.failure is not None:
            return
        if isinstance(event, VerificationStep) and len(self._lines) >= TELEMETRY_BACKLOG:
            self.dropped += 1
            return
        self._lines.append(encode_json(event))

    async def flush_until(self, stop: asyncio.Event) -> None:
        """Write every `FLUSH_S` seconds, and once more after ``stop``. Never cancelled in the middle of a write."""
        while self.failure is None:
            stopping = stop.is_set()
            lines, self._lines = self._lines, []
            try:
                await asyncio.to_thread(self._write, lines)
            except Exception as error:  # told at once: the end may be days away
                self.failure, self._lines = error, []
                logger.error("recording_failed", extra={"path": str(self.path), "error": _why(error)})
            if stopping:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), FLUSH_S)

    def _write(self, lines: list[bytes]) -> None:
        with self.path.open("ab") as file:
            file.writelines(line + b"\n" for line in lines)


@asynccontextmanager
async def record(hub: Hub, path: Path) -> AsyncIterator[Recorder]:
    """Record everything published while the block runs into a new file, complete when the block has ended.

    Raises ConfigError for a path that cannot be written: at the start, or at the end when a later write failed.
    """
    try:
        await asyncio.to_thread(path.write_bytes, b"")
    except OSError as error:
        raise _unwritable(path, error) from None
    recorder, stop = Recorder(path), asyncio.Event()
    with hub.sink(recorder.take):
        task = asyncio.create_task(recorder.flush_until(stop), name="recorder")
        try:
            yield recorder
        finally:
            stop.set()
            await asyncio.shield(task)
    if recorder.failure is not None:
        raise _unwritable(path, recorder.failure)


def _unwritable(path: Path, error: Exception) -> ConfigError:
    return ConfigError("events", str(path), f"cannot be written ({_why(error)}); choose another file")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or loggable(error)


def replay(path: Path) -> Iterator[Event]:
    """The events of a recording. Raises ConfigError naming the line that is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield decode_json(line)
            except ValueError as error:
                raise ConfigError(f"{path.name}:{number}", line[:80], f"is not an event ({error})") from None
