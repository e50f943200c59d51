"""What an agent's run cost, from the gateway's own accounts before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COUNTS = ("steps", "tokens", "think_tokens", "closes")


@dataclass(frozen=True, slots=True)
class Spent:
    """Sums over the sessions that moved meanwhile; ``sessions`` is their number."""

    sessions: int
    steps: int
    tokens: int
    think_tokens: int
    closes: int


def spent(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Spent:
    """From two answers of GET /agentguard/sessions."""
    known = {row["session"]: row for row in before}
    sums, moved = dict.fromkeys(COUNTS, 0), 0
    for row in after:
        was = known.get(row["session"], dict.fromkeys(COUNTS, 0))
        if row["steps"] < was["steps"]:  # the gateway was started anew, and counts from there
            was = dict.fromkeys(COUNTS, 0)
        gained = {name: row[name] - was[name] for name in COUNTS}
        moved += gained["steps"] > 0
        for name in COUNTS:
            sums[name] += gained[name]
    return Spent(moved, **sums)


def ratio(economics: Mapping[str, Any]) -> str:
    """λ of the relaxed arm with the most sessions, with its interval; "—" when nothing is compared."""
    rows = [row for row in economics.get("rows", ()) if (row.get("ratios") or {}).get("tokens")]
    if not rows:
        return "—"
    tokens = max(rows, key=lambda row: row["sessions"])["ratios"]["tokens"]
    high = "∞" if tokens["high"] is None else f"{tokens['high']:.2f}"
    return f"{tokens['value']:.2f} [{tokens['low']:.2f}, {high}]"


def line(spent: Spent, lam: str) -> str:
    if not spent.steps:
        return "agentguard: no step came through the guard; the agent may have asked another server"
    share = f"{spent.think_tokens / spent.tokens:.0%}" if spent.tokens else "—"
    counted = [
        f"{spent.steps} step{'s' * (spent.steps != 1)}", f"{spent.tokens} tokens ({share} thinking)",
        f"{spent.closes} close{'s' * (spent.closes != 1)}", f"λ {lam}",
    ]  # fmt: skip
    if spent.sessions > 1:
        counted.append(f"{spent.sessions} sessions, all that ran meanwhile")
    return "agentguard: " + ", ".join(counted)
