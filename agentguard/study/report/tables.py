"""The report's tables, as text cells: from a study's JSON alone, so that a page can be written anew without its recording."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentguard.rulespec import RuleSpec
from agentguard.study.report.papers import PAPER, Row, compare, estimate, percent

Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table with its title and what its columns mean."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self, *, level: int = 2) -> str:
        lines = [f"{'#' * level} {self.title}", "", self.note, "", *self.lines()]
        return "\n".join(lines) + "\n"

    def lines(self) -> list[str]:
        """The table alone, in Markdown."""
        return [
            "| " + " | ".join(self.head) + " |",
            "|" + "---|" * len(self.head),
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows),
        ]

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.head)
        body = "".join("<tr>" + "".join(f"<td>{_code(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        note = _code(self.note)
        return f"<h2>{html.escape(self.title)}</h2><p>{note}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def sheets(document: Mapping[str, Any]) -> list[Sheet]:
    """All tables there is something for."""
    arms = document["arms"]
    free = [a for a in arms if a["close"] == "off"]
    made = [
        _sheet("Which rules pay", WHICH, free, PAYS),
        _sheet("Lengths", LENGTHS_NOTE, free, LENGTHS),
        _sheet("What the support filter changes", FILTER_NOTE, [a for a in free if a["filter"]], FILTER),
        _sheet("What closing rescues", _closing_note(document), [a for a in arms if a["closing"]], CLOSING),
        _sheet("Where the extra tokens are", EXTRA_NOTE, [a for a in free if a["extra"] and a["rule"] != "strict"], EXTRA),
        _sheet("Which tokens are let through", TOKENS_NOTE, free, TOKENS),
        _positions(free),
        _sheet("Verdicts", VERDICT_NOTE, [a for a in arms if a["verdict"] != "baseline"], VERDICTS),
        papers(document),
    ]
    return [sheet for sheet in made if sheet.rows]


def papers(document: Mapping[str, Any]) -> Sheet:
    rows = [(c.what, c.paper, c.ours, c.agrees) for c in compare(document)]
    return Sheet("Beside the paper", f"{PAPER}: other models, other tasks. Agreement is in kind.", PAPER_HEAD, rows)


PAPER_HEAD = ("finding", "the paper", "here", "agrees")


def _sheet(title: str, note: str, rows: Iterable[Row], columns: Sequence[Column]) -> Sheet:
    return Sheet(title, note, [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def rule(row: Row) -> str:
    """The rule without its filter."""
    spec = RuleSpec.parse(row["rule"], what="rule")
    return f"`{spec.filtered_by(None, None)}`"


def support(row: Row) -> str:
    spec = RuleSpec.parse(row["rule"], what="rule")
    return f"{spec.p_min or 0:g}, {spec.top_k or 0}" if spec.filtered else ""


def count(row: Row, key: str) -> str:
    return "—" if row.get(key) is None else f"{row[key]:,}"


def p_value(value: float | None) -> str:
    if value is None:
        return "—"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def inside(key: str, cell: Callable[[Row], str]) -> Callable[[Row], str]:
    """A cell of a nested row, "—" where there is none."""
    return lambda row: "—" if row.get(key) is None else cell(row[key])


def pairs(row: Row | None) -> str:
    """How the share of right answers changed: points with their interval, sessions gained and lost, McNemar's p."""
    if row is None:
        return "—"
    low, high = (100 * v for v in row["difference_ci"])
    return f"{100 * row['difference']:+.0f} [{low:+.0f}, {high:+.0f}], +{row['gained']} −{row['lost']}, p {p_value(row['p'])}"


