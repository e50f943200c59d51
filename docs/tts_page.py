"""Writes the tables and the figure of docs/tts.md from docs/tts-study*.json: `python docs/tts_page.py` (needs the extra `docs`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "tts.md"
STUDIES = ("tts-study",)


def ratio(value: dict[str, float]) -> str:
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def row(arm: dict[str, Any]) -> str:
    first, last = arm["thirds"][0]["value"], arm["thirds"][-1]["value"]
    cells = [
        arm["label"], str(arm["n"]), f"{arm['length']['value']:.2f}", f"{first:.2f}", f"{last:.2f} ({last + 1:.2f})",
        ratio(arm["gain"][0]), ratio(arm["gain"][-1]), ratio(arm["rounds"]), f"{arm['tokens_per_s']:.0f}", ratio(arm["speed"]),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def table(study: dict[str, Any]) -> str:
    heads = ["draft", "n", "ℓ", "first third", "last third (ℓ + 1)", "gain first third", "gain last third", "rounds a token"]
    heads += ["tokens/s", "speed"]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *map(row, study["arms"])])


def figure(study: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "agentguard"
    import matplotlib.pyplot as plt

    chart, panel = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for arm, colour in zip(study["arms"][:2], ("#56B4E9", "#D55E00"), strict=True):
        at = [b["from"] + 200 for b in arm["buckets"]]
        values = [b["length"]["value"] for b in arm["buckets"]]
        low = [b["length"]["low"] for b in arm["buckets"]]
        high = [b["length"]["high"] for b in arm["buckets"]]
        panel.plot(at, values, marker="o", color=colour, label={"tts": "learning (TTS)"}.get(arm["label"], arm["label"]))
        panel.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    panel.set(xlabel="position in the output (tokens)", ylabel="accepted length ℓ", ylim=(0, None))
    panel.set_title(
        f"{study['suite']}, {study['n']} problems, K = {study['engine']['K']}, {study['engine']['draft']}, 95 % intervals"
    )
    panel.legend(frameon=False)
    chart.savefig(path, metadata={"Date": None})


def page(text: str) -> str:
    """The page with the tables of the kept results."""
    for name in STUDIES:
        block = f"<!-- {name} -->\n{table(json.loads((DOCS / f'{name}.json').read_text()))}\n<!-- end -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, b=block: b, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def main() -> None:
    figure(json.loads((DOCS / "tts-study.json").read_text()), DOCS / "tts.svg")
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
