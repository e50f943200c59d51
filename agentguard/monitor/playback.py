"""Recordings and the simulator, played into a model at any speed: pause, seek, faster, slower."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from agentguard.errors import ConfigError
from agentguard.events import Event, FromSource
from agentguard.monitor.model import Model
from agentguard.monitor.simulator import Simulator
from agentguard.monitor.snapshot import Playback, SourceKind
from agentguard.telemetry.recorder import replay

POINTS_S = 700.0
"""Seconds before the target for which the strip charts are made when seeking; they show 600."""
SLOWEST, FASTEST = 0.1, 100.0


class Script(Protocol):
    """Something that can be played: what happened up to a time, from the beginning on."""

    kind: SourceKind
    start_t: float
    end_t: float

    def restart(self) -> None: ...

    def advance(self, t: float) -> Iterable[tuple[float, str, Event]]:
        """What happened since the last call and up to ``t``: when, the source that told it, and what."""
        ...


class RecordingScript:
    """A recording, read line by line as it is played; only the first pass reads it whole, for its times. Raises ConfigError for a
    file that cannot be read, is empty, or holds a line that is no event."""

    kind: SourceKind = "recording"

    def __init__(self, path: Path) -> None:
        self.path = path
        times = [math.inf, -math.inf]
        for t, _, _ in self._dated():
            times = [min(times[0], t), max(times[1], t)]
        if times[0] > times[1]:
            raise ConfigError("replay", str(path), "holds no event; give a file of --record or of a study's --events")
        self.start_t, self.end_t = times
        self.restart()

    def _events(self) -> Iterator[Event]:
        try:
            yield from replay(self.path)
        except OSError as error:
            raise ConfigError("replay", str(self.path), f"cannot be read ({error.strerror}); give a recording") from None

    def _dated(self) -> Iterator[tuple[float, str, Event]]:
        """With the time at which each came, which is its own only where the recording does not say when it came."""
        source, arrived = self.path.name, False
        t = 0.0
        for event in self._events():
            if isinstance(event, FromSource):
                source, arrived, t = event.source, event.arrived, event.t
            yield t if arrived else event.t, source, event

    def restart(self) -> None:
        self._reader = self._dated()
        self._held: tuple[float, str, Event] | None = None

    def advance(self, t: float) -> Iterator[tuple[float, str, Event]]:
        while True:
            found = self._held if self._held is not None else next(self._reader, None)
            self._held = None
            if found is None:
                return
            if found[0] > t:
                self._held = found
                return
            yield found


class SimulatorScript:
    """A scenario, without an end."""

    kind: SourceKind = "simulator"

    def __init__(self, scenario: str, seed: int, start_t: float) -> None:
        self._scenario, self._seed, self.start_t, self.end_t = scenario, seed, start_t, math.inf
        self.restart()

    def restart(self) -> None:
        self.simulator = Simulator(self._scenario, seed=self._seed, start=self.start_t)

    def advance(self, t: float) -> Iterable[tuple[float, str, Event]]:
        return ((event.t, source, event) for source, event in self.simulator.advance(t))


class Player:
    """Plays a script into a model whose clock it sets. ``wall`` is the time of the one who watches."""

    def __init__(self, script: Script, make: Callable[[Callable[[], float]], Model], wall: Callable[[], float], speed: float = 1.0):
        self.script = script
        self.speed = speed
        self.paused = False
        self._make, self._wall = make, wall
        self._wall_t = wall()
        self.at_t = self._cursor_t = script.start_t
        self.model = make(self.now)
        self.target_t: float | None = None
        """Where it is being moved to while that takes a thread: then nothing else may play, and this is where it stands."""
        self.hurry = False
        """Leave what is being played, as another time was asked for."""
        self._sampled = 0
        self._play(script.start_t)

    def now(self) -> float:
        return self._cursor_t

    def state(self) -> Playback:
        at = self.at_t if self.target_t is None else self.target_t
        return Playback(self.script.start_t, self.script.end_t, at, self.speed, self.paused, at >= self.script.end_t)

    def advance(self) -> None:
        """Play what the passed time asks for; nothing while it is moved."""
        if self.target_t is not None:
            return
        wall = self._wall()
        passed, self._wall_t = wall - self._wall_t, wall
        if not self.paused:
            self._play(min(self.script.end_t, self.at_t + max(0.0, passed) * self.speed))

    def set_speed(self, speed: float) -> None:
        self.advance()
        self.speed = min(FASTEST, max(SLOWEST, speed))

    def set_paused(self, paused: bool) -> None:
        self.advance()
        self.paused = paused

    def seek(self, t: float) -> None:
        """Go to a time. Backwards everything is played again from the beginning, as sums cannot be taken apart: of ten minutes of
        single rounds that takes seconds."""
        t = self.within(t)
        if t < self.at_t:
            self.script.restart()
            self.at_t = self._cursor_t = self.script.start_t
            self._sampled = 0
            self.model = self._make(self.now)
        self._play(t)
        self._wall_t = self._wall()

    def within(self, t: float) -> float:
        return min(self.script.end_t, max(self.script.start_t, t))

    def _play(self, t: float) -> None:
        second = math.floor(self.at_t) + 1.0
        while second <= t:
            if self.hurry:
                return
            self._take(second)
            self.at_t = second
            if t - second <= POINTS_S:
                self.model.tick()
            second += 1.0
        self._take(t)
        self.at_t = t

    def _take(self, t: float) -> None:
        model = self.model
        for at, source, event in self.script.advance(t):
            self._cursor_t = max(self._cursor_t, at)
            model.add_source(source, self._kind(event), can_act=self.script.kind == "simulator")
            if isinstance(event, FromSource):
                if event.error:
                    model.trouble(source, event.error)
                else:
                    model.heard(source)
            else:
                model.take(source, event)
        self._cursor_t = max(self._cursor_t, t)
        seconds = math.floor(t - self.script.start_t)
        sample, self._sampled = seconds > self._sampled, seconds
        for name, source_state in model.sources.items():
            if not source_state.error:
                model.heard(name, sample=sample)

    def _kind(self, event: Event) -> SourceKind:
        if isinstance(event, FromSource) and self.script.kind == "recording":
            known: tuple[SourceKind, ...] = ("gateway", "metrics")
            return next((kind for kind in known if kind == event.kind), "recording")
        return self.script.kind
