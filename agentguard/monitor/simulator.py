"""A gateway that is not there: sessions, engines and their troubles by scenario, as the real event types.

For `agentguard tui --demo` and for tests. Everything follows from the seed and the time given; what is said of the arms is worked
out by the real ledger from the steps that are made up here.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentguard.economics.arms import STRICT, Arms
from agentguard.economics.cells import SessionSums
from agentguard.economics.ledger import Assignment, Ledger
from agentguard.economics.report import report
from agentguard.errors import ConfigError, nearest
from agentguard.events import (
    DraftRows,
    DraftUpdated,
    EconomicsReport,
    EngineDied,
    EngineMetrics,
    EngineReady,
    Event,
    Fate,
    FromSource,
    Meter,
    Note,
    OperatorActed,
    OperatorAction,
    RunningStep,
    SessionAlarm,
    SessionSeen,
    StepFinished,
    StepsRunning,
    StepStarted,
    TraceClosed,
    TtsChanged,
    TtsState,
    VerificationStep,
    Verified,
    arm_reports,
)

TICK_S = 0.25
ROUNDS = 3
"""Verification rounds of every running request a tick."""
DRAFTED = 4
RULE = "cactus:delta=0.25,p_min=0.1,top_k=10"
WINDOW = 8192
BUDGET = 1024
CAP = int(0.85 * BUDGET)
_STRICT_P, _RELAXED_P = 0.45, 0.72
"""Chance of a drafted token: (0.45 + … + 0.45^4) + 1 = 1.78 tokens a round under strict, 2.88 relaxed, a gain of 1.61."""
_WORDS = [
    "so",
    "the",
    "sum",
    "of",
    "both",
    "is",
    "then",
    "we",
    "check",
    "that",
    "it",
    "holds",
    "for",
    "each",
    "case",
    "but",
    "first",
    "let",
    "me",
    "count",
    "again",
    "from",
    "the",
    "start",
]
_TTFT_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_E2E_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens. ``inflation``: λ of the relaxed arm; the times are seconds after the start, None for never."""

    help: str
    engines: tuple[str, ...] = ("qwen3-8b",)
    sessions: int = 8
    inflation: float = 1.05
    switch_s: float | None = None
    runaway: bool = False
    loops: bool = False
    down_s: float | None = None
    back_s: float | None = None
    reset_s: float | None = None
    tts: bool = False


SCENARIOS: dict[str, Scenario] = {
    "healthy": Scenario("the relaxed rule pays, the draft learns", ("qwen3-8b", "qwen3-32b"), sessions=12, tts=True),
    "losing-rule": Scenario(
        "traces get longer than rounds get shorter, and the guard switches to strict", inflation=2.15, switch_s=8.0
    ),
    "runaway-session": Scenario("one session thinks more from step to step, until its limit", runaway=True),
    "loop": Scenario("one session repeats itself and is closed again and again", loops=True),
    "engine-down": Scenario(
        "one of two engines dies and comes back 40 s later", ("qwen3-8b", "qwen3-32b"), down_s=10.0, back_s=50.0
    ),
    "counter-reset": Scenario("an engine restarts and its counters begin at 0", reset_s=12.0),
    "many-sessions": Scenario("200 sessions on two engines", ("qwen3-8b", "qwen3-32b"), sessions=200),
}


def unknown(scenario: str) -> ConfigError:
    return ConfigError("demo", scenario, nearest(scenario, SCENARIOS))


@dataclass(slots=True)
class _Session:
    name: str
    engine: int
    kind: str = ""
    step: int = 0
    arm: str = STRICT
    rule: str = STRICT
    prompt: int = 0
    think: int = 0
    answer: int = 0
    target: int = 0
    answer_target: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    began: float = 0.0
    closed: str = ""
    running: bool = False
    stopped: bool = False
    limit: int = 60_000
    warned: bool = False
    fruitless: int = 0
    request: str = ""
    assignment: Assignment | None = None
    sums: dict[tuple[str, str], SessionSums] = field(default_factory=dict)


@dataclass(slots=True)
class _Engine:
    source: str
    model: str
    book: Ledger
    waiting: list[Event] = field(default_factory=list)
    up: bool = True
    frames: int = 0
    version: int = 0
    learning: bool = False
    counters: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


