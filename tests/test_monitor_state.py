"""What the monitor says of sessions, sources and engines: states, alarms with their thresholds, the event log and the verdict."""

from __future__ import annotations

import random

import msgspec
import pytest

from agentguard.events import (
    CompactionAdvised,
    DraftRows,
    DraftUpdated,
    EconomicsReport,
    EngineDied,
    EngineMetrics,
    Event,
    Fate,
    Meter,
    Note,
    RoundSums,
    RunningStep,
    SessionAlarm,
    SessionSeen,
    StepsRunning,
    TraceClosed,
    TtsChanged,
    VerificationStep,
    Verified,
)
from agentguard.monitor import once, words
from agentguard.monitor.alarms import CONTEXT_SHARE, GROWTH_SHARE, KV_USE_SHARE, STALLED_S, WAITING_PER_RUNNING, Alarm, Threshold
from agentguard.monitor.log import KEPT, Log
from agentguard.monitor.snapshot import BARS, SessionRow
from agentguard.telemetry.rounds import REQUESTS, RULES, RoundCollector
from tests.monitor_rig import GATEWAY, SERVER, Engine, Watched, finished, ready, started, text
from tests.test_monitor_numbers import arm


def session(w: Watched) -> SessionRow:
    (row,) = w.model.snapshot().sessions
    return row


def closed(step: int, reason: str, session: str = "s", think: int = 50) -> TraceClosed:
    return TraceClosed(
        t=0, session=session, step=step, request=f"{session}-{step}", reason=reason, think_tokens=think, cap=400, how="engine"
    )


def progress(think: int, answer: int = 0, *, inside: bool = True, request: str = "s-1") -> StepsRunning:
    step = RunningStep(session="s", step=1, request=request, think_tokens=think, answer_tokens=answer, inside=inside)
    return StepsRunning(t=0, steps=[step])


# -- sessions ----------------------------------------------------------------------------------------------------------------------


def test_a_step_from_its_start_to_its_end() -> None:
    w = Watched()
    w.model.take(GATEWAY, ready(window=1000))
    w.model.take(GATEWAY, started(prompt=300, cap=400))
    row = session(w)
    assert (row.state, row.phase, row.think_tokens, row.think_cap, row.context_used) == ("running", None, None, 400, 300)
    assert (row.context_limit, row.band_low, row.band_high) == (1000, 800, 850)
    seen = []
    for event in (progress(0), progress(40), progress(60, 10, inside=False)):
        w.model.take(GATEWAY, event)
        row = session(w)
        seen.append((row.phase, row.think_tokens, row.context_used))
    assert seen == [("queued", 0, 300), ("thinking", 40, 340), ("answering", 60, 370)]
    w.model.take(GATEWAY, finished(think=60, answer=30, prompt_tokens=300, closed="budget", rounds=30, accepted=60))
    row = session(w)
    assert (row.state, row.phase, row.think_tokens, row.steps, row.tokens, row.closes) == ("idle", "idle", None, 1, 92, 1)
    (bar,) = row.bars
    assert (bar.think_tokens, bar.answer_tokens, bar.closed, bar.cap, bar.budget, bar.done) == (60, 30, "budget", 400, 500, True)
    assert bar.accepted_length == 2.0


def test_a_step_without_a_cutoff_has_no_cap() -> None:
    w = Watched()
    w.model.take(GATEWAY, started(bound_by="off"))
    assert session(w).think_cap is None


def test_ids_and_callers_are_told_apart() -> None:
    w = Watched()
    for name in ("0123456789ab/my/session", "plain", "not-a-hash/x"):
        w.model.take(GATEWAY, started(name))
    assert [(row.caller, row.id) for row in w.model.snapshot().sessions] == [
        ("0123456789ab", "my/session"), (None, "plain"), (None, "not-a-hash/x"),
    ]  # fmt: skip


def test_the_same_session_on_two_gateways_is_two() -> None:
    w = Watched()
    w.model.add_source("http://other:1", "gateway")
    for source in (GATEWAY, "http://other:1"):
        w.model.take(source, started())
    assert len({row.key for row in w.model.snapshot().sessions}) == 2


def test_a_late_reader_learns_the_past_once_and_counts_none_of_it_as_present() -> None:
    w = Watched()
    past = SessionSeen(
        t=0, session="s", steps=40, tokens=9000, think_tokens=8000, closes=3, latest=[finished("s", n) for n in (38, 39, 40)]
    )
    for _ in range(2):  # a reader that comes back is told again
        w.model.take(GATEWAY, past)
        row = session(w)
        assert (row.steps, row.tokens, row.think_tokens_total, row.closes, [bar.step for bar in row.bars]) == (
            40, 9000, 8000, 3, [38, 39, 40],
        )  # fmt: skip
    w.model.take(GATEWAY, finished("s", 41))
    assert session(w).tokens == 9092
    assert w.row(GATEWAY).steps == 1


