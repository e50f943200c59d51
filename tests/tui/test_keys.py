"""Every key, every action, the palette and the mouse, through the pilot."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.binding import Binding
from textual.command import CommandPalette
from textual.widgets import OptionList, Static

from agentguard.errors import ActionRefusedError, ConfigError
from agentguard.tui.app import MonitorApp
from agentguard.tui.commands import ACTIONS
from agentguard.tui.dialogs import Ask, Choose, Confirm
from agentguard.tui.event_log import Events
from agentguard.tui.frame import PAGES, Page, Panel
from agentguard.tui.lines import text_of
from agentguard.tui.sessions import SessionDetail, Sessions
from agentguard.tui.speculation import SpeculationPage
from agentguard.tui.table import Table
from agentguard.tui.themes import CYCLE
from tests.tui.scenes import (
    GATEWAY,
    ONE,
    PLAYBACK,
    RULE,
    SERVER,
    T,
    down,
    engine,
    healthy,
    many_sessions,
    session,
    source,
    speculation,
    step,
)  # fmt: skip
from tests.tui.screen import Running, running

TWO = f"{GATEWAY} qwen3-8b 2"
FIRST = f"{GATEWAY} agent-0001"
SECOND = f"{GATEWAY} agent-0002"
Check = Callable[[Running], Awaitable[None]]
CASES: dict[str, Check] = {}
"""By binding id; a test below holds that every binding has one."""


def key(*ids: str) -> Callable[[Check], Check]:
    def take(check: Check) -> Check:
        CASES.update(dict.fromkeys(ids, check))
        return check

    return take


def page(run: Running) -> Page:
    screen = run.app.screen
    assert isinstance(screen, Page)
    return screen


def dialog(run: Running) -> str:
    """What the dialog in front asks."""
    return str(run.app.screen.query_one(".question", Static).content)


def marked(run: Running) -> str:
    """The row of the cursor."""
    return next(line for line in run.text if line.startswith("▶"))


@key(*(f"app.page_{name}" for name, _ in PAGES), "app.events", "app.help", "help.back")
async def pages(run: Running) -> None:
    for number, (name, title) in enumerate(PAGES, 1):
        await run.press(str(number))
        assert name == page(run).NAME
        assert f"[{number} {title}]" in run.text[0]
    await run.press("escape")
    assert page(run).NAME == "overview"
    await run.press("e")
    assert page(run).NAME == "events"
    for help_key in ("question_mark", "f1"):
        await run.press("1", help_key)
        assert page(run).NAME == "help"


@key("app.quit")
async def quits(run: Running) -> None:
    await run.press("q")
    assert not run.app.is_running
    assert run.app.return_code == 0


@key("app.pause")
async def pauses(run: Running) -> None:
    await run.press("space")
    assert "‖ paused" in run.text[0]
    await run.show(dataclasses.replace(healthy(), verdict=dataclasses.replace(healthy().verdict, text="something else")))
    assert "speculation pays" in run.text[1]
    await run.press("space")
    assert "something else" in run.text[1]
    assert "paused" not in run.text[0]


@key("app.interval_up", "app.interval_down")
async def interval(run: Running) -> None:
    await run.press("minus")
    assert run.monitor.calls[-1] == ("interval", 2.0)
    await run.press("plus", "plus")
    assert run.monitor.calls[-1] == ("interval", 10.0)
    await run.press("plus")
    assert run.app.interval_s == 10.0


@key("app.refresh")
async def refreshes(run: Running) -> None:
    run.monitor.scene = dataclasses.replace(healthy(), verdict=dataclasses.replace(healthy().verdict, text="news"))
    await run.press("r")
    assert "news" in run.text[1]


@key("app.filter")
async def filters(run: Running) -> None:
    await run.press("2", "slash")
    assert isinstance(run.app.screen, Ask)
    await run.type("0004")
    await run.press("enter")
    assert [at.row.id for at in run.app.screen.query_one("#sessions", Table).rows] == ["agent-0004"]
    assert "1 of 6 sessions  filter: 0004" in run.text[3]
    await run.press("slash", "escape")
    assert "filter: 0004" in run.text[3]
    await run.press("slash", *["backspace"] * 4, "enter")
    assert "6 of 6" in run.text[3]
    await run.press("4", "slash")
    await run.type("LEARNED")
    await run.press("enter")
    assert [row.event.number for row in run.app.screen.query_one("#events", Table).rows] == [2]


@key("app.sort")
async def sorts(run: Running) -> None:
    await run.press("2", "s", "s", "s")
    table = run.app.screen.query_one("#sessions", Table)
    assert table.sort_by == "steps"
    steps = [at.row.steps for at in table.rows]
    assert steps == sorted(steps, reverse=True)
    assert " step▼ " in run.text[4]
    assert run.notices[-1] == "sorted by steps"
    for _ in range(30):
        if table.sort_by is None:
            break
        await run.press("s")
    assert [at.row.id for at in table.rows] == [s.id for s in healthy().sessions]


@key("table.up", "table.down", "table.page_up", "table.page_down", "table.first", "table.last")
async def moves(run: Running) -> None:
    await run.show(many_sessions())
    await run.press("2", "down", "j")
    assert "agent-0003" in marked(run)
    await run.press("up", "k", "up")
    assert "agent-0001" in marked(run)
    await run.press("pagedown")
    first = marked(run)
    assert "agent-0001" not in first
    await run.press("pageup")
    assert "agent-0001" in marked(run)
    for last in ("end", "G"):
        await run.press(last)
        assert "agent-0200" in marked(run)
        await run.press("home" if last == "end" else "g")
        assert "agent-0001" in marked(run)


@key("overview.open")
async def opens_speculation(run: Running) -> None:
    await run.press("down", "enter")
    assert page(run).NAME == "speculation"
    assert "qwen3-8b/2 2 of 2" in "\n".join(run.text)


@key("speculation.next", "speculation.previous")
async def walks_engines(run: Running) -> None:
    await run.press("3")
    assert "qwen3-8b/1 1 of 2" in run.text[3]
    await run.press("right_square_bracket")
    assert "qwen3-8b/2 2 of 2" in run.text[3]
    await run.press("left_square_bracket")
    assert "qwen3-8b/1 1 of 2" in run.text[3]


@key("sessions.open", "session.back")
async def opens_a_session(run: Running) -> None:
    await run.press("2", "down", "enter")
    assert isinstance(run.app.screen, SessionDetail)
    assert run.app.screen.key == SECOND
    assert any("think + answer" in line for line in run.text)
    for back in ("escape", "backspace"):
        await run.press(back)
        assert isinstance(run.app.screen, Sessions)
        assert "agent-0002" in marked(run)
        await run.press("enter")
    # a page's key leads out of a session too
    await run.press("1")
    assert page(run).NAME == "overview"


@key("events.level")
async def filters_by_severity(run: Running) -> None:
    await run.press("4")
    table = run.app.screen.query_one("#events", Table)
    assert len(table.rows) == 3
    await run.press("f")
    assert [r.event.severity for r in table.rows] == ["warning"]
    await run.press("f")
    assert not table.rows
    assert "nothing has happened yet" in run.text[5]
    await run.press("f")
    assert len(table.rows) == 3


@key("events.open")
async def opens_the_session_of_an_event(run: Running) -> None:
    await run.press("4")
    assert "closed at 2,400" in marked(run)
    await run.press("enter")
    assert isinstance(run.app.screen, SessionDetail)
    assert run.app.screen.key == SECOND


@key("app.theme")
async def changes_the_theme(run: Running) -> None:
    seen = [run.app.theme]
    for _ in CYCLE:
        await run.press("t")
        seen.append(run.app.theme)
    assert seen == [*CYCLE, CYCLE[0]]


@key("app.copy")
async def copies(run: Running) -> None:
    for keys, text in (("1", "qwen3-8b/1"), ("2", "agent-0001"), ("4", "17:45:58 trace_closed agent-0002 step 6")):
        await run.press(keys, "y")
        assert run.app.clipboard.startswith(text)
        assert run.notices[-1] == f"copied: {run.app.clipboard}"
    await run.press("2", "enter", "y")
    assert run.app.clipboard == "chatcmpl-004"


@key("app.record")
async def records(run: Running) -> None:
    await run.press("R")
    assert run.monitor.calls[-1] == ("record", ".jsonl")
    assert "● rec" in run.text[0]
    await run.press("R")
    assert run.monitor.calls[-1] == ("stop_recording",)
    assert "● rec" not in run.text[0]


@key("app.export", "dialog.cancel")
async def asks_for_the_form(run: Running) -> None:
    await run.press("x")
    assert isinstance(run.app.screen, Choose)
    await run.press("escape")
    assert isinstance(run.app.screen, Page)


@key("app.close_trace", "confirm.yes", "confirm.no")
async def closes_a_trace(run: Running) -> None:
    await run.press("2", "down", "c")
    assert isinstance(run.app.screen, Confirm)
    assert any("Close the running trace of session agent-0002 at 422 think tokens?" in line for line in run.text)
    # Enter on what the cursor is on at first, n and Escape do nothing
    for no in ("enter", "n", "escape"):
        await run.press(no)
        assert isinstance(run.app.screen, Sessions)
        await run.press("c")
    await run.press("y")
    assert run.monitor.calls == [("close_trace", SECOND, "chatcmpl-2")]
    assert run.notices[-1] == "done: close_trace"
    # in a session's own page, and with the list instead of the letter
    await run.press("enter", "c", "down", "enter")
    assert run.monitor.calls[1:] == [("close_trace", SECOND, "chatcmpl-2")]


@key("app.limit", "ask.cancel")
async def changes_a_limit(run: Running) -> None:
    await run.press("2", "l", "enter")
    assert isinstance(run.app.screen, Ask)
    await run.press("escape")
    assert isinstance(run.app.screen, Sessions)
    await run.press("l", "down", "enter")
    await run.type("many")
    await run.press("enter")
    assert any("'many' is no number above 0" in line for line in run.text)
    await run.press(*["backspace"] * 4)
    await run.type("90000")
    await run.press("enter")
    assert any("Let session agent-0001 use 90,000 tokens?" in line for line in run.text)
    await run.press("y")
    assert run.monitor.calls == [("set_limit", FIRST, "tokens", 90000)]
    await run.press("l", "down", "down", "enter", "y")
    assert run.monitor.calls[-1] == ("set_limit", FIRST, "no_progress", 1)


@key("app.pin")
async def pins(run: Running) -> None:
    workload = "qwen3-8b / chat / tool"
    for downs, rule in ((0, RULE), (1, "strict"), (2, None)):
        await run.press("3", "p", "enter", *["down"] * downs, "enter")
        assert isinstance(run.app.screen, Confirm)
        await run.press("y")
        assert run.monitor.calls[-1] == ("pin", ONE, workload, RULE, rule)
    assert len(run.monitor.calls) == 3
    await run.press("p", "escape", "p", "enter", "escape")
    assert len(run.monitor.calls) == 3


@key("app.culprit")
async def goes_to_the_culprit(run: Running) -> None:
    await run.press("v")
    assert page(run).NAME == "overview"
    verdict = healthy().verdict
    await run.show(healthy(verdict=dataclasses.replace(verdict, engine=TWO)))
    await run.press("v")
    assert page(run).NAME == "speculation"
    assert "qwen3-8b/2 2 of 2" in run.text[3]
    await run.show(healthy(verdict=dataclasses.replace(verdict, engine=TWO, session=SECOND)))
    await run.press("v")
    assert isinstance(run.app.screen, SessionDetail)
    assert run.app.screen.key == SECOND


@key("app.tts")
async def pauses_tts(run: Running) -> None:
    await run.press("T")
    assert any("Pause the draft" in line for line in run.text)
    await run.press("y")
    assert run.monitor.calls == [("set_tts", ONE, False)]
    tts = speculation("").tts
    assert tts is not None
    paused = tuple(dataclasses.replace(s, tts=dataclasses.replace(tts, state="paused")) for s in healthy().speculation)
    await run.show(healthy(speculation=paused))
    await run.press("down", "T", "y")
    assert run.monitor.calls[-1] == ("set_tts", TWO, True)
    await run.show(healthy(speculation=tuple(dataclasses.replace(s, tts=None) for s in healthy().speculation)))
    await run.press("T")
    assert "TTS is off" in run.notices[-1]


@key("app.back", "app.forward", "app.back_far", "app.forward_far", "app.slower", "app.faster")
async def scrubs_a_replay(run: Running) -> None:
    await run.press("left", "right", "less_than_sign")
    assert not run.monitor.calls
    await run.show(healthy(playback=PLAYBACK))
    await run.press("left")
    assert run.monitor.calls[-1] == ("seek", T - 10)
    await run.press("right", "right")
    assert run.monitor.calls[-1] == ("seek", T + 10)
    await run.press("shift+right")
    assert run.monitor.calls[-1] == ("seek", T + 70)
    await run.press("shift+right")
    assert run.monitor.calls[-1] == ("seek", T + 100)
    await run.press(*["shift+left"] * 4)
    assert run.monitor.calls[-1] == ("seek", T - 100)
    await run.press("greater_than_sign")
    assert run.monitor.calls[-1] == ("speed", 2.0)
    assert "▶ 2×" in run.text[0]
    await run.press("less_than_sign", "less_than_sign")
    assert run.monitor.calls[-1] == ("speed", 0.5)
    await run.press("space")
    assert run.monitor.calls[-1] == ("paused", True)
    assert "‖ 0.5×" in run.text[0]
    await run.press("space")
    assert run.monitor.calls[-1] == ("paused", False)


async def test_a_long_seek_holds_nothing_up_and_keys_in_a_row_add_up() -> None:
    async with running(healthy(playback=PLAYBACK)) as run:
        run.monitor.held = asyncio.Event()
        await run.pilot.press("left", "left", "left", "left", "greater_than_sign", "r", "2")
        while page(run).NAME != "sessions":
            await run.pilot.pause(0.001)
        assert run.monitor.calls == [("seek", T - 10), ("seek", T - 20), ("seek", T - 30), ("seek", T - 40), ("speed", 2.0)]
        run.monitor.held.set()
        await run.settle()
        await run.press("right")
        assert run.monitor.calls[-1] == ("seek", T - 30)


async def test_leaving_during_a_seek() -> None:
    async with running(healthy(playback=PLAYBACK)) as run:
        run.monitor.held = asyncio.Event()
        await run.pilot.press("left")
        while not run.monitor.calls:
            await run.pilot.pause(0.001)
        await run.pilot.press("q")
        while run.app.is_running:
            await run.pilot.pause(0.001)


@pytest.mark.parametrize("case", sorted({check.__name__ for check in CASES.values()}))
async def test_keys(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check = next(check for check in CASES.values() if check.__name__ == case)
    async with running(healthy(), (120, 40), interval_s=5.0 if case == "interval" else 3600.0) as run:
        await check(run)


def test_every_binding_has_a_test() -> None:
    dialogs = {b.id for owner in (Choose, Confirm, Ask) for b in owner.BINDINGS if isinstance(b, Binding)}
    assert set(CASES) == MonitorApp.binding_ids() | dialogs


# which engine an action is for


async def test_an_action_on_a_source_without_an_engine_is_for_no_other() -> None:
    async with running(down()) as run:
        await run.press("down", "down")
        assert "127.0.0.1:8000" in marked(run)
        for action in "pT":
            await run.press(action)
            assert isinstance(run.app.screen, Page)
            assert "nothing to act on" in run.notices[-1]
        # the chosen engine goes while its speculation is looked at
        await run.press("up", "3")
        assert "qwen3-8b/2" in run.text[3]
        await run.show(healthy(engines=healthy().engines[:1]))
        for action in "pT":
            await run.press(action)
            assert isinstance(run.app.screen, Page)
        assert run.monitor.calls == []


async def test_the_cursor_and_the_actions_are_on_one_engine() -> None:
    async with running(healthy()) as run:
        await run.press("3", "right_square_bracket", "1")
        assert "qwen3-8b/2" in marked(run)
        await run.press("p", "enter")
        assert f"on qwen3-8b/2 ({GATEWAY})" in dialog(run)
        await run.press("down", "enter")
        assert f"on qwen3-8b/2 ({GATEWAY})?" in dialog(run)
        await run.press("y")
        assert run.monitor.calls == [("pin", TWO, "qwen3-8b / chat / tool", RULE, "strict")]
        await run.press("T")
        assert f"on qwen3-8b/2 ({GATEWAY})?" in dialog(run)


async def test_an_engine_without_arms_is_given_no_other_engines() -> None:
    server = engine(2, source=SERVER, arm=None, rule=None)
    ours, plain = speculation(ONE), speculation(server.key, arms=())
    sources = (source(), source(SERVER, kind="metrics", can_act=False))
    scene = healthy(sources=sources, engines=(engine(1), server), speculation=(ours, plain))
    async with running(scene) as run:
        await run.press("down", "3", "p")
        assert isinstance(run.app.screen, Page)
        assert run.notices[-1] == "no arm to pin on qwen3-8b/2: no economics: this source has no gateway"
        arms = page(run).query_one("#arms", Panel)
        assert [text_of(line) for line in arms.lines][:3] == ["arms", "no economics: this source has no gateway", ""]
        assert page(run).rows_for_export() == ()
        await run.show(dataclasses.replace(scene, engines=(engine(1), engine(2)), speculation=(ours,)))
        assert text_of(arms.lines[1]) == "no economics yet: the gateway has told of no arm"
        await run.show(dataclasses.replace(scene, speculation=(ours, dataclasses.replace(plain, arms=ours.arms[:1]))))
        await run.press("p")
        assert run.notices[-1] == "no arm to pin on qwen3-8b/2: strict is the only arm there"
        assert run.monitor.calls == []


# what an operator may not do


@pytest.mark.parametrize("where", ["readonly", "no gateway"])
async def test_actions_are_greyed_out(where: str) -> None:
    scene = healthy() if where == "readonly" else healthy(sources=(source(kind="metrics", can_act=False),))
    async with running(scene, (200, 40), readonly=where == "readonly") as run:
        assert ("read only" in run.text[-2]) == (where == "readonly")
        for start, keys, shown in (("1", "pT", ("(p Pin arm)", "(T TTS on/off)")), ("2", "cl", ("(c Close trace)", "(l Limit)"))):
            await run.press(start)
            for text in shown:
                assert text in run.text[-1]
            await run.press(*keys)
            assert isinstance(run.app.screen, Page)
        await run.press("ctrl+p")
        await run.type("close this trace")
        assert not any("selected session's running trace" in line for line in run.text)
        assert not run.monitor.calls


async def test_a_refused_action_is_told_and_nothing_breaks() -> None:
    async with running(healthy()) as run:
        run.monitor.refuse = ActionRefusedError("the gateway has a key for actions; give --operator-key")
        await run.press("2", "c", "y")
        assert run.notices[-1] == "the gateway has a key for actions; give --operator-key"
        assert page(run).NAME == "sessions"
        assert run.monitor.calls == []


async def test_the_same_notice_is_shown_once_in_a_while() -> None:
    async with running(healthy()) as run:
        for _ in range(3):
            run.app.tell("twice is enough")
        await run.settle()
        assert run.notices == ["twice is enough"]


async def test_only_the_trace_that_was_asked_about_is_closed() -> None:
    """Not the next step's, and none when none runs."""
    next_step = session(2, running_request="chatcmpl-next")
    both = dataclasses.replace(next_step, bars=(*next_step.bars, step(9, 500, request="chatcmpl-2", done=False)))
    async with running(healthy()) as run:
        for gone in (healthy(sessions=(session(1), next_step)), healthy(sessions=(session(1),))):
            await run.show(healthy())
            await run.press("2", "g", "down", "c")
            assert "session agent-0002 at 422 think tokens" in dialog(run)
            await run.show(gone)
            await run.press("y")
            assert run.notices[-1] == "that trace of session agent-0002 has ended meanwhile; nothing was closed"
        assert run.monitor.calls == []
        await run.show(healthy(sessions=(session(1, running_request=None, think_tokens=None),)))
        await run.press("g", "c")
        assert isinstance(run.app.screen, Page)
        assert run.notices[-1] == "no trace of session agent-0001 runs now"
        # a newer step beside it does not end it
        await run.show(healthy())
        await run.press("g", "down", "c")
        await run.show(healthy(sessions=(session(1), both)))
        await run.press("y")
        assert run.monitor.calls == [("close_trace", SECOND, "chatcmpl-2")]


