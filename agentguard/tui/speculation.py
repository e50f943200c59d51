"""One engine's speculation: what is accepted where, at which probability and rank, what strict would have accepted, and TTS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget

from agentguard.monitor.snapshot import ArmRow, Bin, EngineRow, Speculation, Tts
from agentguard.monitor.words import rule
from agentguard.tui.chart import Plot, bar, chart, scale, spark
from agentguard.tui.format import age, count, interval, number, percent, whole
from agentguard.tui.frame import Page, Panel, View, fields
from agentguard.tui.glyphs import GLYPHS, words
from agentguard.tui.lines import Line, fit
from agentguard.tui.overview import VERDICTS
from agentguard.tui.palette import Role

STRICT, RELAXED, CUT, REJECTED = "█", "▓", "▒", "·"
"""Accepted as strict would, only because of the rule; cut by the support filter; rejected by the rule's own test."""


def speculation_of(view: View) -> Speculation | None:
    engine = view.engine_row
    return None if engine is None else next((s for s in view.snapshot.speculation if s.engine == engine.key), None)


def of_the_arm(spec: Speculation, engine: EngineRow) -> bool:
    """Are these the rounds of the arm on the engine's row, run as itself? Else a gain of them would stand beside the arm's λ and be
    another's: after a switch they are strict's, and without a known rule those of all rules."""
    return spec.rule is not None and spec.rule == engine.arm


def _filled(lines: list[Line], height: int) -> list[Line]:
    return lines[:height] + [()] * (height - len(lines))


def _unknown(title: str, height: int, why: str = "no verification was seen") -> list[Line]:
    return _filled([((title, "title"),), ((why, "dim"),)], height)


def summary_panel(view: View, width: int, height: int) -> list[Line]:
    """ℓ, and what strict would have accepted of the same drafts."""
    spec, engine = speculation_of(view), view.engine_row
    name = engine.name if engine is not None else "no engine"
    several = len(view.snapshot.engines)
    at = next((i for i, e in enumerate(view.snapshot.engines, 1) if engine is not None and e.key == engine.key), 0)
    parts: list[Line] = [((name, "title"), (f" {at} of {several}" if several > 1 else "", "dim"))]
    if spec is None or spec.rounds == 0:
        return _filled([fields(parts, width), (("no verification was seen", "dim"),)], height)
    strict = spec.strict_accepted_length
    parts += [
        # what the rest is of comes first, as the last ones have no room in a narrow terminal
        (("of ", "dim"), (words(rule(spec.rule)), "text")) if spec.rule else (("of all rules", "dim"),),
        (("ℓ ", "dim"), (number(spec.accepted_length), "length")),
        (("strict would accept ", "dim"), (number(strict), "text")),
    ]
    if engine is not None and of_the_arm(spec, engine) and spec.accepted_length is not None and strict is not None:
        parts.append((("gain ", "dim"), (number((spec.accepted_length + 1) / (strict + 1)), "gain")))
    second: list[Line] = [
        (("rounds ", "dim"), (whole(spec.rounds), "text")),
        (("accepted ", "dim"), (f"{whole(spec.accepted)} of {whole(spec.drafted)}", "text")),
        (("lost frames ", "dim"), (whole(spec.lost_frames), "warn" if spec.lost_frames else "text")),
        *[((f"{name.replace('_', ' ')} ", "dim"), (count(n), "text")) for name, n in spec.fates],
    ]
    return _filled([fields(parts, width), fields(second, width)], height)


def position_panel(view: View, width: int, height: int) -> list[Line]:
    """Share of rounds that accepted draft position i; the mark is what strict would have accepted there."""
    title = "accepted by position"
    spec = speculation_of(view)
    if spec is None or not spec.by_position:
        return _unknown(title, height)
    lines: list[Line] = [fields([((title, "title"),), (("┊ strict", "cut"),)], width)]
    inner = max(4, width - 18)
    for i, share in enumerate(spec.by_position[: height - 1]):
        strict = spec.strict_by_position[i] if i < len(spec.strict_by_position) else None
        lines.append((
            (f"{i + 1:>3} ", "dim"), *bar(((share, "█", "length"),), inner, 1.0, strict), (f" {percent(share):>4}", "text"),
            (f" {percent(strict):>6}", "cut"),
        ))  # fmt: skip
    if len(spec.by_position) > height - 1:
        lines[-1] = ((f"and {len(spec.by_position) - height + 2} more positions", "dim"),)
    return _filled(lines, height)