class Simulator:
    """``advance`` returns what happened up to a time, with the source that tells it. Raises ConfigError for an unknown scenario."""

    def __init__(self, scenario: str, *, seed: int = 0, start: float = 0.0) -> None:
        if scenario not in SCENARIOS:
            raise unknown(scenario)
        self.name, self.scenario = scenario, SCENARIOS[scenario]
        self.start = self.now = start
        self._random = random.Random(seed)  # noqa: S311  # nosec B311  # seeds and jitter, no secret
        self._ticks = 0
        self._engines = [self._engine(model) for model in self.scenario.engines]
        self._sessions: list[_Session] = []
        self._waking: list[tuple[float, int]] = []
        self._begun = self._switched = self._was_down = self._was_back = self._was_reset = False

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(engine.source for engine in self._engines)

    def advance(self, now: float) -> list[tuple[str, Event]]:
        """Everything up to ``now``, in order."""
        out: list[tuple[str, Event]] = []
        if not self._begun:
            self._begun = True
            self._begin()
            out += self._drain()
        while self.start + (self._ticks + 1) * TICK_S <= now:
            self._ticks += 1
            self.now = self.start + self._ticks * TICK_S
            self._tick()
            out += self._drain()
        return out

    def _drain(self) -> Iterator[tuple[str, Event]]:
        for engine in self._engines:
            waiting, engine.waiting = engine.waiting, []
            for event in waiting:
                yield engine.source, event

    def tails(self) -> dict[str, str]:
        """The latest words of running traces: made up, a word a token."""
        return {
            session.request: " ".join(_WORDS[(len(session.name) * 7 + i * i) % len(_WORDS)] for i in range(session.think))[-600:]
            for session in self._sessions
            if session.running
        }

    # -- an operator's actions -----------------------------------------------------------------------------------------------------

    def close_trace(self, source: str, session: str) -> bool:
        for one in self._of(source, session):
            if one.running and one.think < one.target:
                self._close(one, "operator")
                self._acted(source, "close", session, "closed the trace")
                return True
        return False

    def set_limit(self, source: str, session: str, limit: int) -> bool:
        for one in self._of(source, session):
            one.limit, one.stopped, one.warned, one.fruitless = limit, False, False, 0
            self._wake(one, 1.0)
            self._acted(source, "limit", session, f"limit of tokens is {limit}")
            return True
        return False

    def pin(self, source: str, workload: str, arm: str, rule: str | None) -> None:
        engine = self._of_source(source)
        engine.book.pin(workload, arm, rule)
        self._acted(source, "pin", arm, f"pinned to {rule}" if rule else "unpinned")
        self._tell_economics(engine)

    def set_tts(self, source: str, enabled: bool) -> None:
        engine = self._of_source(source)
        engine.learning = enabled
        engine.waiting.append(self._tts(engine, "live" if enabled else "paused", "operator"))
        self._acted(source, "tts", source, "TTS goes on" if enabled else "TTS paused")

    def _of(self, source: str, session: str) -> Iterator[_Session]:
        return (one for one in self._sessions if one.name == session and self._engines[one.engine].source == source)

    def _of_source(self, source: str) -> _Engine:
        return next(engine for engine in self._engines if engine.source == source)

    def _acted(self, source: str, action: OperatorAction, target: str, detail: str) -> None:
        event = OperatorActed(t=self.now, action=action, target=target, detail=detail)
        self._of_source(source).waiting.append(event)

    # -- the beginning -------------------------------------------------------------------------------------------------------------

    def _engine(self, model: str) -> _Engine:
        arms = Arms(b"simulator", 0.25, (RULE,), (1.0,))
        book = Ledger(arms, exploration=0.0, min_sessions=20, clock=lambda: self.now)
        engine = _Engine(f"sim://{model}", model, book)
        book.on_event = lambda event: engine.waiting.append(event)
        engine.counters = dict.fromkeys(
            ("tokens_in", "tokens_out", "preemptions", "prefix_queries", "prefix_hits", "drafts", "drafted", "accepted",
             "finished/stop", "finished/length"), 0.0,
        )  # fmt: skip
        engine.counters |= {f"accepted_at/{i}": 0.0 for i in range(DRAFTED)}
        engine.buckets = {
            name: dict.fromkeys((*bounds, math.inf), 0.0) for name, bounds in (("ttft_s", _TTFT_S), ("e2e_s", _E2E_S))
        }
        return engine

    def _begin(self) -> None:
        for engine in self._engines:
            engine.waiting.append(EngineReady(t=self.now, engine="engine-0", model=engine.model, max_model_len=WINDOW))
            self._past(engine, self._history(engine))
            if self.scenario.tts:
                engine.learning = True
                engine.waiting.append(self._tts(engine, "live", "the first update is in"))
            self._tell_economics(engine)
        for i in range(self.scenario.sessions):
            kind = "runaway" if i == 2 and self.scenario.runaway else "loops" if i == 2 and self.scenario.loops else ""
            session = _Session(f"agent-{i:03d}", i % len(self._engines), kind)
            self._sessions.append(session)
            session.arm = self._engines[session.engine].book.arms.assign(session.name)
            session.prompt = 300 + self._random.randrange(600)
            self._session_past(session)
            self._wake(session, self._random.random() * 6.0)

    def _history(self, engine: _Engine) -> int:
        """Sessions an arm that ran before the start: up to one before the switch where the scenario has one."""
        if self.scenario.switch_s is None:
            return 120
        trial = Ledger(engine.book.arms, exploration=0.0, min_sessions=20, on_event=lambda _: None)
        state = self._random.getstate()
        for n in range(5000):
            self._pair(trial, engine.model)
            if any(not switch.on for switch in trial.switches.values()):
                self._random.setstate(state)
                return n
        raise AssertionError(f"the rule does not lose with an inflation of {self.scenario.inflation}")

    def _past(self, engine: _Engine, sessions: int) -> None:
        for _ in range(sessions):
            self._pair(engine.book, engine.model)

    def _pair(self, book: Ledger, model: str) -> None:
        """One session of each arm, one step long."""
        workload = f"{model}/chat/follow_up"
        for arm, inflation, chance in ((STRICT, 1.0, _STRICT_P), (RULE, self.scenario.inflation, _RELAXED_P)):
            think = max(8, round(self._length() * inflation))
            per_round = sum(chance**i for i in range(DRAFTED + 1))
            step = self._finished_step("past", 1, arm, workload, model, think, 40, round((think + 40) / per_round), 0, "")
            book.finished(step, Assignment(arm, arm, workload, ""), {})
            cell = book.cells[(workload, arm)]
            for _ in range(10):
                accepted = 0
                while accepted < DRAFTED and self._random.random() < chance:
                    accepted += 1
                cell.add_round(accepted, sum(_STRICT_P ** (i + 1) for i in range(DRAFTED)))

    def _session_past(self, session: _Session) -> None:
        """Steps it had before we looked, as a gateway tells a reader that comes late."""
        engine, latest = self._engines[session.engine], []
        lengths = (
            [90, 120, 170, 260] if session.kind == "runaway" else [self._length() for _ in range(self._random.randrange(1, 4))]
        )
        for think in lengths:
            session.step += 1
            answer = 20 + self._random.randrange(40)
            rule = self._rule(session)
            latest.append(
                self._finished_step(
                    session.name, session.step, rule, self._workload(session), engine.model, think, answer, think // 3,
                    session.prompt, "",
                )
            )  # fmt: skip
            session.prompt += answer + self._random.randrange(80)
            session.tokens += think + answer
        think_tokens = sum(step.think_tokens for step in latest)
        engine.waiting.append(
            SessionSeen(
                t=self.now, session=session.name, steps=session.step, tokens=session.tokens, think_tokens=think_tokens, closes=0,
                latest=latest,
            )
        )  # fmt: skip

    # -- a tick --------------------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._happenings()
        while self._waking and self._waking[0][0] <= self.now:
            session = self._sessions[heapq.heappop(self._waking)[1]]
            if not session.running and not session.stopped:
                self._start(session)
        for number, engine in enumerate(self._engines):
            for _ in range(ROUNDS if engine.up else 0):
                self._rounds(engine, [s for s in self._sessions if s.engine == number and s.running])
        if self._ticks % round(1 / TICK_S) == 0:
            for number, engine in enumerate(self._engines):
                if engine.up:
                    self._second(engine, number)

    def _happenings(self) -> None:
        scenario, passed = self.scenario, self.now - self.start
        if scenario.switch_s is not None and passed >= scenario.switch_s and not self._switched:
            self._switched = True
            for engine in self._engines:
                while all(switch.on for switch in engine.book.switches.values()):
                    self._pair(engine.book, engine.model)
                self._tell_economics(engine)
        last = self._engines[-1]
        if scenario.down_s is not None and passed >= scenario.down_s and not self._was_down:
            self._was_down, last.up = True, False
            reason = "process ended with status -9; see its log"
            last.waiting.append(EngineDied(t=self.now, engine="engine-0", reason=reason))
            last.waiting.append(
                FromSource(t=self.now, source=last.source, kind="simulator", state="down", error="connection refused")
            )
            for session in self._sessions:
                if session.running and self._engines[session.engine] is last:
                    session.running = False
        if scenario.back_s is not None and passed >= scenario.back_s and not self._was_back:
            self._was_back, last.up = True, True
            last.waiting.append(FromSource(t=self.now, source=last.source, kind="simulator", state="ok"))
            self._restart(last)
            for session in self._sessions:
                if self._engines[session.engine] is last:
                    self._wake(session, self._random.random() * 4)
        if scenario.reset_s is not None and passed >= scenario.reset_s and not self._was_reset:
            self._was_reset = True
            self._restart(self._engines[0])

    def _restart(self, engine: _Engine) -> None:
        engine.counters = dict.fromkeys(engine.counters, 0.0)
        engine.buckets = {name: dict.fromkeys(counts, 0.0) for name, counts in engine.buckets.items()}
        engine.waiting.append(EngineReady(t=self.now, engine="engine-0", model=engine.model, max_model_len=WINDOW))

    def _start(self, session: _Session) -> None:
        engine = self._engines[session.engine]
        if not engine.up:
            return
        session.step += 1
        session.request = f"{session.name}-{session.step}"
        session.rule = self._rule(session)
        session.think = session.answer = session.rounds = session.drafted = session.accepted = 0
        session.closed, session.running, session.began = "", True, self.now
        session.target = round(self._length() * (self.scenario.inflation if session.rule != STRICT else 1.0))
        if session.kind == "runaway":
            session.target = round(260 * 1.5 ** (session.step - 4))
        elif session.kind == "loops":
            session.target = 10_000
        session.answer_target = 20 + self._random.randrange(40)
        if session.prompt > 0.78 * WINDOW:
            session.prompt = 400  # its agent compacted the context
        session.assignment = Assignment(session.rule, session.arm, self._workload(session), "")
        engine.book.started(session.request, session.assignment)
        engine.counters["tokens_in"] += session.prompt
        engine.counters["prefix_queries"] += session.prompt
        engine.counters["prefix_hits"] += session.prompt * 0.7
        self._count(engine, "ttft_s", 0.04 + self._random.random() * 0.3)
        engine.waiting.append(
            StepStarted(
                t=self.now, session=session.name, step=session.step, request=session.request, model=engine.model, rule=session.rule,
                prompt_tokens=session.prompt, budget=BUDGET, think_cap=CAP, bound_by="fraction", arm=session.arm,
                workload=self._workload(session), assigned="control" if session.arm == STRICT else "assigned",
            )
        )  # fmt: skip

    def _rounds(self, engine: _Engine, running: list[_Session]) -> None:
        verified = []
        for session in running:
            one = self._verify(session)
            verified.append(one)
            self._grow(session, one.accepted + 1)
            session.rounds += 1
            session.drafted += DRAFTED
            session.accepted += one.accepted
            engine.counters["tokens_out"] += one.accepted + 1
            engine.counters["drafts"] += 1
            engine.counters["drafted"] += DRAFTED
            engine.counters["accepted"] += one.accepted
            for position in range(one.accepted):
                engine.counters[f"accepted_at/{position}"] += 1
        if verified:
            engine.frames += 1
            frame = VerificationStep(t=self.now, engine="engine-0", step=engine.frames, requests=verified)
            engine.book.verified(frame)
            engine.waiting.append(frame)
        for session in running:
            if session.answer >= session.answer_target:
                self._finish(session)

    def _grow(self, session: _Session, tokens: int) -> None:
        if session.think < session.target:
            session.think = min(session.target, session.think + tokens)
            if session.kind == "loops" and session.think >= 160:
                self._close(session, "loop")
            elif session.think >= CAP:
                self._close(session, "budget")
        else:
            session.answer += tokens

    def _close(self, session: _Session, reason: str) -> None:
        session.closed, session.target = reason, session.think
        self._engines[session.engine].waiting.append(
            TraceClosed(
                t=self.now, session=session.name, step=session.step, request=session.request, reason=reason,
                think_tokens=session.think, cap=CAP, how="engine",
            )
        )  # fmt: skip

    def _finish(self, session: _Session) -> None:
        engine = self._engines[session.engine]
        session.running = False
        assert session.assignment is not None
        step = self._finished_step(
            session.name, session.step, session.rule, session.assignment.workload, engine.model, session.think, session.answer,
            session.rounds, session.prompt, session.closed, session=session,
        )  # fmt: skip
        engine.book.finished(step, session.assignment, session.sums)
        engine.waiting.append(step)
        engine.counters["finished/stop"] += 1
        self._count(engine, "e2e_s", self.now - session.began)
        session.tokens += step.tokens
        session.prompt += session.answer + self._random.randrange(80)
        session.fruitless = session.fruitless + 1 if session.closed == "loop" else 0
        self._alarm(engine, session)
        self._wake(session, (0.5 if session.kind else 1.0) + self._random.random() * 3.0)

    def _alarm(self, engine: _Engine, session: _Session) -> None:
        limit = 2400 if session.kind == "runaway" and session.limit == 60_000 else session.limit
        stopped = session.tokens >= limit
        if session.kind == "runaway" and session.tokens >= 0.8 * limit and (stopped or not session.warned):
            session.warned, session.stopped = True, stopped
            engine.waiting.append(self._meter(session, "tokens", session.tokens, limit, stopped))
        if session.fruitless == 3:
            engine.waiting.append(self._meter(session, "no_progress", 3, 3, False))

    def _meter(self, session: _Session, meter: Meter, value: int, limit: int, stopped: bool) -> SessionAlarm:
        return SessionAlarm(
            t=self.now, session=session.name, step=session.step, meter=meter, value=value, limit=limit, stopped=stopped,
        )  # fmt: skip

    def _second(self, engine: _Engine, number: int) -> None:
        running = [s for s in self._sessions if s.engine == number and s.running]
        held = sum(s.prompt + s.think + s.answer for s in running)
        gauges = {
            "running": float(len(running)),
            "waiting": 0.0,
            "kv_use": min(1.0, held / (WINDOW * max(8, self.scenario.sessions))),
        }
        buckets: dict[str, list[tuple[float | None, float]]] = {
            name: [(None if math.isinf(bound) else bound, n) for bound, n in counts.items()]
            for name, counts in engine.buckets.items()
        }
        engine.waiting.append(
            EngineMetrics(
                t=self.now, engine="0", model=engine.model, gauges=gauges, counters=dict(engine.counters), buckets=buckets,
            )
        )  # fmt: skip
        engine.waiting.append(StepsRunning(t=self.now, steps=[self._running(engine, s) for s in running]))
        seconds = round(self.now - self.start)
        if seconds % 2 == 0:
            self._tell_economics(engine)
        if engine.learning and seconds % 5 == 0:
            engine.waiting.append(self._update(engine))

    def _running(self, engine: _Engine, session: _Session) -> RunningStep:
        return RunningStep(
            session=session.name, step=session.step, request=session.request, think_tokens=session.think,
            answer_tokens=session.answer, inside=session.think < session.target, rule=session.rule, prompt_tokens=session.prompt,
            budget=BUDGET, think_cap=CAP, bound_by="fraction", arm=session.arm, workload=self._workload(session),
            started=session.began,
        )  # fmt: skip

    # -- pieces --------------------------------------------------------------------------------------------------------------------

    def _verify(self, session: _Session) -> Verified:
        """One round: each drafted token with its probabilities, judged on one coin by strict and by the rule."""
        draw, relaxed = self._random, session.rule != STRICT
        rows = DraftRows(token=[], p=[], q=[], rank=[], strict=[], flags=[])
        accepted, reading = 0, True
        for _ in range(DRAFTED):
            p = draw.betavariate(1.2, 1.0)
            rank = 0 if p > 0.5 else min(2000, int(draw.expovariate(p * 3)))
            strict = min(1.0, max(0.0, draw.gauss(_STRICT_P, 0.15)))
            coin = draw.random()
            allowed = p >= 0.1 and rank < 10
            more = strict + (_RELAXED_P + 0.04 - _STRICT_P if relaxed and allowed else 0.0)
            if not reading:
                fate = Fate.UNREAD
            elif coin < strict:
                fate = Fate.STRICT
            elif coin < more:
                fate = Fate.RELAXED
            elif relaxed and not allowed:
                fate = Fate.LOW_SUPPORT
            else:
                fate = Fate.COIN
            reading = reading and fate in (Fate.STRICT, Fate.RELAXED)
            accepted += reading
            rows.token.append(0)
            rows.p.append(p)
            rows.q.append(min(1.0, p / max(strict, 1e-6)))
            rows.rank.append(rank)
            rows.strict.append(strict)
            rows.flags.append(1 if reading else 0)
            rows.would.append(coin < strict)
            rows.fate.append(fate)
        return Verified(
            request=session.request,
            rule_asked=session.rule,
            rule_effective=session.rule,
            drafted=DRAFTED,
            accepted=accepted,
            rows=rows,
        )

    def _finished_step(
        self, name: str, number: int, rule: str, workload: str, model: str, think: int, answer: int, rounds: int, prompt: int,
        closed: str, *, session: _Session | None = None,
    ) -> StepFinished:  # fmt: skip
        took = self.now - session.began if session is not None else rounds * TICK_S / ROUNDS
        notes = [Note.EMPTY_ANSWER] if session is not None and session.kind == "loops" and session.fruitless >= 2 else []
        return StepFinished(
            t=self.now, session=name, step=number, request=f"{name}-{number}", model=model, rule=rule, prompt_tokens=prompt,
            tokens=think + answer + 2, think_tokens=think, answer_tokens=answer, marker_tokens=2, rounds=rounds,
            drafted=session.drafted if session else rounds * DRAFTED, accepted=session.accepted if session else 0, closed=closed,
            finish_reason="stop", ttlt_s=took, arm=session.arm if session else rule, workload=workload, notes=notes,
        )  # fmt: skip

    def _update(self, engine: _Engine) -> DraftUpdated:
        engine.version += 1
        learned = 1 - math.exp(-engine.version / 12)
        live = 0.45 + 0.12 * learned + self._random.gauss(0, 0.005)
        return DraftUpdated(
            t=self.now, engine="engine-0", version=engine.version, epoch=1, rounds=engine.frames, rows=256,
            loss=0.9 - 0.35 * learned + self._random.gauss(0, 0.02), train_ms=120.0, publish_ms=2.5, live=live, frozen=0.45,
            gain=1 + 0.18 * learned, break_even=1.04,
        )  # fmt: skip

    def _tts(self, engine: _Engine, state: TtsState, reason: str) -> TtsChanged:
        return TtsChanged(t=self.now, engine="engine-0", state=state, reason=reason, epoch=1, version=engine.version)

    def _tell_economics(self, engine: _Engine) -> None:
        engine.waiting.append(EconomicsReport(t=self.now, rows=arm_reports(report(engine.book)["rows"])))

    def _rule(self, session: _Session) -> str:
        if session.arm == STRICT:
            return STRICT
        return self._engines[session.engine].book.assign(session.name, self._workload(session)).rule

    def _workload(self, session: _Session) -> str:
        return f"{self._engines[session.engine].model}/chat/follow_up"

    def _length(self) -> int:
        return max(16, round(self._random.lognormvariate(math.log(150), 0.25)))

    def _count(self, engine: _Engine, name: str, seconds: float) -> None:
        for bound in engine.buckets[name]:
            engine.buckets[name][bound] += seconds <= bound

    def _wake(self, session: _Session, after_s: float) -> None:
        heapq.heappush(self._waking, (self.now + after_s, self._sessions.index(session)))
