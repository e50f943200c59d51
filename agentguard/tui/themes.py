"""The monitor's own themes. Textual's ansi-dark and ansi-light, which use the terminal's 16 colours, complete the set."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="agentguard-dark", primary="#6cb6ff", secondary="#56d4c8", accent="#d2a8ff", success="#57d38c", warning="#f0b34f",
    error="#ff7b72", foreground="#d5dbe3", background="#0f141a", surface="#161c24", panel="#1d2530", dark=True,
)  # fmt: skip
LIGHT = Theme(
    name="agentguard-light", primary="#0550ae", secondary="#0f6b64", accent="#7a35c9", success="#1a6b34", warning="#8a5300",
    error="#b42318", foreground="#1f2630", background="#fbfbf9", surface="#f2f2ee", panel="#e7e7e1", dark=False,
)  # fmt: skip
# Okabe and Ito's palette: good is blue, not green, and bad is vermillion, not red, so they differ for every kind of colour vision.
COLOUR_BLIND = Theme(
    name="agentguard-cb", primary="#56b4e9", secondary="#009e73", accent="#cc79a7", success="#56b4e9", warning="#e69f00",
    error="#d55e00", foreground="#e6e6e6", background="#080808", surface="#121212", panel="#191919", dark=True,
)  # fmt: skip

OURS = (DARK, LIGHT, COLOUR_BLIND)
CYCLE = (*(theme.name for theme in OURS), "ansi-dark", "ansi-light")
DEFAULT = DARK.name