def test_a_step_whose_end_was_not_heard_is_over_once_two_lists_do_not_name_it() -> None:
    w = Watched()
    w.model.take(GATEWAY, started())
    w.model.take(GATEWAY, progress(10))
    w.model.take(GATEWAY, StepsRunning(t=0, steps=[]))
    assert session(w).state == "running"
    w.model.take(GATEWAY, StepsRunning(t=0, steps=[]))
    assert (session(w).state, session(w).running_request) == ("idle", None)


def test_an_attempt_that_was_undone_leaves_nothing_behind() -> None:
    """Its limit was too large, and the guard asks again: the step that follows has the same number and another request."""
    w = Watched()
    w.model.take(GATEWAY, started(request="first"))
    w.model.take(GATEWAY, finished(request="first", tokens=0, error="max_tokens is too large", undone=True))
    row = session(w)
    assert (row.state, row.steps, row.tokens, row.bars) == ("idle", 1, 0, ())
    assert "step_failed" not in [event.kind for event in w.model.snapshot().events]
    w.model.take(GATEWAY, started())
    w.model.take(GATEWAY, finished())
    assert (session(w).state, len(session(w).bars)) == ("idle", 1)


def test_a_session_that_fills_its_window() -> None:
    w = Watched()
    w.model.take(GATEWAY, ready(window=1000))
    states = []
    for step, prompt in enumerate((705, 706, 655, 654), 1):  # and 92 or 94 tokens on top
        w.model.take(GATEWAY, finished("s", step, prompt_tokens=prompt, tokens=95))
        states.append(session(w).state)
    assert states == ["filling", "filling", "filling", "idle"]  # on from 0.80, off below 0.75
    w.model.take(
        GATEWAY, CompactionAdvised(t=0, session="s", step=5, request="s-5", context_tokens=600, next_tokens=900, window=1000)
    )
    assert session(w).state == "filling"


@pytest.mark.parametrize(
    ("traces", "state"),
    [
        ([100, 100, 100, 199], "idle"),  # below twice the median
        ([100, 90, 100, 300], "idle"),  # one long trace is no trend
        ([100, 110, 130, 219], "idle"),
        ([100, 110, 130, 220], "growing"),
        ([100, 110, 130, 220, 180], "growing"),  # still 1.5 times the median
        ([100, 110, 130, 220, 160], "idle"),
    ],
)
def test_a_session_that_thinks_more_and_more(traces: list[int], state: str) -> None:
    w = Watched()
    for step, think in enumerate(traces, 1):
        w.model.take(GATEWAY, finished("s", step, think=think))
        row = session(w)
    assert row.state == state


def test_a_session_that_loops_and_one_that_recovers() -> None:
    w = Watched()
    states = []
    for step, reason in enumerate(("", "loop", "loop", "loop", ""), 1):
        w.model.take(GATEWAY, started("s", step))
        if reason:
            w.model.take(GATEWAY, closed(step, reason))
        w.model.take(GATEWAY, finished("s", step, closed=reason))
        states.append(session(w).state)
    assert states == ["idle", "idle", "looping", "looping", "idle"]
    for step in (6, 7):
        w.model.take(GATEWAY, finished("s", step, notes=[Note.EMPTY_ANSWER]))
    assert session(w).state == "looping"


def test_a_session_at_its_limit_goes_on_once_it_is_raised() -> None:
    w = Watched()
    w.model.take(GATEWAY, finished())
    states = []
    for value, stopped in ((80, False), (100, True)):
        w.model.take(GATEWAY, SessionAlarm(t=0, session="s", step=1, meter="tokens", value=value, limit=100, stopped=stopped))
        states.append((session(w).state, session(w).why))
    w.model.take(GATEWAY, started("s", 2))
    states.append((session(w).state, session(w).why))
    assert states == [("growing", "tokens is 80 of 100"), ("stopped", "tokens is 100 of 100"), ("running", "")]


def test_a_failed_step_and_a_client_that_hung_up() -> None:
    w = Watched()
    w.model.take(GATEWAY, finished("s", 1, error="cancelled"))
    assert session(w).state == "idle"
    w.model.take(GATEWAY, finished("s", 2, error="engine is gone"))
    assert (session(w).state, session(w).why) == ("failed", "engine is gone")
    w.model.take(GATEWAY, finished("s", 3))
    assert session(w).state == "idle"


def test_sessions_of_a_source_that_is_gone_are_lost_and_come_back() -> None:
    w = Watched()
    w.model.take(GATEWAY, started())
    assert w.after(30).sessions[0].state == "lost"
    w.model.take(GATEWAY, started())
    assert session(w).state == "running"


def test_rows_keep_their_place_whatever_happens() -> None:
    w, rng = Watched(), random.Random(1)
    names = [f"s{i}" for i in range(20)]
    for name in names:
        w.model.take(GATEWAY, started(name))
    for step in range(200):
        name = rng.choice(names)
        w.model.take(GATEWAY, finished(name, step + 2, closed=rng.choice(["", "loop"])))
        assert [row.id for row in w.model.snapshot().sessions] == names


