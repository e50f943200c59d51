"""The simulator: each scenario comes to the verdict it stands for, through the model of live sources; and playing recordings."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from agentguard.errors import ActionRefusedError, ConfigError
from agentguard.events import (
    EconomicsReport,
    EngineMetrics,
    Event,
    FromSource,
    OperatorActed,
    RuleSwitched,
    StepFinished,
    StepStarted,
    VerificationStep,
    decode_json,
    encode_json,
)
from agentguard.monitor.live import PlayedMonitor
from agentguard.monitor.model import Model
from agentguard.monitor.options import Options
from agentguard.monitor.playback import Player, RecordingScript, SimulatorScript
from agentguard.monitor.simulator import SCENARIOS, Simulator
from agentguard.monitor.snapshot import Snapshot
from tests.monitor_rig import Clock, finished, ready, started


def player(scenario: str, *, seed: int = 0, speed: float = 1.0) -> tuple[Player, Clock]:
    clock = Clock()
    return Player(SimulatorScript(scenario, seed, clock()), lambda now: Model(clock=now), clock, speed), clock


def after(play: Player, clock: Clock, seconds: float) -> Snapshot:
    clock.t += seconds
    play.advance()
    return play.model.snapshot()


def test_a_healthy_fleet() -> None:
    shown = after(*player("healthy"), 60)
    assert (shown.verdict.severity, shown.verdict.engine) == ("good", "sim://qwen3-8b")
    assert shown.verdict.text.startswith("cactus δ=0.25 on qwen3-8b pays: λ 1.0")
    assert [row.state for row in shown.engines] == ["ok", "ok"]
    assert all(row.length_ratio and row.gain and row.length_ratio.value < row.gain for row in shown.engines)
    assert {session.state for session in shown.sessions} <= {"running", "idle"}
    tts = shown.speculation[0].tts
    assert tts is not None
    assert (tts.state, tts.publishes) == ("live", 12)
    assert tts.losses[-1] < tts.losses[0]


def test_the_accepted_length_beside_an_arm_is_that_arms() -> None:
    """Of 200 s: the control's rounds, which accept 0.8, are not in it."""
    shown = after(*player("healthy", speed=100), 2)
    for row, spec in zip(shown.engines, shown.speculation, strict=True):
        (own,) = [arm for arm in spec.arms if arm.arm == row.arm]
        assert own.accepted_length is not None
        assert spec.rule == row.rule == row.arm
        assert row.accepted_length == spec.accepted_length == pytest.approx(own.accepted_length, rel=0.1)


def test_a_losing_rule_is_switched_off_by_the_real_ledger() -> None:
    play, clock = player("losing-rule")
    before = after(play, clock, 7)
    assert before.verdict.text.startswith("cactus δ=0.25 on qwen3-8b: undecided, λ 1.8")
    shown = after(play, clock, 5)
    assert shown.verdict.severity == "warning"
    assert shown.verdict.text.startswith("cactus δ=0.25 on qwen3-8b: λ 1.")
    assert shown.verdict.text.endswith("switched to strict 4 s ago")
    (row,) = shown.engines
    assert row.length_ratio is not None
    assert row.gain is not None
    assert row.length_ratio.value > row.gain
    assert (row.rule, row.verdict) == ("strict", "loss")
    assert [line.kind for line in shown.events if line.severity == "warning"] == ["rule_switched"]


def test_a_session_that_runs_away_until_its_limit() -> None:
    play, clock = player("runaway-session")
    first = after(play, clock, 20)
    assert (first.verdict.severity, first.verdict.session) == ("warning", "sim://qwen3-8b|agent-002")
    assert first.verdict.text == "session agent-002 on qwen3-8b is running away: traces grow: 170 → 260 → 390 tokens"
    last = after(play, clock, 60)
    assert last.verdict.severity == "alarm"
    assert last.verdict.text.startswith("session agent-002 on qwen3-8b is stopped: tokens is ")


