"""The monitor's model: events and scrapes go in, snapshots come out. Pure but for the clock, which is given; no task, no IO.

Times are the clock's: an event counts when it arrives, as clocks of other machines differ; only what is said to have happened
earlier (a session's past) does not count to the present window. The clock must not go back (`clock.steady`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentguard.economics.cells import CANCELLED
from agentguard.events import (
    CompactionAdvised,
    DraftUpdated,
    EconomicsReport,
    EngineDied,
    EngineMetrics,
    EngineReady,
    Event,
    OperatorActed,
    RoundSums,
    RuleSwitched,
    SessionAlarm,
    SessionSeen,
    StepFinished,
    StepsRunning,
    StepStarted,
    TraceClosed,
    TtsChanged,
    VerificationStep,
)
from agentguard.monitor import words
from agentguard.monitor.clock import steady
from agentguard.monitor.engines import EngineState
from agentguard.monitor.log import Log
from agentguard.monitor.sessions import SessionStates
from agentguard.monitor.snapshot import DOWN_S, STALE_S, Playback, SessionRow, Severity, Snapshot, SourceKind, SourceRow, State
from agentguard.monitor.verdict import verdict
from agentguard.telemetry.rounds import RoundCollector

SESSIONS_KEPT = 1000
POINT_S = 1.0
"""The shortest time between two points of the strip charts; a monitor that looks less often has one a look."""
_BAD_CLOSES = ("loop", "deadline", "session")


class _Source:
    def __init__(self, name: str, kind: SourceKind, can_act: bool, now: float) -> None:
        self.name, self.kind, self.can_act = name, kind, can_act
        self.opened_t = self.since_t = now
        self.seen_t: float | None = None
        self.error = ""
        self.retry_s: float | None = None
        self.dropped = 0
        self.state: State = "stale"
        self.samples = 0
        self.collector = RoundCollector()
        self.taken_t = now
        self.raw = False
        """Did it send single verification rounds since the last take?"""


class Model:
    """``interval_s``: between two words of a healthy source; a source is stale after 3 of them, at least `STALE_S`."""

    def __init__(
        self, *, clock: Callable[[], float] | None = None, window_s: float = 60.0, interval_s: float = 1.0,
        sessions_kept: int = SESSIONS_KEPT,
    ) -> None:  # fmt: skip
        self.clock = clock or steady()
        self.window_s = window_s
        self.interval_s = interval_s
        self.sources: dict[str, _Source] = {}
        self.engines: dict[str, EngineState] = {}
        self.sessions = SessionStates(sessions_kept)
        self.log = Log()
        self.content: dict[str, dict[str, str]] = {}
        """Latest words of running traces by source and request, where the operator asked for them and the gateway gives them."""
        self.skipped = 0
        """Events of kinds the monitor does not show."""
        self._number = 0
        self._take: dict[type, Callable[[_Source, Any, float], None]] = {
            EngineReady: self._ready,
            EngineDied: self._died,
            EngineMetrics: self._metrics,
            EconomicsReport: self._economics,
            StepStarted: self._started,
            StepFinished: self._finished,
            StepsRunning: self._running,
            SessionSeen: self._session_seen,
            TraceClosed: self._closed,
            CompactionAdvised: self._advised,
            SessionAlarm: self._session_alarm,
            RuleSwitched: self._switched,
            DraftUpdated: self._learned,
            TtsChanged: self._tts,
            VerificationStep: self._verified,
            RoundSums: self._rounds,
            OperatorActed: self._acted,
        }

    @property
    def stale_s(self) -> float:
        return max(STALE_S, 3 * self.interval_s)

    @property
    def down_s(self) -> float:
        return max(DOWN_S, 2 * self.stale_s)

    def held(self) -> dict[str, int]:
        """Objects kept, by part; none of them grows with the number of events."""
        return {
            "sources": len(self.sources),
            "engines": sum(engine.held() for engine in self.engines.values()),
            "sessions": self.sessions.held(),
            "log": len(self.log),
            "rounds": sum(source.collector.held() for source in self.sources.values()),
        }

    # -- sources -------------------------------------------------------------------------------------------------------------------

    def add_source(self, name: str, kind: SourceKind, *, can_act: bool = False) -> None:
        if name not in self.sources:
            self.sources[name] = _Source(name, kind, can_act, self.clock())

    def heard(self, source: str, *, sample: bool = False, dropped: int = 0) -> None:
        """It answers. ``sample``: with a whole interval's word."""
        one = self.sources[source]
        one.seen_t, one.error, one.retry_s = self.clock(), "", None
        one.samples += sample
        one.dropped += dropped

    def trouble(self, source: str, error: str, retry_s: float | None = None) -> None:
        """It does not answer, or not what was asked."""
        one = self.sources[source]
        one.error, one.retry_s = error, retry_s

    def take(self, source: str, event: Event) -> None:
        """One event of a source that was added. Raises nothing for an event it does not know."""
        one, now = self.sources[source], self.clock()
        one.seen_t, one.error, one.retry_s = now, "", None
        handler = self._take.get(type(event))
        if handler is None:
            self.skipped += 1
            return
        handler(one, event, now)

    def _engine(self, source: _Source, label: str = "") -> EngineState:
        """A gateway guards one engine, whatever the labels; a server's metrics are a row for each."""
        label = label if source.kind == "metrics" else ""
        key = f"{source.name}#{label}" if label else source.name
        engine = self.engines.get(key)
        if engine is None:
            engine = self.engines[key] = EngineState(
                key, source.name, label, self.window_s, self.clock(), measured_only=source.kind == "metrics"
            )  # fmt: skip
        return engine

    # -- events: engines -----------------------------------------------------------------------------------------------------------

    def _ready(self, source: _Source, event: EngineReady, now: float) -> None:
        engine = self._engine(source)
        fresh = engine.model != event.model or (bool(engine.died) and event.t >= engine.died_t)
        engine.model, engine.window_tokens, engine.has_steps = event.model, event.max_model_len, True
        engine.band = (event.f_min, event.f_max)
        engine.alive(now, event.t)
        if fresh:
            text = f"{words.model(event.model)} is ready, window {event.max_model_len} tokens"
            self.log.say(now, "info", "engine_ready", text, engine=engine.key)

    def _died(self, source: _Source, event: EngineDied, now: float) -> None:
        engine = self._engine(source)
        told = engine.died_t == event.t
        engine.died, engine.died_t = event.reason, event.t
        if told:
            return  # a gateway that is asked again says so again
        self.log.say(now, "alarm", "engine_died", f"engine {event.engine} ended: {event.reason}", engine=engine.key)

    def _metrics(self, source: _Source, event: EngineMetrics, now: float) -> None:
        if source.kind == "metrics" and not event.engine and not event.gauges:
            self._server_wide(source, event, now)
            return
        engine = self._engine(source, event.engine)
        if engine.measured(event, now):
            self.log.say(now, "warning", "restart", f"{self._name(engine)} began anew: its counters fell", engine=engine.key)

    def _server_wide(self, source: _Source, event: EngineMetrics, now: float) -> None:
        """What the server counts without an engine label, and a failed scrape, which is every engine's."""
        own = [engine for engine in self.engines.values() if engine.source == source.name]
        for engine in own:
            if event.error:
                engine.measured(event, now)
            elif len(own) == 1:
                engine.rejections.take(event)

    def _economics(self, source: _Source, event: EconomicsReport, now: float) -> None:
        self._engine(source).economics(event)

    def _verified(self, source: _Source, event: VerificationStep, now: float) -> None:
        source.collector.add(event)
        source.raw = True
        if now - source.taken_t >= 1.0:
            self._take_rounds(source, now)

    def _take_rounds(self, source: _Source, now: float) -> None:
        span, source.taken_t, source.raw = now - source.taken_t, now, False
        for sums in source.collector.take(now, span):
            self._rounds(source, sums, now)

    def _rounds(self, source: _Source, event: RoundSums, now: float) -> None:
        engine = self._engine(source)
        engine.alive(now, event.t - event.span_s)
        engine.spec.take(event, now)
        if event.lost:
            text = f"{event.lost} telemetry frames of {self._name(engine)} were lost"
            self.log.say(now, "warning", "lost", text, same="lost", engine=engine.key)

    def _switched(self, source: _Source, event: RuleSwitched, now: float) -> None:
        engine = self._engine(source)
        what = "back on" if event.on else "switched to strict"
        text = f"{words.rule(event.arm)} {what} in {event.workload}: {event.reason}"
        self.log.say(now, "good" if event.on else "warning", "rule_switched", text, engine=engine.key)

    def _learned(self, source: _Source, event: DraftUpdated, now: float) -> None:
        if self._engine(source).spec.learned(event):
            source.collector.see(event)

    def _tts(self, source: _Source, event: TtsChanged, now: float) -> None:
        engine = self._engine(source)
        if not engine.spec.learned(event):
            return
        source.collector.see(event)
        severity: Severity = "warning" if event.state in ("rolled_back", "off", "restarting", "skipped") else "info"
        text = f"TTS {event.state.replace('_', ' ')}: {event.reason}"
        self.log.say(now, severity, "tts_changed", text, same=event.state, engine=engine.key)

    def _acted(self, source: _Source, event: OperatorActed, now: float) -> None:
        text = f"operator: {event.detail} ({event.target})" if event.target else f"operator: {event.detail}"
        self.log.say(now, "info", "operator_acted", text, engine=self._engine(source).key)
        if event.action == "limit":
            self.sessions.raised(source.name, event.target)

    # -- events: sessions ----------------------------------------------------------------------------------------------------------

    def _started(self, source: _Source, event: StepStarted, now: float) -> None:
        source.collector.see(event)
        engine = self._engine(source)
        engine.model = engine.model or event.model
        self.sessions.started(source.name, event, now)

    def _finished(self, source: _Source, event: StepFinished, now: float) -> None:
        if event.undone:
            self.sessions.undone(source.name, event, now)
            return
        engine = self._engine(source)
        engine.step(event, now)
        if not event.error:
            engine.alive(now, event.t)
        entry = self.sessions.finished(source.name, event, now)
        engine.observed.take(event, entry.observed)
        if event.error and event.error != CANCELLED:
            text = f"{entry.id} step {event.step} failed: {event.error}"
            self.log.say(now, "warning", "step_failed", text, same=event.error, engine=engine.key, session=entry.key)
        for note in event.notes:
            text = f"{entry.id} step {event.step}: {str(note).replace('_', ' ')}"
            self.log.say(now, "info", "note", text, same=str(note), engine=engine.key, session=entry.key, request=event.request)

    def _running(self, source: _Source, event: StepsRunning, now: float) -> None:
        self.sessions.progress(source.name, event, now)

    def _session_seen(self, source: _Source, event: SessionSeen, now: float) -> None:
        self.sessions.seen(source.name, event, now)

    def _closed(self, source: _Source, event: TraceClosed, now: float) -> None:
        engine = self._engine(source)
        entry = self.sessions.closed(source.name, event, now)
        bad = event.reason in _BAD_CLOSES
        where = f"{event.think_tokens} of {event.cap} tokens ({event.reason}, by {event.how})"
        text = f"{entry.id} step {event.step}: trace closed at {where}"
        self.log.say(
            now, "warning" if bad else "info", "trace_closed", text, same=f"{event.reason} {entry.key if bad else ''}",
            engine=engine.key, session=entry.key, request=event.request,
        )  # fmt: skip

    def _advised(self, source: _Source, event: CompactionAdvised, now: float) -> None:
        self.sessions.advised(source.name, event, now)
        entry = self.sessions.entry(source.name, event.session, now)
        text = f"{entry.id}: context {event.context_tokens} of {event.window} tokens, compaction advised"
        self.log.say(
            now, "info", "compaction_advised", text, same=entry.key, engine=self._engine(source).key, session=entry.key,
            request=event.request,
        )  # fmt: skip

    def _session_alarm(self, source: _Source, event: SessionAlarm, now: float) -> None:
        if not self.sessions.alarmed(source.name, event, now):
            return
        entry = self.sessions.entry(source.name, event.session, now)
        what = "stopped" if event.stopped else "warned"
        text = f"{entry.id} {what}: {event.meter.replace('_', ' ')} {event.value} of {event.limit}"
        self.log.say(
            now, "alarm" if event.stopped else "warning", "session_alarm", text, same=f"{entry.key} {event.meter} {event.stopped}",
            engine=self._engine(source).key, session=entry.key,
        )  # fmt: skip

    # -- the snapshot --------------------------------------------------------------------------------------------------------------

    def snapshot(self, *, playback: Playback | None = None, recording: str | None = None) -> Snapshot:
        """What is known now; a `tick` too."""
        now = self.clock()
        self.tick()
        self._number += 1
        names = self._names()
        slots = {key: engine.rounds(now) for key, engine in self.engines.items()}
        engines = tuple(engine.row(names[key], now, slots[key]) for key, engine in self.engines.items())
        speculation = tuple(engine.speculation(now, slots[key]) for key, engine in self.engines.items())
        sources = tuple(self._source_row(source) for source in self.sources.values())
        sessions = self._session_rows()
        return Snapshot(
            number=self._number, t=now, verdict=verdict(sources, engines, sessions, speculation, now), sources=sources,
            engines=engines, series=tuple(engine.series(max(POINT_S, self.interval_s)) for engine in self.engines.values()),
            sessions=sessions,
            sessions_hidden=self.sessions.forgotten, speculation=speculation,
            arms=tuple(arm for engine in self.engines.values() for arm in engine.arms), events=self.log.lines(), playback=playback,
            recording=recording,
            content={request: tail for tails in self.content.values() for request, tail in tails.items()},
            window_s=self.window_s, samples=min((s.samples for s in self.sources.values()), default=0),
        )  # fmt: skip

    def tick(self) -> None:
        """The moment at which states are judged and the strip charts go on."""
        now = self.clock()
        for source in self.sources.values():
            if source.raw:
                self._take_rounds(source, now)
            self._judge_source(source, now)
        self._judge_engines(now)
        self.sessions.expire(now)
        self._judge_sessions(now)
        for engine in self.engines.values():
            engine.tick(now, POINT_S)

    def _judge_source(self, source: _Source, now: float) -> None:
        silent = now - (source.opened_t if source.seen_t is None else source.seen_t)
        state: State = "ok"
        if silent >= self.down_s or (source.error and silent >= self.stale_s):
            state = "down"
        elif silent >= self.stale_s or source.error or source.seen_t is None:
            state = "stale"
        if state == source.state:
            return
        first = source.seen_t is not None and source.state == "stale" and source.since_t == source.opened_t
        source.state, source.since_t = state, now
        if state == "ok":
            text = f"{source.name} answers" if first else f"{source.name} is back"
            self.log.say(now, "good", "source", text, same=f"{source.name} {'answers' if first else 'back'}")
        else:
            text = f"{source.name} is {state}: {source.error or f'nothing came for {silent:.0f} s'}"
            self.log.say(now, "alarm" if state == "down" else "warning", "source", text, same=f"{source.name} {state}")

    def _judge_engines(self, now: float) -> None:
        for engine in self.engines.values():
            source = self.sources[engine.source]
            before = engine.state
            why = source.error or f"nothing came for {now - (source.seen_t or source.opened_t):.0f} s"
            if not engine.judge(source.state, why, now, self.stale_s) or engine.state == source.state != "ok":
                continue
            name = self._name(engine)
            if engine.state != "ok":
                severity: Severity = "alarm" if engine.state == "down" else "warning"
                text = f"{name} is {engine.state}: {engine.why}"
                self.log.say(now, severity, "alarm", text, same=engine.state, engine=engine.key)
            elif before in ("slow", "down"):
                self.log.say(now, "good", "alarm", f"{name} is ok again", same="ok", engine=engine.key)

    def _judge_sessions(self, now: float) -> None:
        for entry in self.sessions.entries.values():
            engine = self.engines.get(entry.source)
            if entry.judge(engine.window_tokens if engine is not None else None, now) and entry.state in ("looping", "growing"):
                severity: Severity = "alarm" if entry.state == "looping" else "warning"
                text, same = f"{entry.id} is {entry.state}: {entry.why}", f"{entry.key} {entry.state}"
                self.log.say(now, severity, "alarm", text, same=same, engine=entry.source, session=entry.key)

    def _session_rows(self) -> tuple[SessionRow, ...]:
        rows = []
        for entry in self.sessions.entries.values():
            engine = self.engines.get(entry.source)
            band = engine.band if engine is not None else (0.80, 0.85)
            lost = self.sources[entry.source].state in ("stale", "down")
            rows.append(entry.row(entry.source, engine.window_tokens if engine is not None else None, band, lost))
        return tuple(rows)

    def _source_row(self, source: _Source) -> SourceRow:
        return SourceRow(
            source.name, source.kind, source.state, source.since_t, source.seen_t, source.error, source.retry_s, source.dropped,
            source.can_act, source.samples,
        )  # fmt: skip

    def _name(self, engine: EngineState) -> str:
        return self._names().get(engine.key, engine.key)

    def _names(self) -> dict[str, str]:
        """The model's name; where several engines have the same, with what tells them apart."""
        plain = {key: words.model(engine.model) if engine.model else engine.source for key, engine in self.engines.items()}
        alike: dict[str, int] = {}
        for name in plain.values():
            alike[name] = alike.get(name, 0) + 1
        return {key: name if alike[name] == 1 else f"{name} {_place(self.engines[key])}" for key, name in plain.items()}


def _place(engine: EngineState) -> str:
    where = engine.source.partition("://")[2] or engine.source
    return f"{where}#{engine.label}" if engine.label else where
