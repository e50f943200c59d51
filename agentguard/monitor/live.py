"""Opening a monitor: the sources that were asked for, each in a task of its own, or a recording or scenario that is played."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import httpx2

from agentguard.engines.http import http_client
from agentguard.errors import ActionRefusedError
from agentguard.monitor.clock import steady
from agentguard.monitor.feed import Feed
from agentguard.monitor.model import Model
from agentguard.monitor.options import DEFAULT_GATEWAY, Options
from agentguard.monitor.playback import Player, RecordingScript, Script, SimulatorScript
from agentguard.monitor.snapshot import Snapshot
from agentguard.monitor.sources import GatewaySource, MetricsSource, TailReader, _Source, act
from agentguard.tasks import owned_task

PATIENCE_S = 10.0
"""Besides the samples themselves, how long `wait` waits for sources that do not answer."""
Meter = Literal["steps", "tokens", "no_progress"]


class LiveMonitor:
    """Reads gateways and servers (see `monitor.Monitor`)."""

    def __init__(self, options: Options, feed: Feed, sources: list[_Source]) -> None:
        self.options = options
        self.feed = feed
        self._sources = {source.name: source for source in sources}
        self._clients: dict[str, httpx2.AsyncClient] = {}

    @property
    def model(self) -> Model:
        return self.feed.model

    def snapshot(self) -> Snapshot:
        recording = self.feed.recording
        return self.model.snapshot(recording=str(recording) if recording else None)

    async def wait(self, samples: int) -> Snapshot:
        return await _wait(self, samples, self.options.interval_s)

    def start_recording(self, path: Path) -> None:
        self.feed.start_recording(path)

    async def stop_recording(self) -> None:
        await self.feed.stop_recording()

    def set_interval(self, seconds: float) -> None:
        """A gateway's stream is opened anew with it after its next frame."""
        self.model.interval_s = seconds
        for source in self._sources.values():
            source.interval_s = seconds

    async def seek_to(self, t: float) -> None:
        """Nothing: the present cannot be moved."""

    def set_speed(self, speed: float) -> None:
        """Nothing, as with `seek_to`."""

    def set_paused(self, paused: bool) -> None:
        """Nothing: a screen that is paused just asks for no snapshot."""

    async def close_trace(self, session: str, request: str | None = None) -> str:
        """Of this running request of the session, and nothing once that one has ended; None: of all that run."""
        source, _, name = session.partition("|")
        which = {"session": name} if request is None else {"request": request}
        told = await self._act(source, "/agentguard/close", {**which, "why": "operator"})
        return f"closed {told.get('told', 0)} trace(s) of {name}"

    async def set_limit(self, session: str, meter: Meter, limit: int) -> str:
        source, _, name = session.partition("|")
        await self._act(source, "/agentguard/sessions/limit", {"session": name, "meter": meter, "limit": limit})
        return f"limit of {meter} of {name} is {limit} now"

    async def pin(self, engine: str, workload: str, arm: str, rule: str | None) -> str:
        await self._act(engine, "/agentguard/pin", {"workload": workload, "arm": arm, "rule": rule})
        return f"{arm} is pinned to {rule}" if rule else f"{arm} is left to the guard again"

    async def set_tts(self, engine: str, enabled: bool) -> str:
        await self._act(engine, "/agentguard/tts", {"enabled": enabled})
        return "TTS goes on" if enabled else "TTS is paused"

    async def _act(self, source: str, route: str, body: dict[str, object]) -> dict[str, object]:
        if self.options.readonly:
            raise ActionRefusedError("this monitor was started with --readonly")
        if not isinstance(self._sources.get(source), GatewaySource):
            raise ActionRefusedError(f"{source} is no gateway, so nothing can be done there")
        key = self.options.operator_key or self.options.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else None
        async with http_client(source, headers=headers, timeout=httpx2.Timeout(30.0)) as client:
            return await act(client, route, body)