def coarser(bins: Sequence[Bin], most: int) -> tuple[Bin, ...]:
    """At most ``most`` bins: neighbours together where there are more, so that none is left out."""
    if len(bins) <= most or most < 1:
        return tuple(bins)
    size = -(-len(bins) // most)
    groups = [bins[i : i + size] for i in range(0, len(bins), size)]
    return tuple(
        Bin(
            group[0].low,
            group[-1].high,
            sum(b.strict for b in group),
            sum(b.relaxed for b in group),
            sum(b.cut for b in group),
            sum(b.rejected for b in group),
        )
        for group in groups
    )


def histogram(title: str, bins: Sequence[Bin], labels: Sequence[str], width: int, height: int, cut: Sequence[bool]) -> list[Line]:
    """A line a bin: accepted as strict would, by the rule only, cut by the filter, rejected. Bins the filter cuts are shaded."""
    if not bins:
        return _unknown(title, height)
    legend: list[Line] = [
        ((title, "title"),), ((f"{STRICT} strict too", "length"),), ((f"{RELAXED} rule only", "accent"),),
        ((f"{CUT} filter cut", "warn"),), ((f"{REJECTED} rejected", "dim"),),
    ]  # fmt: skip
    lines: list[Line] = [fields(legend, width)]
    total = max(b.strict + b.relaxed + b.cut + b.rejected for b in bins) or 1
    size = max(len(label) for label in labels)
    inner = max(4, width - size - 9)
    for b, label, shaded in zip(bins, labels, cut, strict=True):
        parts: list[tuple[float, str, Role]] = [
            (b.strict, STRICT, "length"), (b.relaxed, RELAXED, "accent"), (b.cut, CUT, "warn"), (b.rejected, REJECTED, "dim"),
        ]  # fmt: skip
        sign = CUT if shaded else " "
        accepted = b.strict + b.relaxed
        lines.append(
            (
                (f"{label:>{size}} ", "dim"),
                (sign, "warn"),
                (" ", "text"),
                *bar(parts, inner, total),
                (f" {count(accepted):>5}", "text"),
            )
        )
    return _filled(lines, height)


def probability_panel(view: View, width: int, height: int) -> list[Line]:
    spec = speculation_of(view)
    bins = coarser(spec.probability, height - 1) if spec is not None else ()
    p_min = spec.p_min if spec is not None else None
    title = "target probability" if p_min is None else f"target probability, filter p ≥ {p_min:g}"
    return histogram(
        title, bins, [f"{b.low:.2g}-{b.high:.2g}" for b in bins], width, height,
        [p_min is not None and b.high <= p_min + 1e-9 for b in bins],
    )  # fmt: skip


def rank_panel(view: View, width: int, height: int) -> list[Line]:
    spec = speculation_of(view)
    bins = coarser(spec.rank, height - 1) if spec is not None else ()
    top_k = spec.top_k if spec is not None else None
    title = "target rank" if top_k is None else f"target rank, filter top {top_k}"
    return histogram(
        title, bins, [_rank(b, i == len(bins) - 1) for i, b in enumerate(bins)], width, height,
        [top_k is not None and b.low >= top_k for b in bins],
    )  # fmt: skip


def _rank(b: Bin, last: bool) -> str:
    """Ranks from 1; the model counts how many tokens the target prefers, from 0."""
    low, high = int(b.low) + 1, int(b.high) if b.high < 1e9 else 0
    return f"{low}+" if last or not high else f"{low}" if low == high else f"{low}-{high}"


def tts_panel(view: View, width: int, height: int) -> list[Line]:
    """The learning draft: ℓ against output position, live and frozen, its loss, and whether it pays."""
    spec = speculation_of(view)
    tts = spec.tts if spec is not None else None
    if tts is None:
        return _unknown("TTS: the draft that learns", height, "off: no learning draft on this engine")
    sign, role = _tts_sign(tts)
    losses = spark(tts.losses, min(24, max(1, width - 20))).strip()
    lines: list[Line] = [
        fields([
            (("TTS ", "title"), (f"{sign} {tts.state.replace('_', ' ')}", role), (f" {age(view.snapshot.t - tts.since_t)}", "dim")),
            (("version ", "dim"), (whole(tts.version), "text")),
            (("publishes ", "dim"), (whole(tts.publishes), "text")),
            (("epoch ", "dim"), (whole(tts.epoch), "text")),
            ((words(tts.reason), "dim"),) if tts.reason else (("", "dim"),),
        ], width),
        fields([
            _verdict_of(tts),
            (("of all rules", "dim"),),
            (("overlap live ", "dim"), (number(tts.live_overlap), "length")),
            (("frozen ", "dim"), (number(tts.frozen_overlap), "gain")),
            (("train/publish ms ", "dim"), (f"{number(tts.train_ms, 1)}/{number(tts.publish_ms, 1)}", "text")),
        ], width),
        fields([
            (("loss ", "dim"), (number(tts.loss), "text"), (f" {losses}", "think")),
        ], width),
    ]  # fmt: skip
    points = tts.by_output_position
    live = [p.live for p in points]
    frozen = [p.frozen for p in points]
    full, dots = ("*", "o") if GLYPHS.ascii else ("──", "··")
    if any(v is not None for v in (*live, *frozen)) and height > 6:
        upto = points[-1].high
        lines.append(fields([((f"{full} live ", "length"),), ((f"{dots} frozen", "gain"),),
                             ((words(f"ℓ against output position, to {upto:,} tokens"), "dim"),)], width))  # fmt: skip
        plots = [Plot(_spread(live, width), "length"), Plot(_spread(frozen, width), "gain", dotted=True)]
        lines += chart(plots, width, height - len(lines), *scale(plots, 0.2))
    return _filled(lines, height)


def _spread(values: Sequence[float | None], width: int) -> list[float | None]:
    """Few points over the whole width, each as a step."""
    columns = max(len(values), (width - 6) * 2)
    return [values[i * len(values) // columns] for i in range(columns)]


def _tts_sign(tts: Tts) -> tuple[str, Role]:
    if tts.state == "live":
        return ("✓", "good")
    if tts.state in ("off", "stopped", "rolled_back"):
        return ("✗", "bad")
    return ("◆", "warn")


def _verdict_of(tts: Tts) -> Line:
    if tts.gain is None or tts.break_even is None:
        return (("gain ", "dim"), (number(tts.gain), "text"), (" break-even ", "dim"), (number(tts.break_even), "text"))
    pays = tts.gain > tts.break_even
    return (
        ("✓ pays: " if pays else "✗ does not pay: ", "good" if pays else "bad"),
        (f"gain {number(tts.gain)} {'>' if pays else '≤'} break-even {number(tts.break_even)}", "text"),
    )


def arms_panel(view: View, width: int, height: int) -> list[Line]:
    """Every arm of this engine's classes: what the guard decided, and on what."""
    spec, engine = speculation_of(view), view.engine_row
    arms = spec.arms if spec is not None else ()
    lines: list[Line] = [(("arms", "title"),)]
    if not arms:
        lines.append(((view.why_no_arms(engine) if engine is not None else "no engine", "dim"),))
    for arm in arms[: height - 1]:
        lines.append(arm_line(arm, width))
    if len(arms) > height - 1:
        lines[-1] = ((f"and {len(arms) - height + 2} more", "dim"),)
    return _filled(lines, height)


def arm_line(arm: ArmRow, width: int) -> Line:
    sign, role = VERDICTS[arm.verdict]
    held = f" pinned: {arm.pinned}" if arm.pinned else "" if arm.on or arm.verdict == "control" else " → strict now"
    return fields([
        ((fit(sign, 11), role), (" " + words(rule(arm.arm) + held), "text")),
        ((arm.workload, "dim"),),
        (("λ ", "dim"), (interval(arm.length_ratio), "text")),
        (("gain ", "dim"), (number(arm.gain), "text")),
        (("ℓ ", "dim"), (f"{number(arm.accepted_length)}/{number(arm.strict_accepted_length)}", "text")),
        (("sessions ", "dim"), (whole(arm.sessions), "text")),
        ((words(arm.reason), "dim"),),
    ], width)  # fmt: skip


class SpeculationPage(Page):
    NAME = "speculation"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "left_square_bracket", "app.next_engine(-1)", "Engine before", key_display="[", show=False, id="speculation.previous"
        ),
        Binding("right_square_bracket", "app.next_engine(1)", "Next engine", key_display="]", id="speculation.next"),
    ]

    def body(self) -> Sequence[Widget]:
        return (
            Panel(summary_panel, id="summary"),
            VerticalScroll(
                Panel(position_panel, id="positions"),
                Panel(probability_panel, id="probabilities"),
                Panel(rank_panel, id="ranks"),
                Panel(tts_panel, id="tts"),
                Panel(arms_panel, id="arms"),
                id="spec-grid",
            ),
        )

    @property
    def copy_text(self) -> str | None:
        engine = self.monitor_app.view().engine_row
        return None if engine is None else engine.name

    def rows_for_export(self) -> Sequence[object]:
        spec = speculation_of(self.monitor_app.view())
        return spec.arms if spec is not None else ()