# -- sources and engines -----------------------------------------------------------------------------------------------------------


def test_silence_is_stale_then_down_then_back() -> None:
    w = Watched()
    w.model.take(GATEWAY, ready())
    states = []
    for _ in range(30):
        shown = w.after(1)
        states.append(next(row for row in shown.sources if row.name == GATEWAY).state)
    assert states == ["ok"] * 4 + ["stale"] * 15 + ["down"] * 11
    w.model.heard(GATEWAY)
    shown = w.model.snapshot()
    assert (shown.sources[0].state, shown.engines[0].state) == ("ok", "ok")
    said = [line.text for line in shown.events if line.kind == "source" and GATEWAY in line.text]
    assert said == [
        f"{GATEWAY} answers", f"{GATEWAY} is stale: nothing came for 5 s", f"{GATEWAY} is down: nothing came for 20 s",
        f"{GATEWAY} is back",
    ]  # fmt: skip


def test_a_refused_connection_is_down_sooner_and_says_why() -> None:
    w = Watched()
    w.model.take(GATEWAY, ready())
    states = []
    for _ in range(8):
        w.clock.t += 1
        w.model.trouble(GATEWAY, "ConnectError: refused", retry_s=2.0)
        row = w.model.snapshot().sources[0]
        states.append(row.state)
    assert states == ["stale"] * 4 + ["down"] * 4
    assert (row.error, row.retry_s) == ("ConnectError: refused", 2.0)
    shown = w.model.snapshot()
    assert shown.verdict.severity == "alarm"
    assert shown.verdict.text == "qwen3-8b is down since 3 s (and 1 more): ConnectError: refused"


def test_a_slow_interval_makes_staleness_slower() -> None:
    w = Watched(interval_s=10.0)
    w.model.take(GATEWAY, ready())
    assert w.after(29).sources[0].state == "ok"
    assert w.after(1).sources[0].state == "stale"


def test_an_engine_that_died_is_down_although_its_gateway_answers() -> None:
    w = Watched()
    w.model.take(GATEWAY, ready())
    w.model.take(GATEWAY, EngineDied(t=0, engine="engine-0", reason="status -9"))
    assert (w.row(GATEWAY).state, w.row(GATEWAY).why) == ("down", "status -9")
    assert w.model.snapshot().sources[0].state == "ok"
    w.model.take(GATEWAY, finished(error="engine is gone"))
    assert w.row(GATEWAY).state == "down"
    w.model.take(GATEWAY, finished("s", 2))
    assert w.row(GATEWAY).state == "ok"


def test_an_engine_whose_metrics_cannot_be_read() -> None:
    w = Watched()
    w.model.take(GATEWAY, ready())
    states = []
    for _ in range(7):
        w.failed()
        states.append(w.row(GATEWAY).state)
        w.clock.t += 1
    assert states == ["stale"] * 5 + ["down"] * 2
    w.model.take(GATEWAY, EngineMetrics(t=w.clock.t, engine="0"))
    assert w.row(GATEWAY).state == "ok"


@pytest.mark.parametrize(
    ("use", "state"),
    [([0.12], "ok"), ([0.949], "ok"), ([0.95], "slow"), ([0.95, 0.90], "slow"), ([0.95, 0.899], "ok")],
)
def test_a_full_cache_is_an_alarm_at_95_percent_and_none_at_12(use: list[float], state: str) -> None:
    w = Watched()
    for share in use:
        w.scrape(text({"0": Engine(kv=share)}))
        row = w.row(f"{SERVER}#0")
    assert row.state == state


def test_waiting_requests_have_to_wait_for_a_while() -> None:
    w, engine = Watched(), Engine(running=4, waiting=4)
    states = []
    for waiting in (4, 4, 4, 4, 4, 4, 3, 2, 1):
        engine.waiting = waiting
        engine.tokens_out += 10
        w.scrape(text({"0": engine}))
        states.append(w.row(f"{SERVER}#0").state)
        w.clock.t += 1
    assert states == ["ok"] * 5 + ["slow"] * 3 + ["ok"]
    assert w.model.snapshot().engines[0].why == ""


def test_requests_that_run_without_a_token() -> None:
    w, engine = Watched(), Engine(running=2)
    states = []
    for second in range(14):
        engine.tokens_out += 1 if second in (0, 12) else 0
        w.scrape(text({"0": engine}))
        states.append(w.row(f"{SERVER}#0").state)
        w.clock.t += 1
    assert states == ["ok"] * 10 + ["slow"] * 2 + ["ok"] * 2


def test_a_server_that_does_not_count_tokens_is_not_called_stalled() -> None:
    w = Watched()
    for _ in range(20):
        w.scrape('# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 5\n')
        w.clock.t += 1
        assert w.row(f"{SERVER}#0").state == "ok"


