"""The study's table for a terminal: a column an arm, so that it fits 80 characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from agentguard.economics.ratios import Ratio
from agentguard.study.inference import Estimate
from agentguard.study.probe import ProbeResult
from agentguard.study.results import ArmResult
from agentguard.study.summary import Arm, Summary
from agentguard.study.tts import Against

ARMS_A_TABLE = 3
CAPTION = "λ and rounds are ratios to strict [95 % interval]; a rule pays when gain > λ, that is when rounds < 1"
LINES: tuple[tuple[str, Callable[[ArmResult], str]], ...] = (
    ("support filter", lambda r: "on" if r.filter else "off"),
    ("sessions / steps", lambda r: f"{r.sessions} / {r.steps}"),
    ("answers right", lambda r: "—" if r.accuracy is None else f"{r.right} ({r.accuracy.value:.0%})"),
    ("tokens", lambda r: str(r.tokens)),
    ("think share", lambda r: f"{r.think_tokens / r.tokens:.0%}" if r.tokens else "-"),
    ("accepted length ℓ", lambda r: f"{r.accepted_length:.2f}"),
    ("gain", lambda r: _interval(r, r.gain)),
    ("λ", lambda r: _interval(r, r.inflation)),
    ("rounds ratio", lambda r: _interval(r, r.rounds_ratio)),
    ("closes", lambda r: str(r.closes)),
    ("empty answers", lambda r: str(r.empty_answers)),
    ("TTLT, mean s", lambda r: f"{r.ttlt_s:.2f}"),
)


def render(rows: Sequence[ArmResult], title: str) -> list[Table]:
    """As many tables as the arms need, strict first."""
    return [_table(rows[i : i + ARMS_A_TABLE], title) for i in range(0, len(rows), ARMS_A_TABLE)]


ARM_LINES: tuple[tuple[str, Callable[[Arm], str]], ...] = (
    ("close", lambda a: a.close),
    ("support filter", lambda a: "on" if a.filter else "off"),
    ("sessions / steps", lambda a: f"{a.sessions} / {a.steps}"),
    ("answers right", lambda a: "—" if a.accuracy is None else f"{a.right} ({a.accuracy.value:.0%})"),
    ("tokens", lambda a: str(a.tokens)),
    ("think share", lambda a: f"{a.think_tokens / a.tokens:.0%}" if a.tokens else "—"),
    ("accepted length ℓ", lambda a: _of(a.accepted_length)),
    ("gain", lambda a: _of(a.gain)),
    ("λ", lambda a: _of(a.inflation)),
    ("rounds ratio", lambda a: _of(a.rounds_ratio)),
    ("TTLT ratio", lambda a: _of(a.ttlt_ratio)),
    ("truncated / closes", lambda a: f"{a.truncated} / {a.closes}"),
    ("rescued / regressed", lambda a: "—" if a.closing is None else f"{a.closing.rescued} / {a.closing.regressed}"),
    ("verdict", lambda a: a.verdict),
)


def render_arms(summary: Summary) -> list[Table]:
    """As many tables as the arms need, strict first."""
    plan = summary.header.plan
    title = f"{plan['suite']}: {plan['steps']} step{'s' * (plan['steps'] > 1)} a session, seed {plan['seed']}"
    if summary.budget:
        title += f", closed runs within {summary.budget} tokens"
    tables = []
    for i in range(0, len(summary.arms), ARMS_A_TABLE):
        table = Table(title=title, caption=CAPTION)
        table.add_column("rule", no_wrap=True)
        arms = summary.arms[i : i + ARMS_A_TABLE]
        for arm in arms:
            table.add_column(arm.rule.replace(",", ", "), justify="right")
        for heading, cell in ARM_LINES:
            table.add_row(heading, *(cell(arm) for arm in arms))
        tables.append(table)
    return tables


def _of(estimate: Estimate | None) -> str:
    if estimate is None:
        return "—"
    return f"{estimate.value:.2f}" if estimate.low == estimate.high else str(estimate)


def render_tts(rows: Sequence[Against], title: str) -> Table:
    """A line an arm; ℓ in the first and in the last third of the output, and over the frozen draft's there."""
    caption = "gain and speed: over the frozen draft on the same problems [95 % interval]; ℓ does not count the bonus token"
    table = Table(title=title, caption=caption)
    for heading in ("draft", "n", "ℓ first, last third", "gain there", "tokens/s", "speed"):
        table.add_column(heading)
    for r in rows:
        lengths = f"{r.thirds[0].value:.2f}, {r.thirds[-1].value:.2f}"
        table.add_row(r.label, str(r.n), lengths, _ratio(r.gain[-1]), f"{r.tokens_per_s:.0f}", _ratio(r.speed))
    return table


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def render_probe(result: ProbeResult, title: str) -> Table:
    """A line for each fraction of the trace."""
    signals = "  ".join(
        f"{name}: AUC {value:.2f}"
        for name, value in (("end marker", result.auc_end), ("entropy", result.auc_entropy))
        if value is not None
    )
    median = "-" if result.ready_median is None else f"{result.ready_median:.0%}"
    table = Table(title=title, caption=f"median trace is ready at {median} of its length; {signals}")
    table.add_column("closed at")
    table.add_column("right")
    for fraction, right in result.right_at.items():
        table.add_row(f"{float(fraction):.0%}", interval_text(right))
    return table


def _table(rows: Sequence[ArmResult], title: str) -> Table:
    table = Table(title=title, caption=CAPTION)
    table.add_column("rule", no_wrap=True)
    for row in rows:
        table.add_column(row.rule.replace(",", ", "), justify="right")
    for heading, cell in LINES:
        table.add_row(heading, *(cell(row) for row in rows))
    return table


def _interval(row: ArmResult, ratio: Ratio) -> str:
    return "1" if row.rule == "strict" else interval_text(ratio)


def interval_text(ratio: Ratio | None) -> str:
    return "—" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
