"""Nothing is cut, rows stay where they are whatever happens, and every state can be read without colour and outside Unicode."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from rich.cells import cell_len

from agentguard.monitor.snapshot import EngineRow, SessionRow, Snapshot
from agentguard.tui.format import SESSION_STATES, SEVERITIES, STATES
from agentguard.tui.glyphs import GLYPHS
from tests.tui.scenes import STATES as SCENES
from tests.tui.scenes import T, engine, healthy, one_trip, session, source, step
from tests.tui.screen import Running, dump, lines, running

SIZES = ((60, 20), (80, 24), (120, 40), (200, 60))
PAGES = "12345"


@pytest.fixture
def ascii_only() -> Any:
    GLYPHS.ascii = True
    yield
    GLYPHS.ascii = False


def anchors(run: Running) -> dict[str, int]:
    """Where the parts of the overview stand."""
    found: dict[str, int] = {}
    for y, line in enumerate(run.text):
        for name, sign in (("head", "1 Over"), ("table", " state "), ("events", "latest events"), ("keys", "q Quit")):
            if sign in line and name not in found:
                found[name] = y
    for name in ("#fleet", "#engine", "#lambda-chart", "#accepted-chart", "#basis"):
        found[name] = run.app.screen.query_one(name).region.y
    return found


@pytest.mark.parametrize("size", SIZES)
async def test_rows_stay_between_healthy_and_alarmed(size: tuple[int, int]) -> None:
    async with running(healthy(), size) as run:
        calm = anchors(run)
        first, second = (next(y for y, line in enumerate(run.text) if f"qwen3-8b/{n}  " in line) for n in (1, 2))
        for name, scene in SCENES.items():
            await run.show(scene())
            assert anchors(run) == calm, name
            assert len(run.text) == size[1]
            if name != "no-servers":
                assert "qwen3-8b/1 " in run.text[first], name
                assert "qwen3-8b/2 " in run.text[second], name


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_is_cut(size: tuple[int, int]) -> None:
    """On every page each line has the screen's width, and only free text (events, reasons) may end in an ellipsis."""
    async with running(healthy(), size) as run:
        for page in PAGES:
            await run.press(page)
            for name, scene_of in SCENES.items():
                scene = scene_of()
                await run.show(scene)
                for text in lines(run.app):
                    assert cell_len(text) == size[0]
                    if "…" in re.sub(r"… (\d+ )?(stale|lost)", "", text):
                        assert any(e.text[:8] in text for e in scene.events) or "request" in text, (name, text)
                assert any("q Quit" in line for line in run.text)
                assert f"[{page}" in run.text[0]
                assert any(SEVERITIES[scene.verdict.severity][0] in line for line in run.text)


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_is_cut_of_a_session(size: tuple[int, int]) -> None:
    steps = (step(1, 300), step(2, 2_400, 90, closed="budget"), step(12, 1_111, 0, done=False, ttlt_s=None, accepted_length=None))
    async with running(healthy(sessions=(session(1, bars=steps),)), size) as run:
        await run.press("2", "enter")
        assert "[2" in run.text[0]
        for text in lines(run.app):
            assert cell_len(text) == size[0]
            assert "…" not in text
        for words in ("● closed: budget", "▶ runs now", "✓ ended itself", "┊"):
            assert any(words in line for line in run.text)


@pytest.mark.parametrize("size", [(40, 10), (30, 6), (20, 4)])
async def test_a_tiny_terminal_is_not_refused(size: tuple[int, int]) -> None:
    async with running(one_trip(), size) as run:
        assert len(run.text) == size[1]
        await run.press(*PAGES, "2", "enter", "escape")
        assert run.app.is_running


@pytest.mark.parametrize(
    ("size", "shown"), [((60, 20), ("3.12", "1.61", "1.86")), ((200, 60), ("1.86", "[1.71, 2.02]", "1.16", "4.2s", "71%"))]
)
async def test_values_are_whole(size: tuple[int, int], shown: tuple[str, ...]) -> None:
    async with running(one_trip(), size) as run:
        row = next(line for line in run.text if line.startswith("▶"))
        for value in shown:
            assert f" {value} " in f"{row} "