@pytest.mark.parametrize("threshold", [KV_USE_SHARE, WAITING_PER_RUNNING, STALLED_S, CONTEXT_SHARE, GROWTH_SHARE])
def test_every_alarm_has_an_on_and_a_lower_off_threshold(threshold: Threshold) -> None:
    alarm, t = Alarm(threshold), 0.0

    def at(value: float | None) -> bool:
        nonlocal t
        for _ in range(3):
            alarm.update(value, t)
            t += threshold.hold_s + 1
        return alarm.on

    between = (threshold.on + threshold.off) / 2
    values = (threshold.on - 1e-6, threshold.on, None, between, threshold.off, threshold.off - 1e-6, between)
    assert [at(value) for value in values] == [False, True, True, True, True, False, False]


def test_an_alarm_whose_thresholds_are_the_wrong_way_round_is_refused() -> None:
    with pytest.raises(ValueError, match="would flicker"):
        Threshold(on=0.5, off=0.6)


def test_an_alarm_that_has_to_hold_begins_anew_after_a_dip() -> None:
    alarm = Alarm(Threshold(on=1.0, off=0.5, hold_s=5.0))
    assert [alarm.update(value, t) for t, value in enumerate((1, 1, 1, 0.9, 1, 1, 1, 1, 1, 1))] == [False] * 9 + [True]


# -- the event log -----------------------------------------------------------------------------------------------------------------


def test_the_same_again_within_a_minute_is_one_line_with_its_count() -> None:
    log = Log()
    for t in (0.0, 20.0, 59.9, 60.0, 61.0):
        log.say(t, "warning", "alarm", f"KV cache full at {t}", same="kv", engine="a")
    log.say(61.0, "warning", "alarm", "KV cache full", same="kv", engine="b")
    assert [(line.t, line.last_t, line.n, line.engine, line.number) for line in log.lines()] == [
        (0.0, 59.9, 3, "a", 1), (60.0, 61.0, 2, "a", 2), (61.0, 61.0, 1, "b", 3),
    ]  # fmt: skip
    assert log.lines()[0].text == "KV cache full at 59.9"


def test_a_state_that_stays_is_told_once() -> None:
    w = Watched()
    for _ in range(16):
        w.scrape(text({"0": Engine(kv=0.97)}))
        w.after(0.25)
    alarms = [(line.text, line.n) for line in w.model.snapshot().events if line.kind == "alarm"]
    assert alarms == [("m is slow: the KV cache is 97% full", 1)]


def test_the_log_is_bounded_and_its_numbers_go_on() -> None:
    log = Log()
    for i in range(3 * KEPT):
        log.say(float(i), "info", "note", f"event {i}")
    assert len(log.lines()) == KEPT
    assert log.lines()[-1].number == 3 * KEPT


# -- speculation -------------------------------------------------------------------------------------------------------------------


def verified(
    request: str, accepted: int, fates: list[Fate], p: list[float], rank: list[int], strict: list[float],
    rule: str = "cactus:delta=1,p_min=0.1,top_k=10",
) -> Verified:  # fmt: skip
    rows = DraftRows(token=[0] * len(p), p=p, q=p, rank=rank, strict=strict, flags=[0] * len(p), would=[True] * len(p), fate=fates)
    return Verified(
        request=request, rule_asked=rule, rule_effective=rule, drafted=len(p), accepted=accepted, rows=rows,
    )  # fmt: skip


def frame(step: int, *requests: Verified, lost: int = 0) -> VerificationStep:
    return VerificationStep(t=0, engine="worker-0", step=step, requests=list(requests), lost=lost)


ROUND = ([Fate.STRICT, Fate.RELAXED, Fate.LOW_SUPPORT, Fate.UNREAD], [0.95, 0.30, 0.02, 0.5], [0, 1, 40, 0], [1.0, 0.5, 0.5, 0.5])


def test_rounds_by_position_probability_and_rank() -> None:
    w = Watched()
    w.model.take(GATEWAY, ready())
    for step in range(10):
        w.model.take(GATEWAY, frame(step, verified("r", 2, *ROUND), lost=int(step == 4)))
    w.clock.t += 1
    spec = w.model.snapshot().speculation[0]
    assert (spec.rounds, spec.accepted_length, spec.window_s, spec.lost_frames) == (10, 2.0, 1.0, 1)
    assert spec.strict_accepted_length == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert spec.by_position == (1.0, 1.0, 0.0, 0.0)
    assert spec.strict_by_position == pytest.approx((1.0, 0.5, 0.25, 0.125))
    assert (spec.p_min, spec.top_k) == (0.1, 10)
    bins = [(b.low, b.strict, b.relaxed, b.cut, b.rejected) for b in spec.probability]
    counted = [one for one in bins if any(one[1:])]
    assert counted == [(0.0, 0, 0, 10, 0), (0.3, 0, 10, 0, 0), (0.95, 10, 0, 0, 0)]
    ranks = [(b.low, b.high, b.strict, b.relaxed, b.cut) for b in spec.rank if b.strict + b.relaxed + b.cut]
    assert ranks == [(0, 1, 10, 0, 0), (1, 2, 0, 10, 0), (20, 50, 0, 0, 10)]
    assert dict(spec.fates) == {"strict": 10, "relaxed": 10, "low_support": 10, "unread": 10}
    assert w.after(62).speculation[0].rounds == 0