async def test_one_dialog_at_a_time() -> None:
    async with running(healthy()) as run:
        await run.press("2", "c")
        question = run.app.screen
        assert isinstance(question, Confirm)
        await run.press("ctrl+p")
        run.app.action_limit()
        run.app.action_export()
        await run.settle()
        assert run.app.screen is question
        await run.press("y")
        assert run.monitor.calls == [("close_trace", FIRST, "chatcmpl-1")]
        assert isinstance(run.app.screen, Page)
        # two keys at once ask one question
        run.app.action_close_trace()
        run.app.action_limit()
        await run.settle()
        await run.press("escape")
        assert isinstance(run.app.screen, Page)


async def test_a_slow_action_is_told_although_another_dialog_is_open() -> None:
    async with running(healthy()) as run:
        run.monitor.slow = asyncio.Event()
        await run.pilot.press("2", "c", "y")
        while not any(w.group == "act" for w in run.app.workers):
            await run.pilot.pause(0)
        await run.pilot.press("x")
        while not isinstance(run.app.screen, Choose):
            await run.pilot.pause(0)
        run.monitor.slow.set()
        await run.settle()
        assert run.notices[-1] == "done: close_trace"
        assert isinstance(run.app.screen, Choose)


# the palette


@pytest.mark.parametrize(
    ("typed", "seen"),
    [
        ("go to events", lambda run: page(run).NAME == "events"),
        ("session agent-0004", lambda run: isinstance(run.app.screen, SessionDetail) and run.app.screen.key.endswith("0004")),
        ("engine qwen3-8b/2", lambda run: run.app.view().engine == TWO),
        ("theme agentguard-cb", lambda run: run.app.theme == "agentguard-cb"),
        ("read every 2 s", lambda run: run.monitor.calls == [("interval", 2.0)]),
        ("pause the screen", lambda run: "‖ paused" in run.text[0]),
        ("pin an arm", lambda run: isinstance(run.app.screen, Choose)),
        ("pause tts", lambda run: isinstance(run.app.screen, Confirm) and "Pause the draft" in dialog(run)),
        ("next theme", lambda run: run.app.theme == CYCLE[1]),
        ("read more often", lambda run: run.monitor.calls == [("interval", 5.0)]),
        ("record to a file", lambda run: run.monitor.calls == [("record", ".jsonl")]),
    ],
)
async def test_palette(typed: str, seen: Callable[[Running], Any]) -> None:
    async with running(healthy()) as run:
        await run.press("ctrl+p")
        await run.type(typed)
        await run.press("enter")
        if isinstance(run.app.screen, CommandPalette):
            await run.press("enter")
        await run.settle()
        assert seen(run), run.text


