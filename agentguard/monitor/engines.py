"""One engine of the fleet: its load from /metrics, its steps and rounds from events, its economics, and whether it is well."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from agentguard.economics.ratios import Ratio
from agentguard.events import ArmReport, EconomicsReport, EngineMetrics, RatioReport, StepFinished
from agentguard.monitor.alarms import KV_USE_SHARE, STALLED_S, WAITING_PER_RUNNING, Alarm
from agentguard.monitor.observed import Observed
from agentguard.monitor.snapshot import ArmRow, ArmVerdict, EngineRow, Point, Series, Speculation, State
from agentguard.monitor.speculation import RoundsSlot, SpeculationState, most_used
from agentguard.monitor.windows import Buckets, Growth, History, Ring, merged, percentile, quantile

POINTS = 600
STEPS_KEPT = 4096
"""Times to the last token kept for their percentiles; at more than 68 steps a second they cover less than a minute."""
STRICT = "strict"


class Load:
    """What /metrics said of one engine label."""

    def __init__(self, window_s: float) -> None:
        self.gauges: dict[str, float] = {}
        self.history = History(window_s)
        self.t: float | None = None
        """Of the latest sample, by the clock of who tells it."""
        self._growth = Growth()

    @property
    def grown(self) -> dict[str, float]:
        """Its counters since the first sample, without the falls of a restart."""
        return self._growth.grown

    def take(self, event: EngineMetrics) -> bool:
        """Returns whether the server began anew."""
        self.gauges = dict(event.gauges)
        flat = dict(event.counters)
        for name, pairs in event.buckets.items():
            for bound, count in pairs:
                flat[f"{name}<{'' if bound is None else repr(bound)}"] = count
        reset = self._growth.take(flat)
        self.t = event.t
        self.history.add(event.t, self._growth.grown)
        return reset

    def buckets(self, name: str) -> Buckets:
        found: Buckets = {}
        for key in self.history.names(f"{name}<"):
            delta = self.history.delta(key)
            if delta is not None:
                text = key.partition("<")[2]
                found[float(text) if text else None] = delta
        return found


class _Steps:
    __slots__ = ("closes", "steps", "think", "tokens", "tokens_in")

    def __init__(self) -> None:
        self.steps = self.closes = self.think = self.tokens = self.tokens_in = 0


class EngineState:
    """``measured_only``: all that is known of it comes from /metrics, so it is gone when it stands there no longer."""

    def __init__(self, key: str, source: str, label: str, window_s: float, now: float, *, measured_only: bool = False) -> None:
        self.measured_only = measured_only
        self.key, self.source, self.label = key, source, label
        self.window_s = window_s
        self.model: str | None = None
        self.window_tokens: int | None = None
        self.band = (0.80, 0.85)
        self.loads: dict[str, Load] = {}
        self.told: tuple[ArmRow, ...] = ()
        """The gateway's economics."""
        self.observed = Observed()
        self.spec = SpeculationState(window_s)
        self.seen_t: float | None = None
        self.died: str = ""
        self.died_t = float("-inf")
        self.trouble_t: float | None = None
        self.trouble = ""
        self.state: State = "stale"
        self.since_t = now
        self.why = "nothing heard of it yet"
        self.rejections = Load(window_s)
        self.has_steps = False
        """Its steps are told; then none in the window is 0, and not unknown."""
        self._began_t = now
        self._steps: Ring[_Steps] = Ring(window_s, _Steps)
        self._ttlt: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._progress: tuple[float | None, float] = (None, now)
        self._drafts: dict[str, float] = {}
        self._tokens: dict[str, tuple[float, float]] = {}
        """Time and tokens of the sample that the strip chart's last point with a rate ended at, by label."""
        self._alarms = {"kv": Alarm(KV_USE_SHARE), "waiting": Alarm(WAITING_PER_RUNNING), "stalled": Alarm(STALLED_S)}

    def held(self) -> int:
        loads = sum(len(load.history) for load in (*self.loads.values(), self.rejections))
        return (
            len(self._steps) + len(self._ttlt) + len(self._points) + self.spec.held() + loads + len(self.told) + len(self.observed)
        )

    # -- what comes in -------------------------------------------------------------------------------------------------------------

    def alive(self, now: float, t: float) -> None:
        """It does something at its own time ``t``; what it did before it died is no sign of life."""
        self.seen_t, self.trouble_t, self.trouble = now, None, ""
        if t >= self.died_t:
            self.died = ""

    def measured(self, event: EngineMetrics, now: float) -> bool:
        """Returns whether the server's counters began anew."""
        if event.error:
            self.trouble, self.trouble_t = event.error, now if self.trouble_t is None else self.trouble_t
            return False
        self.alive(now, event.t)
        self.model = self.model or event.model or None
        load = self.loads.get(event.engine)
        if load is None:
            load = self.loads[event.engine] = Load(self.window_s)
        return load.take(event)

    def step(self, event: StepFinished, now: float) -> None:
        slot = self._steps.at(now)
        self.has_steps = True
        slot.steps += 1
        slot.closes += bool(event.closed)
        slot.think += event.think_tokens
        slot.tokens += event.tokens
        slot.tokens_in += event.prompt_tokens
        if not event.error:
            self._ttlt.append((now, event.ttlt_s))

    def economics(self, report: EconomicsReport) -> None:
        self.told = tuple(_arm(row) for row in report.rows)

    @property
    def arms(self) -> tuple[ArmRow, ...]:
        """The gateway's arms; where it has no relaxed one, the rules of the steps that were seen."""
        if any(arm.arm != STRICT for arm in self.told):
            return self.told
        return self.observed.rows(self.model or "") or self.told

    # -- how it is -----------------------------------------------------------------------------------------------------------------

    def judge(self, source: State, source_why: str, now: float, stale_s: float) -> bool:
        """Work out the state; returns whether it changed."""
        found, why = self._found(source, source_why, now, stale_s)
        if found in ("stale", "down"):
            self._progress = (self._progress[0], now)  # nobody could see a token in that time
        changed = found != self.state
        self.since_t = now if changed else self.since_t
        self.state, self.why = found, why
        return changed

    def _found(self, source: State, source_why: str, now: float, stale_s: float) -> tuple[State, str]:
        if self.died:
            return "down", self.died
        if source in ("stale", "down"):
            return source, source_why
        silent = now - self.seen_t if self.seen_t is not None else 0.0
        if self.measured_only and silent >= stale_s:
            return ("down" if silent >= 2 * stale_s else "stale"), f"the server tells nothing of engine {self.label!r} any more"
        if self.trouble_t is not None:
            return ("down" if now - self.trouble_t >= stale_s else "stale"), self.trouble
        running, waiting = self._sum("running"), self._sum("waiting")
        kv = self._max("kv_use")
        grown = self._grown("tokens_out")
        if grown != self._progress[0] or grown is None or not running:
            self._progress = (grown, now)
        alarms = self._alarms
        alarms["kv"].update(kv, now)
        alarms["waiting"].update(None if waiting is None else waiting / max(1, running or 0), now)
        alarms["stalled"].update(now - self._progress[1] if running is not None else None, now)
        if alarms["stalled"].on:
            return "slow", f"{int(running or 0)} requests run without a token for {now - self._progress[1]:.0f} s"
        if alarms["kv"].on and kv is not None:
            return "slow", f"the KV cache is {kv:.0%} full"
        if alarms["waiting"].on:
            return "slow", f"{int(waiting or 0)} requests wait while {int(running or 0)} run"
        return "ok", ""

    # -- what is shown -------------------------------------------------------------------------------------------------------------

    def lead(self) -> ArmRow | None:
        """The arm to look at: a losing one, else the relaxed one with most steps, else the control."""
        relaxed = [arm for arm in self.arms if arm.arm != STRICT]
        losing = [arm for arm in relaxed if arm.verdict == "loss"]
        return max(losing or relaxed or self.arms, key=lambda arm: arm.steps, default=None)

    def rule(self, rounds: Mapping[str, int]) -> str | None:
        """Whose rounds are shown, of those that are counted by rule: what the lead arm's requests run under; where no arm is
        relaxed, the rule with most rounds."""
        lead = self.lead()
        return most_used(rounds) if lead is None or lead.arm == STRICT else _runs(lead)

    def tick(self, now: float, every_s: float) -> None:
        """A point of the strip charts, once in ``every_s``."""
        if self._points and now - self._points[-1].t < every_s * 0.99:
            return
        lead = self.lead()
        recent, self.spec.recent = self.spec.recent, {}
        rounds, accepted = map(float, recent.get(self.rule({name: n for name, (n, _) in recent.items()}) or "", (0, 0)))
        drafts = {name: self._grown(name) for name in ("drafts", "accepted")}
        change = {name: value - self._drafts.get(name, value) for name, value in drafts.items() if value is not None}
        self._drafts = {name: value for name, value in drafts.items() if value is not None}
        if not self.spec.told and self._unmixed() and change.get("drafts"):
            rounds, accepted = change["drafts"], change.get("accepted", 0.0)
        fresh = self.state in ("ok", "slow")
        ratio = lead.length_ratio if lead is not None and fresh else None
        rate = self._sampled_rate()
        self._points.append(
            Point(
                now, ratio.value if ratio else None, ratio.low if ratio else None, ratio.high if ratio else None,
                lead.gain if lead is not None and fresh else None, accepted / rounds if rounds else None,
                rate if fresh else None,
            )
        )  # fmt: skip

    def _sampled_rate(self) -> float | None:
        """Tokens a second between the samples that came since the last point and the one before them; None if none came, as what
        went on since then is not known yet."""
        rate = None
        for label, load in self.loads.items():
            tokens, before = load.grown.get("tokens_out"), self._tokens.get(label)
            if tokens is None or load.t is None or (before is not None and before[0] == load.t):
                continue
            if before is not None and load.t > before[0]:
                rate = (rate or 0.0) + (tokens - before[1]) / (load.t - before[0])
            self._tokens[label] = load.t, tokens
        return rate

    def series(self, every_s: float) -> Series:
        """``every_s``: where there are no two points yet."""
        points = tuple(self._points)
        if len(points) >= 2:
            every_s = (points[-1].t - points[0].t) / (len(points) - 1)
        return Series(self.key, every_s, points)

    def row(self, name: str, now: float, rules: Mapping[str, RoundsSlot]) -> EngineRow:
        lead, steps = self.lead(), self._window(now)
        span = self._span(now)
        drafts, accepted, drafted = (self._delta(n) for n in ("drafts", "accepted", "drafted"))
        length, whole = None, self._shown_rounds(rules)[1]
        if whole.rounds:
            length = whole.accepted / whole.rounds
            drafted, accepted = whole.drafted, whole.accepted
        elif rules or not self._unmixed():
            drafted = accepted = None
        elif drafts and accepted is not None:
            length = accepted / drafts
        while self._ttlt and self._ttlt[0][0] < now - self.window_s:
            self._ttlt.popleft()
        times = [value for _, value in self._ttlt]
        p50, p95 = percentile(times, 0.5), percentile(times, 0.95)
        if not self.has_steps:
            e2e = self._buckets("e2e_s")
            p50, p95 = quantile(e2e, 0.5), quantile(e2e, 0.95)
        ttft, tpot, queue = (self._buckets(n) for n in ("ttft_s", "tpot_s", "queue_s"))
        hits, queries = self._delta("prefix_hits"), self._delta("prefix_queries")
        return EngineRow(
            key=self.key, name=name, source=self.source, model=self.model, state=self.state, since_t=self.since_t,
            seen_t=self.seen_t, why=self.why, arm=lead.arm if lead else None,
            rule=None if lead is None else _runs(lead),
            workload=lead.workload if lead else None,
            verdict=lead.verdict if lead else None, accepted_length=length, gain=lead.gain if lead else None,
            length_ratio=lead.length_ratio if lead else None, rounds_ratio=lead.rounds_ratio if lead else None,
            ttlt_ratio=lead.ttlt_ratio if lead else None, window_s=span, ttlt_p50_s=p50, ttlt_p95_s=p95,
            ttft_p50_s=quantile(ttft, 0.5), ttft_p95_s=quantile(ttft, 0.95), tpot_p50_s=quantile(tpot, 0.5),
            tpot_p95_s=quantile(tpot, 0.95), queue_p95_s=quantile(queue, 0.95),
            think_share=steps.think / steps.tokens if steps.tokens else None, steps=steps.steps if self.has_steps else None,
            closes=steps.closes if self.has_steps else None, tokens_in_per_s=self._rate("tokens_in", steps.tokens_in, now),
            tokens_in_computed_per_s=self._metric_rate("tokens_in_from/local_compute"),
            tokens_out_per_s=self._rate("tokens_out", steps.tokens, now), kv_use=self._max("kv_use"),
            running=_whole(self._sum("running")), waiting=_whole(self._sum("waiting")),
            preemptions_per_s=self._metric_rate("preemptions"), rejections_per_s=self.rejections.history.rate("rejections"),
            prefix_hit_share=hits / queries if hits is not None and queries else None,
            acceptance_share=accepted / drafted if drafted and accepted is not None else None, finish_reasons=self._reasons(),
        )  # fmt: skip

    def speculation(self, now: float, rules: Mapping[str, RoundsSlot]) -> Speculation:
        rule, whole = self._shown_rounds(rules)
        shown = self.spec.shown(self.key, rule, whole, now, self.arms)
        drafts = self._delta("drafts")
        if rules or not drafts:
            return shown
        accepted, drafted = self._delta("accepted") or 0.0, self._delta("drafted") or 0.0
        names = sorted((n for load in self.loads.values() for n in load.history.names("accepted_at/")), key=_position)
        return Speculation(
            engine=self.key, window_s=self._load_span(), rounds=int(drafts), drafted=int(drafted), accepted=int(accepted),
            accepted_length=accepted / drafts, strict_accepted_length=None,
            by_position=tuple((self._delta(name) or 0.0) / drafts for name in dict.fromkeys(names)),
            lost_frames=shown.lost_frames, tts=shown.tts, arms=self.arms,
        )  # fmt: skip

    def rounds(self, now: float) -> dict[str, RoundsSlot]:
        """Of the window, by rule."""
        return self.spec.window(now)

    def _shown_rounds(self, rules: Mapping[str, RoundsSlot]) -> tuple[str | None, RoundsSlot]:
        rule = self.rule({name: slot.rounds for name, slot in rules.items()})
        return rule, rules.get(rule or "", RoundsSlot()) if rule is not None else RoundsSlot()

    def _unmixed(self) -> bool:
        """The engine's own counters know no rules, so they say nothing of one arm beside others."""
        return all(arm.arm == STRICT for arm in self.arms)

    def _window(self, now: float) -> _Steps:
        whole = _Steps()
        for slot in self._steps.slots(now):
            whole.steps += slot.steps
            whole.closes += slot.closes
            whole.think += slot.think
            whole.tokens += slot.tokens
            whole.tokens_in += slot.tokens_in
        return whole

    def _span(self, now: float) -> float | None:
        """Of the load where there is one, else of the events."""
        if self.loads:
            return self._load_span()
        span = min(self.window_s, now - self._began_t)
        return span if self.has_steps and span > 0 else None

    def _load_span(self) -> float | None:
        return max((span for load in self.loads.values() if (span := load.history.span_s()) is not None), default=None)

    def _rate(self, name: str, counted: int, now: float) -> float | None:
        """From the engine's counter, else from the steps that ended."""
        if any(name in load.history.names(name) for load in self.loads.values()):
            return self._metric_rate(name)
        span = self._span(now)
        return counted / span if self.has_steps and not self.loads and span else None

    def _metric_rate(self, name: str) -> float | None:
        return _total(load.history.rate(name) for load in self.loads.values())

    def _delta(self, name: str) -> float | None:
        return _total(load.history.delta(name) for load in self.loads.values())

    def _grown(self, name: str) -> float | None:
        return _total(load.grown.get(name) for load in self.loads.values())

    def _sum(self, gauge: str) -> float | None:
        return _total(load.gauges.get(gauge) for load in self.loads.values())

    def _max(self, gauge: str) -> float | None:
        return max((value for load in self.loads.values() if (value := load.gauges.get(gauge)) is not None), default=None)

    def _buckets(self, name: str) -> Buckets:
        return merged(found for load in self.loads.values() if (found := load.buckets(name)))

    def _reasons(self) -> tuple[tuple[str, int], ...]:
        names = {name for load in self.loads.values() for name in load.history.names("finished/")}
        found = [(name.partition("/")[2], int(n)) for name in names if (n := self._delta(name))]
        return tuple(sorted(found, key=lambda item: (-item[1], item[0])))


def _runs(arm: ArmRow) -> str:
    """What new requests of an arm run under; an operator's pin goes before the guard's switch."""
    return arm.pinned or (arm.arm if arm.on else STRICT)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _position(name: str) -> int:
    return int(name.partition("/")[2] or 0)


def _arm(row: ArmReport) -> ArmRow:
    known: tuple[ArmVerdict, ...] = ("control", "win", "loss")
    word: ArmVerdict = next((one for one in known if one == row.verdict), "undecided")
    return ArmRow(
        workload=row.workload, arm=row.arm, on=row.on, since_t=row.since or None, verdict=word, reason=row.reason,
        baseline=row.baseline, sessions=row.sessions, steps=row.steps, censored=row.censored, accepted_length=row.accepted_length,
        strict_accepted_length=row.strict_accepted_length, gain=row.gain, length_ratio=_ratio(row.ratios.get("tokens")),
        rounds_ratio=_ratio(row.ratios.get("rounds")), ttlt_ratio=_ratio(row.ratios.get("ttlt")), pinned=row.pinned,
    )  # fmt: skip


def _ratio(report: RatioReport | None) -> Ratio | None:
    if report is None:
        return None
    return Ratio(report.value, report.low, float("inf") if report.high is None else report.high, report.n)