def test_sums_of_rounds_say_the_same_as_the_rounds() -> None:
    rng, one, other, collector = random.Random(3), Watched(), Watched(), RoundCollector()
    for step in range(200):
        accepted = rng.randrange(5)
        fates = [Fate.STRICT] * accepted + [Fate.COIN] * (accepted < 4) + [Fate.UNREAD] * (3 - accepted)
        row = verified("r", accepted, fates, [rng.random() for _ in range(4)], [rng.randrange(60) for _ in range(4)], [0.5] * 4)
        one.model.take(GATEWAY, frame(step, row))
        collector.add(frame(step, row))
    one.clock.t += 1
    other.clock.t += 1
    for sums in collector.take(0.0, 1.0):
        assert isinstance(sums, RoundSums)
        other.model.take(GATEWAY, sums)
    assert one.model.snapshot().speculation == other.model.snapshot().speculation


RULE = "cactus:delta=0.25,p_min=0.1,top_k=10"


METERS: tuple[Meter, ...] = ("steps", "tokens")


TOLD = ("engine_ready", "tts_changed", "engine_died", "session_alarm")


def mixed(w: Watched, *, sums: bool) -> None:
    """Ten rounds of the relaxed arm with 3 accepted, thirty of its control with 1."""
    collector = RoundCollector()
    for step in range(10):
        relaxed = verified("a", 3, [Fate.STRICT] * 3 + [Fate.COIN], [0.9] * 4, [0] * 4, [0.5] * 4, RULE)
        control = [verified(f"c{i}", 1, [Fate.STRICT, Fate.COIN], [0.5] * 2, [1] * 2, [0.5] * 2, "strict") for i in range(3)]
        event = frame(step, control[0], relaxed, *control[1:], lost=int(step == 4))
        collector.add(event)
        if not sums:
            w.model.take(GATEWAY, event)
    told = collector.take(0.0, 1.0)
    assert {one.rule: (one.rounds, one.accepted, one.drafted) for one in told} == {"strict": (30, 30, 60), RULE: (10, 30, 40)}
    assert (sum(one.lost for one in told), sum(one.frames for one in told)) == (1, 10)
    for one in told if sums else ():
        w.model.take(GATEWAY, one)


@pytest.mark.parametrize("sums", [True, False])
def test_arms_side_by_side_are_not_mixed(sums: bool) -> None:
    """The rounds that are shown are those of the rule beside which they stand."""
    w = Watched(GATEWAY)
    w.model.take(GATEWAY, ready())
    w.model.snapshot()
    w.model.take(GATEWAY, economics())
    mixed(w, sums=sums)
    w.clock.t += 1
    shown = w.model.snapshot()
    (row,), (spec,), (series,) = shown.engines, shown.speculation, shown.series
    assert (row.rule, row.accepted_length, row.acceptance_share) == (RULE, 3.0, 0.75)
    assert (spec.rule, spec.rounds, spec.accepted_length, spec.by_position, spec.lost_frames) == (
        RULE,
        10,
        3.0,
        (1.0,) * 3 + (0.0,),
        1,
    )
    assert spec.strict_accepted_length == pytest.approx(0.5 + 0.25 + 0.125 + 0.0625)
    assert dict(spec.fates) == {"strict": 30, "coin": 10}
    assert sum(b.strict + b.rejected for b in spec.probability) == 40
    assert series.points[-1].accepted_length == 3.0
    w.model.take(GATEWAY, economics(verdict="loss", on=False, since=1.0))  # what its requests run under now
    shown = w.model.snapshot()
    (row,), (spec,) = shown.engines, shown.speculation
    assert (row.rule, row.accepted_length) == ("strict", 1.0)
    assert (spec.rule, spec.rounds, spec.p_min) == ("strict", 30, None)


def test_an_arm_without_a_round_has_no_accepted_length_although_the_engine_counts_drafts() -> None:
    w, engines = Watched(GATEWAY), {"0": Engine(drafts=1000, drafted=4000, accepted_at=[900.0] * 4)}
    w.model.take(GATEWAY, ready())
    w.model.take(GATEWAY, economics(arm="cactus:delta=9"))
    w.scrape(text(engines), GATEWAY)
    mixed(w, sums=True)
    w.clock.t += 1
    engines["0"].drafts += 100
    w.scrape(text(engines), GATEWAY)
    shown = w.model.snapshot()
    assert (shown.engines[0].accepted_length, shown.engines[0].acceptance_share) == (None, None)
    assert (shown.speculation[0].rule, shown.speculation[0].rounds) == ("cactus:delta=9", 0)
    assert [p.accepted_length for p in shown.series[0].points] == [None]


