"""The real driver in a real terminal (tmux), and a gateway that goes away and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from agentguard.events import EngineReady, Event, RunningStep, StepsRunning, WatchFrame
from agentguard.monitor.live import open_monitor
from agentguard.monitor.options import Options
from agentguard.telemetry.recorder import replay
from agentguard.tui.app import MonitorApp
from agentguard.tui.sessions import SessionDetail, Sessions
from agentguard.tui.settings import Settings

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux on this machine; apt-get install tmux")


class Terminal:
    """A program in a detached tmux session of its own server."""

    def __init__(self, command: list[str], size: tuple[int, int], env: dict[str, str]) -> None:
        self._socket = f"agentguard-{uuid.uuid4().hex[:8]}"
        # COLUMNS and LINES of whoever runs the tests would be taken for the terminal's size
        unset = "env -u COLUMNS -u LINES"
        words = " ".join([unset, *(f"{k}={shlex.quote(v)}" for k, v in env.items()), shlex.join(command)])
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), f"{words}; echo ended with $?; read"
        )

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self._socket, *words], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout

    def screen(self) -> list[str]:
        return [line.rstrip() for line in self._tmux("capture-pane", "-p").splitlines()]

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def until(self, seen: Callable[[list[str]], bool], seconds: float = 60) -> list[str]:
        """The screen once it is as asked; fails with what stands there instead."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            screen = self.screen()
            if seen(screen):
                return screen
            time.sleep(0.05)
        pytest.fail("\n".join(["the screen never came:", *self.screen()]))

    def processes(self) -> list[int]:
        return [int(pid) for pid in self._tmux("list-panes", "-F", "#{pane_pid}").split()]

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._tmux("kill-server")


