"""What goes wrong is told in words, and the last good picture stays."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
from rich.cells import cell_len
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from textual.worker import WorkerState

from agentguard.errors import ConfigError
from agentguard.events import encode_json
from agentguard.monitor.feed import Feed
from agentguard.monitor.live import open_monitor
from agentguard.monitor.model import Model
from agentguard.monitor.options import Options
from agentguard.monitor.simulator import Simulator
from agentguard.monitor.snapshot import EventLine, Playback
from agentguard.monitor.sources import GatewaySource, TailReader
from agentguard.tui import run as run_screen
from agentguard.tui.app import MonitorApp
from agentguard.tui.frame import Panel, View
from agentguard.tui.lines import text_of
from agentguard.tui.sessions import TAILS, SessionDetail, Sessions, rows_of, why_no_words
from agentguard.tui.settings import Settings, load
from tests.tui.scenes import GATEWAY, SceneMonitor, T, down, healthy, no_servers, session, stale
from tests.tui.screen import running


async def test_an_outage_keeps_the_last_picture_dimmed_with_its_age() -> None:
    async with running(healthy()) as run:
        await run.press("2", "down", "down", "down")
        for scene, words in ((stale(), "… stale 7s"), (down(), "✗ down")):
            await run.show(scene)
            assert words in run.text[0]
            assert any(line.startswith("▶") and "agent-0004" in line for line in run.text)
        await run.press("1")
        row = next(line for line in run.text if line.startswith("▶"))
        assert "✗ down 31s" in row
        assert "3.12" in row
        assert "the engine ended: out of memory" in "\n".join(run.text[14:17])
        fresh = next(line for line in run.text if "qwen3-8b/2 " in line)
        assert style_of(run.app, row, "3.12") != style_of(run.app, fresh, "3.01")
        await run.show(healthy())
        await run.press("2")
        assert any(line.startswith("▶") and "agent-0004" in line for line in run.text)


def style_of(app: MonitorApp, row: str, text: str) -> str:
    """The colour of a text in a row."""
    for strip in app.screen._compositor.render_strips(app.size):
        if strip.text.rstrip() == row:
            return next(str(segment.style.color) for segment in strip if text in segment.text and segment.style is not None)
    raise AssertionError(row)


async def test_a_dead_server_beside_living_ones_has_a_row_of_its_own() -> None:
    async with running(down()) as run:
        await run.press("down", "down")
        assert next(line for line in run.text if line.startswith("▶")).split()[:4] == ["▶", "✗", "down", "60m"]
        text = "\n".join(run.text)
        assert "http://127.0.0.1:8000: connection refused; next try in 4 s" in text
        assert "λ —" in text
        await run.press("up")
        assert "λ 1.22" in "\n".join(run.text)


async def test_a_session_that_is_forgotten_while_it_is_looked_at() -> None:
    async with running(healthy()) as run:
        await run.press("2", "enter")
        assert isinstance(run.app.screen, SessionDetail)
        await run.show(healthy(sessions=()))
        assert any("this session is not known any more" in line for line in run.text)
        await run.press("c", "escape")
        assert isinstance(run.app.screen, Sessions)
        assert any("no session yet" in line for line in run.text)
        await run.press("c", "l", "enter", "y", "down")
        assert run.app.is_running


async def test_nobody_answers_from_the_start() -> None:
    async with running(no_servers()) as run:
        assert "✗ down 12s" in run.text[0]
        assert any("connection refused; next try in 4 s" in line for line in run.text)
        for page in "2345":
            await run.press(page)


async def test_the_monitor_itself_fails_and_is_started_again() -> None:
    async with running(healthy()) as run:
        run.monitor.fail = ValueError("a frame from another world")
        await run.pilot.press("r")
        while not run.app._broken:
            await run.pilot.pause(0)
        await run.pilot.pause(0)
        assert "✗ stopped" in run.text[0]
        assert "a frame from another world" in run.text[1]
        assert any("qwen3-8b/1" in line for line in run.text)
        await run.pilot.press("2", "c", "y")
        await run.pilot.pause(0)
        assert run.monitor.calls == []
        run.monitor.fail = None
        await run.press("r")
        assert run.monitor.opened == 2
        assert "✓ live" in run.text[0]


async def test_what_cannot_be_opened_ends_the_app_with_its_reason() -> None:
    error = ConfigError("replay", "gone.jsonl", "there is no such file")

    @asynccontextmanager
    async def refuse() -> AsyncIterator[SceneMonitor]:
        raise error
        yield

    app = MonitorApp(Options(), refuse, Settings())
    async with app.run_test() as pilot:
        while app.return_code is None:
            await pilot.pause(0)
    assert app.failure is error
    assert app.return_code == 2


async def test_a_worker_that_fails_is_told() -> None:
    async with running(healthy()) as run:
        worker = run.app.run_worker(_fail(), exit_on_error=False)
        while worker.state != WorkerState.ERROR:
            await run.pilot.pause(0)
        await run.settle()
        assert run.notices == ["the disk is full"]


async def _fail() -> None:
    raise OSError("the disk is full")


async def test_live_tail_only_with_content() -> None:
    request = session(1).running_request
    assert request is not None
    scene = dataclasses.replace(healthy(), content={request: "first line\nlet me think about " + "it " * 100})
    async with running(scene) as run:
        await run.press("2", "enter")
        assert any("content is off; start with --content" in line for line in run.text)
        assert not any("let me think" in line for line in run.text)
    async with running(scene, content=True) as run:
        await run.press("2", "enter")
        assert any("let me think about it" in line for line in run.text)


async def test_why_there_are_no_words_of_a_trace() -> None:
    from agentguard.gateway import app as gateway

    assert gateway.TAILS == TAILS
    one = session(1)
    refused = EventLine(9, T, "info", "source", f"{GATEWAY} gives no content (403): this gateway gives no content")
    crowd = tuple(session(n) for n in range(2, TAILS + 2))
    words = {s.running_request or "": "words" for s in crowd}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "no words of it yet; they are asked for once a second"),
        ({"sessions": (session(1, phase="queued"),)}, "queued: it has no words yet"),
        ({"sessions": (session(1, running_request=None),)}, "no step runs now"),
        ({"sessions": ()}, "no step runs now"),
        ({"sessions": (one, *crowd), "content": words}, f"tells the words of its latest {TAILS} running traces only"),
        ({"sessions": (one, *crowd[1:]), "content": words}, "no words of it yet"),
        ({"events": (refused,)}, "content is off: this gateway gives none out"),
    )
    async with running(healthy(), content=True) as run:
        await run.press("2", "enter")
        for changes, said in cases:
            await run.show(healthy(**changes))
            tail = run.app.screen.query_one("#tail", Panel)
            assert said in text_of(tail.lines[1]), said


async def test_the_monitor_says_of_a_gateway_without_content_what_the_screen_looks_for() -> None:
    """The real line of the event log, from a server that answers as a gateway without content does."""

    async def refuse(_: object) -> JSONResponse:
        return JSONResponse({"error": {"message": "no"}}, 403)

    transport = httpx2.ASGITransport(Starlette(routes=[Route("/agentguard/tails", refuse)]))
    model = Model(clock=lambda: T)
    model.add_source(GATEWAY, "gateway")
    source = GatewaySource(GATEWAY, Feed(model, lambda: T), interval_s=1.0)
    with patch("agentguard.monitor.sources.http_client", lambda url, **_: httpx2.AsyncClient(transport=transport, base_url=url)):
        await TailReader(source, None).run()
    await source.client.aclose()
    view = View(dataclasses.replace(healthy(), events=model.snapshot().events), content=True)
    assert why_no_words(view, session(1)) == "content is off: this gateway gives none out"


@pytest.mark.parametrize("width", [2, 7, 20])
def test_wide_words_lose_nothing(width: int) -> None:
    text = "名前を考える wait\n\x1b[2J絵文字 🙂 [b]bold[/b]\n\nend"
    rows = rows_of(text, width)
    assert all(cell_len(row) <= width for row in rows)
    assert "".join(rows) == text.replace("\x1b", "?").replace("\n", "")


async def test_a_real_recording_is_scrubbed(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    events = Simulator("losing-rule", seed=1, start=T).advance(T + 60)
    await asyncio.to_thread(path.write_bytes, b"".join(encode_json(event) + b"\n" for _, event in events))
    options = Options(replay=path, interval_s=0.05)
    app = MonitorApp(options, lambda: open_monitor(options), Settings(), utc=True)

    async def until(seen: Callable[[Playback], bool]) -> Playback:
        async with asyncio.timeout(60):
            while True:
                playback = app.view().snapshot.playback
                if playback is not None and seen(playback):
                    return playback
                await asyncio.sleep(0.01)

    async with app.run_test(size=(120, 40)) as pilot:
        start = await until(lambda p: True)
        await pilot.press("space")
        held = await until(lambda p: p.paused)
        await pilot.press("right")
        later = await until(lambda p: p.at_t > held.at_t)
        assert later.at_t == pytest.approx(held.at_t + 10)
        await pilot.press("shift+right")
        end = await until(lambda p: p.ended)
        assert end.at_t == start.end_t
        assert "■ end" in str(app.screen.query_one("#head").render_line(0).text)
        await pilot.press("left")
        back = await until(lambda p: not p.ended)
        assert back.at_t == pytest.approx(end.end_t - 10)
        await pilot.press("greater_than_sign", "space")
        await until(lambda p: p.speed == 2.0 and not p.paused)
        await until(lambda p: p.at_t > back.at_t)
        assert app.view().snapshot.sessions


# settings


def test_settings_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert load(environ={}).theme == "agentguard-dark"
    load(environ={}).save_theme("agentguard-cb")
    assert load(environ={}).theme == "agentguard-cb"
    assert load(environ={"TEXTUAL_THEME": "nord"}).theme == "nord"
    folder = tmp_path / "agentguard"
    folder.mkdir()
    (folder / "tui.yaml").write_text("theme: agentguard-light\nkeys: {app.quit: ctrl+x, table.up: i}\n")
    assert load(environ={}).theme == "agentguard-light"
    both = load(environ={"AGENTGUARD_TUI_THEME": "ansi-dark", "AGENTGUARD_TUI_KEYS": "app.quit=f10;app.theme=ctrl+t"})
    assert both.theme == "ansi-dark"
    assert both.keys == {"app.quit": "f10", "table.up": "i", "app.theme": "ctrl+t"}
    assert load("gruvbox", environ={"AGENTGUARD_TUI_THEME": "ansi-dark"}).theme == "gruvbox"
    other = tmp_path / "other.yaml"
    other.write_text("keys: {}\n")
    assert load(environ={"AGENTGUARD_TUI_CONFIG": str(other)}).keys == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("them: x", "did you mean 'theme'"),
        ("- a", "write it as name: value"),
        ("keys: [a]", "write it as name: value"),
        ("theme: [", "is no YAML"),
    ],
)
def test_a_broken_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tui.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(environ={"AGENTGUARD_TUI_CONFIG": str(path)})


def test_a_missing_or_broken_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load(environ={"AGENTGUARD_TUI_CONFIG": str(tmp_path / "none.yaml")})
    with pytest.raises(ConfigError, match="write it as name=key"):
        load(environ={"AGENTGUARD_TUI_KEYS": "app.quit"})


def test_run_needs_a_known_theme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from agentguard import logs

    monkeypatch.setattr(logs, "silence", lambda: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="did you mean 'agentguard-light'"):
        run_screen(Options(theme="agentguard-ligth"))


def test_only_the_screen_imports_textual() -> None:
    modules = "agentguard.cli.tui, agentguard.monitor.live, agentguard.monitor.once, agentguard.tui"
    code = f"import sys, {modules}; print('textual' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert importlib.import_module("agentguard.tui").run is run_screen
