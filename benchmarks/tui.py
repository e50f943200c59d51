"""What watching costs: `python -m benchmarks.tui [--json FILE] [--seconds 20]`.

The real screen on a pseudo-terminal, the real model, and frames as a gateway sends them, decoded from JSON. CPU is the process's
own, of one core; the time from key to paint is by the clock, so it wants a quiet machine (the load average is in the result, and
what the process itself worked between key and paint).

first_frame_cpu_s: from the imports of Textual being done to the first frame that shows an engine. cpu_share_50_sessions: 1 Hz, 100
events a second. cpu_share_500_sessions: 2 Hz, 1,000 events a second, the sessions page in front. key_to_paint_ms_p95: under that
load, from a key at the driver to the frame that answers it. memory: after 10^5 and after 10^6 events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import json
import os
import pty
import random
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from agentguard.events import (
    ArmReport,
    EconomicsReport,
    Event,
    RoundSums,
    RunningStep,
    StepFinished,
    StepsRunning,
    StepStarted,
    TraceClosed,
    WatchFrame,
    decode_frame,
)
from agentguard.monitor.feed import Feed
from agentguard.monitor.model import Model
from agentguard.monitor.options import Options
from agentguard.monitor.snapshot import Snapshot

SOURCE = "http://127.0.0.1:8484"
RULE = "cactus:delta=0.25,p_min=0.1,top_k=10"
CLASS = "qwen3-8b/chat/follow_up"
SIZE = (120, 40)


class Gateway:
    """Frames of a busy gateway, as bytes."""

    def __init__(self, sessions: int, events_per_s: float, interval_s: float) -> None:
        self.rng = random.Random(0)
        self.sessions = [f"agent-{i:04}" for i in range(sessions)]
        self.steps = dict.fromkeys(self.sessions, 1)
        self.events = round(events_per_s * interval_s)
        self.interval_s = interval_s
        self.frames = 0

    def frame(self) -> bytes:
        t = time.time()
        events: list[Event] = []
        rng = self.rng
        while len(events) < self.events:
            name = self.sessions[(self.frames * 131 + len(events) * 7) % len(self.sessions)]
            step = self.steps[name]
            self.steps[name] += 1
            think, prompt = rng.randrange(100, 900), min(7000, 200 + step * 90)
            ended = StepFinished(
                t=t, session=name, step=step, request=f"{name}-{step}", model="qwen3-8b", rule=RULE, prompt_tokens=prompt,
                tokens=think + 62, think_tokens=think, answer_tokens=60, marker_tokens=2, rounds=think // 3, drafted=think * 4 // 3,
                accepted=think // 2, ttlt_s=think / 100, arm=RULE, workload=CLASS, closed="budget" if think > 870 else "",
            )  # fmt: skip
            events.append(ended)
            if think > 870:
                events.append(TraceClosed(
                    t=t, session=name, step=step, request=f"{name}-{step}", reason="budget", think_tokens=think, cap=870,
                    how="engine",
                ))  # fmt: skip
            events.append(StepStarted(
                t=t, session=name, step=step + 1, request=f"{name}-{step + 1}", model="qwen3-8b", rule=RULE, prompt_tokens=prompt,
                budget=1024, think_cap=870, bound_by="budget", arm=RULE, workload=CLASS,
            ))  # fmt: skip
        self.frames += 1
        return msgspec.json.encode(WatchFrame(t=t, interval_s=self.interval_s, events=[*events[: self.events], *self.sums(t)]))

    def sums(self, t: float) -> Iterator[Event]:
        rng = self.rng
        yield StepsRunning(t=t, steps=[
            RunningStep(
                session=name, step=step, request=f"{name}-{step}", think_tokens=rng.randrange(800), answer_tokens=0, inside=True,
                rule=RULE, prompt_tokens=min(7000, 200 + step * 90), budget=1024, think_cap=870, bound_by="budget", arm=RULE,
                workload=CLASS, started=t - 1,
            )
            for name, step in self.steps.items()
        ])  # fmt: skip
        rounds = len(self.sessions) * 10
        yield RoundSums(
            t=t, engine="", span_s=self.interval_s, frames=20, lost=0, rounds=rounds, drafted=rounds * 4, accepted=rounds * 2,
            strict=rounds * 0.8, rule=RULE, by_position=[rounds * (8 - i) // 10 for i in range(4)],
            strict_by_position=[rounds * (5 - i) / 10 for i in range(4)], probability=[[9, 3, 1, 5]] * 20, rank=[[9, 3, 1, 5]] * 9,
            fates={"strict": rounds, "relaxed": rounds, "coin": rounds},
        )  # fmt: skip
        ratio = 1.2 + rng.random() / 10
        yield EconomicsReport(t=t, rows=[msgspec.convert(self.arm(ratio), ArmReport)])

    def arm(self, ratio: float) -> dict[str, Any]:
        whole = {"value": ratio, "low": ratio - 0.1, "high": ratio + 0.1, "n": 84}
        return {
            "workload": CLASS, "arm": RULE, "on": True, "since": 0.0, "verdict": "win", "reason": "rounds", "sessions": 84,
            "baseline": "live control", "steps": 640 + self.frames, "censored": 0, "accepted_length": 2.0,
            "strict_accepted_length": 0.8, "gain": 1.66,
            "ratios": {"tokens": whole, "rounds": whole, "ttlt": whole},
        }  # fmt: skip


class BenchMonitor:
    """The model of the monitor, fed from frames in the same event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.model = Model(interval_s=gateway.interval_s)
        self.model.add_source(SOURCE, "gateway", can_act=True)
        self.feed = Feed(self.model)
        self.frames: list[bytes] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[BenchMonitor]:
        task = asyncio.create_task(self._read())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def take(self, frame: bytes) -> None:
        self.feed.take(SOURCE, decode_frame(frame).events, sample=True)

    async def _read(self) -> None:
        """Frames made before the clock starts, so that making them is not counted."""
        for frame in self.frames:
            self.take(frame)
            await asyncio.sleep(self.gateway.interval_s)

    def snapshot(self) -> Snapshot:
        return self.model.snapshot()

    def set_interval(self, seconds: float) -> None:
        pass


