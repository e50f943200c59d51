"""The papers' figures, for the report's reference column, and how ours compare.

arXiv 2610.23818 (Acceptance Is Not Speed): 12 model pairs of real size, GSM8K to LongBench-v2, K = 6, H100 and A100. A figure of
another model on another task agrees or not in kind; it is no target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentguard.study.verdict import FEW

Row = Mapping[str, Any]
Agrees = Literal["yes", "no", "partly", "cannot be told"]
PAPER = "arXiv 2610.23818"


@dataclass(frozen=True, slots=True)
class Compared:
    """A finding of the paper, its figure, ours, and whether they agree in kind."""

    what: str
    paper: str
    ours: str
    agrees: Agrees


def rules(arms: Iterable[Row], *, filtered: bool, close: str = "off") -> list[Row]:
    """The relaxed arms."""
    return [a for a in arms if a["close"] == close and a["filter"] == filtered and not a["rule"].startswith("strict")]


def named(arms: Iterable[Row], name: str) -> Row | None:
    """A rule's arm without filter and close."""
    return next((a for a in rules(arms, filtered=False) if a["rule"].partition(":")[0] == name), None)


def longer(row: Row) -> bool:
    """Is the arm's text significantly longer than strict's?"""
    return row["lambda"] is not None and bool(row["lambda_ci"][0] > 1)


def compare(document: Mapping[str, Any]) -> list[Compared]:
    """One row for each finding that the study can speak to; arms with few sessions say nothing."""
    arms = [arm for arm in document["arms"] if arm["sessions"] >= FEW]
    found = (one(arms) for one in CLAIMS)
    return [row for row in found if row is not None]


def estimate(row: Row, key: str, digits: int = 2) -> str:
    """A value with its interval, "—" where it is unknown."""
    value = row.get(key)
    if value is None:
        return "—"
    low, high = row[key + "_ci"]
    if low == high == value:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def percent(row: Row, key: str) -> str:
    value = row.get(key)
    if value is None:
        return "—"
    low, high = row[key + "_ci"]
    return f"{value:.0%} [{low:.0%}, {high:.0%}]"


def _inflation(arms: Iterable[Row]) -> Compared | None:
    plain = [a for a in rules(arms, filtered=False) if a["lambda"] is not None]
    if not plain:
        return None
    more = [a for a in plain if longer(a)]
    shorter = [a for a in plain if a["lambda_ci"][1] < 1]
    tokens = sum(a["lambda"] for a in plain) / len(plain)
    ours = f"mean λ of {len(plain)} rules {tokens:.2f}; {len(more)} significantly longer than strict, {len(shorter)} shorter"
    agrees: Agrees = "yes" if len(more) > len(plain) / 2 else "partly" if more else "no"
    return Compared("relaxed rules make the text longer", "λ 1.54 over all cells", ours, agrees)


def _rule(name: str, paper: float, accuracy: str) -> Callable[[Iterable[Row]], Compared | None]:
    def one(arms: Iterable[Row]) -> Compared | None:
        arms = list(arms)
        arm = named(arms, name)
        if arm is None or arm["lambda"] is None:
            return None
        ours = f"λ {estimate(arm, 'lambda')}"
        pairs = arm["against_strict"]
        if pairs is not None:
            ours += f", right {arm['accuracy']:.2f}, by {pairs['difference']:+.2f} from strict"
        more = longer(arm)
        worse = pairs is None or pairs["difference_ci"][1] < 0
        agrees: Agrees = "yes" if more and worse else "partly" if more or worse else "no"
        return Compared(
            f"{name} is longer and answers wrongly more often", f"λ {paper} (AIME24, GPT-OSS-20B), {accuracy}", ours, agrees
        )

    return one


def _think(arms: Iterable[Row]) -> Compared | None:
    some = [a for a in rules(arms, filtered=False) if a["think_share_of_extra"] is not None]
    if not some:
        return None
    low = min(a["think_share_of_extra"] for a in some)
    high = max(a["think_share_of_extra"] for a in some)
    ours = f"{low:.0%} to {high:.0%} over {len(some)} longer rules"
    return Compared("the extra tokens are inside the think block", "more than 90 %", ours, "yes" if low > 0.9 else "partly")


