"""The one sentence on top: is something wrong, what, and whose fault is it? The worst first, one culprit named, others counted."""

from __future__ import annotations

from collections.abc import Sequence

from agentguard.monitor import words
from agentguard.monitor.snapshot import ArmRow, EngineRow, SessionRow, SourceRow, Speculation, VerdictLine

STRICT = "strict"
LATELY_S = 180.0
"""A session that ran within this time still counts; an abandoned one is in the list, but not what is wrong now."""
_BAD = ("looping", "stopped", "growing", "failed")


def verdict(
    sources: Sequence[SourceRow], engines: Sequence[EngineRow], sessions: Sequence[SessionRow], speculation: Sequence[Speculation],
    now: float,
) -> VerdictLine:  # fmt: skip
    """From rows that are already judged; ``sources`` without an engine of their own count too."""
    names = {engine.key: engine.name for engine in engines}
    return (
        _gone(sources, engines, now)
        or _losing(engines, speculation, names, now, switched=False)
        or _running_away(sessions, names, now)
        or _losing(engines, speculation, names, now, switched=True)
        or _slow(engines, now)
        or _learning(speculation, names)
        or _well(sources, engines, sessions)
    )


def _gone(sources: Sequence[SourceRow], engines: Sequence[EngineRow], now: float) -> VerdictLine | None:
    bad: list[tuple[bool, float, str, str, str]] = []
    for engine in engines:
        if engine.state in ("stale", "down") and engine.seen_t is not None:
            bad.append((engine.state != "down", engine.since_t, engine.name, engine.why, engine.key))
    known = {engine.source for engine in engines if engine.seen_t is not None}
    for source in sources:
        if source.state in ("stale", "down") and source.name not in known:
            bad.append((source.state != "down", source.since_t, source.name, source.error, ""))
    if not bad:
        return None
    stale, since, name, why, key = min(bad)
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    text = f"{name} {'says nothing' if stale else 'is down'} since {words.age(now - since)}{more}: {why or 'no answer'}"
    return VerdictLine("warning" if stale else "alarm", text, key, "", since)


def _losing(
    engines: Sequence[EngineRow], speculation: Sequence[Speculation], names: dict[str, str], now: float, *, switched: bool
) -> VerdictLine | None:  # fmt: skip
    rows = [
        (one.engine, arm) for one in speculation for arm in one.arms
        if arm.verdict == "loss" and _runs_strict(arm) == switched and arm.arm != STRICT
    ]  # fmt: skip
    if not rows:
        return None
    key, arm = max(rows, key=lambda row: row[1].steps)
    more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    text = f"{words.rule(arm.arm)} on {names.get(key, key)}: {_why(arm)}"
    if switched:
        when = f" {words.age(now - arm.since_t)} ago" if arm.since_t else ""
        text += ", pinned to strict" if arm.pinned else f", switched to strict{when}"
        return VerdictLine("warning", text + more, key, "", arm.since_t)
    pinned = " although it is pinned on" if arm.pinned else " and the guard is off"
    return VerdictLine("alarm", f"{text}, still on{pinned}{more}", key, "", arm.since_t)


def _runs_strict(arm: ArmRow) -> bool:
    """An operator's pin goes before the guard's switch."""
    return (arm.pinned or (arm.arm if arm.on else STRICT)) == STRICT


def _why(arm: ArmRow) -> str:
    """λ against gain where both are known and say so, else the ratio that decided."""
    if arm.length_ratio is not None and arm.gain is not None and arm.length_ratio.value > arm.gain:
        return f"λ {arm.length_ratio.value:.2f} > gain {arm.gain:.2f}"
    return arm.reason


def _running_away(sessions: Sequence[SessionRow], names: dict[str, str], now: float) -> VerdictLine | None:
    bad = [
        session for session in sessions
        if session.state in _BAD and (session.phase != "idle" or now - session.last_t < LATELY_S)
    ]  # fmt: skip
    if not bad:
        return None
    worst = min(bad, key=lambda session: (_BAD.index(session.state), session.since_t))
    alike = sum(session.state == worst.state for session in bad) - 1
    also = f" ({alike} more {worst.state})" if alike else ""
    text = f"session {worst.id} on {names.get(worst.engine, worst.engine)} is {_WORDS[worst.state]}{also}: {worst.why}"
    return VerdictLine(
        "alarm" if worst.state in ("looping", "stopped") else "warning", text, worst.engine, worst.key, worst.since_t
    )


_WORDS = {"looping": "looping", "stopped": "stopped", "growing": "running away", "failed": "failing"}


def _slow(engines: Sequence[EngineRow], now: float) -> VerdictLine | None:
    slow = [engine for engine in engines if engine.state == "slow"]
    if not slow:
        return None
    one = min(slow, key=lambda engine: engine.since_t)
    more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
    text = f"{one.name} is slow since {words.age(now - one.since_t)}{more}: {one.why}"
    return VerdictLine("warning", text, one.key, "", one.since_t)


def _learning(speculation: Sequence[Speculation], names: dict[str, str]) -> VerdictLine | None:
    for one in speculation:
        tts = one.tts
        if tts is not None and tts.state in ("rolled_back", "off", "restarting"):
            word = tts.state.replace("_", " ")
            return VerdictLine(
                "warning", f"TTS on {names.get(one.engine, one.engine)} is {word}: {tts.reason}", one.engine, "", tts.since_t
            )
    return None


def _well(sources: Sequence[SourceRow], engines: Sequence[EngineRow], sessions: Sequence[SessionRow]) -> VerdictLine:
    if not engines:
        return VerdictLine("info", "waiting for the first sample" if sources else "nothing is watched; give --gateway or --metrics")
    running = sum(session.phase not in (None, "idle") for session in sessions)
    load = f"{words.plural(len(sessions), 'session')}, {running} running" if sessions else ""
    arms = [engine for engine in engines if engine.verdict not in (None, "control")]
    paying = [engine for engine in arms if engine.verdict == "win"]
    if paying:
        best = paying[0]  # not the best one, which would change from moment to moment
        return VerdictLine("good", _joined(f"{words.rule(best.arm or '')} on {best.name} pays: {_numbers(best)}", load), best.key)
    if arms:
        one = arms[0]
        text = f"{words.rule(one.arm or '')} on {one.name}: undecided, {_numbers(one)}"
        return VerdictLine("info", _joined(text, load), one.key)
    drafting = [engine for engine in engines if engine.accepted_length is not None]
    if drafting:
        one = drafting[0]
        text = f"all well: {one.name} accepts {one.accepted_length:.2f} draft tokens a round"
        return VerdictLine("good", _joined(text, load), one.key)
    speculating = "no speculation seen" if any(engine.window_s for engine in engines) else "nothing measured yet"
    return VerdictLine("info", _joined(f"{words.plural(len(engines), 'engine')} up, {speculating}", load))


def _numbers(engine: EngineRow) -> str:
    parts = []
    if engine.length_ratio is not None:
        sign = "" if engine.gain is None else "<" if engine.length_ratio.value < engine.gain else ">"
        parts.append(f"λ {engine.length_ratio.value:.2f}" + (f" {sign} gain {engine.gain:.2f}" if engine.gain is not None else ""))
    elif engine.gain is not None:
        parts.append(f"gain {engine.gain:.2f}")
    if engine.rounds_ratio is not None:
        parts.append(f"rounds ratio {engine.rounds_ratio.value:.2f}")
    return ", ".join(parts) or "λ unknown yet"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
