"""The table, the charts and text: what they show for given data, and how little they repaint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.theme import Theme

from agentguard.economics.ratios import Ratio
from agentguard.monitor.snapshot import Bin
from agentguard.tui.chart import Plot, bar, chart, resample, scale, spark
from agentguard.tui.format import age, count, interval, number, percent, seconds
from agentguard.tui.glyphs import GLYPHS, plain, say
from agentguard.tui.lines import between, clean, crop, fit, text_of, width_of, wrap
from agentguard.tui.palette import ROLES, role_styles
from agentguard.tui.sessions import context_bar
from agentguard.tui.speculation import coarser
from agentguard.tui.table import Column, Table, choose
from agentguard.tui.themes import OURS
from tests.tui.scenes import session

Row = tuple[str, float | None]
COLUMNS: tuple[Column[Row], ...] = (
    Column("name", "name", 6, lambda r, _: (r[0], "text"), align="left", grow=True, sort=lambda r: r[0]),
    Column("value", "value", 6, lambda r, _: (number(r[1]), "text"), sort=lambda r: r[1]),
    Column("more", "more", 10, lambda r, _: ("more", "dim"), 2),
    Column("most", "most", 5, lambda r, _: ("most", "dim"), 1),
)


class TableApp(App[None]):
    role_styles: dict[str, Style] = dict.fromkeys((*ROLES, "cursor"), Style.null())

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[Row] = Table(COLUMNS, lambda r: r[0], empty="nothing")

    def compose(self) -> ComposeResult:
        yield self.table


@asynccontextmanager
async def table(rows: list[Row], size: tuple[int, int] = (40, 8)) -> AsyncIterator[tuple[Table[Row], Pilot[None]]]:
    app = TableApp()
    async with app.run_test(size=size) as pilot:
        app.table.show_rows(rows)
        await pilot.pause(0)
        yield app.table, pilot


def rows(n: int) -> list[Row]:
    return [(f"r{i:03}", float(i)) for i in range(n)]


async def test_the_cursor_belongs_to_its_row() -> None:
    async with table(rows(50)) as (one, pilot):
        await pilot.press(*["down"] * 10)
        assert one.cursor_key == "r010"
        one.show_rows([("new", 1.0), *rows(50)])
        assert one.cursor_key == "r010"
        one.sort("value")
        assert one.cursor_key == "r010"
        assert any("r010" in text_of(line) and text_of(line).startswith("▶") for line in one.text_lines())
        one.show_rows([row for row in rows(50) if row[0] != "r010"])
        assert one.cursor_key is not None
        assert one.cursor_row is not None
        one.show_rows([])
        assert one.cursor_row is None
        assert text_of(one.line(0)) == "nothing"
        one.show_rows(rows(50))
        assert one.cursor_row is not None


async def test_unknown_sorts_last_both_ways() -> None:
    async with table([("a", 1.0), ("b", None), ("c", 3.0)]) as (one, _):
        one.sort("value")
        assert [r[0] for r in one.rows] == ["c", "a", "b"]
        one.sort("value")
        assert [r[0] for r in one.rows] == ["a", "c", "b"]
        one.sort("value")
        assert [r[0] for r in one.rows] == ["a", "b", "c"]


async def test_only_lines_that_changed_are_painted() -> None:
    async with table(rows(500), (60, 20)) as (one, pilot):
        painted: list[int] = []
        render = one.render_line

        def counted(y: int):  # type: ignore[no-untyped-def]
            painted.append(y)
            return render(y)

        one.render_line = counted  # type: ignore[method-assign]
        one.show_rows(rows(500))
        await pilot.pause(0)
        assert painted == []
        changed = rows(500)
        changed[3] = ("r003", 99.0)
        changed[400] = ("r400", 99.0)
        one.show_rows(changed)
        await pilot.pause(0)
        assert painted == [4]
        painted.clear()
        await pilot.press("down")
        assert sorted(set(painted)) == [1, 2]


async def test_only_rows_in_view_are_formatted() -> None:
    asked: list[str] = []
    async with table(rows(5000), (60, 20)) as (one, pilot):
        one._columns = (Column("n", "n", 9, lambda r, _: (asked.append(r[0]) or r[0], "text"), grow=True),)
        one._fitted = (-1, [])
        one.show_rows(rows(5000)[::-1])
        await pilot.pause(0)
        assert len(set(asked)) <= 20


@pytest.mark.parametrize(
    ("width", "names"), [(14, "name value"), (20, "name value"), (22, "name value most"), (40, "name value more most")]
)
def test_the_least_needed_columns_go_first(width: int, names: str) -> None:
    chosen = choose(COLUMNS, width)
    assert " ".join(c.key for c, _ in chosen) == names
    assert 2 + sum(w + 1 for _, w in chosen) - 1 == max(width, 15)


# charts


def dots(lines: list[str]) -> int:
    return sum(bin(ord(c) - 0x2800).count("1") for line in lines for c in line if 0x2800 < ord(c) < 0x2900)


def test_a_rising_line_rises() -> None:
    lines = [text_of(line) for line in chart([Plot([float(i) for i in range(20)], "lambda")], 16, 4, 0, 19)]
    assert lines[0].startswith("19.00┤")
    assert lines[-1].startswith(" 0.00┤")
    columns = [next(y for y, line in enumerate(lines) if line[x] != " ") for x in range(6, 16)]
    assert columns == sorted(columns, reverse=True)
    assert columns[0] == 3
    assert columns[-1] == 0


def test_a_gap_is_a_gap() -> None:
    values = [1.0] * 8 + [None] * 8 + [1.0] * 8
    line = text_of(chart([Plot(values, "gain")], 6 + 12, 1, 0, 2)[0])[6:]
    assert line[4:8] == "    "
    assert " " not in line[:4] + line[8:]


def test_two_series_are_told_apart_without_colour() -> None:
    full = dots([text_of(line) for line in chart([Plot([1.0] * 40, "lambda")], 26, 3, 0, 2)])
    dotted = dots([text_of(line) for line in chart([Plot([1.0] * 40, "gain", dotted=True)], 26, 3, 0, 2)])
    assert dotted * 2 == full


def test_an_ascii_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GLYPHS, "ascii", True)
    plots = [Plot([0.0, 1.0, 2.0], "lambda"), Plot([2.0, 2.0, 1.0], "gain", dotted=True)]
    lines = [plain(text_of(line))[6:] for line in chart(plots, 13, 3, 0, 2)]
    assert lines == ["    oo*", "     *o", "    *  "]
    assert spark([1, None, 8], 4) == " . #"


def test_resample_keeps_the_newest_at_the_right() -> None:
    assert resample([1.0, 2.0], 4) == [None, None, 1.0, 2.0]
    assert resample([1.0, 3.0, None, None, 5.0, None], 3) == [2.0, None, 5.0]


def test_scale_is_never_flat() -> None:
    assert scale([Plot([], "gain")]) == (0.0, 1.0)
    assert scale([Plot([2.0], "gain")]) == pytest.approx((1.95, 2.05))


def test_a_bar_shows_every_part_and_the_cutoff() -> None:
    assert text_of(bar(((50, "█", "think"), (25, "▒", "answer")), 8, 100, 100)) == "████▒▒ ┊"
    assert text_of(bar(((1, "█", "think"), (1, "▒", "answer")), 8, 1000)) == "█▒      "
    assert text_of(bar(((0, "█", "think"),), 4, 0)) == "    "


def test_the_context_bar_has_its_band_in_every_width() -> None:
    for width in range(10, 90):
        line = context_bar(session(1, context_used=3_000), width)
        assert width_of(line) == width
        assert "▒" in text_of(line)
        full = text_of(context_bar(session(1, context_used=32_000), width))
        assert "▒" not in full
        assert "▓" in full
    assert text_of(context_bar(session(1, context_used=None), 10)) == "—         "


def test_coarser_bins_lose_nothing() -> None:
    bins = [Bin(i / 20, (i + 1) / 20, i, 1, 2, 3) for i in range(20)]
    few = coarser(bins, 7)
    assert len(few) <= 7
    assert few[0].low == 0
    assert few[-1].high == 1
    assert sum(b.strict for b in few) == sum(b.strict for b in bins)
    assert sum(b.rejected for b in few) == 60
    assert coarser(bins, 20) == tuple(bins)


@pytest.mark.parametrize("theme", OURS, ids=lambda theme: theme.name)
def test_every_role_can_be_read_on_its_background(theme: Theme) -> None:
    """The contrast of WCAG 2: 4.5 for text, 3 for what is faint on purpose."""
    variables = theme.to_color_system().generate()
    styles = role_styles(variables, ansi=False, no_color=False)
    for role, style in styles.items():
        if role == "cursor":
            continue
        for ground in (style.bgcolor, styles["cursor"].bgcolor):
            assert style.color is not None
            assert ground is not None
            least = 3.0 if role in ("stale", "off", "dim") else 4.5
            assert contrast(style.color.get_truecolor(), ground.get_truecolor()) >= least, (role, style)


def contrast(one: tuple[int, int, int], two: tuple[int, int, int]) -> float:
    def light(colour: tuple[int, int, int]) -> float:
        parts = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    bright, dark = sorted((light(one), light(two)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


# text


def test_numbers() -> None:
    assert [count(n) for n in (None, 0, 999, 9_994, 9_995, 12_345, 99_951, 999_600, 38_000_000, 2_000_000_000)] == [
        "—", "0", "999", "9994", "10.0k", "12.3k", "100k", "1.0M", "38.0M", "2.0G",
    ]  # fmt: skip
    assert [seconds(s) for s in (None, 0.0, 0.0123, 0.9996, 4.23, 84, 400, 90_000, 500_000)] == [
        "—", "0ms", "12ms", "1.0s", "4.2s", "84s", "7m", "25h", "6d",
    ]  # fmt: skip
    assert [age(s) for s in (-3, 7, 99.4, 99.6)] == ["0s", "7s", "99s", "2m"]
    assert (percent(None), percent(0.0), percent(0.485)) == ("—", "0%", "48%")
    assert interval(Ratio(1.86, 1.71, float("inf"), 9)) == "1.86 [1.71, ∞]"
    assert number(float("nan")) == "—"
    assert all(len(count(10**i)) <= 6 for i in range(12))


words = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


@given(words, st.integers(0, 30))
def test_fit_has_the_asked_width(text: str, width: int) -> None:
    fitted = fit(text, width)
    assert cell_len(fitted) == width
    assert clean(fitted) == fitted


@given(words)
def test_ascii_keeps_the_length(text: str) -> None:
    assert plain(text).isascii()
    assert len(plain(text)) == len(text)


@given(st.lists(words, max_size=5), st.integers(5, 40), st.integers(1, 3))
def test_wrap_has_the_asked_height_and_width(parts: list[str], width: int, height: int) -> None:
    lines = wrap(tuple((part, "text") for part in parts), width, height)
    assert len(lines) == height
    assert all(width_of(line) <= width for line in lines)


@given(words, words, st.integers(1, 40))
def test_between_never_overflows_when_the_right_part_fits(left: str, right: str, width: int) -> None:
    right_line = crop(((clean(right), "text"),), width)
    assert width_of(between(((clean(left), "text"),), right_line, width)) <= width


def test_wrap_breaks_at_spaces() -> None:
    assert [text_of(line) for line in wrap((("one two three four", "text"),), 9, 2)] == ["one two", "three fo…"]
    assert [text_of(line) for line in wrap((("one two", "text"), (" three", "dim")), 9, 2)] == ["one two", "three"]


def test_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert say("a\x1b[2Jb") == "a?[2Jb"
    monkeypatch.setattr(GLYPHS, "ascii", True)
    assert say("λ 1.2 – ℓ 3 ’") == "lambda 1.2 - len 3 '"
