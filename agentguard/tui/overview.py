"""The overview: the fleet, λ against gain and ℓ of the selected engine, and the latest events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from agentguard.monitor.snapshot import ArmVerdict, EngineRow, Series, Snapshot, SourceRow
from agentguard.monitor.words import rule
from agentguard.tui.chart import Plot, chart, scale
from agentguard.tui.format import SEVERITIES, STATES, age, clock, count, interval, number, percent, ratio, seconds
from agentguard.tui.frame import Page, Panel, View, fields, source_key
from agentguard.tui.glyphs import GLYPHS, words
from agentguard.tui.lines import Line, Span, crop, fit, wrap
from agentguard.tui.palette import Role
from agentguard.tui.table import Column, Table

VERDICTS: dict[ArmVerdict, Span] = {
    "control": ("· control", "dim"),
    "win": ("✓ win", "good"),
    "loss": ("✗ loss", "bad"),
    "undecided": ("? open", "text"),
}


@dataclass(frozen=True, slots=True)
class FleetRow:
    """An engine, or a source that has shown none yet, at time ``t``."""

    row: EngineRow
    t: float

    @property
    def dimmed(self) -> bool:
        return self.row.state in ("stale", "down")


def fleet(snapshot: Snapshot) -> list[FleetRow]:
    """A row per engine, and one per source without any, so that a dead server has its row from the start."""
    seen = {engine.source for engine in snapshot.engines}
    rows = [FleetRow(engine, snapshot.t) for engine in snapshot.engines]
    return rows + [FleetRow(_of_source(source), snapshot.t) for source in snapshot.sources if source.name not in seen]


def _of_source(source: SourceRow) -> EngineRow:
    why = source.error or "no engine has been seen yet"
    return EngineRow(
        key=source_key(source), name=source.name, source=source.name, model=None, state=source.state, since_t=source.since_t,
        seen_t=source.seen_t, why=why,
    )  # fmt: skip


def _state(row: FleetRow, width: int) -> Span:
    text, role = STATES[row.row.state]
    return (f"{text} {age(row.t - (row.row.seen_t or row.row.since_t))}" if row.dimmed else text, role)


def _arm(row: FleetRow, width: int) -> Span:
    engine = row.row
    if engine.arm is None:
        return ("—", "dim")
    return (words(rule(engine.arm)), "stale" if row.dimmed else "warn" if switched(engine) else "text")


def switched(engine: EngineRow) -> bool:
    """Do new requests of the arm run under another rule (strict) than the arm's own?"""
    return engine.arm is not None and engine.rule not in (None, engine.arm)


def _verdict(row: FleetRow, width: int) -> Span:
    if row.row.verdict is None:
        return ("—", "dim")
    text, role = VERDICTS[row.row.verdict]
    if switched(row.row):
        text, role = f"✗ {row.row.rule}", "bad"
    return (text, "stale" if row.dimmed else role)


def _load(row: FleetRow, width: int) -> Span:
    running, waiting = row.row.running, row.row.waiting
    text = "—" if running is None and waiting is None else f"{count(running)}+{count(waiting)}"
    return (text, "stale" if row.dimmed else "text")


def _lambda_role(engine: EngineRow) -> Role:
    if engine.length_ratio is None or engine.gain is None:
        return "text"
    return "bad" if engine.verdict == "loss" else "good" if engine.verdict == "win" else "text"


def _value(
    key: str, title: str, width: int, need: int, get: Callable[[EngineRow], Any], write: Callable[[Any], str],
    role: Callable[[EngineRow], Role] = lambda _: "text", sort: Callable[[EngineRow], Any] | None = None,
) -> Column[FleetRow]:  # fmt: skip
    def cell(row: FleetRow, _: int) -> Span:
        value = get(row.row)
        return (write(value), "stale" if row.dimmed else "dim" if value is None else role(row.row))

    sort_value = sort or get
    return Column(key, title, width, cell, need, sort=lambda row: sort_value(row.row))