def test_rules_that_are_told_apart_are_bounded() -> None:
    collector, w = RoundCollector(), Watched(GATEWAY)
    w.model.take(GATEWAY, ready())
    for step in range(3 * RULES):
        collector.add(frame(step, verified("r", 1, [Fate.STRICT], [0.9], [0], [0.9], f"cactus:delta={step}")))
        if step % 7 == 6:
            for one in collector.take(0.0, 1.0):
                w.model.take(GATEWAY, one)
    assert len(w.model.engines[GATEWAY].rounds(w.clock.t)) <= RULES + 1
    rounds = sum(slot.rounds for slot in w.model.engines[GATEWAY].rounds(w.clock.t).values())
    assert rounds == 3 * RULES - 3 * RULES % 7


def test_accepted_length_by_output_position_with_and_without_a_learning_draft() -> None:
    w = Watched()

    def rounds(request: str, accepted: int, n: int) -> None:
        for i in range(n):
            w.model.take(GATEWAY, frame(i, verified(request, accepted, [Fate.STRICT] * 4, [0.9] * 4, [0] * 4, [0.9] * 4)))

    w.model.take(GATEWAY, started("frozen"))
    rounds("frozen-1", 1, 64)  # 2 tokens a round: 128 tokens
    changed = TtsChanged(t=1, engine="e", state="live", reason="first update", epoch=1, version=1)
    w.model.take(GATEWAY, changed)
    w.model.take(GATEWAY, started("live"))
    rounds("live-1", 3, 32)  # 4 tokens a round: 128 tokens
    rounds("unknown", 2, 9)  # began before we looked, so where it stands is not known
    update = DraftUpdated(
        t=2, engine="e", version=7, epoch=1, rounds=96, rows=256, loss=0.5, train_ms=10, publish_ms=2, live=0.6, frozen=0.4,
        gain=1.3, break_even=1.05,
    )  # fmt: skip
    w.model.take(GATEWAY, update)
    w.clock.t += 1
    tts = w.model.snapshot().speculation[0].tts
    assert tts is not None
    points = [(p.low, p.high, p.frozen, p.frozen_rounds, p.live, p.live_rounds) for p in tts.by_output_position]
    assert points == [(0, 64, 1.0, 32, 3.0, 16), (64, 128, 1.0, 32, 3.0, 16)]
    assert (tts.state, tts.version, tts.publishes, tts.loss, tts.gain, tts.break_even) == ("live", 7, 1, 0.5, 1.3, 1.05)


def test_what_a_gateway_tells_again_is_counted_once() -> None:
    """A reader that comes back is told the past, with the times it had."""
    w = Watched(GATEWAY)
    update = DraftUpdated(
        t=2, engine="e", version=7, epoch=1, rounds=96, rows=256, loss=0.5, train_ms=10, publish_ms=2, live=0.6, frozen=0.4,
        gain=1.3, break_even=1.05,
    )  # fmt: skip
    changed = TtsChanged(t=1, engine="e", state="live", reason="first update", epoch=1, version=1)
    seen = SessionSeen(t=5, session="s", steps=1, tokens=92, think_tokens=60, closes=0, latest=[finished(t=1)])
    for again in range(4):
        past = [
            ready(), changed, update, EngineDied(t=3, engine="engine-0", reason="status -9"),
            msgspec.structs.replace(seen, t=5 + 100 * again),
            *(SessionAlarm(t=5 + 100 * again, session="s", step=1, meter=m, value=8, limit=9, stopped=False) for m in METERS),
        ]  # fmt: skip
        for event in past:
            w.model.take(GATEWAY, event)
        w.clock.t += 100
    shown = w.model.snapshot()
    tts = shown.speculation[0].tts
    assert tts is not None
    assert (tts.publishes, tts.losses) == (1, (0.5,))
    told = {
        kind: [line.n for line in shown.events if line.kind == kind] for kind in ("tts_changed", "engine_died", "session_alarm")
    }
    assert told == {"tts_changed": [1], "engine_died": [1], "session_alarm": [1, 1]}
    assert shown.engines[0].why == "status -9"
    assert shown.sessions[0].last_t == 1000.0 - 4  # the step's end, and not the last time it was told
    w.model.take(GATEWAY, msgspec.structs.replace(update, t=9, version=8))
    assert (tts := w.model.snapshot().speculation[0].tts) is not None
    assert tts.publishes == 2


# -- the verdict -------------------------------------------------------------------------------------------------------------------


def verdict(*events: Event, seconds: float = 0.0) -> tuple[str, str]:
    w = Watched(GATEWAY)
    for event in events:
        w.model.take(GATEWAY, event)
    w.clock.t += seconds
    w.model.heard(GATEWAY)
    line = w.model.snapshot().verdict
    return line.severity, line.text


def economics(**more: object) -> EconomicsReport:
    return EconomicsReport(t=0, rows=[arm(**more)])