def test_a_session_that_loops() -> None:
    shown = after(*player("loop"), 60)
    assert (shown.verdict.severity, shown.verdict.session) == ("alarm", "sim://qwen3-8b|agent-002")
    assert "agent-002 on qwen3-8b is looping" in shown.verdict.text
    (looping,) = [session for session in shown.sessions if session.state == "looping"]
    assert [bar.closed for bar in looping.bars if bar.done][-3:] == ["loop"] * 3


def test_an_engine_that_goes_and_comes_back() -> None:
    play, clock = player("engine-down")
    states = [[row.state for row in after(play, clock, 1).engines] for _ in range(60)]
    assert [one for one, _ in states] == ["ok"] * 60
    assert [other for _, other in states] == ["ok"] * 9 + ["down"] * 40 + ["ok"] * 11
    assert play.model.snapshot().verdict.severity == "good"


def test_an_engine_down_is_the_verdict_and_its_sessions_are_lost() -> None:
    shown = after(*player("engine-down"), 30)
    assert shown.verdict.text == "qwen3-32b is down since 20 s: process ended with status -9; see its log"
    assert {session.state for session in shown.sessions if session.engine == "sim://qwen3-32b"} == {"lost"}


def test_counters_that_are_set_back_give_no_negative_rate() -> None:
    play, clock = player("counter-reset")
    for _ in range(40):
        (row,) = after(play, clock, 1).engines
        assert row.tokens_out_per_s is None or row.tokens_out_per_s >= 0
        assert row.accepted_length is None or 0 <= row.accepted_length <= 4
    assert [line.text for line in play.model.snapshot().events if line.kind == "restart"] == [
        "qwen3-8b began anew: its counters fell"
    ]


def test_two_hundred_sessions() -> None:
    shown = after(*player("many-sessions"), 30)
    assert len(shown.sessions) == 200
    assert sum(session.phase != "idle" for session in shown.sessions) > 100
    assert sum(row.running or 0 for row in shown.engines) == sum(session.phase != "idle" for session in shown.sessions)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_is_the_same_for_a_seed_and_time_in_any_pieces(scenario: str) -> None:
    whole = Simulator(scenario, seed=7, start=1000.0).advance(1015.0)
    pieces, simulator = [], Simulator(scenario, seed=7, start=1000.0)
    for step in range(1, 151):
        pieces += simulator.advance(1000.0 + step / 10)
    assert [encode_json(event) for _, event in whole] == [encode_json(event) for _, event in pieces]
    assert whole != Simulator(scenario, seed=8, start=1000.0).advance(1015.0)
    assert all(decode_json(encode_json(event)) == event for _, event in whole)
    assert [event.t for _, event in whole] == sorted(event.t for _, event in whole)
    kinds = {type(event) for _, event in whole}
    assert {VerificationStep, StepStarted, StepFinished, EngineMetrics, EconomicsReport} <= kinds
    assert (RuleSwitched in kinds) == (scenario == "losing-rule")


def test_an_unknown_scenario_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'healthy'"):
        Simulator("helthy")


async def test_an_operator_acts_on_the_demo() -> None:
    play, clock = player("healthy")
    monitor = PlayedMonitor(Options(demo="healthy"), play)
    shown = after(play, clock, 20)
    thinking = next(session for session in shown.sessions if session.phase == "thinking")
    assert "closed 1 trace" in await monitor.close_trace(thinking.key)
    assert "limit of tokens" in await monitor.set_limit(thinking.key, "tokens", 99)
    arm = shown.engines[0].arm
    assert arm is not None
    await monitor.pin("sim://qwen3-8b", "", arm, "strict")
    await monitor.set_tts("sim://qwen3-8b", False)
    shown = after(play, clock, 2)
    row = next(session for session in shown.sessions if session.key == thinking.key)
    assert [bar.closed for bar in row.bars if bar.step == thinking.steps] == ["operator"]
    assert shown.engines[0].rule == "strict"
    tts = shown.speculation[0].tts
    assert tts is not None
    assert tts.state == "paused"
    said = [line.text for line in shown.events if line.kind == "operator_acted"]
    assert len(said) == 4
    with pytest.raises(ActionRefusedError, match="nothing there to act on"):
        await monitor.close_trace("sim://qwen3-8b|nobody")
    with pytest.raises(ActionRefusedError, match="--readonly"):
        await PlayedMonitor(Options(demo="healthy", readonly=True), play).close_trace(thinking.key)