RULE: tuple[Column, ...] = (("rule", rule), ("filter", support), ("n", lambda r: str(r["sessions"])))
PAYS: tuple[Column, ...] = (
    *RULE,
    ("ℓ", lambda r: estimate(r, "accepted_length")),
    ("gain", lambda r: estimate(r, "gain")),
    ("λ", lambda r: estimate(r, "lambda")),
    ("rounds ratio", lambda r: estimate(r, "rounds_ratio")),
    ("TTLT ratio", lambda r: estimate(r, "ttlt_ratio")),
    ("right", lambda r: percent(r, "accuracy")),
    ("verdict", lambda r: r["verdict"]),
)
LENGTHS: tuple[Column, ...] = (
    *RULE,
    ("L", lambda r: estimate(r, "length", 0)),
    ("think L", lambda r: estimate(r, "think_length", 0)),
    ("answer L", lambda r: estimate(r, "answer_length", 1)),
    ("think share of the extra", lambda r: percent(r, "think_share_of_extra")),
    ("tokens/s", lambda r: estimate(r, "tokens_per_s", 0)),
    ("truncated", lambda r: str(r["truncated"])),
    ("no answer", lambda r: str(r["empty_answers"])),
)
FILTER: tuple[Column, ...] = (
    ("rule", rule),
    ("n", lambda r: str(r["sessions"])),
    ("λ, with over without", inside("without_filter", lambda r: estimate(r, "inflation"))),
    ("rounds", inside("without_filter", lambda r: estimate(r, "rounds_ratio"))),
    ("right, points", inside("without_filter", lambda r: pairs(r["accuracy"]))),
    ("λ to strict with the filter", inside("strict_same_filter", lambda r: estimate(r, "inflation"))),
    ("rounds", inside("strict_same_filter", lambda r: estimate(r, "rounds_ratio"))),
    ("right, points", inside("strict_same_filter", lambda r: pairs(r["accuracy"]))),
)
CLOSING: tuple[Column, ...] = (
    *RULE,
    ("close", lambda r: r["close"]),
    ("right, cut", lambda r: str(r["closing"]["right_off"])),
    ("right, closed", lambda r: str(r["closing"]["right"])),
    ("rescued", lambda r: str(r["closing"]["rescued"])),
    ("regressed", lambda r: str(r["closing"]["regressed"])),
    ("p", lambda r: p_value(r["closing"]["p"])),
    ("change", lambda r: percent(r["closing"], "difference")),
    (
        "budget-bound: n, right cut, right closed",
        lambda r: f"{r['closing']['bound']}, {r['closing']['bound_right_off']}, {r['closing']['bound_right']}",
    ),
    ("no answer", lambda r: str(r["closing"]["empty"])),
)
EXTRA: tuple[Column, ...] = (
    *RULE,
    ("pairs", lambda r: str(r["extra"]["pairs"])),
    ("before", lambda r: estimate(r["extra"], "before", 0)),
    ("after", lambda r: estimate(r["extra"], "after", 0)),
    ("share after", lambda r: percent(r["extra"], "after_share")),
    ("state it: rule, strict", lambda r: f"{r['extra']['proved']}, {r['extra']['proved_strict']}"),
    ("median place: rule", lambda r: estimate(r["extra"], "place", 0)),
    ("strict", lambda r: estimate(r["extra"], "place_strict", 0)),
)
TOKENS: tuple[Column, ...] = (
    *RULE,
    ("let through", lambda r: count(r["relaxed_tokens"], "n")),
    ("p", lambda r: estimate(r["relaxed_tokens"], "p", 3)),
    ("rank", lambda r: estimate(r["relaxed_tokens"], "rank", 0)),
    ("strict: p", lambda r: estimate(r["strict_tokens"], "p", 3)),
    ("rank", lambda r: estimate(r["strict_tokens"], "rank", 0)),
    ("hesitation words let through", lambda r: ", ".join(f"{w} {n}" for w, n in r["hesitations"].items()) or "none"),
    ("share", lambda r: percent(r, "hesitation_share")),
    ("strict: share", lambda r: percent(r, "hesitation_share_strict")),
)
VERDICTS: tuple[Column, ...] = (
    *RULE,
    ("close", lambda r: r["close"]),
    ("verdict", lambda r: r["verdict"]),
    ("p rounds", lambda r: p_value(r["p_rounds"])),
    ("p right", lambda r: p_value(r["p_accuracy"])),
    ("why", lambda r: r["reason"]),
)
WHICH = (
    "No trace closed. ℓ: accepted draft tokens a round, without the bonus token. gain, λ (tokens), rounds and TTLT are ratios to "
    "strict on the same problems [95 % interval]. A rule pays when gain > λ, that is when the rounds ratio is below 1, and its "
    "answers are as often right. filter: p_min, top_k."
)
LENGTHS_NOTE = "L: tokens a session. think share of the extra: of what is written beyond strict, where that is significantly more."
FILTER_NOTE = (
    "Left: the rule with the filter over the same rule without it. Right: over strict with the same filter, which takes the "
    "filter's own effect out of the rule's. right: points of accuracy, sessions gained and lost, McNemar's exact p."
)
EXTRA_NOTE = (
    "Tokens a session written beyond strict, before and after the trace first states the right answer, over pairs of which both "
    "do; share after: where the arm is significantly longer. A trace that never states it is in no pair; see how many do."
)
TOKENS_NOTE = (
    "let through: drafted tokens accepted only because the rule relaxes, with the target's mean probability and the median rank (1 "
    "is the most probable); strict: those that strict accepts on the same coin. Words are counted where they are one token."
)
VERDICT_NOTE = "p: that rounds, or right answers, are those of strict; adjusted after Holm over the arms of the same close."


def _closing_note(document: Mapping[str, Any]) -> str:
    budget = document.get("budget")
    return (
        f"Every problem within {budget} tokens: the free run cut there, and a run whose trace is closed in time. rescued: wrong or "
        "without an answer when cut, right when closed; regressed: the other way round; over all sessions, so what chance alone "
        "rescues it also regresses. budget-bound: free runs whose trace passes 85 % of the budget."
    )


def _positions(arms: Sequence[Row]) -> Sheet:
    most = max((len(a["by_position"]) for a in arms), default=0)
    rows = [
        [rule(a), support(a), *(f"{share:.2f}" for share in a["by_position"]), *[""] * (most - len(a["by_position"]))] for a in arms
    ]
    note = (
        "Share of the rounds that accepted the drafted token at this place; a token behind a rejected one counts as not accepted."
    )
    return Sheet("Acceptance by draft position", note, ["rule", "filter", *map(str, range(1, most + 1))], rows)


def _code(text: str) -> str:
    """HTML of a cell; what stands in backticks is code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
