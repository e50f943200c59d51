"""The colours of the roles, worked out once per theme.

Not component classes of the style sheet: those are matched for every widget at every change of state, 20 classes a panel, and with
them the five pages took 2.4 s of CPU to open instead of 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from rich.style import Style
from textual.color import Color

Role: TypeAlias = Literal[
    "text", "dim", "title", "good", "warn", "bad", "stale", "accent", "lambda", "gain", "length", "think", "answer", "band", "cut",
    "bar", "tab", "key", "off",
]  # fmt: skip
ROLES: tuple[Role, ...] = get_args(Role)

# role: theme colour, how much of it over the background, bold
_ROLES: dict[Role, tuple[str, float, bool]] = {
    "text": ("foreground", 1.0, False),
    "dim": ("foreground", 0.65, False),
    "title": ("foreground", 1.0, True),
    "good": ("success", 1.0, False),
    "warn": ("warning", 1.0, False),
    "bad": ("error", 1.0, True),
    "stale": ("foreground", 0.6, False),
    "accent": ("accent", 1.0, False),
    "lambda": ("warning", 1.0, False),
    "gain": ("primary", 1.0, False),
    "length": ("secondary", 1.0, False),
    "think": ("accent", 1.0, False),
    "answer": ("secondary", 1.0, False),
    "band": ("warning", 1.0, False),
    "cut": ("warning", 1.0, False),
    "bar": ("primary", 1.0, False),
    "tab": ("primary", 1.0, True),
    "key": ("primary", 1.0, True),
    "off": ("foreground", 0.6, False),
}


def role_styles(variables: Mapping[str, str], ansi: bool, no_color: bool) -> dict[str, Style]:
    """A style per role, and "cursor", which lies over the others. With the terminal's own 16 colours, or none, nothing is mixed:
    what is fainter is dim, and the cursor is reversed."""
    plain = ansi or no_color
    ground = Color.parse(variables["background"])
    styles: dict[str, Style] = {}
    for role, (name, share, bold) in _ROLES.items():
        colour = Color.parse(variables[name])
        if not plain:
            colour = ground.blend(colour, share, alpha=1.0)
        styles[role] = Style(
            color=colour.rich_color, bgcolor=ground.rich_color, bold=bold or None, dim=(plain and share < 1) or None
        )
    if plain:
        styles["cursor"] = Style(bold=True, reverse=True)
    else:
        styles["cursor"] = Style(bold=True, bgcolor=Color.parse(variables["panel"]).rich_color)
    return styles
