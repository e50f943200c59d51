"""The study's table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from agentguard.economics.ratios import Ratio
from agentguard.study.results import ArmResult


def render(rows: Sequence[ArmResult], title: str) -> Table:
    table = Table(title=title, caption="λ and rounds: ratio to strict [95 % interval]. A rule pays when gain > λ, i.e. rounds < 1.")
    table.add_column("rule", overflow="fold", min_width=14)
    for heading in ("steps", "right", "tokens", "think", "ℓ", "gain", "λ", "rounds", "closes", "empty", "TTLT s"):
        table.add_column(heading, justify="right")
    for row in rows:
        share = row.think_tokens / row.tokens if row.tokens else 0.0
        strict = row.rule == "strict"
        table.add_row(
            row.rule.replace(",", ", "),
            str(row.steps),
            f"{row.right} ({row.right / row.steps:.0%})",
            str(row.tokens),
            f"{share:.0%}",
            f"{row.accepted_length:.2f}",
            f"{row.gain:.2f}",
            "1" if strict else _interval(row.inflation),
            "1" if strict else _interval(row.rounds_ratio),
            str(row.closes),
            str(row.empty_answers),
            f"{row.ttlt_s:.2f}",
        )
    return table


def _interval(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
