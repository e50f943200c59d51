"""Snapshots written by hand, one for each state the screen must show, and a monitor that serves them and notes what it is told."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from agentguard.economics.ratios import Ratio
from agentguard.errors import AgentGuardError
from agentguard.monitor.snapshot import (
    ArmRow,
    Bin,
    EngineRow,
    EventLine,
    Playback,
    Point,
    PositionPoint,
    Series,
    SessionRow,
    Snapshot,
    SourceRow,
    Speculation,
    StepBar,
    Tts,
    VerdictLine,
)

T = 1_900_000_000.0
RULE = "cactus:delta=0.25,p_min=0.1,top_k=10"
GATEWAY = "http://127.0.0.1:8484"
SERVER = "http://127.0.0.1:8000"
ONE = f"{GATEWAY} qwen3-8b 1"


def engine(n: int = 1, **changes: Any) -> EngineRow:
    row = EngineRow(
        key=f"{GATEWAY} qwen3-8b {n}",
        name=f"qwen3-8b/{n}",
        source=GATEWAY,
        model="qwen3-8b",
        state="ok",
        since_t=T - 3600,
        seen_t=T - 0.4,
        arm=RULE,
        rule=RULE,
        workload="qwen3-8b / chat / tool",
        verdict="win",
        accepted_length=3.12,
        gain=1.61,
        length_ratio=Ratio(1.22, 1.08, 1.37, 84),
        rounds_ratio=Ratio(0.76, 0.7, 0.83, 84),
        ttlt_ratio=Ratio(0.79, 0.71, 0.88, 84),
        window_s=60.0,
        ttlt_p50_s=4.2,
        ttlt_p95_s=11.7,
        ttft_p50_s=0.21,
        ttft_p95_s=0.63,
        tpot_p50_s=0.012,
        tpot_p95_s=0.019,
        queue_p95_s=0.04,
        think_share=0.71,
        steps=88,
        closes=3,
        tokens_in_per_s=5210.0,
        tokens_in_computed_per_s=911.0,
        tokens_out_per_s=1432.0,
        kv_use=0.48,
        running=6,
        waiting=0,
        preemptions_per_s=0.0,
        rejections_per_s=0.0,
        prefix_hit_share=0.83,
        acceptance_share=0.52,
        finish_reasons=(("stop", 83), ("length", 4), ("repetition", 1)),
    )
    return dataclasses.replace(row, **changes)


def series(key: str, length_ratio: float = 1.22, gain: float = 1.61) -> Series:
    points = tuple(
        Point(
            T - 300 + i,
            round(length_ratio + 0.2 * ((i * 7919) % 13 - 6) / 40, 3),
            length_ratio - 0.1,
            length_ratio + 0.1,
            round(gain + 0.05 * ((i * 104729) % 7 - 3) / 3, 3),
            None if 100 < i < 112 else round(3.1 + ((i * 31) % 17 - 8) / 20, 3),
        )
        for i in range(300)
    )
    return Series(key, 1.0, points)


def step(n: int, think: int, answer: int = 180, **changes: Any) -> StepBar:
    row = StepBar(
        step=n,
        request=f"chatcmpl-{n:03}",
        rule=RULE,
        prompt_tokens=2_000 + 1_400 * n,
        think_tokens=think,
        answer_tokens=answer,
        cap=2_400,
        budget=3_000,
        bound_by="budget",
        closed="",
        done=True,
        ttlt_s=2.0 + think / 400,
        accepted_length=3.0 + (n % 5) / 10,
    )
    return dataclasses.replace(row, **changes)


def session(n: int = 1, **changes: Any) -> SessionRow:
    bars = tuple(step(i, 400 + 90 * ((i * 5 + n) % 7)) for i in range(1, 4 + n % 9))
    row = SessionRow(
        key=f"{GATEWAY} agent-{n:04}",
        id=f"agent-{n:04}",
        caller="team-a",
        source=GATEWAY,
        engine=f"{GATEWAY} qwen3-8b {1 + n % 2}",
        model="qwen3-8b",
        arm=RULE,
        workload="qwen3-8b / chat / tool",
        state="running",
        why="",
        since_t=T - 600,
        last_t=T - n % 50,
        steps=len(bars),
        phase="thinking",
        running_request=f"chatcmpl-{n}",
        context_used=6_000 + 700 * (n % 20),
        context_limit=32_768,
        band_low=26_214,
        band_high=27_853,
        think_tokens=420 + n,
        think_cap=2_400,
        tokens=8_000 + n,
        think_tokens_total=6_100 + n,
        closes=n % 3,
        bars=bars,
    )
    return dataclasses.replace(row, **changes)


def speculation(key: str, **changes: Any) -> Speculation:
    probability = tuple(
        Bin(i / 10, (i + 1) / 10, 40 * i * i // 4, 30 * (10 - i) if i else 0, 260 if i == 0 else 0, 120 - 11 * i) for i in range(10)
    )
    ranks = (
        Bin(0, 1, 4210, 120, 0, 60),
        Bin(1, 2, 310, 260, 0, 190),
        Bin(2, 4, 80, 130, 0, 160),
        Bin(4, 10, 12, 61, 0, 120),
        Bin(10, 100, 0, 0, 140, 44),
        Bin(100, float("inf"), 0, 0, 90, 12),
    )
    row = Speculation(
        engine=key,
        window_s=60.0,
        rounds=1_530,
        drafted=9_180,
        accepted=4_774,
        accepted_length=3.12,
        strict_accepted_length=1.56,
        by_position=(0.83, 0.66, 0.54, 0.45, 0.36, 0.28),
        strict_by_position=(0.62, 0.4, 0.25, 0.15, 0.09, 0.05),
        probability=probability,
        rank=ranks,
        p_min=0.1,
        top_k=10,
        rule=RULE,
        fates=(("strict", 2400), ("relaxed", 2374), ("coin", 1180), ("low_support", 350), ("unread", 2876)),
        lost_frames=0,
        tts=Tts(
            "live",
            T - 900,
            "",
            41,
            3,
            41,
            0.412,
            (0.9, 0.8, 0.71, 0.6, 0.55, 0.5, 0.44, 0.41),
            38.2,
            6.1,
            0.74,
            0.66,
            1.19,
            1.04,
            tuple(PositionPoint(256 * i, 256 * (i + 1), 3.0 + i * 0.05, 200, 3.0 - i * 0.11, 200) for i in range(8)),
            T - 3,
        ),
        arms=(
            ArmRow("qwen3-8b / chat / tool", "strict", True, None, "control", "", "live control", 21, 160, 0, 1.56, 1.56),
            ArmRow(
                "qwen3-8b / chat / tool",
                RULE,
                True,
                None,
                "win",
                "rounds 0.76 [0.70, 0.83] are below 1",
                "live control",
                84,
                640,
                1,
                3.12,
                1.56,
                1.61,
                Ratio(1.22, 1.08, 1.37, 84),
                Ratio(0.76, 0.7, 0.83, 84),
                Ratio(0.79, 0.71, 0.88, 84),
            ),
        ),
    )
    return dataclasses.replace(row, **changes)


def source(name: str = GATEWAY, **changes: Any) -> SourceRow:
    return dataclasses.replace(SourceRow(name, "gateway", "ok", T - 3600, T - 0.4, can_act=True), **changes)


EVENTS = (
    EventLine(1, T - 310, "info", "engine_ready", "qwen3-8b is ready, 32,768 tokens of context", ONE),
    EventLine(2, T - 200, "good", "draft_updated", "the draft learned: version 41, loss 0.41", ONE),
    EventLine(
        3,
        T - 42,
        "warning",
        "trace_closed",
        "agent-0002 step 6: closed at 2,400 of 2,400 think tokens (budget)",
        ONE,
        f"{GATEWAY} agent-0002",
        "chatcmpl-2",
        2,
    ),
)


def healthy(**changes: Any) -> Snapshot:
    engines = (engine(1), engine(2, tokens_out_per_s=1221.0, running=4, kv_use=0.31, accepted_length=3.01))
    row = Snapshot(
        number=1,
        t=T,
        verdict=VerdictLine("good", "speculation pays on all 2 engines: rounds 0.76 [0.70, 0.83] of strict"),
        sources=(source(),),
        engines=engines,
        series=tuple(series(e.key) for e in engines),
        sessions=tuple(session(n) for n in range(1, 7)),
        speculation=tuple(speculation(e.key) for e in engines),
        arms=speculation("").arms,
        events=EVENTS,
        window_s=60.0,
        samples=60,
    )
    return dataclasses.replace(row, **changes)


def one_trip() -> Snapshot:
    calm = healthy()
    losing = engine(
        1, rule="strict", verdict="loss", length_ratio=Ratio(1.86, 1.71, 2.02, 84), rounds_ratio=Ratio(1.16, 1.05, 1.28, 84)
    )
    looping = session(2, state="looping", why="the latest 3 traces were closed for a loop", closes=3)
    return dataclasses.replace(
        calm,
        verdict=VerdictLine(
            "alarm", "cactus δ=0.25 on qwen3-8b/1: λ 1.86 > gain 1.61, switched to strict 4 min ago", losing.key, since_t=T - 240
        ),
        engines=(losing, calm.engines[1]),
        series=(series(losing.key, 1.86), calm.series[1]),
        sessions=tuple(looping if s.id == looping.id else s for s in calm.sessions),
        events=(
            *EVENTS,
            EventLine(4, T - 240, "alarm", "rule_switched", "cactus δ=0.25 switched to strict: rounds 1.16 [1.05, 1.28]", ONE),
        ),
    )


def stale() -> Snapshot:
    calm = healthy()
    return dataclasses.replace(
        calm,
        verdict=VerdictLine("warning", f"no word from {GATEWAY} for 7 s: the numbers are old", since_t=T - 7),
        sources=(source(state="stale", since_t=T - 7, seen_t=T - 7, error="the event stream is silent", retry_s=2.0),),
        engines=tuple(
            dataclasses.replace(e, state="stale", seen_t=T - 7, why="no word for 7 s; the numbers are the last ones")
            for e in calm.engines
        ),
        sessions=tuple(dataclasses.replace(s, state="lost") for s in calm.sessions),
    )


def down() -> Snapshot:
    calm = healthy()
    one = dataclasses.replace(
        calm.engines[0], state="down", seen_t=T - 31, why="the engine ended: out of memory", running=None, waiting=None, kv_use=None
    )
    return dataclasses.replace(
        calm,
        verdict=VerdictLine("alarm", "qwen3-8b/1 is down: the engine ended: out of memory", one.key, since_t=T - 31),
        sources=(
            source(),
            source(SERVER, kind="metrics", state="down", seen_t=None, error="connection refused", retry_s=4.0, can_act=False),
        ),
        engines=(one, calm.engines[1]),
        events=(*EVENTS, EventLine(4, T - 31, "alarm", "engine_died", "qwen3-8b/1 ended: out of memory", ONE)),
    )


def no_servers() -> Snapshot:
    return Snapshot(
        number=1,
        t=T,
        verdict=VerdictLine("alarm", f"nobody answers at {GATEWAY}", since_t=T - 12),
        sources=(source(state="down", since_t=T - 12, seen_t=None, error="connection refused", retry_s=4.0),),
    )


def many_sessions(n: int = 200) -> Snapshot:
    states: tuple[Any, ...] = (
        "running",
        "running",
        "idle",
        "filling",
        "growing",
        "running",
        "looping",
        "failed",
        "stopped",
        "running",
    )
    rows = tuple(
        session(i, state=states[i % 10], why="" if states[i % 10] in ("running", "idle") else "a sentence about the state")
        for i in range(1, n + 1)
    )
    return healthy(sessions=rows, sessions_hidden=12)


STATES = {
    "healthy": healthy,
    "one-trip": one_trip,
    "stale": stale,
    "down": down,
    "no-servers": no_servers,
    "200-sessions": many_sessions,
}


class SceneMonitor:
    """Serves ``scene`` and notes every call. ``gate`` holds the opening back; ``refuse`` is raised by every action."""

    def __init__(self, scene: Snapshot) -> None:
        self.scene = scene
        self.calls: list[tuple[Any, ...]] = []
        self.refuse: AgentGuardError | None = None
        self.fail: Exception | None = None
        self.held: asyncio.Event | None = None
        """Every seek waits for it."""
        self.slow: asyncio.Event | None = None
        """Every action waits for it."""
        self.opened = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SceneMonitor]:
        self.opened += 1
        yield self

    def snapshot(self) -> Snapshot:
        if self.fail is not None:
            raise self.fail
        return self.scene

    async def wait(self, samples: int) -> Snapshot:
        return self.scene

    def start_recording(self, path: Path) -> None:
        self.calls.append(("record", path.suffix))
        self.scene = dataclasses.replace(self.scene, recording=str(path))

    async def stop_recording(self) -> None:
        self.calls.append(("stop_recording",))
        self.scene = dataclasses.replace(self.scene, recording=None)

    def set_interval(self, seconds: float) -> None:
        self.calls.append(("interval", seconds))

    def _playback(self, **changes: Any) -> None:
        assert self.scene.playback is not None
        self.scene = dataclasses.replace(self.scene, playback=dataclasses.replace(self.scene.playback, **changes))

    async def seek_to(self, t: float) -> None:
        playback = self.scene.playback
        assert playback is not None
        t = min(playback.end_t, max(playback.start_t, t))
        self.calls.append(("seek", t))
        self._playback(at_t=t)
        if self.held is not None:
            await self.held.wait()

    def set_speed(self, speed: float) -> None:
        self.calls.append(("speed", speed))
        self._playback(speed=speed)

    def set_paused(self, paused: bool) -> None:
        self.calls.append(("paused", paused))
        self._playback(paused=paused)

    async def _act(self, *call: Any) -> str:
        await asyncio.sleep(0)
        if self.slow is not None:
            await self.slow.wait()
        if self.refuse is not None:
            raise self.refuse
        self.calls.append(call)
        return f"done: {call[0]}"

    async def close_trace(self, session: str, request: str | None = None) -> str:
        return await self._act("close_trace", session, request)

    async def set_limit(self, session: str, meter: Literal["steps", "tokens", "no_progress"], limit: int) -> str:
        return await self._act("set_limit", session, meter, limit)

    async def pin(self, engine: str, workload: str, arm: str, rule: str | None) -> str:
        return await self._act("pin", engine, workload, arm, rule)

    async def set_tts(self, engine: str, enabled: bool) -> str:
        return await self._act("set_tts", engine, enabled)


PLAYBACK = Playback(T - 100, T + 100, T, 1.0, False, False)
