"""The report's pictures, as SVG text, from a study's JSON alone. Drawn with matplotlib, which the extra `report` brings."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentguard.study.report.papers import Row, longer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 8
"""Arms in a plot of curves: strict, and those that differ most from it."""


def pictures(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(caption, SVG) of every picture there is something for."""
    free = [a for a in document["arms"] if a["close"] == "off"]
    relaxed = [a for a in free if a["rule"] != "strict" and a["lambda"] is not None and a["gain"] is not None]
    made = []
    if relaxed:
        made.append(("λ against gain. Left of the line a rule needs fewer rounds than strict.", _drawn(_gains, relaxed)))
    graded = [a for a in relaxed if a["accuracy"] is not None]
    if graded:
        made.append(("Right answers against rounds. Up and to the left is better.", _drawn(_accuracy, graded)))
    if free:
        made.append(("Tokens a session: 5 to 95 %, 25 to 75 %, and the median.", _drawn(_lengths, free)))
        made.append(("Acceptance by draft position.", _drawn(_by_position, _curves(free))))
        made.append(("Accepted length by output position.", _drawn(_by_output, _curves(free))))
    extra = [a for a in relaxed if a["extra"] and longer(a)]
    if extra:
        made.append(("Extra tokens a session, before and after the first right answer.", _drawn(_extra, extra)))
    placed = [a for a in relaxed if len(a["relaxed_places"]) and a["relaxed_tokens"]["n"] >= 30]
    if placed:
        made.append(("Where tokens were let through: 5 to 95 %, 25 to 75 %, and the median.", _drawn(_places, placed)))
    return made


def _drawn(draw: Callable[[Axes, Sequence[Row]], None], rows: Sequence[Row]) -> str:
    import matplotlib

    settings: Any = {"svg.hashsalt": "agentguard", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    with matplotlib.rc_context(settings):
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        tall = draw in (_lengths, _extra, _places)
        figure: Figure = Figure(figsize=(9, max(3.0, 0.22 * len(rows) + 1) if tall else 5), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots(), rows)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def _label(row: Row) -> str:
    return str(row["rule"]).replace(",p_min=0.1,top_k=10", " +").replace(":p_min=0.1,top_k=10", " +")


def _spread(row: Row, key: str) -> tuple[float, float]:
    low, high = row[key + "_ci"]
    return max(0.0, row[key] - low), max(0.0, high - row[key])


def _crosses(axes: Axes, rows: Sequence[Row], x: str, y: str) -> None:
    for row in rows:
        left, right = _spread(row, x)
        down, up = _spread(row, y)
        colour = "tab:blue" if row["filter"] else "tab:red"
        axes.errorbar(
            row[x], row[y], xerr=[[left], [right]], yerr=[[down], [up]], fmt="o" if row["filter"] else "s", color=colour,
            markersize=4, linewidth=0.7, alpha=0.85,
        )  # fmt: skip
        if row["verdict"] == "loss":  # the others lie on top of each other
            axes.annotate(_label(row), (row[x], row[y]), xytext=(4, 3), textcoords="offset points", fontsize=6)
    axes.plot([], [], "s", color="tab:red", label="without the filter")
    axes.plot([], [], "o", color="tab:blue", label="with the filter (+)")


def _log(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [t for t in (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10, 20) if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_xticks([], minor=True)


def _gains(axes: Axes, rows: Sequence[Row]) -> None:
    _crosses(axes, rows, "lambda", "gain")
    low = min(0.6, *(r["lambda_ci"][0] for r in rows))
    high = max(1.5, *(r["lambda_ci"][1] for r in rows))
    # on a logarithmic axis the line is a curve
    line = [low * (high / low) ** (i / 200) for i in range(201)]
    axes.plot(line, line, "k--", linewidth=1, label="break even: gain = λ")
    _log(axes)
    axes.set_ylim(min(r["gain_ci"][0] for r in rows) - 0.05, max(1.1, *(r["gain_ci"][1] for r in rows)) + 0.05)
    axes.set_xlabel("λ, tokens relative to strict")
    axes.set_ylabel("gain, (ℓ + 1) relative to strict")
    axes.legend()


def _accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    _crosses(axes, rows, "rounds_ratio", "accuracy")
    axes.axvline(1, color="k", linestyle="--", linewidth=1, label="as many rounds as strict")
    _log(axes)
    axes.set_xlabel("verification rounds relative to strict")
    axes.set_ylabel("share of right answers")
    axes.legend()


def _boxes(axes: Axes, rows: Sequence[Row], key: str) -> None:
    for i, row in enumerate(reversed(rows)):
        p5, p25, p50, p75, p95 = row[key]
        colour = "k" if row["rule"] == "strict" else "tab:blue" if row["filter"] else "tab:red"
        axes.plot([p5, p95], [i, i], color=colour, linewidth=1)
        axes.plot([p25, p75], [i, i], color=colour, linewidth=5, alpha=0.5, solid_capstyle="butt")
        axes.plot([p50], [i], "|", color=colour, markersize=10, markeredgewidth=2)
    axes.set_yticks(range(len(rows)), [_label(r) for r in reversed(rows)], fontsize=7)
    axes.set_xlabel("tokens")


def _lengths(axes: Axes, rows: Sequence[Row]) -> None:
    _boxes(axes, rows, "lengths")


def _places(axes: Axes, rows: Sequence[Row]) -> None:
    _boxes(axes, rows, "relaxed_places")
    axes.set_xlabel("output position, tokens")


def _curves(rows: Sequence[Row]) -> list[Row]:
    """Strict, and the arms whose lengths differ most from its."""
    strict = [r for r in rows if r["rule"] == "strict"]
    others = sorted((r for r in rows if r["rule"] != "strict"), key=lambda r: -abs((r["lambda"] or 1) - 1))
    return [*strict, *others[: SHOWN - 1]]


def _by_position(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        style = "k-o" if row["rule"] == "strict" else "-o"
        axes.plot(range(1, len(row["by_position"]) + 1), row["by_position"], style, markersize=3, label=_label(row))
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of rounds")
    axes.legend(fontsize=7)


def _by_output(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        bins = [(at, length) for at, rounds, length in row["by_output"] if rounds >= 30]
        style = "k-o" if row["rule"] == "strict" else "-o"
        axes.plot([at for at, _ in bins], [length for _, length in bins], style, markersize=3, label=_label(row))
    axes.set_xlabel("output position, tokens (bins with at least 30 rounds)")
    axes.set_ylabel("ℓ")
    axes.legend(fontsize=7)


def _extra(axes: Axes, rows: Sequence[Row]) -> None:
    shown = list(reversed(rows))
    before, after = [r["extra"]["before"] for r in shown], [r["extra"]["after"] for r in shown]
    # a part may be negative: then both start at 0
    starts = [b if b > 0 and a > 0 else 0.0 for b, a in zip(before, after, strict=True)]
    axes.barh(range(len(shown)), before, color="tab:orange", label="before the first right answer")
    axes.barh(range(len(shown)), after, left=starts, color="tab:purple", label="after it")
    axes.set_yticks(range(len(shown)), [_label(r) for r in shown], fontsize=7)
    axes.set_xlabel("tokens a session beyond strict, where both traces state the right answer")
    axes.legend()
