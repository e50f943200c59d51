"""A study's verdict in sentences, each made from numbers of its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentguard.study.report.papers import Row, compare, estimate, longer, rules
from agentguard.study.verdict import FEW


def verdict(document: dict[str, Any]) -> list[str]:
    """The answers a report owes: which rules lose although ℓ rises, what the filter changes, what the close rescues, where the
    extra tokens are, and where that agrees with the paper."""
    arms = [arm for arm in document["arms"] if arm["sessions"] >= FEW]
    said = [*_losers(arms), *_filter(arms), *_close(document | {"arms": arms}), *_extra(arms), *_agreement(document)]
    few = len(document["arms"]) - len(arms)
    if few:
        said.insert(0, f"{few} of {len(document['arms'])} arms have fewer than {FEW} sessions: nothing is concluded from them.")
    unfinished = document["sessions"]["planned"] - document["sessions"]["recorded"]
    if unfinished > 0:
        said.insert(
            0, f"Not finished: {unfinished:,} of {document['sessions']['planned']:,} sessions are missing; go on with --resume."
        )
    missing = [a for a in arms if a["telemetry"] is not None and a["telemetry"] < 0.99]
    if missing:
        said.append(
            "Telemetry lost more than 1 % of the rounds of "
            + ", ".join(f"`{a['rule']}` ({1 - a['telemetry']:.1%})" for a in missing)
            + "; what is said of single tokens there is of the rest."
        )
    return said


def _range(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{row['rule']}`" for row in rows)


def _losers(arms: Sequence[Row]) -> list[str]:
    relaxed = [a for a in arms if a["close"] == "off" and a["rule"] != "strict"]
    if not relaxed:
        return []
    said = []
    lost = [a for a in relaxed if a["verdict"] == "loss"]
    up = [a for a in lost if a["gain"] is not None and a["gain_ci"][0] > 1]
    more = [a for a in lost if longer(a)]
    said.append(f"Of {len(relaxed)} arms beside strict {len(lost)} lose: {_names(lost)}." if lost else "No arm loses to strict.")
    if up:
        said.append(
            "ℓ rises significantly and the arm loses all the same: "
            + ", ".join(f"`{a['rule']}` ({'longer' if longer(a) else 'wrong answers'})" for a in up)
            + "."
        )
    elif lost:
        said.append("In none of them ℓ rises significantly: here ℓ alone would not have recommended them either.")
    if more:
        worst = max(more, key=lambda a: a["lambda"])
        said.append(f"The longest is `{worst['rule']}`: λ {estimate(worst, 'lambda')} against a gain of {estimate(worst, 'gain')}.")
    won = [a for a in relaxed if a["verdict"] == "win"]
    said.append(f"Fewer rounds, answers as often right: {_names(won)}." if won else "No arm wins.")
    return said


def _filter(arms: Sequence[Row]) -> list[str]:
    said = []
    alone = next((a for a in arms if a["close"] == "off" and a["filter"] and a["rule"].startswith("strict")), None)
    if alone is not None and alone["lambda"] is not None:
        said.append(
            f"The filter alone, strict behind it: λ {estimate(alone, 'lambda')}, rounds {estimate(alone, 'rounds_ratio')}; what "
            "a filtered rule gains beyond that is the rule's."
        )
    filtered = [a for a in rules(arms, filtered=True) if a["without_filter"] and a["without_filter"]["inflation"] is not None]
    if filtered:
        shorter = [a for a in filtered if a["without_filter"]["inflation_ci"][1] < 1]
        mended = [
            a for a in filtered if a["without_filter"]["accuracy"] and a["without_filter"]["accuracy"]["difference_ci"][0] > 0
        ]
        said.append(
            f"The filter makes {len(shorter)} of {len(filtered)} relaxed rules significantly shorter and {len(mended)} "
            "significantly more often right."
        )
    own = [a for a in rules(arms, filtered=True) if a["strict_same_filter"] and a["strict_same_filter"]["rounds_ratio"] is not None]
    if own:
        better = [a for a in own if a["strict_same_filter"]["rounds_ratio_ci"][1] < 1]
        worse = [a for a in own if a["strict_same_filter"]["rounds_ratio_ci"][0] > 1]
        said.append(
            f"Against strict behind the same filter {len(better)} of {len(own)} filtered rules need fewer rounds"
            + (f" ({_names(better)})" if better else "")
            + f" and {len(worse)} more"
            + (f" ({_names(worse)})." if worse else ".")
        )
    return said


def _close(document: Mapping[str, Any]) -> list[str]:
    closed = [a for a in document["arms"] if a["closing"] is not None]
    if not closed:
        return []
    total = {key: sum(a["closing"][key] for a in closed) for key in ("rescued", "regressed", "right_off", "right", "empty")}
    n = sum(a["sessions"] for a in closed)
    said = [
        f"In {document['budget']} tokens closing rescues {total['rescued']:,} of {n:,} runs, and {total['regressed']:,} regress.",
        f"Right answers go from {total['right_off']:,} to {total['right']:,}; {total['empty']:,} runs end without an answer.",
    ]
    strict = next((a for a in closed if a["rule"] == "strict"), None)
    if strict is not None:
        c = strict["closing"]
        said.append(
            f"Under strict: {c['rescued']} rescued, {c['regressed']} regressed of {strict['sessions']}; right {c['right_off']} to "
            f"{c['right']}."
        )
    least = min(closed, key=lambda a: a["closing"]["right"] / a["sessions"])
    c = least["closing"]
    said.append(
        f"It rescues least under `{least['rule']}`: {c['right']} of {least['sessions']} right; a close cannot mend a wrong trace."
    )
    return said


def _extra(arms: Sequence[Row]) -> list[str]:
    some = [a for a in rules(arms, filtered=False) if a["think_share_of_extra"] is not None]
    if not some:
        return []
    think = [a["think_share_of_extra"] for a in some]
    said = [f"Of what longer rules write beyond strict, {_range(think)} is thinking."]
    after = [a["extra"]["after_share"] for a in some if a["extra"] and a["extra"]["after_share"] is not None]
    if after:
        said.append(
            f"Where both traces state the right answer, {_range(after)} of the extra tokens come after its first statement."
        )
    never = [a for a in some if a["extra"] and a["extra"]["proved"] < 0.8 * a["extra"]["proved_strict"]]
    if never:
        said.append(
            "Some never state it: "
            + ", ".join(
                f"`{a['rule']}` {a['extra']['proved']} of {a['sessions']} (strict {a['extra']['proved_strict']})" for a in never
            )
            + "."
        )
    return said


def _agreement(document: Mapping[str, Any]) -> list[str]:
    found = compare(document)
    said = []
    for word, sentence in (("yes", "As in the paper"), ("partly", "In part as in the paper"), ("no", "Other than in the paper")):
        some = [c.what for c in found if c.agrees == word]
        if some:
            said.append(f"{sentence}: {'; '.join(some)}.")
    return said