def test_the_verdict_names_the_losing_rule_its_numbers_and_when_it_was_switched() -> None:
    loss = economics(verdict="loss", on=False, since=1000.0 - 250, reason="rounds ratio 1.16 [1.02, 1.30] is above 1")
    expected = "cactus δ=0.25 on qwen3-8b: λ 1.86 > gain 1.61, switched to strict 4 min ago"
    assert verdict(ready(), loss) == ("warning", expected)


def test_a_losing_rule_that_is_still_on_is_an_alarm() -> None:
    assert verdict(ready(), economics(verdict="loss")) == (
        "alarm", "cactus δ=0.25 on qwen3-8b: λ 1.86 > gain 1.61, still on and the guard is off",
    )  # fmt: skip
    pinned = economics(verdict="loss", pinned="cactus:delta=0.25,p_min=0.1,top_k=10")
    assert verdict(ready(), pinned)[1].endswith("still on although it is pinned on")
    off = economics(verdict="loss", on=False, since=990.0, pinned="cactus:delta=0.25,p_min=0.1,top_k=10")
    assert verdict(ready(), off) == verdict(ready(), pinned)  # the pin goes before the switch
    assert verdict(ready(), economics(verdict="loss", pinned="strict"))[1].endswith("gain 1.61, pinned to strict")


def test_a_loss_that_lambda_does_not_show_says_what_decided() -> None:
    text = "ttlt ratio 1.20 [1.01, 1.40] is above 1"
    assert verdict(ready(), economics(verdict="loss", on=False, since=990.0, gain=2.5, reason=text)) == (
        "warning", f"cactus δ=0.25 on qwen3-8b: {text}, switched to strict 10 s ago",
    )  # fmt: skip


def test_the_verdict_when_all_is_well_and_while_it_is_open() -> None:
    assert verdict(ready(), economics(verdict="win", gain=2.5)) == (
        "good", "cactus δ=0.25 on qwen3-8b pays: λ 1.86 < gain 2.50, rounds ratio 1.16",
    )  # fmt: skip
    assert verdict(ready(), economics(gain=None, ratios={}), started()) == (
        "info", "cactus δ=0.25 on qwen3-8b: undecided, λ unknown yet; 1 session, 0 running",
    )  # fmt: skip
    assert verdict(ready()) == ("info", "1 engine up, nothing measured yet")
    assert verdict(ready(), economics(arm="strict", verdict="control"), finished()) == (
        "info", "1 engine up, nothing measured yet; 1 session, 0 running",
    )  # fmt: skip


def test_the_verdict_before_anything_came() -> None:
    assert Watched().model.snapshot().verdict.text.startswith((GATEWAY, SERVER)) is True


def test_the_worst_comes_first() -> None:
    loop = [finished("a", step, closed="loop") for step in (1, 2)]
    stop = SessionAlarm(t=0, session="b", step=1, meter="steps", value=9, limit=9, stopped=True)
    lost = economics(verdict="loss", on=False, since=990.0)
    died = EngineDied(t=0, engine="engine-0", reason="status -9")
    everything: list[Event] = [ready(), lost, stop, *loop, died]
    said = [verdict(*everything[:n], seconds=1)[1] for n in range(2, len(everything) + 1)]
    assert said == [
        "cactus δ=0.25 on qwen3-8b: λ 1.86 > gain 1.61, switched to strict 11 s ago",
        "session b on qwen3-8b is stopped: steps is 9 of 9",
        "session b on qwen3-8b is stopped: steps is 9 of 9",
        "session a on qwen3-8b is looping: 2 of the latest 2 steps looped or brought nothing",
        "qwen3-8b is down since 0 s: status -9",
    ]


def test_an_abandoned_session_is_not_what_is_wrong_now() -> None:
    w = Watched(GATEWAY)
    loop = [finished("a", step, closed="loop") for step in (1, 2)]
    stop = SessionAlarm(t=0, session="b", step=1, meter="steps", value=9, limit=9, stopped=True)
    for event in (ready(), *loop, finished("b"), stop):
        w.model.take(GATEWAY, event)

    def said(seconds: float) -> tuple[str, list[str]]:
        w.clock.t += seconds
        w.model.take(GATEWAY, stop)  # told again, as to a reader that comes back; no sign of life
        shown = w.model.snapshot()
        return shown.verdict.severity, [row.state for row in shown.sessions]

    assert said(179.0) == ("alarm", ["looping", "stopped"])
    assert said(2.0) == ("info", ["looping", "stopped"])
    w.model.take(GATEWAY, started("a", 3))
    assert w.model.snapshot().verdict.text.startswith("session a on qwen3-8b is looping")
    assert said(600.0)[0] == "alarm"  # it still runs