@pytest.mark.parametrize(
    ("start", "typed", "keys", "seen"),
    [
        ("2", "close this trace", "y", lambda run: run.monitor.calls == [("close_trace", FIRST, "chatcmpl-1")]),
        ("2", "change a session's limit", "", lambda run: "Change which limit of session agent-0001?" in dialog(run)),
        ("1", "pause tts", "y", lambda run: run.monitor.calls == [("set_tts", ONE, False)]),
        ("1", "seek 60 s back", "", lambda run: run.monitor.calls == [("seek", T - 60)]),
        ("1", "seek 10 s forth", "", lambda run: run.monitor.calls == [("seek", T + 10)]),
        ("1", "speed: faster", "", lambda run: run.monitor.calls == [("speed", 2.0)]),
        ("3", "next engine", "", lambda run: run.app.view().engine == TWO),
        ("4", "severity of the events", "", lambda run: "warnings and alarms" in run.text[3]),
    ],
)
async def test_palette_on_its_page(start: str, typed: str, keys: str, seen: Callable[[Running], Any]) -> None:
    async with running(healthy(playback=PLAYBACK)) as run:
        await run.press(start, "ctrl+p")
        await run.type(typed)
        await run.press("enter")
        if isinstance(run.app.screen, CommandPalette):
            await run.press("enter")
        await run.settle()
        await run.press(*keys)
        assert seen(run), run.text