def _strict_tokens(arms: Iterable[Row]) -> Compared | None:
    strict = next((a for a in arms if a["rule"] == "strict" and a["close"] == "off"), None)
    if strict is None or strict["strict_tokens"]["p"] is None:
        return None
    tokens = strict["strict_tokens"]
    ours = f"mean p {estimate(tokens, 'p', 3)}, median rank {tokens['rank']:.0f}"
    inside = tokens["rank"] == 1 and 0.78 <= tokens["p"] <= 0.93
    agrees: Agrees = "yes" if inside else "partly" if tokens["rank"] == 1 else "no"
    return Compared("what strict accepts is probable", "mean p 0.78 to 0.93, median rank 1", ours, agrees)


def _relaxed_tokens(arms: Iterable[Row]) -> Compared | None:
    some = [a["relaxed_tokens"] for a in rules(arms, filtered=False) if a["relaxed_tokens"]["n"] >= 30]
    if not some:
        return None
    p, rank = sorted(t["p"] for t in some), sorted(t["rank"] for t in some)
    ours = (
        f"mean p {p[0]:.3f} to {p[-1]:.3f}, median rank {rank[0]:.0f} to {rank[-1]:.0f} "
        f"({len(some)} rules with at least 30 such tokens)"
    )
    low_p, deep = p[len(p) // 2] < 0.09, rank[-1] >= 37
    agrees: Agrees = "yes" if low_p and deep else "partly" if low_p or deep else "no"
    return Compared("what only relaxation lets through is not", "p 0.01 to 0.09, rank 37 to 234", ours, agrees)


def _after(arms: Iterable[Row]) -> Compared | None:
    some = [a["extra"]["after_share"] for a in rules(arms, filtered=False) if a["extra"] and a["extra"]["after_share"] is not None]
    if not some:
        return None
    ours = f"{min(some):.0%} to {max(some):.0%} over {len(some)} longer rules, where both traces state it"
    within = sum(s >= 0.5 for s in some)
    agrees: Agrees = "yes" if within == len(some) else "partly" if within else "no"
    return Compared("on easy tasks the extra tokens come after the right answer", "50 to 82 % (GSM8K)", ours, agrees)


def _place(arms: Iterable[Row]) -> Compared | None:
    some = [a["extra"] for a in rules(arms, filtered=False) if a["extra"] and longer(a)]
    if not some:
        return None
    later = [e for e in some if e["before_ci"][0] > 0]
    unproved = [1 - e["proved"] / max(1, e["proved_strict"]) for e in some]
    ours = (
        f"later in {len(later)} of {len(some)} longer rules; up to {max(unproved):.0%} fewer traces state it at all "
        f"(median place of strict {some[0]['place_strict']:.0f} tokens)"
    )
    agrees: Agrees = "yes" if len(later) > len(some) / 2 else "partly" if later or max(unproved) > 0.1 else "no"
    return Compared("on hard tasks the right answer comes later", "median place 1,721 to 3,865 (AIME24)", ours, agrees)


def _close(arms: Iterable[Row]) -> Compared | None:
    closed = [a["closing"] for a in arms if a["closing"] is not None]
    if not closed:
        return None
    bound, rescued, regressed = (sum(c[k] for c in closed) for k in ("bound", "bound_rescued", "bound_regressed"))
    before, after = (sum(c[k] for c in closed) for k in ("bound_right_off", "bound_right"))
    ours = f"{rescued} of {bound} budget-bound runs rescued, {regressed} regressed (right {before} to {after})"
    return Compared(
        "closing a trace at 80-85 % of the budget rescues answers", "335 of 1,132 rescued, 22 regressed (right 126 to 439)", ours,
        "yes" if rescued > 2 * regressed else "no",
    )  # fmt: skip


def _filter(arms: Iterable[Row]) -> Compared | None:
    arms = list(arms)
    more = {a["rule"] for a in rules(arms, filtered=False) if longer(a)}
    behind = [a for a in rules(arms, filtered=True) if a["without_filter"] and a["without_filter"]["arm"] in more]
    if not behind:
        return None
    still = [a for a in behind if longer(a)]
    ours = f"of {len(behind)} longer rules {len(still)} stay longer than strict behind it"
    agrees: Agrees = "yes" if not still else "partly" if len(still) < len(behind) / 2 else "no"
    return Compared("the support filter keeps relaxation harmless", "recommended: p(x) ≥ 0.10 and among the top 10", ours, agrees)


CLAIMS: tuple[Callable[[Iterable[Row]], Compared | None], ...] = (
    _inflation,
    _rule("casc-opt", 2.48, "right 0.70 to 0.37"),
    _rule("r-fuzzy", 2.13, "right 0.70 to 0.50"),
    _think,
    _strict_tokens,
    _relaxed_tokens,
    _after,
    _place,
    _filter,
    _close,
)