def test_a_draft_that_was_rolled_back() -> None:
    back = TtsChanged(t=0, engine="e", state="rolled_back", reason="gain 0.97 is below 1.04", epoch=2, version=40)
    assert verdict(ready(), back) == ("warning", "TTS on qwen3-8b is rolled back: gain 0.97 is below 1.04")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("strict", "strict"),
        ("cactus:delta=0.25,p_min=0.1,top_k=10", "cactus δ=0.25"),
        ("cactus:delta=0.25,p_min=0,top_k=0", "cactus δ=0.25 unfiltered"),
        ("cactus:delta=0.25,p_min=0.2,top_k=10", "cactus δ=0.25 p_min=0.2 top_k=10"),
        ("typical:eps=0.09,delta=0.3,p_min=0.1,top_k=10", "typical ε=0.09 δ=0.3"),
        ("of another version:x=1", "of another version:x=1"),
    ],
)
def test_rules_in_words(rule: str, said: str) -> None:
    assert words.rule(rule) == said


def test_ages_in_words() -> None:
    assert [words.age(s) for s in (-3, 0, 59.9, 60, 3599, 3600, 86_399, 86_400)] == [
        "0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d",
    ]  # fmt: skip


@pytest.mark.parametrize("bad", ["\x1b[2J\x1b]0;t\x07", "\u202egnp.exe", "a\nalarm: b", "\u2066x\u2069", "\x9b1m"])
def test_names_of_clients_reach_no_terminal_raw(bad: str) -> None:
    w = Watched(GATEWAY)
    for event in (ready(f"m{bad}"), *[finished(bad, step, closed="loop") for step in (1, 2)]):
        w.model.take(GATEWAY, event)
    shown = w.model.snapshot()
    lines = once.as_text(shown).split("\n")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert "is looping" in lines[0]
    assert words.clean("λ 1.2 — 日本") == "λ 1.2 — 日本"


# -- bounds ------------------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_flat_over_a_million_events() -> None:
    """Counted in objects: a million steps of half a million sessions leave as much as fifty thousand."""
    w = Watched(sessions=200)
    w.model.take(GATEWAY, ready())
    held: list[dict[str, int]] = []
    events = 0
    for i in range(500_000):
        name = f"s{i // 3}"
        w.model.take(GATEWAY, started(name, i) if i % 50 == 0 else closed(i, "budget", name))
        w.model.take(GATEWAY, finished(name, i, closed="budget" if i % 7 == 0 else ""))
        events += 2
        w.clock.t += 0.002
        if i % 5000 == 4999:
            w.model.snapshot()
        if i % 25_000 == 24_999:
            held.append(w.model.held())
    assert events == 1_000_000
    assert len(held) == 20
    assert held[0]["sessions"] <= 200 * (BARS + 4)
    for part in ("sources", "engines", "sessions"):
        late = [one[part] for one in held[5:]]
        assert max(late) <= 1.1 * min(late) + 10, part
    assert max(one["log"] for one in held) <= 2 * KEPT
    assert max(one["rounds"] for one in held) <= REQUESTS


def test_requests_that_name_their_rules_are_measured_by_rule() -> None:
    """As those of the demo: λ is the ratio of tokens a step, gain that of tokens a round, and no verdict follows."""
    w = Watched(GATEWAY)
    w.model.take(GATEWAY, ready())
    relaxed = "cactus:delta=1,p_min=0.1,top_k=10"
    for i in range(20):
        for rule, tokens, accepted in (("strict", 100, 60), (relaxed, 150, 120)):
            think = tokens - 42
            step = finished(f"{rule}{i}", 1, think=think, answer=40, rule=rule, arm="", rounds=40, accepted=accepted, tokens=tokens)
            w.model.take(GATEWAY, step)
    w.model.take(GATEWAY, finished("own", 1, rule="strict", arm="strict", rounds=1, accepted=5))  # the gateway's to count
    row = w.row(GATEWAY)
    assert (row.arm, row.verdict) == (relaxed, "undecided")
    assert row.length_ratio is not None
    assert (row.length_ratio.value, row.gain) == (pytest.approx(1.5), pytest.approx((3 + 1) / (1.5 + 1)))
    assert w.model.snapshot().verdict.severity == "info"
    w.model.take(GATEWAY, economics(arm="cactus:delta=9"))  # a gateway with arms of its own speaks for itself
    assert w.row(GATEWAY).arm == "cactus:delta=9"


def test_sessions_are_forgotten_by_number_and_by_idleness() -> None:
    w = Watched(sessions=5)
    for i in range(8):
        w.model.take(GATEWAY, started(f"s{i}"))
    shown = w.model.snapshot()
    assert ([row.id for row in shown.sessions], shown.sessions_hidden) == (["s3", "s4", "s5", "s6", "s7"], 3)
    w.clock.t += 1700
    w.model.take(GATEWAY, started("s4", 2))
    assert [row.id for row in w.after(200).sessions] == ["s4"]
    assert len(w.model.sessions.by_request) == 2


def test_an_event_of_another_kind_is_counted_and_skipped() -> None:
    from agentguard.events import Graded

    w = Watched()
    w.model.take(GATEWAY, Graded(t=0, session="s", step=1, arm="strict", right=True))
    assert w.model.skipped == 1