def test_every_key_but_those_that_move_is_in_the_palette() -> None:
    """As docs/tui.md says; pages, quitting and help have commands of their own."""
    owners = (MonitorApp, SpeculationPage, Events)
    bound = {b.action for owner in owners for b in owner.BINDINGS if isinstance(b, Binding)}
    known = {f"app.{action}" if not action.startswith("app.") else action for action in bound if action != "level"}
    known -= {"app.quit", "app.open"} | {a for a in known if a.startswith("app.page(")}
    inherited = {f"app.{b.action}" for b in App.BINDINGS if isinstance(b, Binding)}
    assert known - inherited == {action for action, _, _ in ACTIONS} - {"screen.level"}
    assert "level" in bound


async def test_palette_lists_pages_and_actions_before_anything_is_typed() -> None:
    async with running(healthy(), (120, 60)) as run:
        await run.press("ctrl+p")
        text = "\n".join(run.text)
        for name in ("Go to Sessions", "Pin an arm", "Export CSV"):
            assert name in text


EVIL = ("x[/bold] agent-0", "[bold]agent-0", "a [/b] agent-0[", r"agent-0 \[red]", "agent-0 [@click=app.quit]")
"""Names as a client may choose them."""


@pytest.mark.parametrize("name", EVIL)
async def test_the_palette_takes_no_name_for_markup(name: str) -> None:
    """Ids of sessions, models and engines come from clients and servers."""
    evil = session(1, id=name, key="evil")
    scene = healthy(sessions=(evil, session(2)), engines=(engine(1, name=f"{name} engine", model=name),))
    async with running(scene) as run, asyncio.timeout(30):
        await run.press("ctrl+p")
        await run.type("session agent-0")
        palette = run.app.screen
        assert isinstance(palette, CommandPalette)
        options = palette.query_one(OptionList)
        while options.option_count < 2:
            await run.pilot.pause(0)
        shown = [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]
        assert f"Session {name}\nrunning" in shown
        assert "Session agent-0002\nrunning" in shown
        await run.press("escape", "escape", "ctrl+p")
        await run.type("engine agent")
        options = run.app.screen.query_one(OptionList)
        while options.option_count < 1:
            await run.pilot.pause(0)
        assert str(options.get_option_at_index(0).prompt).startswith(f"Engine {name} engine\n")


