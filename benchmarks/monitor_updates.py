"""What the monitor's model costs, without a screen: events a second, a snapshot, memory over a million events, the gateway's side.

    python benchmarks/monitor_updates.py [--events 1000000] [--json FILE]

CPU time of one core. ``model_cpu_share_500_sessions``: for 500 sessions that send 1,000 events a second in frames as a
gateway's watch route sends them (decoded from JSON), and two snapshots a second. ``watch_cpu_share_500_sessions``: in the
gateway, for one watcher while 500 requests verify 5 rounds of 6 tokens a second each. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from agentguard.events import (
    DraftRows,
    Event,
    Fate,
    RunningStep,
    StepFinished,
    StepsRunning,
    StepStarted,
    VerificationStep,
    Verified,
    WatchFrame,
    decode_frame,
)
from agentguard.monitor.model import Model
from agentguard.telemetry.rounds import RoundCollector

SESSIONS, RATE, SOURCE = 500, 1000, "http://gateway"
K, ROUNDS_PER_S = 6, 5


class Clock:
    t = 0.0

    def __call__(self) -> float:
        return self.t


def events(n: int, rng: random.Random, clock: Clock) -> Iterator[Event]:
    """Steps that begin and end, of 500 sessions in turn."""
    for i in range(n // 2):
        name, step = f"agent-{i % SESSIONS}", i // SESSIONS + 1
        think = rng.randrange(40, 400)
        request = f"{name}-{step}"
        yield StepStarted(
            t=clock.t, session=name, step=step, request=request, model="m", rule="strict", prompt_tokens=500 + step % 900,
            budget=1000, think_cap=850, bound_by="fraction", arm="strict", workload="w",
        )  # fmt: skip
        yield StepFinished(
            t=clock.t, session=name, step=step, request=request, model="m", rule="strict", prompt_tokens=500 + step % 900,
            tokens=think + 42, think_tokens=think, answer_tokens=40, marker_tokens=2, rounds=think // 3, drafted=think,
            accepted=think // 2, closed="budget" if rng.random() < 0.05 else "", finish_reason="stop",
            ttlt_s=rng.random() * 10, arm="strict", workload="w",
        )  # fmt: skip


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def reduce_events(n: int) -> dict[str, float]:
    """A million events one by one: how fast, and what stays in memory: objects kept, and the process."""
    clock, rng = Clock(), random.Random(0)
    model = Model(clock=clock)
    model.add_source(SOURCE, "gateway")
    spent, early = 0.0, 0.0
    held: dict[str, int] = {}
    for i, event in enumerate(events(n, rng, clock)):
        before = time.process_time()
        model.take(SOURCE, event)
        spent += time.process_time() - before
        clock.t += 1 / RATE
        if i % 10_000 == 9_999:
            model.snapshot()
        if i == n // 5:
            held, early = model.held(), resident_mib()
    return {
        "events_per_s": n / spent,
        "objects_held_at_a_fifth": float(sum(held.values())),
        "objects_held_at_the_end": float(sum(model.held().values())),
        "resident_mib": resident_mib(),
        "resident_growth_mib": resident_mib() - early,
    }


def rounds(step: int, rng: random.Random) -> VerificationStep:
    requests = []
    for i in range(SESSIONS):
        accepted = rng.randrange(K + 1)
        fates = [Fate.STRICT] * accepted + [Fate.COIN] * (accepted < K) + [Fate.UNREAD] * (K - accepted - 1)
        rows = DraftRows(
            token=[1] * K, p=[rng.random() for _ in range(K)], q=[0.5] * K, rank=[rng.randrange(30) for _ in range(K)],
            strict=[0.6] * K, flags=[0] * K, would=[True] * K, fate=fates,
        )  # fmt: skip
        requests.append(
            Verified(request=f"r{i}", rule_asked="strict", rule_effective="strict", drafted=K, accepted=accepted, rows=rows)
        )
    return VerificationStep(t=0.0, engine="e", step=step, requests=requests)


def watching(seconds: int) -> dict[str, float]:
    """The two ends of the watch route at 1,000 events and 2,500 rounds a second: collect and encode, decode and show."""
    clock, rng, encode = Clock(), random.Random(1), msgspec.json.Encoder().encode
    model, collector = Model(clock=clock), RoundCollector()
    model.add_source(SOURCE, "gateway")
    stream, frames = events(RATE * seconds, rng, clock), [rounds(i, rng) for i in range(ROUNDS_PER_S)]
    gateway = monitor = 0.0
    sizes = []
    for _ in range(2 * seconds):
        clock.t += 0.5
        batch: list[Event] = [event for _, event in zip(range(RATE // 2), stream, strict=False)]
        running = [
            RunningStep(
                session=f"agent-{i}", step=1, request=f"x{i}", think_tokens=rng.randrange(400), answer_tokens=0, inside=True
            )
            for i in range(SESSIONS)
        ]
        before = time.process_time()
        for frame in frames[: ROUNDS_PER_S // 2 + 1]:
            collector.add(frame)
        told = WatchFrame(
            t=clock.t, interval_s=0.5, events=[*batch, *collector.take(clock.t, 0.5), StepsRunning(t=clock.t, steps=running)]
        )
        wire = encode(told)
        middle = time.process_time()
        for event in decode_frame(wire).events:
            model.take(SOURCE, event)
        model.heard(SOURCE, sample=True)
        model.snapshot()
        monitor += time.process_time() - middle
        gateway += middle - before
        sizes.append(len(wire))
    return {
        "model_cpu_share_500_sessions": monitor / seconds,
        "watch_cpu_share_500_sessions": gateway / seconds,
        "frame_kib": sum(sizes) / len(sizes) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    result = watching(asked.seconds) | reduce_events(asked.events)
    for name, value in result.items():
        print(f"{name:32} {value:12.3f}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
