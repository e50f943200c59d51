"""One snapshot for scripts: `agentguard tui --once`, as JSON or in a few lines, and the exit status it stands for."""

from __future__ import annotations

import msgspec

from agentguard.monitor.live import PlayedMonitor, open_monitor
from agentguard.monitor.options import Options
from agentguard.monitor.snapshot import EngineRow, Snapshot
from agentguard.monitor.words import clean

OK, FINDING, RETRY = 0, 1, 3
SAMPLES = 2
"""Rates need two."""


async def look(options: Options) -> Snapshot:
    """The state after two samples; of a recording that ends, the state at its end. Raises ConfigError."""
    async with open_monitor(options) as monitor:
        if isinstance(monitor, PlayedMonitor) and options.replay is not None:
            await monitor.seek_to(monitor.player.script.end_t)
            return monitor.snapshot()
        return await monitor.wait(SAMPLES)


def status(snapshot: Snapshot) -> int:
    """0: all well. 1: something is wrong, which the verdict names. 3: no source answers, so try again."""
    if not any(source.samples for source in snapshot.sources):
        return RETRY
    return FINDING if snapshot.verdict.severity == "alarm" else OK


def as_json(snapshot: Snapshot) -> str:
    """What is unknown, and an open end of an interval, is null."""
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=1).decode()


def as_text(snapshot: Snapshot) -> str:
    """The verdict, and a line an engine; for a terminal."""
    return "\n".join(map(clean, [f"{snapshot.verdict.severity}: {snapshot.verdict.text}", *map(_line, snapshot.engines)]))


def _line(engine: EngineRow) -> str:
    ratio = engine.length_ratio
    interval = "—" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {_number(ratio.high, 2)}]"
    window = "—" if engine.window_s is None else f"{engine.window_s:.0f} s"
    parts = [
        f"{engine.name}: {engine.state}", f"ℓ {_number(engine.accepted_length, 2)}", f"gain {_number(engine.gain, 2)}",
        f"λ {interval}",
        f"{_number(engine.tokens_out_per_s, 1)} tok/s out", f"{_number(engine.running, 0)} running",
        f"{_number(engine.waiting, 0)} waiting", f"KV {_number(None if engine.kv_use is None else 100 * engine.kv_use, 0)} %",
        f"over {window}",
    ]  # fmt: skip
    return "  ".join(parts)


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "—"
    return "∞" if value == float("inf") else f"{value:.{digits}f}"