# the mouse


async def test_mouse() -> None:
    async with running(many_sessions()) as run:
        await run.press("2")
        table = run.app.screen.query_one("#sessions", Table)
        x = run.text[4].index("steps")
        await run.pilot.click("#sessions", offset=(x, 0))
        await run.settle()
        assert (table.sort_by, table.descending) == ("steps", True)
        await run.pilot.click("#sessions", offset=(x, 0))
        await run.settle()
        assert (table.sort_by, table.descending) == ("steps", False)
        await run.pilot.click("#sessions", offset=(x, 0))
        await run.settle()
        assert table.sort_by is None
        await run.pilot.click("#sessions", offset=(20, 3))
        await run.settle()
        assert "agent-0003" in marked(run)
        await run.pilot.click("#sessions", offset=(20, 3), times=2)
        await run.settle()
        assert isinstance(run.app.screen, SessionDetail)
        await run.pilot.click("#keys", offset=(run.text[-1].index("Esc Back") + 2, 0))
        await run.settle()
        assert isinstance(run.app.screen, Sessions)
        await run.pilot.click("#head", offset=(run.text[0].index("4 Events") + 2, 0))
        await run.settle()
        assert page(run).NAME == "events"


async def test_the_wheel_scrolls_and_the_cursor_stays() -> None:
    async with running(many_sessions()) as run:
        await run.press("2")
        table = run.app.screen.query_one("#sessions", Table)
        table.scroll_to(y=50, animate=False)
        await run.settle()
        assert "agent-0051" in run.text[5]
        assert table.cursor_key == FIRST