@contextlib.contextmanager
def terminal(*words: str, size: tuple[int, int] = (100, 30), folder: Path, **env: str) -> Iterator[Terminal]:
    own = {"XDG_CONFIG_HOME": str(folder), "XDG_STATE_HOME": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    one = Terminal([sys.executable, "-m", "agentguard", "tui", *words], size, own | env)
    try:
        yield one
    finally:
        one.close()


@needs_tmux
def test_the_real_driver(tmp_path: Path) -> None:
    with terminal("--demo", "many-sessions", "--speed", "4", folder=tmp_path) as tty:
        tty.until(lambda s: any("qwen3-8b" in line for line in s[4:7]))
        tty.keys("2")
        tty.until(lambda s: "[2 Sessions]" in s[0] and any("200 of 200 sessions" in line for line in s))
        tty.keys("Down", "Down")
        screen = tty.until(lambda s: s[7].startswith("▶"))
        name = screen[7].split()[3]
        assert name.startswith("agent-")
        tty.keys("Enter")
        tty.until(lambda s: any("think + answer" in line for line in s) and s[3].startswith(name))
        tty.keys("Escape")
        tty.until(lambda s: s[7].startswith("▶") and s[7].split()[3] == name)
        tty.keys("3")
        tty.until(lambda s: any("accepted by position" in line for line in s))
        tty.keys("t")
        tty.until(lambda s: any("theme agentguard-light" in line for line in s))
        tty.keys("q")
        tty.until(lambda s: any(line == "ended with 0" for line in s))
    assert (tmp_path / "agentguard" / "tui-theme").read_text() == "agentguard-light\n"


@needs_tmux
def test_a_small_terminal_without_colour_or_unicode(tmp_path: Path) -> None:
    with terminal("--demo", "losing-rule", "--speed", "8", "--ascii", size=(60, 20), folder=tmp_path, NO_COLOR="1") as tty:
        screen = tty.until(lambda s: any("lambda" in line and "> gain" in line for line in s[1:3]))
        assert all(line.isascii() for line in screen)
        assert any("q Quit" in line for line in screen)
        tty.keys("q")
        tty.until(lambda s: any(line == "ended with 0" for line in s))


@needs_tmux
def test_mini_is_six_lines_below_the_prompt(tmp_path: Path) -> None:
    with terminal("--demo", "losing-rule", "--mini", folder=tmp_path) as tty:
        screen = tty.until(lambda s: any("qwen3-8b" in line and line.startswith("▶") for line in s))
        assert sum(bool(line) for line in screen) <= 6
        tty.keys("q")
        tty.until(lambda s: any(line == "ended with 0" for line in s))


@needs_tmux
def test_sigterm_gives_the_terminal_back(tmp_path: Path) -> None:
    with terminal("--demo", "losing-rule", folder=tmp_path) as tty:
        tty.until(lambda s: any("qwen3-8b" in line for line in s[4:7]))
        (shell,) = tty.processes()
        (child,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        screen = tty.until(lambda s: any(line == "ended with 130" for line in s))
        assert not any("Overview" in line for line in screen)


@pytest.mark.parametrize("words", [["--demo", "losing-rule"], ["--demo", "losing-rule", "--mini"]])
def test_without_a_terminal_it_names_the_way_for_scripts(words: list[str]) -> None:
    command = [sys.executable, "-m", "agentguard", "tui", *words]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 2
    assert "--once" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@needs_tmux
def test_a_wrong_option_is_one_line_and_status_2(tmp_path: Path) -> None:
    with terminal("--demo", "losing-rule", "--theme", "drak", size=(150, 10), folder=tmp_path) as tty:
        screen = tty.until(lambda s: any(line == "ended with 2" for line in s))
        assert any(line.startswith("agentguard: theme='drak'") for line in screen)
        assert not any("Traceback" in line for line in screen)


# a gateway that goes and comes


class Gateway:
    """A server of watch frames on a port of its own, which can be stopped and started again."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sent = 0

    def _frame(self, t: float) -> bytes:
        import msgspec

        events: list[Event] = [
            EngineReady(t=t, engine="0", model="qwen3-8b", max_model_len=8192),
            StepsRunning(
                t=t,
                steps=[
                    RunningStep(session=f"agent-{n}", step=1, request=f"r{n}", think_tokens=self.sent, answer_tokens=0, inside=True)
                    for n in range(6)
                ],
            ),
        ]
        self.sent += 1
        return b"data: " + msgspec.json.encode(WatchFrame(t=t, interval_s=0.25, events=events)) + b"\n\n"

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        stop = asyncio.Event()

        async def watch(_: object) -> StreamingResponse:
            async def frames() -> AsyncIterator[bytes]:
                while not stop.is_set():
                    yield self._frame(time.time())
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), 0.1)

            return StreamingResponse(frames(), media_type="text/event-stream")

        app = Starlette(routes=[Route("/guard/v1/watch", watch)])
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            stop.set()
            server.should_exit = True
            await serving


async def test_a_recording_is_complete_when_the_screen_is_left(unused_tcp_port: int, tmp_path: Path) -> None:
    gateway, path = Gateway(unused_tcp_port), tmp_path / "watched.jsonl"
    options = Options(gateways=(f"http://127.0.0.1:{unused_tcp_port}",), interval_s=0.05, record=path)
    app = MonitorApp(options, lambda: open_monitor(options), Settings(), utc=True)
    async with gateway.up(), app.run_test(size=(120, 30)) as pilot:
        async with asyncio.timeout(60):
            while len(app.view().snapshot.sessions) < 6 or gateway.sent < 5:
                await asyncio.sleep(0.01)
        assert app.view().snapshot.recording == str(path)
        shown = max(b.think_tokens for s in app.view().snapshot.sessions for b in s.bars)
        feed = next(w for w in app.workers if w.group == "feed")
        await pilot.press("q")
    async with asyncio.timeout(60):
        while feed.is_running:
            await asyncio.sleep(0.01)
    recorded = [e for e in await asyncio.to_thread(lambda: list(replay(path))) if isinstance(e, StepsRunning)]
    assert max(step.think_tokens for event in recorded for step in event.steps) >= shown


async def test_a_gateway_gone_and_back(unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale, down, back; the last rows stay, dimmed, and the cursor is where it was."""
    monkeypatch.setattr("agentguard.monitor.model.STALE_S", 0.3)
    monkeypatch.setattr("agentguard.monitor.model.DOWN_S", 0.9)
    gateway = Gateway(unused_tcp_port)
    options = Options(gateways=(f"http://127.0.0.1:{unused_tcp_port}",), interval_s=0.05)
    app = MonitorApp(options, lambda: open_monitor(options), Settings(), utc=True)

    async def until(seen: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not seen():
                await asyncio.sleep(0.02)

    def sessions() -> Sessions:
        page = app.screen
        assert isinstance(page, Sessions)
        return page

    async with app.run_test(size=(120, 30)) as pilot:
        async with gateway.up():
            await until(lambda: len(app.view().snapshot.sessions) == 6)
            await app.action_page("sessions")
            await until(lambda: len(sessions().table.rows) == 6)
            await pilot.press("down", "down", "down")
            chosen = sessions().table.cursor_key
            assert chosen is not None
            assert chosen.endswith("agent-3")
        await until(lambda: any(s.state == "stale" for s in app.view().snapshot.sources))
        await until(lambda: all(at.row.state == "lost" for at in sessions().table.rows))
        await until(lambda: any(s.state == "down" for s in app.view().snapshot.sources))
        assert len(sessions().table.rows) == 6
        assert sessions().table.cursor_key == chosen
        await pilot.press("enter")
        assert isinstance(app.screen, SessionDetail)
        await pilot.press("escape")
        await pilot.press("1")
        await until(lambda: app.screen.main_table is not None and any(r.dimmed for r in app.screen.main_table.rows))  # type: ignore[attr-defined]
        await pilot.press("2")
        before = gateway.sent
        async with gateway.up():
            await until(lambda: gateway.sent > before and all(s.state == "ok" for s in app.view().snapshot.sources))
            await until(lambda: all(at.row.state != "lost" for at in sessions().table.rows))
            assert sessions().table.cursor_key == chosen
    assert app.return_code == 0 or app.return_code is None
