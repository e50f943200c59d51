"""What sources hand their events to: the model, and a recording while one is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from agentguard.errors import AgentGuardError, ConfigError
from agentguard.events import Event, FromSource
from agentguard.monitor.model import Model
from agentguard.tasks import tell_failure
from agentguard.telemetry.hub import Hub
from agentguard.telemetry.recorder import record

MARK_S = 0.05
"""What comes from one source within this time bears one mark, in a recording."""


class Feed:
    """Every word of every source goes through here, so that a recording holds what was shown, from whom it came and when."""

    def __init__(self, model: Model, clock: Callable[[], float] | None = None) -> None:
        """``clock``: the model's own if none is given."""
        self.model = model
        self.clock = clock or model.clock
        self._hub = Hub()
        self._marked = ""
        self._marked_t = 0.0
        self._down: set[str] = set()
        self._early: list[Event] | None = None
        """What came before the file was open; None once it is."""
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self.recording: Path | None = None

    def take(self, source: str, events: Iterable[Event], *, sample: bool = False, dropped: int = 0) -> None:
        """``sample``: the events are a whole interval's."""
        self.model.heard(source, sample=sample, dropped=dropped)
        if source in self._down:
            self._down.discard(source)
            self._mark(source)
        if self.recording is not None and (self._marked != source or self.clock() - self._marked_t >= MARK_S):
            self._mark(source)
        for event in events:
            self.model.take(source, event)
            if self.recording is not None:
                self._record_one(event)

    def trouble(self, source: str, error: str, retry_s: float | None = None) -> None:
        self.model.trouble(source, error, retry_s)
        if source not in self._down:
            self._down.add(source)
            self._mark(source, error)

    def _mark(self, source: str, error: str = "") -> None:
        self._marked, self._marked_t = source, self.clock()
        if self.recording is not None:
            kind, state = self.model.sources[source].kind, "down" if error else "ok"
            self._record_one(FromSource(t=self._marked_t, source=source, kind=kind, state=state, error=error, arrived=True))

    def _record_one(self, event: Event) -> None:
        if self._early is None:
            self._hub.publish(event)
        else:
            self._early.append(event)

    def start_recording(self, path: Path) -> None:
        """Raises ConfigError while another one is made. A file that cannot be written is told in the event log."""
        if self.recording is not None:
            raise ConfigError("record", str(path), f"{self.recording} is being written; stop that first")
        self.recording, self._marked, self._early, self._stop = path, "", [], asyncio.Event()
        self._task = asyncio.create_task(self._record(path, self._stop), name="monitor recording")
        self._task.add_done_callback(tell_failure)

    async def _record(self, path: Path, stop: asyncio.Event) -> None:
        try:
            async with record(self._hub, path):
                early, self._early = self._early or [], None
                for event in early:
                    self._hub.publish(event)
                await stop.wait()
        except AgentGuardError as error:
            self.model.log.say(self.clock(), "alarm", "recording", str(error))
        finally:
            self.recording = self._early = None

    async def stop_recording(self) -> None:
        """Returns once the file is complete."""
        if self._stop is not None and self._task is not None:
            self._stop.set()
            await asyncio.gather(self._task, return_exceptions=True)
            self._stop = self._task = None
