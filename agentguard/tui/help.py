"""The help page: keys, signs, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget

from agentguard.tui.format import SESSION_STATES, STATES
from agentguard.tui.frame import Page, Panel, View
from agentguard.tui.glyphs import words
from agentguard.tui.lines import Line, Span, fit, wrap

KEYS: tuple[tuple[str, str], ...] = (
    ("1 to 5", "the pages; e: events; ? or F1: this page"),
    ("Enter", "more about the row: an engine's speculation, a session's steps; Escape goes back"),
    ("up down j k", "move; PageUp PageDown Home End g G"),
    ("s", "sort by the next column; a click on a title does it too, twice the other way round"),
    ("/", "filter sessions and events; f: events by severity"),
    ("[ ]", "another engine, on the speculation page"),
    ("v", "go to the culprit: the session or engine that the verdict names"),
    ("c", "close this trace now (sessions); l: change the session's limit"),
    ("p", "pin an arm (overview, speculation); T: pause TTS, or let it go on"),
    ("space", "let the screen, or a replay, stand still"),
    ("left right", "10 s back and forth in a replay, with Shift 60 s; < > change its speed"),
    ("+ -", "read less or more often; r: read now"),
    ("y", "copy the row's id; x: export SVG, CSV or JSON; R: record, or stop"),
    ("t", "the next theme; Ctrl+P: everything by name; q: quit"),
)
WORDS: tuple[tuple[str, str], ...] = (
    ("ℓ", "accepted draft tokens a round; the bonus token is never counted"),
    ("λ", "length of answers against strict of the same work, with its 95 % interval; above gain the rule loses"),
    ("gain", "(ℓ + 1) / (ℓ of strict + 1)"),
    ("rounds", "verification rounds a request against strict: below 1 is a win"),
    ("TTLT", "time to last token of a step; TTLT50 is the median, TTLT95 the 95th percentile"),
    ("think", "share of generated tokens that were thought"),
    ("band", "where the cutoff closes a step: 80 to 85 % of the window"),
    ("window", "the span a number is really taken over; λ, gain and rounds are over the arm's whole life"),
    ("—", "unknown. 0 is a measured nought"),
)


def help_lines(view: View, width: int) -> list[Line]:
    lines: list[Line] = [(("keys", "title"),)]
    lines += _rows(KEYS, width, 12)
    lines += [(), (("words", "title"),)]
    lines += _rows(WORDS, width, 12)
    lines += [(), (("signs", "title"),)]
    lines.append(tuple(span for text, role in STATES.values() for span in ((text, role), ("   ", "text"))))
    row: list[Span] = []
    used = 0
    for text, role in SESSION_STATES.values():
        if used + 13 > width:
            lines.append(tuple(row))
            row, used = [], 0
        row.append((fit(text, 13), role))
        used += 13
    lines.append(tuple(row))
    lines += [
        (),
        *wrap(
            (("λ above gain means that a relaxed rule is accepted more and still costs more: the model thinks longer.", "dim"),),
            width,
            3,
        ),
    ]
    return [tuple((words(text), role) for text, role in line) for line in lines]


def _rows(rows: Sequence[tuple[str, str]], width: int, left: int) -> list[Line]:
    lines: list[Line] = []
    for key, text in rows:
        room = max(20, width - left - 1)
        parts = [line for line in wrap(((words(text), "text"),), room, 4) if line]
        for i, part in enumerate(parts):
            lines.append(((fit(words(key) if i == 0 else "", left), "key"), (" ", "text"), *part))
    return lines


class Help(Page):
    NAME = "help"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.page('overview')", "Back", key_display="Esc", id="help.back")]

    def __init__(self) -> None:
        super().__init__()
        self.text = Panel(lambda view, width, height: help_lines(view, width), id="help-text")

    def body(self) -> Sequence[Widget]:
        return (VerticalScroll(self.text, id="help-scroll"),)

    def show(self, view: View) -> None:
        width = self.text.size.width
        if width:
            self.text.styles.height = len(help_lines(view, width))
        super().show(view)
