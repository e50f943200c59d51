"""The state of a gateway at intervals, for monitors: `GET /guard/v1/watch`.

A monitor of 500 sessions does not want 15,000 verification rows a second. It gets one frame an interval: sums of the rounds, the
steps that run, the economics, the engine's own metrics, and every other event as it was. The first frame tells the past that a
monitor would otherwise not know. Bounded: `WATCHERS` readers, `EVENTS` events a frame, `SESSIONS` sessions of the past.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator

import msgspec

from agentguard.economics.report import report
from agentguard.engines.base import Engine
from agentguard.errors import AgentGuardError, ConfigError, loggable
from agentguard.events import (
    EconomicsReport,
    EngineMetrics,
    Event,
    RunningStep,
    SessionAlarm,
    SessionSeen,
    StepsRunning,
    VerificationStep,
    WatchFrame,
    arm_reports,
)
from agentguard.middleware import Guard
from agentguard.session import Session
from agentguard.telemetry import exposition
from agentguard.telemetry.rounds import RoundCollector

logger = logging.getLogger(__name__)
WATCHERS = 16
EVENTS = 4096
SESSIONS = 500
SCRAPE_S = 1.0
ECONOMICS_S = 1.0
"""The shortest time between two scrapes of the engine, and two reports; several watchers share them."""
SHORTEST_S, LONGEST_S = 0.25, 10.0
PATIENCE_S = 0.25
"""How long a frame waits for the engine's metrics; they come with the next one then."""
_encode = msgspec.json.Encoder().encode


def interval_of(text: str | None) -> float:
    """The asked interval in seconds. Raises ConfigError."""
    try:
        seconds = float(text) if text is not None else 1.0
    except ValueError:
        seconds = float("nan")
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise ConfigError("interval", text, f"seconds from {SHORTEST_S:g} to {LONGEST_S:g}")
    return seconds


class Watch:
    """What the watchers of one gateway share."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.watchers = 0
        self._scrape = _Scrape(guard.engine)
        self._economics: tuple[float, EconomicsReport] | None = None

    def full(self) -> bool:
        return self.watchers >= WATCHERS

    async def frames(self, interval_s: float) -> AsyncIterator[bytes]:
        """Server-sent events, the first at once. Ends when it is closed."""
        guard = self.guard
        self.watchers += 1
        reader = _Reader()
        scrape: asyncio.Task[list[EngineMetrics]] | None = None
        told: list[EngineMetrics] = []
        try:
            with guard.hub.sink(reader.take):
                yield b": agentguard watch\n\n"
                past: list[Event] = list(self._past())
                for event in past:
                    reader.see(event)
                before = time.monotonic()
                due = before
                while True:
                    if scrape is None:
                        scrape = asyncio.create_task(self._scrape.events(), name="watch scrape")
                    # a busy engine answers late, and its frame must not
                    await asyncio.wait((scrape,), timeout=min(PATIENCE_S, interval_s / 2))
                    measured: list[EngineMetrics] = []
                    if scrape.done():
                        measured, scrape = scrape.result(), None
                        measured, told = ([] if measured is told else measured), measured
                    now = time.monotonic()
                    events, dropped = reader.drain(time.time(), now - before)
                    before = now
                    frame = WatchFrame(
                        t=time.time(), interval_s=interval_s, dropped=dropped,
                        events=[*past, *events, *measured, self._report(now), self._running()],
                    )  # fmt: skip
                    past = []
                    yield b"data: " + _encode(frame) + b"\n\n"
                    due = max(due + interval_s, time.monotonic())
                    await asyncio.sleep(due - time.monotonic())
        finally:
            self.watchers -= 1
            if scrape is not None:
                scrape.cancel()
                await asyncio.gather(scrape, return_exceptions=True)

    def _past(self) -> Iterator[Event]:
        guard = self.guard
        ready = guard.ready()
        # what is known of an engine that is gone is of before it went
        yield ready if guard.died is None else msgspec.structs.replace(ready, t=guard.died.t - 0.001)
        yield from sorted(guard.learning.values(), key=lambda event: event.t)
        if guard.died is not None:
            yield guard.died
        for session in itertools.islice(reversed(list(guard.sessions)), SESSIONS):
            if session.latest:
                yield _seen(session)
                for alarm in session.alarms(guard.policy.limits):
                    yield SessionAlarm(
                        t=time.time(), session=str(session.identity), step=session.steps_started, meter=alarm.meter,
                        value=alarm.value, limit=alarm.limit, stopped=alarm.stop,
                    )  # fmt: skip

    def _report(self, now: float) -> EconomicsReport:
        if self._economics is None or now - self._economics[0] >= ECONOMICS_S:
            rows = arm_reports(report(self.guard.ledger)["rows"])
            self._economics = (now, EconomicsReport(t=time.time(), rows=rows))
        return self._economics[1]

    def _running(self) -> StepsRunning:
        steps = []
        for request, (_, step) in self.guard.running.items():
            begun, tally = self.guard.begun[request], step.reading.tally
            steps.append(
                RunningStep(
                    session=begun.session, step=begun.step, request=request, think_tokens=tally.think, answer_tokens=tally.answer,
                    inside=tally.inside, rule=begun.rule, prompt_tokens=begun.prompt_tokens, budget=begun.budget,
                    think_cap=step.controller.cap.think_cap, bound_by=begun.bound_by, arm=begun.arm, workload=begun.workload,
                    started=begun.t,
                )
            )  # fmt: skip
        return StepsRunning(t=time.time(), steps=steps)


class _Reader:
    """What one watcher has not been told yet."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._rounds = RoundCollector()
        self._dropped = 0

    def take(self, event: Event) -> None:
        if isinstance(event, VerificationStep):
            self._rounds.add(event)
            return
        self._rounds.see(event)
        if len(self._events) < EVENTS:
            self._events.append(event)
        else:
            self._dropped += 1

    def see(self, past: Event) -> None:
        """What the sums of rounds depend on, of before."""
        self._rounds.see(past)

    def drain(self, t: float, span_s: float) -> tuple[list[Event], int]:
        events, self._events = self._events, []
        dropped, self._dropped = self._dropped, 0
        return [*events, *self._rounds.take(t, span_s)], dropped


class _Scrape:
    """The engine's own metrics, asked for at most once in `SCRAPE_S` however many watch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._at = float("-inf")
        self._latest: list[EngineMetrics] = []

    async def events(self) -> list[EngineMetrics]:
        async with self._lock:
            if time.monotonic() - self._at >= SCRAPE_S * 0.9:
                self._latest = await self._ask()
                self._at = time.monotonic()
            return self._latest

    async def _ask(self) -> list[EngineMetrics]:
        try:
            text = await self._engine.metrics()
            return [] if text is None else await asyncio.to_thread(exposition.read, text, time.time())
        except AgentGuardError as error:
            return [EngineMetrics(t=time.time(), engine="", error=str(error))]
        except Exception as error:  # a server's text, or its encoding; the watchers' streams go on
            logger.warning("metrics_unreadable", extra={"error": loggable(error)})
            return []


def _seen(session: Session) -> SessionSeen:
    return SessionSeen(
        t=time.time(), session=str(session.identity), steps=session.steps_started, tokens=session.tokens,
        think_tokens=session.think_tokens, closes=session.closes, latest=session.latest,
    )  # fmt: skip