FLEET: tuple[Column[FleetRow], ...] = (
    Column("state", "state", 11, _state, align="left", sort=lambda r: ("down", "stale", "slow", "ok").index(r.row.state)),
    Column("engine", "engine", 15, lambda r, _: (r.row.name.removeprefix("http://"), "stale" if r.dimmed else "text"), align="left",
           grow=True, sort=lambda r: r.row.name),
    Column("arm", "arm", 20, _arm, 5, align="left", sort=lambda r: r.row.arm),
    Column("verdict", "verdict", 9, _verdict, 2, align="left", sort=lambda r: r.row.verdict),
    _value("accepted", "ℓ", 4, 0, lambda e: e.accepted_length, number),
    _value("gain", "gain", 5, 0, lambda e: e.gain, number),
    _value("lambda", "λ", 5, 0, lambda e: e.length_ratio, ratio, _lambda_role, lambda e: e.length_ratio and e.length_ratio.value),
    _value("interval", "95% of λ", 13, 8, lambda e: e.length_ratio, lambda r: interval(r).partition(" ")[2] or "—",
           sort=lambda e: e.length_ratio and e.length_ratio.low),
    _value("rounds", "rounds", 6, 9, lambda e: e.rounds_ratio, ratio, sort=lambda e: e.rounds_ratio and e.rounds_ratio.value),
    _value("ttlt", "TTLT50", 6, 6, lambda e: e.ttlt_p50_s, seconds),
    _value("ttlt95", "TTLT95", 6, 10, lambda e: e.ttlt_p95_s, seconds),
    _value("ttft", "TTFT50", 6, 11, lambda e: e.ttft_p50_s, seconds),
    _value("think", "think", 5, 7, lambda e: e.think_share, percent),
    _value("closes", "closes", 6, 4, lambda e: e.closes, count),
    _value("tokens", "tok/s", 5, 1, lambda e: e.tokens_out_per_s, count),
    _value("kv", "KV", 4, 3, lambda e: e.kv_use, percent),
    Column("load", "run+wait", 8, _load, 5, sort=lambda r: r.row.running),
    _value("window", "window", 6, 12, lambda e: e.window_s, seconds),
)  # fmt: skip


def engine_lines(view: View, width: int, height: int) -> list[Line]:
    """About the selected engine: why it is not fine, or the numbers that have no column."""
    engine = view.engine_row
    if engine is None:
        return _no_engine(view, width, height)
    if engine.why:
        return wrap(((f"{engine.name}: ", "text"), (words(engine.why), "warn")), width, height)
    reasons = " ".join(f"{reason} {n}" for reason, n in engine.finish_reasons[:4])
    first = [
        ((engine.name, "text"), (f" {engine.model}" if engine.model and engine.model != engine.name else "", "dim")),
        _field("arm", words(rule(engine.arm)) if engine.arm else "—"),
        _field("runs", words(rule(engine.rule)) if engine.rule else "—"),
        _field("class", engine.workload or "—"),
        _field("accepted", percent(engine.acceptance_share)),
        _field("rounds ratio", interval(engine.rounds_ratio)),
        _field("TTLT ratio", interval(engine.ttlt_ratio)),
    ]
    second = [
        _field("TTLT 50/95", f"{seconds(engine.ttlt_p50_s)}/{seconds(engine.ttlt_p95_s)}"),
        _field("TTFT", f"{seconds(engine.ttft_p50_s)}/{seconds(engine.ttft_p95_s)}"),
        _field("prefix hits", percent(engine.prefix_hit_share)),
        _field("in tok/s", count(engine.tokens_in_per_s)),
        _field("time a token", f"{seconds(engine.tpot_p50_s)}/{seconds(engine.tpot_p95_s)}"),
        _field("queued p95", seconds(engine.queue_p95_s)),
        _field("preempted/s", number(engine.preemptions_per_s)),
        _field("ended", reasons or "—"),
    ]
    return [fields(first, width), fields(second, width)][:height]


def _no_engine(view: View, width: int, height: int) -> list[Line]:
    chosen = view.source_row
    for source in view.snapshot.sources if chosen is None else (chosen,):
        if source.error:
            retry = "" if source.retry_s is None else f"; next try in {source.retry_s:.0f} s"
            return wrap(((f"{source.name}: ", "text"), (f"{source.error}{retry}", "warn")), width, height)
    hint = "start one with `agentguard serve`, or look at `agentguard tui --demo losing-rule`"
    return wrap(((hint, "dim"),), width, height)


def _field(name: str, value: str) -> Line:
    return ((f"{name} ", "dim"), (value, "text"))