async def test_what_is_not_known_is_a_dash_and_never_nought() -> None:
    blank = EngineRow(key="e", name="new-engine", source=source().name, model=None, state="ok", since_t=T, seen_t=T)
    nothing = SessionRow(
        key="s", id="new-session", caller=None, source=source().name, engine="e", model=None, arm="", workload="", state="running",
        why="", since_t=T, last_t=T, steps=1, phase=None, running_request=None, context_used=None, context_limit=None,
        band_low=None, band_high=None, think_tokens=None, think_cap=None, tokens=3, think_tokens_total=3, closes=1,
    )  # fmt: skip
    scene = Snapshot(1, T, healthy().verdict, sources=(source(),), engines=(blank,), sessions=(nothing,), samples=1)
    async with running(scene, (200, 60)) as run:
        row = next(line for line in run.text if "new-engine " in line and line.startswith("▶"))
        cells = row.split()
        assert cells[:4] == ["▶", "✓", "ok", "new-engine"]
        assert cells[4:] == ["—"] * 16
        assert any("rates come with the second sample" in line for line in run.text)
        await run.press("2")
        row = next(line for line in run.text if "new-session " in line and line.startswith("▶"))
        assert "—" in row
        assert " 0 " not in row
        await run.press("3")
        assert any("no verification was seen" in line for line in run.text)
        assert not any(" 0%" in line for line in run.text)


async def test_a_measured_nought_is_shown() -> None:
    async with running(healthy(engines=(engine(1, closes=0, tokens_out_per_s=0.0, kv_use=0.0),))) as run:
        row = next(line for line in run.text if line.startswith("▶"))
        assert row.split()[-4:] == ["0", "0", "0%", "6+0"]


async def test_each_number_says_what_it_is_taken_over() -> None:
    async with running(healthy(), (80, 24)) as run:
        assert "over the last 60 s" in run.text[-2]
        assert "the arm's whole life" in run.text[-2]
        await run.show(dataclasses.replace(healthy(), engines=(engine(1, window_s=42.0),)))
        assert "over the last 42 s of 60 s" in run.text[-2]
        for page, words in (("2", "whole life"), ("3", "over the last"), ("4", "within 60 s is one line")):
            await run.press(page)
            assert words in run.text[-2]


@pytest.mark.parametrize("theme", ["ansi-dark", "agentguard-dark"])
async def test_no_color_takes_colours_away_and_leaves_every_state_readable(theme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    states = tuple(SESSION_STATES)
    scene = dataclasses.replace(
        one_trip(),
        engines=tuple(engine(n, state=state) for n, state in enumerate(STATES, 1)),
        sessions=tuple(session(n, state=state) for n, state in enumerate(states, 1)),
    )
    async with running(scene, (120, 40), theme) as run:
        for text, _ in STATES.values():
            assert any(text in line for line in run.text)
        assert all(part.split(" = ")[1].startswith("default on default") for part in dump(run.app).splitlines() if " = " in part)
        await run.press("2", "down")
        for text, _ in SESSION_STATES.values():
            assert any(text in line for line in run.text)
        # the cursor's row is told by its sign and by reverse video
        assert run.text[6].startswith("▶")
        assert " reverse" in dump(run.app)


@pytest.mark.usefixtures("ascii_only")
async def test_ascii_is_ascii_on_every_page_and_dialog() -> None:
    async with running(healthy(), (100, 30), content=True) as run:
        for page in PAGES:
            await run.press(page)
            for name, scene in SCENES.items():
                await run.show(scene())
                assert all(line.isascii() for line in lines(run.app)), (page, name)
        for keys in (("2", "enter"), ("x",), ("escape", "1", "T"), ("escape", "p"), ("escape", "ctrl+p")):
            await run.press(*keys)
            text = "\n".join(lines(run.app))
            assert text.isascii(), (keys, [c for c in text if not c.isascii()])


async def test_a_name_from_a_client_cannot_write_to_the_terminal() -> None:
    evil = session(1, id="\x1b[2J\x07名前-evil")
    async with running(healthy(sessions=(evil,)), (120, 30)) as run:
        await run.press("2")
        text = "\n".join(run.text)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "?[2J?名前-evil" in text
        assert all(cell_len(line) == 120 for line in lines(run.app))
