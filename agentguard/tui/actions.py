"""What an operator may do to a running system. Each action says what it is about to do, asks, does it and reports.

The app does not offer them under --readonly, and the model refuses them then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from agentguard.monitor.monitor import Monitor
from agentguard.monitor.snapshot import SessionRow, Snapshot
from agentguard.monitor.words import rule as name_of
from agentguard.tui.dialogs import Ask, Choose, Confirm
from agentguard.tui.format import whole
from agentguard.tui.frame import View
from agentguard.tui.glyphs import words

if TYPE_CHECKING:
    from agentguard.tui.app import MonitorApp

Meter = Literal["steps", "tokens", "no_progress"]
METERS: dict[Meter, str] = {
    "steps": "steps in all",
    "tokens": "generated tokens in all",
    "no_progress": "steps without progress: start counting again",
}
AUTO = "auto"
NO_ENGINE = "nothing to act on: the chosen row has no engine, or it has gone; choose one on the overview"


class Operated(Monitor, Protocol):
    """The monitor, with what the screen's actions need of it."""

    async def close_trace(self, session: str, request: str | None = None) -> str:
        """Close the trace of this running request of the session, and nothing once it has ended; None: of all that run."""
        ...


async def close_trace(app: MonitorApp, session: SessionRow) -> None:
    """Of the request that runs while the question is asked: the session's next step is another trace, and not meant."""
    request = session.running_request
    if request is None:
        app.tell(f"no trace of session {session.id} runs now", "warning", again=True)
        return
    thought = f" at {whole(session.think_tokens)} think tokens" if session.think_tokens is not None else ""
    if not await _sure(app, f"Close the running trace of session {session.id}{thought}? The answer follows at once.", "close it"):
        return
    if _has_ended(app.latest, session.key, request):
        app.tell(f"that trace of session {session.id} has ended meanwhile; nothing was closed", "warning", again=True)
        return
    app.act(lambda monitor: monitor.close_trace(session.key, request))


def _has_ended(snapshot: Snapshot, session: str, request: str) -> bool:
    row = next((s for s in snapshot.sessions if s.key == session), None)
    if row is None:
        return True
    return row.running_request != request and not any(bar.request == request and not bar.done for bar in row.bars)


async def set_limit(app: MonitorApp, session: SessionRow) -> None:
    chosen = await app.push_screen_wait(Choose(f"Change which limit of session {session.id}?", list(METERS.items())))
    meter: Meter | None = next((m for m in METERS if m == chosen), None)
    if meter is None:
        return
    limit = 1
    if meter != "no_progress":
        now = {"steps": session.steps, "tokens": session.tokens}[meter]
        text = await app.push_screen_wait(Ask(f"New limit of {METERS[meter]} (now at {now:,})", check=_positive))
        if text is None:
            return
        limit = int(text)
    what = f"let session {session.id} use {limit:,} {meter}" if meter != "no_progress" else f"start {session.id}'s count again"
    if await _sure(app, f"{what[0].upper()}{what[1:]}?", "change it"):
        app.act(lambda monitor: monitor.set_limit(session.key, meter, limit))


async def pin(app: MonitorApp, view: View) -> None:
    engine = view.engine_to_act_on
    if engine is None:
        app.tell(NO_ENGINE, "warning", again=True)
        return
    spec = next((s for s in view.snapshot.speculation if s.engine == engine.key), None)
    known = spec.arms if spec is not None else ()
    arms = [arm for arm in known if arm.verdict != "control"]
    if not arms:
        why = "strict is the only arm there" if known else view.why_no_arms(engine)
        app.tell(f"no arm to pin on {engine.name}: {why}", "warning", again=True)
        return
    where = f"on {engine.name} ({engine.source})"
    names = {f"{arm.workload} {arm.arm}": arm for arm in arms}
    labels = [
        (name, words(f"{name_of(arm.arm)} in {arm.workload}" + (f" (pinned: {arm.pinned})" if arm.pinned else "")))
        for name, arm in names.items()
    ]
    chosen = await app.push_screen_wait(Choose(f"Pin which arm {where}?", labels))
    if chosen is None:
        return
    arm = names[chosen]
    held = await app.push_screen_wait(
        Choose(
            words(f"{name_of(arm.arm)} in {arm.workload} {where}"),
            [(arm.arm, words(f"hold it on: {name_of(arm.arm)}")), ("strict", "hold it at strict"), (AUTO, "let the guard decide")],
        )
    )
    if held is None:
        return
    what = "Let the guard decide again about" if held == AUTO else f"Hold at {name_of(held)}, whatever the guard finds:"
    if await _sure(app, words(f"{what} {name_of(arm.arm)} in {arm.workload} {where}?"), "do it"):
        pinned = None if held == AUTO else held
        app.act(lambda monitor: monitor.pin(engine.key, arm.workload, arm.arm, pinned))


async def set_tts(app: MonitorApp, view: View) -> None:
    engine = view.engine_to_act_on
    if engine is None:
        app.tell(NO_ENGINE, "warning", again=True)
        return
    spec = next((s for s in view.snapshot.speculation if s.engine == engine.key), None)
    if spec is None or spec.tts is None or spec.tts.state == "off":
        app.tell(f"TTS is off on {engine.name}; a recipe with `tts: {{}}` turns it on", "warning", again=True)
        return
    on = spec.tts.state == "paused"
    what = "Let the draft learn again" if on else "Pause the draft’s learning"
    if await _sure(app, f"{what} on {engine.name} ({engine.source})?", "do it"):
        app.act(lambda monitor: monitor.set_tts(engine.key, on))


def _positive(text: str) -> str | None:
    return None if text.strip().isdecimal() and int(text) > 0 else f"{text!r} is no number above 0"


async def _sure(app: MonitorApp, question: str, yes: str) -> bool:
    return await app.push_screen_wait(Confirm(question, yes)) == "yes"