def _series(view: View) -> Series | None:
    engine = view.engine_row
    return None if engine is None else next((s for s in view.snapshot.series if s.engine == engine.key), None)


def lambda_chart(view: View, width: int, height: int) -> list[Line]:
    """λ against gain, with the span in the title. Where λ lies above gain, the rule loses."""
    engine, series = view.engine_row, _series(view)
    lam = interval(engine.length_ratio) if engine is not None else "—"
    gain = number(engine.gain) if engine is not None else "—"
    full, dots = ("*", "o") if GLYPHS.ascii else ("──", "··")
    title = fields(
        [
            ((f"{full} λ ", "lambda"), (lam, "text")),
            ((f"{dots} gain ", "gain"), (gain, "text")),
            ((engine.name if engine is not None else "", "dim"), (_span(series), "dim")),
        ],
        width,
        "   ",
    )
    points = series.points if series is not None else ()
    plots = [
        Plot([p.length_ratio for p in points], "lambda"),
        Plot([p.gain for p in points], "gain", dotted=True),
    ]
    return _with_title(title, plots, width, height)


def accepted_chart(view: View, width: int, height: int) -> list[Line]:
    engine, series = view.engine_row, _series(view)
    now = number(engine.accepted_length) if engine is not None else "—"
    title = fields([(("ℓ ", "length"), (now, "text")), ((f"accepted draft tokens a round{_span(series)}", "dim"),)], width, "   ")
    points = series.points if series is not None else ()
    return _with_title(title, [Plot([p.accepted_length for p in points], "length")], width, height)


def _span(series: Series | None) -> str:
    if series is None or not series.points:
        return ""
    return f", last {age(series.every_s * len(series.points))}, {series.every_s:.0f} s a point"


def _with_title(title: Line, plots: Sequence[Plot], width: int, height: int) -> list[Line]:
    title = tuple((words(text), role) for text, role in title)
    if not any(v is not None for plot in plots for v in plot.values):
        rest: list[Line] = [(("nothing measured yet", "dim"),)]
        return [crop(title, width), *rest, *[()] * max(0, height - 2)][:height]
    low, high = scale(plots)
    return [crop(title, width), *chart(plots, width, height - 1, low, high)]


def latest_events(view: View, width: int, height: int) -> list[Line]:
    """The newest events, the newest last; the place is kept when there are none."""
    lines: list[Line] = [(("latest events", "title"),)]
    for event in view.snapshot.events[-(height - 1) :] if height > 1 else ():
        sign, role = SEVERITIES[event.severity]
        times = f" ×{event.n}" if event.n > 1 else ""
        text = fit(words(event.text), max(0, width - 21 - len(times)))
        lines.append(
            ((clock(event.t, view.utc) + " ", "dim"), (fit(sign, 10), role), (" " + text.rstrip(), "text"), (times, "dim"))
        )
    if len(lines) == 1 and height > 1:
        lines.append((("none yet", "dim"),))
    return lines + [()] * (height - len(lines))


class Overview(Page):
    NAME = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "Speculation", key_display="Enter", id="overview.open")]

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[FleetRow] = Table(FLEET, lambda row: row.row.key, empty="no server yet", id="fleet")

    def body(self) -> Sequence[Widget]:
        return (
            self.table,
            Panel(engine_lines, id="engine"),
            Horizontal(Panel(lambda_chart, id="lambda-chart"), Panel(accepted_chart, id="accepted-chart"), id="charts"),
            Panel(latest_events, id="latest"),
        )

    @property
    def main_table(self) -> Table[Any] | None:
        return self.table

    def show(self, view: View) -> None:
        self.table.show_rows(fleet(view.snapshot))
        super().show(view)

    def action_open(self) -> None:
        self.table.action_open()

    @on(Table.Moved, "#fleet")
    def _moved(self, event: Table.Moved) -> None:
        self.monitor_app.action_engine(event.key)

    @on(Table.Opened, "#fleet")
    def _opened(self, event: Table.Opened) -> None:
        self.app.call_later(self.app.run_action, "app.page('speculation')")

    @property
    def copy_text(self) -> str | None:
        row = self.table.cursor_row
        return None if row is None else row.row.name

    def rows_for_export(self) -> Sequence[object]:
        return [row.row for row in self.table.rows]
