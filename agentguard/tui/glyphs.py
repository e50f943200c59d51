"""The signs of the monitor, in Unicode and in ASCII.

`plain` maps sign by sign, so a line keeps its width, and nothing outside ASCII slips through. λ, ℓ and δ are written out before a
line is laid out (`words`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Glyphs:
    """``ascii`` is set once, before the app starts."""

    ascii: bool = False

    @property
    def blocks(self) -> str:
        """Nine levels from empty to full, for sparklines; never quite full, so that rows of a table stay apart."""
        return " .,:-=+*#" if self.ascii else " ▁▁▂▃▄▅▆▇"


GLYPHS = Glyphs()

_SIGNS = str.maketrans({
    "✓": "+", "◆": "~", "●": "!", "✗": "x", "…": ".", "—": "-", "–": "-", "·": ".", "◀": "<", "▲": "^", "▼": "v",
    "│": "|", "─": "-", "━": "#", "┊": ":", "█": "#", "▓": "%", "▒": "=", "░": ".", "▏": "|", "▌": "|", "▐": "|", "▀": "'",
    "▄": ",",
    "▁": ".", "▂": ",", "▃": ":", "▅": "=", "▆": "+", "▇": "*", "→": ">", "←": "<", "↑": "^", "↓": "v", "×": "x",
    "≥": ">", "≤": "<",
    "≈": "~", "∞": "?", "λ": "L", "ℓ": "l", "δ": "d", "Δ": "D", "±": "~", "‖": "=", "⚑": "!", "’": "'", "∑": "S",
    "┼": "+", "┤": "|", "├": "|", "┬": "+", "┴": "+", "□": "o", "■": "#", "•": "*",
})  # fmt: skip


def plain(text: str) -> str:
    """``text`` in ASCII, as many characters as before."""
    if text.isascii():
        return text
    return text.translate(_SIGNS).encode("ascii", "replace").decode()


def say(text: str) -> str:
    """Free text as it may be shown: without control characters, and in ASCII where asked for."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return plain(words(text)) if GLYPHS.ascii else text


def words(text: str) -> str:
    """λ, ℓ and δ written out where signs outside ASCII are not wanted."""
    if not GLYPHS.ascii or text.isascii():
        return text
    return text.replace("λ", "lambda").replace("ℓ", "len").replace("δ", "delta").replace("∞", "inf")
