"""`agentguard tui --web` in a real headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentguard.errors import ConfigError
from agentguard.monitor.options import Options
from agentguard.tui.web import PAGE, arguments, foreign, serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_serve = pytest.mark.skipif(importlib.util.find_spec("textual_serve") is None, reason="textual-serve is not installed")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of the simulated gateway."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    words = [sys.executable, "-m", "agentguard", "tui", "--web", "--port", str(number), "--demo", "losing-rule", "--speed", "4"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert f"http://127.0.0.1:{number}" in server.stderr.readline()
        try:
            yield number
        finally:
            server.terminate()
            server.wait(20)


class Browser:
    """One page over the debugging protocol; every text frame of its WebSockets is kept."""

    def __init__(self, ws: Any) -> None:
        self._ws = ws
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.frames = ""
        self.asked: list[str] = []
        self.news = asyncio.Event()

    async def read(self) -> None:
        async for message in self._ws:
            data = message.json()
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            elif data.get("method") == "Network.webSocketFrameReceived":
                frame = data["params"]["response"]
                text = frame["payloadData"]
                self.frames += base64.b64decode(text).decode(errors="replace") if frame["opcode"] == 2 else text
                self.news.set()
            elif data.get("method") == "Network.requestWillBeSent":
                self.asked.append(data["params"]["request"]["url"])

    async def do(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._ws.send_json({"id": self._number, "method": method, "params": params})
        result: dict[str, Any] = (await answer)["result"]
        return result

    async def until(self, text: str) -> None:
        while text not in self.frames:
            self.news.clear()
            await self.news.wait()


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    import aiohttp

    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,800",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL)
    try:
        assert process.stderr is not None
        async for line in process.stderr:
            if b"DevTools listening on" in line:
                base = line.decode().split("ws://")[1].split("/")[0]
                break
        else:
            pytest.fail("Chromium ended before it could be asked")
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://{base}/json") as reply:
                page = next(p for p in await reply.json() if p["type"] == "page")
            async with http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as ws:
                one = Browser(ws)
                reading = asyncio.create_task(one.read())
                drained = asyncio.create_task(process.stderr.read())
                try:
                    yield one
                finally:
                    reading.cancel()
                    drained.cancel()
                    await asyncio.gather(reading, drained, return_exceptions=True)
    finally:
        process.terminate()
        await process.wait()


@needs_serve
@needs_browser
async def test_a_browser_shows_the_monitor_and_its_keys_work(port: int, tmp_path: Path) -> None:
    shots = Path(os.environ.get("AGENTGUARD_SHOTS", tmp_path))
    async with browser(tmp_path / "profile") as page:
        await page.do("Network.enable")
        await page.do("Page.enable")
        await page.do("Page.navigate", url=f"http://127.0.0.1:{port}/")
        await page.until("[1 Overview]")
        await page.until("qwen3-8b")
        picture = b""
        async with asyncio.timeout(60):  # what has arrived is painted a little later
            while not picture or colours(picture) <= 20:
                picture = base64.b64decode((await page.do("Page.captureScreenshot"))["data"])
        await asyncio.to_thread((shots / "web.png").write_bytes, picture)
        assert all(url.startswith(("http://127.0.0.1", "data:", "ws:", "blob:")) for url in page.asked), page.asked
        for kind in ("keyDown", "keyUp"):
            text = "2" if kind == "keyDown" else ""
            await page.do("Input.dispatchKeyEvent", type=kind, key="2", code="Digit2", windowsVirtualKeyCode=50, text=text)
        await page.until("[2 Sessions]")


def colours(png: bytes) -> int:
    """Distinct byte triplets in the filtered lines of a PNG: few for a page that shows nothing."""
    at, data = 8, b""
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    raw = zlib.decompress(data)
    return len({raw[i : i + 3] for i in range(0, len(raw), 3)})


@needs_serve
async def test_only_our_own_page_may_ask(port: int) -> None:
    import aiohttp

    url, ours = f"http://127.0.0.1:{port}", f"127.0.0.1:{port}"
    async with aiohttp.ClientSession() as http:
        for headers, path, status in (
            ({}, "/", 200),
            ({"Host": "evil.example"}, "/", 403),
            ({"Origin": "http://evil.example"}, "/ws", 403),
            ({}, "/ws", 403),
        ):
            async with http.get(url + path, headers={"Host": ours} | headers) as reply:
                assert reply.status == status, (headers, path)
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await http.ws_connect(f"{url}/ws", origin="http://evil.example")


def test_foreign() -> None:
    assert foreign("127.0.0.1:8485", "http://localhost:8485", 8485) is None
    assert foreign("127.0.0.1:8485", None, 8485) is None
    for host, origin in ((None, None), ("127.0.0.1:80", None), ("127.0.0.1:8485", "null"), ("127.0.0.1:8485", "http://127.0.0.1")):
        assert foreign(host, origin, 8485) is not None


def test_the_page_asks_nobody_else() -> None:
    text = (PAGE / "app_index.html").read_text()
    assert "http://" not in text
    assert "https://" not in text


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "agentguard-vllm\[tui-web\]"'):
        serve(Options(web=True))


def test_the_command_of_a_visitor_names_every_option_and_no_secret() -> None:
    from agentguard.cli.tui import tui

    options = Options(
        gateways=("http://a:1",), metrics=("http://b:2",), api_key="secret", operator_key="hidden", readonly=True, ascii=True,
        content=True, theme="agentguard-cb", web=True,
    )  # fmt: skip
    for asked in (options, Options(demo="loop", seed=3, web=True), Options(replay=Path("x.jsonl"), web=True)):
        words = arguments(asked)
        assert words[0] == "tui"
        context = tui.make_context("tui", words[1:])
        given = context.params
        assert given["gateways"] == asked.gateways
        assert (given["demo"], given["replay"], given["theme"]) == (asked.demo, asked.replay, asked.theme)
        assert (given["readonly"], given["ascii"], given["content"]) == (asked.readonly, asked.ascii, asked.content)
        assert not given["web"]
        assert "secret" not in words
        assert "hidden" not in words