def test_the_demo_has_words_only_with_content_on() -> None:
    for content in (True, False):
        play, clock = player("healthy")
        clock.t += 20
        shown = PlayedMonitor(Options(demo="healthy", content=content), play).snapshot()
        running = {session.running_request for session in shown.sessions if session.running_request}
        assert shown.content.keys() == (running if content else set())


# -- playing -----------------------------------------------------------------------------------------------------------------------


def written(path: Path, *events: Event) -> Path:
    path.write_bytes(b"".join(encode_json(event) + b"\n" for event in events))
    return path


def recording(path: Path, seconds: int = 60) -> Path:
    """A step that ends each second, from t = 0 on."""
    events: list[Event] = [ready()]
    for i in range(seconds):
        events.append(started("s", i + 1))
        step = finished("s", i + 1)
        events.append(type(step)(**{f: getattr(step, f) for f in step.__struct_fields__} | {"t": float(i + 1)}))
        events[-2] = type(events[-2])(**{f: getattr(events[-2], f) for f in events[-2].__struct_fields__} | {"t": i + 0.5})
    return written(path, *events)


def test_pause_speed_and_seek(tmp_path: Path) -> None:
    clock = Clock()
    play = Player(RecordingScript(recording(tmp_path / "r.jsonl")), lambda now: Model(clock=now), clock)

    def steps() -> int:
        return play.model.snapshot().sessions[0].steps if play.model.snapshot().sessions else 0

    clock.t += 10
    play.advance()
    assert (steps(), play.state().at_t) == (10, 10.0)
    play.set_speed(4)
    clock.t += 5
    play.advance()
    assert (steps(), play.state().speed) == (30, 4)
    play.set_paused(True)
    clock.t += 100
    play.advance()
    assert (steps(), play.state().paused) == (30, True)
    play.set_paused(False)
    play.seek(12.0)
    assert (steps(), play.model.snapshot().t, len(play.model.snapshot().series[0].points)) == (12, 12.0, 12)
    play.seek(1e9)
    assert (steps(), play.state().ended, play.state().at_t) == (60, True, 60.0)
    play.seek(-5)
    assert (steps(), play.state().at_t) == (0, 0.0)
    play.set_speed(1e9)
    assert play.state().speed == 100


