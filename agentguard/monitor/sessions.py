"""The agent sessions of all sources: their steps, what runs, and what is wrong with them. Bounded by number and by idleness."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict, deque
from dataclasses import replace

from agentguard.economics.cells import CANCELLED, SessionSums
from agentguard.events import (
    CompactionAdvised,
    Note,
    RunningStep,
    SessionAlarm,
    SessionSeen,
    StepFinished,
    StepsRunning,
    StepStarted,
    TraceClosed,
)
from agentguard.monitor.alarms import CONTEXT_SHARE, GROWTH_SHARE, Alarm
from agentguard.monitor.snapshot import BARS, Phase, SessionRow, SessionState, StepBar
from agentguard.trace.cutoff import growth_pressure

IDLE_S = 1800.0
"""A session without a step for so long is forgotten."""
_CALLER = re.compile(r"([0-9a-f]{12})/(.+)", re.DOTALL)
_FRUITLESS = (Note.EMPTY_ANSWER, Note.IDENTICAL_RETRY)


class SessionEntry:
    """One session. Everything that is shown is kept as it comes; ``row`` is made again only after a change."""

    def __init__(self, key: str, source: str, session: str, t: float) -> None:
        self.key, self.source = key, source
        caller = _CALLER.fullmatch(session)
        self.caller: str | None = caller[1] if caller else None
        self.id: str = caller[2] if caller else session
        self.session = session
        self.model: str | None = None
        self.arm = self.workload = ""
        self.last_t = self.since_t = t
        self.steps = self.tokens = self.think_total = self.closes = 0
        self.bars: deque[StepBar] = deque(maxlen=BARS)
        self.running: dict[str, StepBar] = {}
        self.phases: dict[str, Phase] = {}
        self.missing: set[str] = set()
        self.context: int | None = None
        self.compact = False
        self.alarm: SessionAlarm | None = None
        self.warned: dict[str, tuple[int, bool]] = {}
        """Limit, and whether it was stopped there, by meter: what was told of it."""
        self.error = ""
        self.observed: dict[str, SessionSums] = {}
        """Its sums by rule, for `observed.Observed`."""
        self.filling, self.growing = Alarm(CONTEXT_SHARE), Alarm(GROWTH_SHARE)
        self.state: SessionState = "idle"
        self.why = ""
        self._judged: tuple[int | None] | None = None
        """The window it was judged with; None after a change."""
        self._row: SessionRow | None = None
        self._frame: tuple[object, ...] = ()

    def held(self) -> int:
        return 1 + len(self.bars) + len(self.running)

    def touch(self, t: float) -> None:
        self.last_t = max(self.last_t, t)
        self._row = self._judged = None

    def row(self, engine: str, limit: int | None, band: tuple[float, float], lost: bool) -> SessionRow:
        frame = (engine, limit, band, lost)
        if self._row is None or self._frame != frame:
            self._frame, self._row = frame, self._made(engine, limit, band, lost)
        return self._row

    def _made(self, engine: str, limit: int | None, band: tuple[float, float], lost: bool) -> SessionRow:
        latest = next(reversed(self.running.values()), None)
        used = self.context
        if latest is not None:
            used = latest.prompt_tokens + latest.think_tokens + latest.answer_tokens
        return SessionRow(
            key=self.key, id=self.id, caller=self.caller, source=self.source, engine=engine, model=self.model, arm=self.arm,
            workload=self.workload, state="lost" if lost else self.state, why="its source is gone" if lost else self.why,
            since_t=self.since_t, last_t=self.last_t, steps=self.steps,
            phase=self.phases.get(latest.request) if latest is not None else "idle",
            running_request=latest.request if latest is not None else None, context_used=used, context_limit=limit,
            band_low=None if limit is None else int(band[0] * limit), band_high=None if limit is None else int(band[1] * limit),
            think_tokens=latest.think_tokens if latest is not None and latest.request in self.phases else None,
            think_cap=latest.cap if latest is not None else None, tokens=self.tokens, think_tokens_total=self.think_total,
            closes=self.closes, bars=(*self.bars, *self.running.values())[-BARS:],
        )  # fmt: skip

    def judge(self, limit: int | None, now: float) -> bool:
        """Work out the state after a change; returns whether it is another one."""
        if self._judged == (limit,):
            return False
        self._judged = (limit,)
        ended = [bar for bar in self.bars if not bar.error]
        share = None if limit is None or self.context is None else self.context / limit
        self.filling.update(share, now)
        if len(ended) >= 4:
            self.growing.update(_growth([bar.think_tokens for bar in ended][-12:], self.growing.on), now)
        found: tuple[SessionState, str] = ("running", "") if self.running else ("idle", "")
        looped = [bar for bar in ended[-3:] if bar.closed == "loop" or any(note in _FRUITLESS for note in bar.notes)]
        alarm = self.alarm
        if alarm is not None and alarm.stopped:
            found = "stopped", f"{alarm.meter} is {alarm.value} of {alarm.limit}"
        elif self.error:
            found = "failed", self.error
        elif (len(looped) >= 2 and looped[-1] is ended[-1]) or (alarm is not None and alarm.meter == "no_progress"):
            found = "looping", f"{len(looped)} of the latest {len(ended[-3:])} steps looped or brought nothing"
        elif self.growing.on or alarm is not None:
            found = "growing", self._growth(ended)
        elif self.filling.on or self.compact:
            found = "filling", f"context {share:.0%} of its window" if share is not None else "its context should be compacted"
        changed = found[0] != self.state
        if found != (self.state, self.why):
            self._row = None
        self.since_t = now if changed else self.since_t
        self.state, self.why = found
        return changed

    def _growth(self, ended: list[StepBar]) -> str:
        if self.alarm is not None:
            return f"{self.alarm.meter} is {self.alarm.value} of {self.alarm.limit}"
        return "traces grow: " + " → ".join(str(bar.think_tokens) for bar in ended[-3:]) + " tokens"


class SessionStates:
    """``kept``: sessions at most; the one that was idle longest goes first."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.forgotten = 0
        self.entries: dict[str, SessionEntry] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self.by_request: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Running requests: the session's key and the step."""

    def held(self) -> int:
        return sum(entry.held() for entry in self.entries.values()) + len(self._recent) + len(self.by_request)

    def entry(self, source: str, session: str, t: float) -> SessionEntry:
        key = f"{source}|{session}"
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = SessionEntry(key, source, session, t)
        self._recent[key] = None
        self._recent.move_to_end(key)
        while len(self.entries) > self.kept:
            self._forget(next(iter(self._recent)))
        return entry

    def _forget(self, key: str) -> None:
        self._recent.pop(key, None)
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.forgotten += 1
            for request in entry.running:
                self.by_request.pop(request, None)

    def expire(self, now: float) -> None:
        while self._recent:
            oldest = self.entries[next(iter(self._recent))]
            if now - oldest.last_t < IDLE_S:
                return
            self._forget(oldest.key)

    def started(self, source: str, event: StepStarted, t: float) -> SessionEntry:
        entry = self.entry(source, event.session, t)
        entry.touch(t)
        entry.model, entry.arm, entry.workload = event.model, event.arm, event.workload
        entry.steps = max(entry.steps, event.step)
        entry.context, entry.error = event.prompt_tokens, ""
        if entry.alarm is not None and entry.alarm.stopped:
            entry.alarm = None  # it goes on, so an operator has raised its limit
        entry.running[event.request] = StepBar(
            event.step, event.request, event.rule, event.prompt_tokens, 0, 0,
            None if event.bound_by == "off" else event.think_cap, event.budget, event.bound_by, "", False,
        )  # fmt: skip
        self.by_request[event.request] = (entry.key, event.step)
        while len(self.by_request) > 4 * self.kept:
            request, (key, _) = self.by_request.popitem(last=False)
            if key in self.entries:
                self.entries[key].running.pop(request, None)
        return entry

    def finished(self, source: str, event: StepFinished, t: float, *, seen: bool = False) -> SessionEntry:
        """``seen``: the step is of a session's past, and its sums already know it."""
        entry = self.entry(source, event.session, t)
        if any(bar.request == event.request for bar in entry.bars):
            return entry
        entry.touch(t)
        entry.model, entry.workload = event.model, event.workload or entry.workload
        entry.arm = event.arm or entry.arm
        before = entry.running.pop(event.request, None)
        entry.phases.pop(event.request, None)
        entry.missing.discard(event.request)
        self.by_request.pop(event.request, None)
        rounds, accepted = event.rounds, event.accepted
        entry.bars.append(
            StepBar(
                event.step, event.request, event.rule, event.prompt_tokens, event.think_tokens, event.answer_tokens,
                before.cap if before else None, before.budget if before else None, before.bound_by if before else "", event.closed,
                True, event.error, event.ttlt_s, accepted / rounds if rounds and accepted is not None else None,
                tuple(map(str, event.notes)), event.estimated,
            )
        )  # fmt: skip
        entry.steps = max(entry.steps, event.step)
        entry.context = event.prompt_tokens + event.tokens
        entry.error = "" if event.error == CANCELLED else event.error
        entry.compact = False
        if not seen:
            entry.tokens += event.tokens
            entry.think_total += event.think_tokens
            entry.closes += bool(event.closed)
        if entry.alarm is not None and entry.alarm.meter == "no_progress" and not event.error and not _fruitless(event):
            entry.alarm = None
        return entry

    def undone(self, source: str, event: StepFinished, t: float) -> None:
        """The guard asks again with a lower limit: what had begun was no step."""
        entry = self.entry(source, event.session, t)
        entry.touch(t)
        entry.running.pop(event.request, None)
        entry.phases.pop(event.request, None)
        entry.missing.discard(event.request)
        self.by_request.pop(event.request, None)

    def seen(self, source: str, event: SessionSeen, t: float) -> SessionEntry:
        ended = max((step.t for step in event.latest), default=event.t)
        entry = self.entry(source, event.session, t - max(0.0, event.t - ended))
        for step in event.latest:
            self.finished(source, step, t - max(0.0, event.t - step.t), seen=True)
        entry.steps, entry.tokens = event.steps, event.tokens
        entry.think_total, entry.closes = event.think_tokens, event.closes
        return entry

    def closed(self, source: str, event: TraceClosed, t: float) -> SessionEntry:
        entry = self.entry(source, event.session, t)
        entry.touch(t)
        bar = entry.running.get(event.request)
        if bar is not None:
            entry.running[event.request] = replace(
                bar, think_tokens=event.think_tokens, closed=event.reason, cap=event.cap if bar.cap is None else bar.cap
            )
            entry.phases[event.request] = "answering"
        return entry

    def advised(self, source: str, event: CompactionAdvised, t: float) -> None:
        entry = self.entry(source, event.session, t)
        entry.touch(t)
        entry.context, entry.compact = event.context_tokens, True

    def alarmed(self, source: str, event: SessionAlarm, t: float) -> bool:
        """Returns whether it is news. A gateway tells each once, and again to a reader that comes again, of a session that may have
        ended long ago; so it is no sign of life."""
        entry = self.entry(source, event.session, t)
        entry.touch(entry.last_t)
        entry.alarm = event
        news = entry.warned.get(event.meter) != (event.limit, event.stopped)
        entry.warned[event.meter] = event.limit, event.stopped
        return news

    def raised(self, source: str, session: str) -> None:
        entry = self.entries.get(f"{source}|{session}")
        if entry is not None:
            entry.alarm = None
            entry.warned.clear()
            entry.touch(entry.last_t)

    def progress(self, source: str, event: StepsRunning, t: float) -> None:
        """A step that two lists in a row do not name has ended without our hearing of it."""
        named: set[str] = set()
        for step in event.steps:
            named.add(step.request)
            self._progressed(source, step, t)
        for request, (key, _) in list(self.by_request.items()):
            entry = self.entries.get(key)
            if entry is None or entry.source != source:
                continue
            if request in named:
                entry.missing.discard(request)
            elif request in entry.missing:
                entry.missing.discard(request)
                entry.running.pop(request, None)
                entry.phases.pop(request, None)
                self.by_request.pop(request, None)
                entry.touch(entry.last_t)
            else:
                entry.missing.add(request)

    def _progressed(self, source: str, step: RunningStep, t: float) -> None:
        entry = self.entry(source, step.session, t)
        bar = entry.running.get(step.request)
        if bar is None:
            if any(one.request == step.request for one in entry.bars):
                return  # its end came first
            entry.arm, entry.workload = step.arm or entry.arm, step.workload or entry.workload
            entry.steps = max(entry.steps, step.step)
            bar = StepBar(
                step.step, step.request, step.rule, step.prompt_tokens, 0, 0,
                None if step.bound_by in ("", "off") else step.think_cap, step.budget or None, step.bound_by, "", False,
            )  # fmt: skip
            self.by_request[step.request] = (entry.key, step.step)
        elif (bar.think_tokens, bar.answer_tokens) == (step.think_tokens, step.answer_tokens) and step.request in entry.phases:
            return
        entry.touch(t)
        entry.running[step.request] = replace(bar, think_tokens=step.think_tokens, answer_tokens=step.answer_tokens)
        generated = step.think_tokens + step.answer_tokens
        entry.phases[step.request] = "queued" if not generated else "thinking" if step.inside else "answering"


def _growth(traces: list[int], on: bool) -> float:
    """The growth pressure; one long trace is no trend, so it begins only after three that each were longer than the one before."""
    pressure = growth_pressure(traces)
    rising = all(before < after for before, after in itertools.pairwise(traces[-4:]))
    return pressure if on or rising else min(pressure, 0.9 * GROWTH_SHARE.on)


def _fruitless(event: StepFinished) -> bool:
    return event.closed == "loop" or any(note in _FRUITLESS for note in event.notes)