# keys from outside


async def test_keys_can_be_mapped_anew() -> None:
    async with running(healthy(), keys={"app.page_events": "f4", "table.down": "i"}) as run:
        await run.press("f4")
        assert page(run).NAME == "events"
        await run.press("2", "i")
        assert "agent-0002" in marked(run)


def test_an_unknown_key_name_is_refused() -> None:
    from agentguard.monitor.options import Options
    from agentguard.tui.settings import Settings
    from tests.tui.scenes import SceneMonitor

    with pytest.raises(ConfigError, match=r"keys='app\.quitt'.*did you mean 'app\.quit'"):
        MonitorApp(Options(), SceneMonitor(healthy()).open, Settings(keys={"app.quitt": "q"}))
    with pytest.raises(ConfigError, match=r"theme='agentguard-drak'.*did you mean 'agentguard-dark'"):
        MonitorApp(Options(), SceneMonitor(healthy()).open, Settings("agentguard-drak"))


# files


async def test_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = session(1, id="=cmd()")
    async with running(healthy(sessions=(evil, session(2, context_used=None)))) as run:
        await run.press("2")
        for downs in range(3):
            await run.press("x", *["down"] * downs, "enter")
            await run.delivered()
        files = await asyncio.to_thread(lambda: {path.suffix: path.read_text() for path in tmp_path.iterdir()})
    assert "agent-0002" in files[".svg"]
    assert files[".svg"].startswith("<svg")
    rows = list(csv.DictReader(io.StringIO(files[".csv"])))
    assert [row["id"] for row in rows] == ["'=cmd()", "agent-0002"]
    assert rows[1]["context_used"] == ""
    whole = json.loads(files[".json"])
    assert whole["sessions"][1]["context_used"] is None
    assert whole["engines"][0]["length_ratio"] == {"value": 1.22, "low": 1.08, "high": 1.37, "n": 84}
