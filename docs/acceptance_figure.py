"""Draws docs/explanation/acceptance.svg from docs/rules-study.json: λ against gain, a dot a rule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
STUDY = DOCS / "rules-study.json"
FIGURE = DOCS / "explanation" / "acceptance.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 60, 150, 20, 50
X, Y = (0.8, 1.15), (0.6, 5.0)
"""Ends of the axes: gain, straight; λ, logarithmic."""


def figure(arms: list[dict[str, Any]]) -> str:
    """The picture; arms as a study writes them. The strict baseline is left out."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for gain in (0.8, 0.9, 1.0, 1.1):
        parts += [
            _line(_x(gain), TOP, _x(gain), HEIGHT - BOTTOM, "#dddddd"),
            _text(_x(gain), HEIGHT - BOTTOM + 16, f"{gain:g}", "middle"),
        ]
    for ratio in (0.7, 1, 1.5, 2, 3, 4):
        parts.append(_line(LEFT, _y(ratio), WIDTH - RIGHT, _y(ratio), "#dddddd"))
        parts.append(_text(LEFT - 6, _y(ratio) + 4, f"{ratio:g}", "end"))
    ends = [(value, value) for value in X]
    parts.append(_line(_x(ends[0][0]), _y(ends[0][1]), _x(ends[1][0]), _y(ends[1][1]), "#000000", dashed=True))
    parts.append(_text(_x(X[1]) + 4, _y(X[1]) + 4, "gain = λ", "start"))
    for arm in arms:
        if arm["rule"] == "strict":
            continue
        filtered = bool(arm["filter"])
        low, high = arm["lambda_ci"]
        x, colour = _x(arm["gain"]), "#0072b2" if filtered else "#d55e00"
        parts.append(_line(x, _y(low), x, _y(high), colour, faint=True))
        title = f"{arm['rule']}: gain {arm['gain']:.2f}, λ {arm['lambda']:.2f} [{low:.2f}, {high:.2f}], n = {arm['sessions']}"
        shape = (
            f'<circle cx="{x:.1f}" cy="{_y(arm["lambda"]):.1f}" r="4.5" fill="{colour}">'
            if filtered
            else f'<rect x="{x - 4:.1f}" y="{_y(arm["lambda"]) - 4:.1f}" width="8" height="8" fill="{colour}">'
        )
        parts.append(f"{shape}<title>{title}</title></{'circle' if filtered else 'rect'}>")
    for number, (colour, words) in enumerate((("#d55e00", "■ no filter"), ("#0072b2", "● support filter"))):
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 20 + 20 * number}" fill="{colour}">{words}</text>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "gain (ℓ + 1) / (ℓ strict + 1)", "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(16 {middle:.1f}) rotate(-90)" text-anchor="middle">length ratio λ, 95 % interval</text>'
    )
    return "\n".join([*parts, "</svg>\n"])


def _x(gain: float) -> float:
    return LEFT + (gain - X[0]) / (X[1] - X[0]) * (WIDTH - LEFT - RIGHT)


def _y(ratio: float) -> float:
    share = math.log(ratio / Y[0]) / math.log(Y[1] / Y[0])
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False, faint: bool = False) -> str:
    more = (' stroke-dasharray="5 4"' if dashed else "") + (' stroke-opacity="0.5"' if faint else "")
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def main() -> None:
    FIGURE.write_text(figure(json.loads(STUDY.read_text())["arms"]))


if __name__ == "__main__":
    main()