def share(sessions: int, events_per_s: float, interval_s: float, seconds: float, page: str, keys: int) -> dict[str, float]:
    """CPU share over ``seconds``; with ``keys`` also the milliseconds from key to paint at the 50th and 95th percentile."""
    gateway = Gateway(sessions, events_per_s, interval_s)
    monitor = BenchMonitor(gateway)
    warm = max(10, -(-sessions // max(1, gateway.events // 2)))
    for _ in range(warm):  # every session has been seen, charts have points
        monitor.take(gateway.frame())
    monitor.frames = [gateway.frame() for _ in range(int((seconds + 30) / interval_s))]

    async def measure(app: Any) -> dict[str, float]:
        await app.action_page(page)
        await asyncio.sleep(2 * interval_s)
        gc.collect()
        started, spent = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        result = {"cpu_share": (time.process_time() - spent) / (time.perf_counter() - started)}
        return result | (await key_to_paint(app, keys) if keys else {})

    return run_app(monitor, interval_s, measure)


def run_app(monitor: BenchMonitor, interval_s: float, measure: Callable[[Any], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """The app on this process's terminal, until ``measure`` is done."""
    from agentguard.tui.app import MonitorApp
    from agentguard.tui.settings import Settings

    result: dict[str, float] = {}

    class Measured(MonitorApp):
        def on_ready(self) -> None:
            self.run_worker(self._measure(), group="measure")

        async def _measure(self) -> None:
            result.update(await measure(self))
            self.exit(0)

    app = Measured(Options(interval_s=interval_s), monitor.open, Settings())  # type: ignore[arg-type]
    app.run()
    return result


async def key_to_paint(app: Any, keys: int) -> dict[str, float]:
    from textual import events

    painted = asyncio.Event()
    write = app._driver.write

    def watched(data: str) -> None:
        write(data)
        if "▶" in data:
            painted.set()

    app._driver.write = watched
    times: list[float] = []
    spent: list[float] = []
    rng = random.Random(1)
    for n in range(keys):
        await asyncio.sleep(rng.uniform(0.01, 0.06))
        painted.clear()
        started, cpu = time.perf_counter(), time.process_time()
        key = events.Key("down" if n // 20 % 2 == 0 else "up", None)
        key.set_sender(app)
        app._driver.send_message(key)
        await asyncio.wait_for(painted.wait(), 10)
        times.append((time.perf_counter() - started) * 1000)
        spent.append((time.process_time() - cpu) * 1000)
    app._driver.write = write
    times.sort()
    spent.sort()
    at = int(keys * 0.95)
    return {"p50": times[keys // 2], "p95": times[at], "cpu_p95": spent[at]}


def memory() -> dict[str, float]:
    """RSS after 10^5 and after 10^6 events of 500 sessions with the screen drawing a snapshot every 1,000 events."""
    gateway = Gateway(500, 2000, 0.5)
    monitor = BenchMonitor(gateway)

    async def measure(app: Any) -> dict[str, float]:
        await app.action_page("sessions")
        sizes: dict[str, float] = {}
        for n in range(1, 1001):
            monitor.take(gateway.frame())
            app.apply(monitor.snapshot())
            await asyncio.sleep(0)
            if n in (100, 1000):
                gc.collect()
                sizes[f"rss_mb_after_{n}k_events"] = rss_mb()
        return sizes

    return run_app(monitor, 3600, measure)


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def in_terminal(part: str, *numbers: float) -> dict[str, float]:
    """Run a part in a process of its own on a pseudo-terminal of `SIZE`, whose output is read and thrown away."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    drain = threading.Thread(target=_drain, args=(master,), daemon=True)
    drain.start()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        words = [sys.executable, "-m", "benchmarks.tui", "--part", part, "--out", out.name, *map(str, numbers)]
        env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        subprocess.run(words, stdin=slave, stdout=slave, stderr=slave, env=env, check=True, timeout=600, start_new_session=True)
        os.close(slave)
        result: dict[str, float] = json.load(out)
    return result


def _drain(master: int) -> None:
    with contextlib.suppress(OSError):  # the other end was closed
        while os.read(master, 65536):
            pass


FIRST = """
import asyncio, sys, time
import textual.app, textual.widgets, textual.command, textual.scroll_view
started = time.process_time()
from agentguard.monitor.live import open_monitor
from agentguard.monitor.options import Options
from agentguard.tui.app import MonitorApp
from agentguard.tui.settings import load
options = Options(demo="healthy")
app = MonitorApp(options, lambda: open_monitor(options), load())
async def main():
    async with app.run_test(size=(120, 40)) as pilot:
        while not app.screen.main_table.rows:
            await asyncio.sleep(0.001)
        await pilot.pause(0)
        print(time.process_time() - started)
asyncio.run(main())
"""


def first_frame() -> float:
    """The least of five starts."""
    runs = [subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout.split()[-1]) for run in runs)


def part(name: str, numbers: list[float]) -> dict[str, float]:
    if name == "memory":
        return memory()
    sessions, events, interval, seconds, page, keys = numbers
    return share(int(sessions), events, interval, seconds, ("overview", "sessions")[int(page)], int(keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=["share", "memory"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("numbers", nargs="*", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keys", type=int, default=300)
    asked = parser.parse_args()
    if asked.part is not None:
        asked.out.write_text(json.dumps(part(asked.part, asked.numbers)))
        return
    small = in_terminal("share", 50, 100, 1.0, asked.seconds, 0, 0)
    large = in_terminal("share", 500, 1000, 0.5, asked.seconds, 1, asked.keys)
    sizes = in_terminal("memory")
    result = {
        "first_frame_cpu_s": round(first_frame(), 3),
        "cpu_share_50_sessions": round(small["cpu_share"], 4),
        "cpu_share_500_sessions": round(large["cpu_share"], 4),
        "key_to_paint_ms_p50": round(large["p50"], 1),
        "key_to_paint_ms_p95": round(large["p95"], 1),
        "key_to_paint_cpu_ms_p95": round(large["cpu_p95"], 1),
        "load_average": round(os.getloadavg()[0], 1),
        **{name: round(size, 1) for name, size in sizes.items()},
        "memory_growth_mb": round(sizes["rss_mb_after_1000k_events"] - sizes["rss_mb_after_100k_events"], 1),
        "size": f"{SIZE[0]}x{SIZE[1]}",
        "seconds": asked.seconds,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