def test_a_seek_back_shows_what_was_shown_then(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    events = [event for _, event in Simulator("losing-rule", start=1000.0).advance(1030.0)]
    written(path, *events)
    clock = Clock()
    play = Player(RecordingScript(path), lambda now: Model(clock=now), clock)
    play.seek(1010.0)
    first = play.model.snapshot()
    play.seek(1030.0)
    play.seek(1010.0)
    again = play.model.snapshot()
    assert (first.verdict, first.engines, first.sessions, first.speculation) == (
        again.verdict, again.engines, again.sessions, again.speculation,
    )  # fmt: skip


class Slow(SimulatorScript):
    """A script whose playing in a thread waits at a second until it is let go."""

    def __init__(self) -> None:
        super().__init__("healthy", 0, 1000.0)
        self.hold_t, self.reached, self.go = math.inf, threading.Event(), threading.Event()

    def advance(self, t: float) -> Iterable[tuple[float, str, Event]]:
        if t >= self.hold_t and threading.current_thread() is not threading.main_thread():
            self.reached.set()
            self.go.wait(30)
        return super().advance(t)


async def test_a_seek_in_a_thread_leaves_the_screen_alive() -> None:
    script, clock = Slow(), Clock()
    play = Player(script, lambda now: Model(clock=now), clock)
    monitor = PlayedMonitor(Options(demo="healthy"), play)
    clock.t += 20
    before = monitor.snapshot()
    script.hold_t = 1005.0
    moving = asyncio.create_task(monitor.seek_to(1010.0))
    await asyncio.to_thread(script.reached.wait, 30)
    clock.t += 5
    during = monitor.snapshot()
    assert during.playback is not None
    assert (during.t, during.engines, during.playback.at_t) == (before.t, before.engines, 1010.0)
    monitor.set_speed(4)
    monitor.set_paused(True)
    with pytest.raises(ActionRefusedError, match="moved to another time"):
        await monitor.set_tts("sim://qwen3-8b", False)
    again = asyncio.create_task(monitor.seek_to(1008.0))  # takes over
    await asyncio.sleep(0)
    script.hold_t = math.inf
    script.go.set()
    await asyncio.gather(moving, again)
    there = monitor.snapshot()
    assert there.playback is not None
    assert (there.t, there.playback.at_t, there.playback.speed, there.playback.paused) == (1008.0, 1008.0, 4, True)
    straight, _ = player("healthy")
    straight.seek(1008.0)
    assert there.engines == straight.model.snapshot().engines
    assert there.sessions == straight.model.snapshot().sessions


async def test_a_seek_that_is_given_up_does_not_outlive_the_monitor() -> None:
    script, clock = Slow(), Clock()
    monitor = PlayedMonitor(Options(demo="healthy"), Player(script, lambda now: Model(clock=now), clock))
    script.hold_t = 1050.0
    moving = asyncio.create_task(monitor.seek_to(1100.0))
    await asyncio.to_thread(script.reached.wait, 30)
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)
    held = monitor.snapshot().playback
    assert held is not None
    assert held.at_t == 1100.0  # its thread still plays
    closing = asyncio.create_task(monitor.close())
    await asyncio.sleep(0)
    assert not closing.done()
    script.go.set()
    await closing
    assert monitor._moving is None
    assert monitor.player.at_t < 1060.0


def test_a_recording_of_several_sources_keeps_them_apart(tmp_path: Path) -> None:
    def word(t: float, source: str, error: str = "") -> FromSource:
        return FromSource(t=t, source=source, kind="gateway", state="down" if error else "ok", error=error)

    path = written(
        tmp_path / "r.jsonl", word(0, "http://a"), ready(), started("x"), word(0, "http://b"), ready("other"), started("x"),
        word(1, "http://a", "ConnectError: refused"), word(40, "http://a"),
        OperatorActed(t=41, action="tts", target="e", detail="d"),
    )  # fmt: skip
    play = Player(RecordingScript(path), lambda now: Model(clock=now), Clock())
    states = []
    for t in (0.5, 3, 10, 41):
        play.seek(t)
        states.append([(row.source, row.state) for row in play.model.snapshot().engines])
    assert states == [
        [("http://a", "ok"), ("http://b", "ok")],
        [("http://a", "stale"), ("http://b", "ok")],
        [("http://a", "down"), ("http://b", "ok")],
        [("http://a", "ok"), ("http://b", "ok")],
    ]
    shown = play.model.snapshot()
    assert [session.key for session in shown.sessions] == ["http://a|x", "http://b|x"]
    assert {row.kind for row in shown.sources} == {"gateway"}
    assert not any(row.can_act for row in shown.sources)


@pytest.mark.parametrize(("text", "message"), [(b"", "holds no event"), (b'{"type":"x"}\n', "r.jsonl:1"), (None, "cannot be read")])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: bytes | None, message: str) -> None:
    path = tmp_path / "r.jsonl"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        RecordingScript(path)
