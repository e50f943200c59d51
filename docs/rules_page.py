"""Writes the figure and the tables of docs/rules.md: `python docs/rules_page.py` (needs the extra `docs`).

The tables come from docs/rules-study.json (`agentguard study run … --json`) and docs/rules-benchmark.json (`python -m
benchmarks.rules --json`), the figure from `rules.exact_law`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from agentguard.rulespec import KNOBS, RuleSpec
from engine_plugins import rules

DOCS = Path(__file__).parent
STUDY = DOCS / "rules-study.json"
BENCHMARK = DOCS / "rules-benchmark.json"
PAGE = DOCS / "rules.md"
VOCABULARY = 256
# knob values from strict to loose; typical sweeps eps with delta = sqrt(eps), top-k its k
SWEEPS: dict[str, list[float]] = {
    "lenience": [1, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02, 0.0],
    "mentored": [0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5],
    "cactus": [0, 0.003, 0.01, 0.03, 0.08, 0.18, 0.35, 0.75, 1, 2],
    "cactus-exact": [0, 0.003, 0.01, 0.03, 0.08, 0.18, 0.35, 0.75, 1, 2],
    "casc-tok-v1": [-1.1, *(i / 20 for i in range(-10, 21, 2))],
    "casc-tok-v2": [-0.1, *(i / 20 for i in range(0, 21, 2))],
    "casc-tok-v3": [-0.1, 0, 0.15, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1],
    "typical": [1, 0.6, 0.3, 0.15, 0.09, 0.04, 0.01, 0.003, 0.001, 0.0001],
    "top-k": [1, 2, 3, 5, 8, 12, 20, 40, 80, 256],
    "interp": [i / 10 for i in range(11)],
}
# rules that decide a whole row: on one pair they are strict or the draft alone, so their curve is over a mixture of rows
TRUSTING = ("fuzzy", "r-fuzzy", "casc-chow", "casc-diff", "casc-opt")
TRUSTING_SWEEPS: dict[str, list[float]] = {
    "fuzzy": [-1, *(i / 40 for i in range(29))],
    "r-fuzzy": [-1, *(i / 40 for i in range(29))],
    "casc-chow": [-0.1, *(i / 20 for i in range(21))],
    "casc-diff": [-1, *(i / 20 for i in range(-20, 21))],
    "casc-opt": [-50, *(i / 10 for i in range(-30, 31, 2)), 50],
}


def text_of(name: str, value: float) -> str:
    if name == "typical":
        return f"typical:eps={value!r},delta={value**0.5!r}"
    return f"{name}:{int(value) if name == 'top-k' else value!r}"


def shapes() -> Iterator[tuple[str, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Kinds of (p, q) a drafter produces: 12 rows each, so that rules that decide by the row show a curve."""
    for title, spread, noise in (
        ("sure target, good draft", 5.0, 1.0),
        ("open target, good draft", 2.0, 1.0),
        ("open target, poor draft", 2.0, 3.0),
    ):
        generator = torch.Generator().manual_seed(0)
        pairs = []
        for _ in range(12):
            z = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) * spread
            other = z + torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) * noise
            pairs.append((z.softmax(-1), other.softmax(-1)))
        yield title, pairs


def point(text: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Mean KL(law || p) in nats and mean acceptance."""
    divergence = acceptance = 0.0
    for p, q in pairs:
        law, rate = rules.exact_law(text, p, q)
        divergence += float(torch.special.xlogy(law, law / p).sum()) / len(pairs)
        acceptance += rate / len(pairs)
    return max(0.0, divergence), acceptance


def figure(path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "agentguard"
    import matplotlib.pyplot as plt

    chart, panels = plt.subplots(1, 3, figsize=(15, 5.2), sharey=True, layout="constrained")
    colours = plt.get_cmap("tab20").colors
    for axes, (title, pairs) in zip(panels, shapes(), strict=True):
        for i, (name, values) in enumerate((SWEEPS | TRUSTING_SWEEPS).items()):
            points = [point(text_of(name, value), pairs) for value in values]
            style = "--" if name in TRUSTING else "-"
            axes.plot(*zip(*points, strict=True), style, marker=".", markersize=4, linewidth=1.2, color=colours[i % 20], label=name)
        strict = point("strict", pairs)
        axes.plot(*strict, "k*", markersize=10, label="strict")
        axes.set_title(title)
        axes.set_xlabel("KL(law || p), nats")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("acceptance")
    handles, labels = panels[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False)
    chart.savefig(path, metadata={"Date": None})


def measured(study: dict[str, Any]) -> str:
    """The study as a Markdown table, a rule's two rows side by side: without and with the support filter."""
    arms = {arm["rule"]: arm for arm in study["arms"]}

    def interval(arm: dict[str, Any], key: str, ci: str) -> str:
        return f"{arm[key]:.2f} [{arm[ci][0]:.2f}, {arm[ci][1]:.2f}]"

    def row(name: str, mark: str, arm: dict[str, Any]) -> str:
        right = f"{arm['accuracy']:.0%} [{arm['accuracy_ci'][0]:.0%}, {arm['accuracy_ci'][1]:.0%}]"
        cells = [name, mark, f"{arm['accepted_length']:.2f}"]
        cells += [
            interval(arm, k, c) for k, c in (("gain", "gain_ci"), ("lambda", "lambda_ci"), ("rounds_ratio", "rounds_ratio_ci"))
        ]
        return "| " + " | ".join([*cells, right, f"{arm['tokens'] / arm['steps']:.0f}"]) + " |"

    lines = ["| rule | filter | ℓ | gain | λ | rounds ratio | right | tokens a step |", "|---|---|---|---|---|---|---|---|"]
    for text, arm in arms.items():
        spec = RuleSpec.parse(text)
        if spec.filtered:
            continue
        lines.append(row(f"`{text}`", "", arm))
        for other in arms.values():
            twin = RuleSpec.parse(other["rule"])
            if twin.filtered and (twin.name, twin.knobs) == (spec.name, spec.knobs):
                lines.append(row("", f"{twin.p_min:g}, {twin.top_k}", other))
    return "\n".join(lines)


def cost(benchmark: dict[str, Any]) -> str:
    """The largest size of the benchmark as a Markdown table."""
    largest = max((row["V"], row["rows"]) for row in benchmark["rows"])
    mine = [row for row in benchmark["rows"] if (row["V"], row["rows"]) == largest]
    # strict and stock have no filter to switch on, and were measured twice for it
    rows = list({row["rule"]: row for row in mine if row["filter"] or row["rule"] in ("stock", "strict")}.values())
    lines = ["| rule | time, ms | ratio to the stock call | peak memory, MiB |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["rule"] != "stock", row["ratio"])):
        lines.append(f"| `{row['rule'].split(',p_min')[0]}` | {row['ms']:.0f} | {row['ratio']:.2f} | {row['peak_mib']:.0f} |")
    return "\n".join(lines)


def page(text: str, study: dict[str, Any], benchmark: dict[str, Any]) -> str:
    """The page with its tables written anew."""
    for mark, table in (("measured", measured(study)), ("cost", cost(benchmark))):
        block = rf"(?s)(<!-- {mark}: docs/rules_page.py -->\n).*?(<!-- end -->)"
        text = re.sub(block, lambda m, table=table: m[1] + table + "\n" + m[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    assert set(SWEEPS) | set(TRUSTING_SWEEPS) == set(KNOBS) - {"strict", "mentored-dec"}
    PAGE.write_text(page(PAGE.read_text(), json.loads(STUDY.read_text()), json.loads(BENCHMARK.read_text())))
    figure(DOCS / "rules.svg")
