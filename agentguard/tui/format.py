"""Numbers as text. Unknown is "—" and never 0."""

from __future__ import annotations

import math
import time

from agentguard.economics.ratios import Ratio
from agentguard.monitor.snapshot import Phase, SessionState, Severity, State
from agentguard.tui.lines import Span
from agentguard.tui.palette import Role

UNKNOWN = "—"


def number(value: float | None, digits: int = 2) -> str:
    if value is None or math.isnan(value):
        return UNKNOWN
    return "∞" if math.isinf(value) else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def count(value: float | None) -> str:
    """Tokens and the like in at most five signs: 999, 1.2k, 38k, 1.2M."""
    if value is None:
        return UNKNOWN
    for limit, unit, divisor in ((9_995, "", 1.0), (99_950, "k", 1e3), (999_500, "k", 1e3), (99_950_000, "M", 1e6)):
        if value < limit:
            if not unit:
                return f"{value:.0f}"
            return f"{value / divisor:.1f}{unit}" if limit in (99_950, 99_950_000) else f"{value / divisor:.0f}{unit}"
    return f"{value / 1e6:.0f}M" if value < 999.5e6 else f"{value / 1e9:.1f}G"


def whole(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def seconds(value: float | None) -> str:
    """A span in at most five signs: 12ms, 4.2s, 84s, 12m, 3h, 4d."""
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{value * 1000:.0f}ms"
    if value < 9.95:
        return f"{value:.1f}s"
    return age(value)


def age(value: float | None) -> str:
    """How long ago, coarse: 7s, 12m, 3h, 4d."""
    if value is None:
        return UNKNOWN
    value = max(0.0, value)
    for limit, unit, divisor in ((99.5, "s", 1), (99.5 * 60, "m", 60), (47.5 * 3600, "h", 3600)):
        if value < limit:
            return f"{value / divisor:.0f}{unit}"
    return f"{value / 86400:.0f}d"


def ratio(value: Ratio | None) -> str:
    return UNKNOWN if value is None else number(value.value)


def interval(value: Ratio | None) -> str:
    """With its 95 % interval: 1.86 [1.71, 2.02]."""
    return UNKNOWN if value is None else f"{number(value.value)} [{number(value.low)}, {number(value.high)}]"


def clock(t: float, utc: bool = False) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(t) if utc else time.localtime(t))


STATES: dict[State, tuple[str, Role]] = {
    "ok": ("✓ ok", "good"),
    "slow": ("◆ slow", "warn"),
    "stale": ("… stale", "stale"),
    "down": ("✗ down", "bad"),
}
SESSION_STATES: dict[SessionState, tuple[str, Role]] = {
    "running": ("✓ running", "good"),
    "idle": ("· idle", "dim"),
    "filling": ("◆ filling", "warn"),
    "growing": ("◆ growing", "warn"),
    "looping": ("● looping", "bad"),
    "stopped": ("■ stopped", "bad"),
    "failed": ("✗ failed", "bad"),
    "lost": ("… lost", "stale"),
}
SEVERITIES: dict[Severity, tuple[str, Role]] = {
    "info": ("· info", "dim"),
    "good": ("✓ good", "good"),
    "warning": ("◆ warning", "warn"),
    "alarm": ("● alarm", "bad"),
}
PHASES: dict[Phase, tuple[str, Role]] = {
    "queued": ("queued", "dim"),
    "thinking": ("thinking", "think"),
    "answering": ("answering", "answer"),
    "idle": ("idle", "dim"),
}


def state(value: State) -> Span:
    return STATES[value]