class PlayedMonitor:
    """Plays a recording or a scenario (see `monitor.Monitor`)."""

    def __init__(self, options: Options, player: Player) -> None:
        self.options = options
        self.player = player
        self._moving: asyncio.Task[None] | None = None
        self._held: Snapshot | None = None
        """What is shown while it is moved."""

    def snapshot(self) -> Snapshot:
        if self._held is not None:
            return replace(self._held, playback=self.player.state())
        self.player.advance()
        script = self.player.script
        if self.options.content and isinstance(script, SimulatorScript):
            self.player.model.content["simulator"] = script.simulator.tails()
        return self.player.model.snapshot(playback=self.player.state())

    async def wait(self, samples: int) -> Snapshot:
        return await _wait(self, samples, self.options.interval_s)

    def start_recording(self, path: Path) -> None:
        raise ActionRefusedError("what is played is not recorded again")

    async def stop_recording(self) -> None:
        """Nothing is recorded."""

    def set_interval(self, seconds: float) -> None:
        """Nothing: what is played has its own times."""

    async def seek_to(self, t: float) -> None:
        if self._moving is None:
            self._held = self.snapshot()
            self.player.target_t = self.player.within(t)
            self._moving = asyncio.create_task(self._move(), name="seek")
        else:
            self.player.target_t, self.player.hurry = self.player.within(t), True
        await asyncio.shield(self._moving)

    async def _move(self) -> None:
        player = self.player
        try:
            while True:
                target, player.hurry = player.target_t, False
                if target is None:
                    return
                await asyncio.to_thread(player.seek, target)
                if not player.hurry:
                    return
        finally:
            self._held = self._moving = player.target_t = None
            player.hurry = False

    async def close(self) -> None:
        """Leave a `seek_to` that is under way; returns once its thread has ended."""
        if self._moving is not None:
            self.player.target_t, self.player.hurry = None, True
            await asyncio.gather(self._moving, return_exceptions=True)

    def set_speed(self, speed: float) -> None:
        self.player.set_speed(speed)

    def set_paused(self, paused: bool) -> None:
        self.player.set_paused(paused)

    async def close_trace(self, session: str, request: str | None = None) -> str:
        """As `LiveMonitor.close_trace`."""
        source, _, name = session.partition("|")
        running = next((row.running_request for row in self.snapshot().sessions if row.key == session), None)
        if request not in (None, running):
            raise ActionRefusedError("nothing there to act on: that trace has ended")
        if not self._script().simulator.close_trace(source, name):
            raise ActionRefusedError("nothing there to act on: no trace of it runs")
        return f"closed 1 trace(s) of {name}"

    async def set_limit(self, session: str, meter: Meter, limit: int) -> str:
        source, _, name = session.partition("|")
        if not self._script().simulator.set_limit(source, name, limit):
            raise ActionRefusedError("nothing there to act on: the session has ended")
        return f"limit of {meter} of {name} is {limit} now"

    async def pin(self, engine: str, workload: str, arm: str, rule: str | None) -> str:
        self._script().simulator.pin(engine, workload, arm, rule)
        return f"{arm} is pinned to {rule}" if rule else f"{arm} is left to the guard again"

    async def set_tts(self, engine: str, enabled: bool) -> str:
        self._script().simulator.set_tts(engine, enabled)
        return "TTS goes on" if enabled else "TTS is paused"

    def _script(self) -> SimulatorScript:
        if self.options.readonly:
            raise ActionRefusedError("this monitor was started with --readonly")
        if not isinstance(self.player.script, SimulatorScript):
            raise ActionRefusedError("a recording cannot be acted on")
        if self._moving is not None:
            raise ActionRefusedError("it is being moved to another time; try again once it is there")
        return self.player.script


@asynccontextmanager
async def open_monitor(
    options: Options, *, clock: Callable[[], float] | None = None
) -> AsyncIterator[LiveMonitor | PlayedMonitor]:  # fmt: skip
    """A monitor of what the options name; it reads until the block ends. Raises ConfigError."""
    clock = clock or steady()
    make = partial(_model, options)
    if options.replay is not None or options.demo is not None:
        played = PlayedMonitor(options, await asyncio.to_thread(_player, options, make, clock))
        try:
            yield played
        finally:
            await played.close()
        return
    model = make(clock)
    feed = Feed(model, clock)
    gateways = options.gateways or (() if options.metrics else (DEFAULT_GATEWAY,))
    sources: list[_Source] = [
        GatewaySource(url, feed, interval_s=options.interval_s, api_key=options.api_key) for url in dict.fromkeys(gateways)
    ]
    sources += [MetricsSource(url, feed, interval_s=options.interval_s) for url in dict.fromkeys(options.metrics)]
    async with AsyncExitStack() as stack:
        if options.record is not None:
            feed.start_recording(options.record)
        stack.push_async_callback(feed.stop_recording)
        for source in sources:
            kind: Literal["gateway", "metrics"] = "gateway" if isinstance(source, GatewaySource) else "metrics"
            model.add_source(source.name, kind, can_act=kind == "gateway")
            task = await stack.enter_async_context(owned_task(source.run(), f"source {source.name}"))
            task.add_done_callback(partial(_ended, feed, source.name))
            if options.content and isinstance(source, GatewaySource):
                tails = TailReader(source, options.operator_key or options.api_key)
                await stack.enter_async_context(owned_task(tails.run(), f"content of {source.name}"))
        yield LiveMonitor(options, feed, sources)


def _player(options: Options, make: Callable[[Callable[[], float]], Model], clock: Callable[[], float]) -> Player:
    script: Script
    if options.replay is not None:
        script = RecordingScript(options.replay)
    else:
        script = SimulatorScript(options.demo or "healthy", options.seed, clock())
    return Player(script, make, clock, options.speed)


def _model(options: Options, clock: Callable[[], float]) -> Model:
    return Model(clock=clock, window_s=options.window_s, interval_s=options.interval_s)


def _ended(feed: Feed, source: str, task: asyncio.Task[None]) -> None:
    """A source that ends has a fault of ours; it is shown where one looks, and raised when the monitor closes."""
    if not task.cancelled() and (error := task.exception()) is not None:
        feed.trouble(source, f"internal: {error!r}")


async def _wait(monitor: LiveMonitor | PlayedMonitor, samples: int, interval_s: float) -> Snapshot:
    deadline = time.monotonic() + samples * interval_s + PATIENCE_S
    while True:
        snapshot = monitor.snapshot()
        taken = snapshot.sources and all(row.samples >= samples or row.state == "down" for row in snapshot.sources)
        # a busy engine's metrics come a frame late, and a gateway asks for them once a second at most
        rates = samples < 2 or all(row.window_s or row.running is None or row.state == "down" for row in snapshot.engines)
        if taken and rates:
            return snapshot
        if time.monotonic() >= deadline:
            return snapshot
        await asyncio.sleep(min(0.1, interval_s))
