"""From a study's recording to its numbers. Everything a report shows is computed here, and only from recorded sessions.

An arm is a rule under one way of closing. It is compared with strict under the same way, on the same problems; an arm with the
support filter also with its rule without it, and with strict behind the same filter; a closed arm also with its rule's free runs
cut at the budget. Ratios are of sums over sessions; sessions are the unit of every interval and test (inference.py).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentguard.economics.ratios import share
from agentguard.errors import AgentGuardError
from agentguard.rulespec import RuleSpec
from agentguard.study.anatomy import OUTPUT_BIN
from agentguard.study.inference import Estimate, bootstrap, difference, mcnemar, median, quantiles, ratio
from agentguard.study.records import Header, SessionRecord, load
from agentguard.study.results import a_step
from agentguard.study.summary import Against, Arm, Closing, Extra, Pairs, Summary, Tokens
from agentguard.study.verdict import judged

BOUND = 0.85
"""A free run is budget-bound when its trace passes this share of the budget (arXiv 2610.23818)."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Sessions:
    """One cell's sessions, by number, as columns."""

    def __init__(self, rule: str, close: str, records: Iterable[SessionRecord]) -> None:
        self.rule = rule
        self.close = close
        self.by_number = {r.number: r for r in sorted(records, key=lambda r: r.number)}

    def __len__(self) -> int:
        return len(self.by_number)

    def on(self, numbers: Iterable[int]) -> Sessions:
        return Sessions(self.rule, self.close, [self.by_number[n] for n in numbers])

    @property
    def records(self) -> list[SessionRecord]:
        return list(self.by_number.values())

    def column(self, name: str) -> list[float]:
        """Sums over the steps of each session: tokens, think_tokens, answer_tokens, rounds, accepted, ttlt_s."""
        return [math.fsum(getattr(s.finished, name) or 0 for s in r.steps) for r in self.records]

    @property
    def right(self) -> list[bool] | None:
        """Of each session, whether all its graded steps are right; None where nothing is graded."""
        if not any(s.right is not None for r in self.records for s in r.steps):
            return None
        return [all(s.right for s in r.steps if s.right is not None) for r in self.records]

    def right_within(self, budget: int) -> list[bool]:
        """Of sessions of one step, whether they are right when the server stops them at ``budget`` tokens."""
        return [bool(r.steps[0].right) and r.steps[0].finished.tokens <= budget for r in self.records]


def summarise_records(path: Path) -> Summary:
    """The numbers of a recording, also of one that is not finished. Raises AgentGuardError where it has too little to compare."""
    header, records = load(path)
    return summarise(header, records)


def summarise(header: Header, records: Sequence[SessionRecord]) -> Summary:
    cells = {
        (rule, close): Sessions(rule, close, [r for r in records if (r.rule, r.close) == (rule, close)])
        for rule, close, _ in header.plan["cells"]
    }
    pilot = [r for r in records if r.close == "pilot"]
    budget = header.plan["budget"] or 0
    if pilot and not budget:
        budget = round(statistics.median(sum(s.finished.think_tokens for s in r.steps) for r in pilot))
    arms = []
    for (_, close), sessions in sorted(cells.items(), key=lambda item: (item[0][1] != "off", not _strict(item[0][0]))):
        strict = cells.get(("strict", close))
        if not len(sessions) or strict is None:
            continue
        arms.append(_arm(sessions, strict, cells, budget))
    if not any(arm.rule == "strict" for arm in arms):
        raise AgentGuardError("the recording has no session of strict, so λ and gain have no baseline; finish it with --resume")
    planned = sum(n for _, _, n in header.plan["cells"]) + (len(pilot) if pilot else 0)
    return Summary(header, judged(arms), budget, planned, len(records))


def _strict(rule: str) -> bool:
    return rule == "strict"


def _paired(one: Sessions, other: Sessions) -> tuple[Sessions, Sessions]:
    """Both on the problems that both have run."""
    numbers = sorted(one.by_number.keys() & other.by_number.keys())
    return one.on(numbers), other.on(numbers)


def _arm(sessions: Sessions, strict: Sessions, cells: Mapping[tuple[str, str], Sessions], budget: int) -> Arm:
    records = sessions.records
    steps = [s for r in records for s in r.steps]
    if any(s.finished.rounds is None and not s.finished.continued for s in steps):  # a stream that was cut has no counters
        raise AgentGuardError(
            f"arm {sessions.rule!r} has steps without the engine's round counts; start the engine with a draft model and "
            "--per-request-spec-decode-metrics summary"
        )
    spec = RuleSpec.parse(sessions.rule, what="recording")
    graded = [s.right for s in steps if s.right is not None]
    tokens, rounds, accepted = sessions.column("tokens"), sessions.column("rounds"), sessions.column("accepted")
    mine, theirs = _paired(sessions, strict)
    compared = len(mine) > 0
    inflation = ratio(mine.column("tokens"), theirs.column("tokens")) if compared else None
    counted = sum(rounds)
    relaxed = [r.stats.relaxed for r in records]
    arm = Arm(
        rule=sessions.rule,
        filter=spec.filtered,
        close=sessions.close,
        sessions=len(records),
        steps=len(steps),
        right=sum(graded) if graded else None,
        accuracy=_share(sum(graded), len(graded), len(records)) if graded else None,
        against_strict=_pairs(mine, theirs) if compared else None,
        tokens=round(sum(tokens)),
        think_tokens=round(sum(sessions.column("think_tokens"))),
        rounds=round(counted),
        length=_mean(tokens),
        think_length=_mean(sessions.column("think_tokens")),
        answer_length=_mean(sessions.column("answer_tokens")),
        accepted_length=bootstrap((accepted, rounds), lambda s: s[0] / s[1] if s[1] else None),
        gain=_gain(mine, theirs) if compared else None,
        inflation=inflation,
        rounds_ratio=ratio(mine.column("rounds"), theirs.column("rounds")) if compared else None,
        ttlt_ratio=ratio(mine.column("ttlt_s"), theirs.column("ttlt_s")) if compared else None,
        ttlt_s=sum(sessions.column("ttlt_s")) / len(steps),
        tokens_per_s=bootstrap((tokens, sessions.column("ttlt_s")), lambda s: s[0] / s[1] if s[1] else None),
        think_share_of_extra=_think_share(mine, theirs) if inflation is not None and inflation.low > 1 else None,
        truncated=sum(s.finished.finish_reason == "length" for s in steps),
        closes=sum(bool(s.finished.closed) for s in steps),
        empty_answers=sum(s.finished.empty_answer for s in steps),
        extra=extra(mine, theirs) if compared else None,  # nosec B610  # our own method of that name, no database
        strict_tokens=Tokens(
            sum(r.stats.strict_n for r in records),
            bootstrap(
                ([r.stats.strict_p for r in records], [r.stats.strict_n for r in records]), lambda s: s[0] / s[1] if s[1] else None
            ),
            median([r.stats.strict_rank for r in records]),
        ),
        relaxed_tokens=Tokens(
            sum(map(len, relaxed)),
            bootstrap(
                ([math.fsum(t.p for t in tokens) for tokens in relaxed], [len(tokens) for tokens in relaxed]),
                lambda s: s[0] / s[1] if s[1] else None,
            ),
            median([Counter(t.rank for t in tokens) for tokens in relaxed]),
        ),
        relaxed_places=quantiles([t.place for tokens in relaxed for t in tokens], QUANTILES),
        hesitations=_summed(r.stats.relaxed_words for r in records),
        hesitation_share=bootstrap(
            ([sum(r.stats.relaxed_words.values()) for r in records], [len(tokens) for tokens in relaxed]),
            lambda s: s[0] / s[1] if s[1] else None,
        ),
        hesitation_share_strict=bootstrap(
            ([sum(r.stats.strict_words.values()) for r in records], [r.stats.strict_n for r in records]),
            lambda s: s[0] / s[1] if s[1] else None,
        ),
        by_position=by_position(records),
        by_output=by_output(records),
        lengths=quantiles(tokens, QUANTILES),
        fates=_summed(r.stats.fates for r in records),
        telemetry=sum(r.stats.rounds for r in records) / counted if counted else None,
        a_step=a_step([[s.finished for s in r.steps] for r in records]),
    )
    return replace(
        arm,
        without_filter=_against(sessions, cells, replace(spec, p_min=None, top_k=None)) if spec.filtered else None,
        strict_same_filter=(
            _against(sessions, cells, replace(RuleSpec("strict"), p_min=spec.p_min, top_k=spec.top_k))
            if spec.filtered and spec.name != "strict"
            else None
        ),
        closing=_closing(sessions, cells, budget) if sessions.close != "off" and budget else None,
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _share(right: int, of: int, sessions: int) -> Estimate:
    """The share of right steps, its interval as if each session were one trial: steps of a session are correlated."""
    found = share(sessions * right / of, sessions)
    return Estimate(right / of, found.low, found.high, sessions)


def _mean(column: Sequence[float]) -> Estimate:
    found = bootstrap((column, [1.0] * len(column)), lambda s: s[0] / s[1])
    assert found is not None
    return found


def _gain(mine: Sessions, theirs: Sessions) -> Estimate | None:
    """(ℓ + 1) / (ℓ_strict + 1)."""

    def gain(s: Sequence[float]) -> float | None:
        accepted, rounds, accepted_strict, rounds_strict = s
        if not rounds or not rounds_strict:
            return None
        return (accepted / rounds + 1) / (accepted_strict / rounds_strict + 1)

    columns = (mine.column("accepted"), mine.column("rounds"), theirs.column("accepted"), theirs.column("rounds"))
    return bootstrap(columns, gain, null=1.0)


def _think_share(mine: Sessions, theirs: Sessions) -> Estimate | None:
    """Think tokens among the tokens written beyond strict."""
    columns = (
        mine.column("think_tokens"), theirs.column("think_tokens"), mine.column("tokens"), theirs.column("tokens"),
    )  # fmt: skip
    return bootstrap(columns, lambda s: (s[0] - s[1]) / (s[2] - s[3]) if s[2] > s[3] else None)


def _pairs(one: Sessions, other: Sessions, before: list[bool] | None = None) -> Pairs | None:
    """``one`` against ``other`` on the same problems; ``before`` takes the place of the other's grades."""
    after = one.right
    before = other.right if before is None else before
    if after is None or before is None:
        return None
    gained = sum(a and not b for a, b in zip(after, before, strict=True))
    lost = sum(b and not a for a, b in zip(after, before, strict=True))
    return Pairs(gained, lost, mcnemar(gained, lost), difference([float(a) for a in after], [float(b) for b in before]))


def extra(mine: Sessions, theirs: Sessions) -> Extra | None:
    """See `Extra`; None where no trace of the suite is known to state an answer."""
    pairs = [
        (a, b) for one, other in zip(mine.records, theirs.records, strict=True) for a, b in zip(one.steps, other.steps, strict=True)
    ]
    proved = [a.proved for a, _ in pairs if a.proved is not None]
    proved_strict = [b.proved for _, b in pairs if b.proved is not None]
    both = [
        (a.proved, a.finished.tokens, b.proved, b.finished.tokens)
        for a, b in pairs
        if a.proved is not None and b.proved is not None
    ]
    if not both:
        return None
    before = [float(a - b) for a, _, b, _ in both]
    after = [float((n - a) - (m - b)) for a, n, b, m in both]
    ones = [1.0] * len(both)
    means = [bootstrap((column, ones), lambda s: s[0] / s[1], null=0.0) for column in (before, after)]
    total = bootstrap((before, after, ones), lambda s: (s[0] + s[1]) / s[2])
    assert means[0] is not None
    assert means[1] is not None
    longer = total is not None and total.low > 0
    return Extra(
        pairs=len(both),
        before=means[0],
        after=means[1],
        after_share=bootstrap((before, after), lambda s: s[1] / (s[0] + s[1]) if s[0] + s[1] > 0 else None) if longer else None,
        proved=len(proved),
        proved_strict=len(proved_strict),
        place=median([{p: 1} for p in proved]),
        place_strict=median([{p: 1} for p in proved_strict]),
    )


def by_position(records: Iterable[SessionRecord]) -> list[float]:
    """Of the rounds that drafted position i, the share that accepted it."""
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for record in records:
        drafted.update(dict(enumerate(record.stats.drafted_at)))
        accepted.update(dict(enumerate(record.stats.by_position)))
    return [accepted[i] / drafted[i] for i in sorted(drafted) if drafted[i]]


def by_output(records: Iterable[SessionRecord]) -> list[tuple[int, int, float]]:
    """(first output position of the bin, rounds, ℓ), for bins with rounds."""
    rounds: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for record in records:
        for i, (n, a) in enumerate(record.stats.by_output):
            rounds[i] += n
            accepted[i] += a
    return [(i * OUTPUT_BIN, rounds[i], accepted[i] / rounds[i]) for i in sorted(rounds) if rounds[i]]


def _against(sessions: Sessions, cells: Mapping[tuple[str, str], Sessions], other: RuleSpec) -> Against | None:
    found = cells.get((str(other), sessions.close))
    if found is None:
        return None
    mine, theirs = _paired(sessions, found)
    if not len(mine):
        return None
    return Against(
        str(other),
        ratio(mine.column("tokens"), theirs.column("tokens")),
        ratio(mine.column("rounds"), theirs.column("rounds")),
        _pairs(mine, theirs),
    )


def _closing(closed: Sessions, cells: Mapping[tuple[str, str], Sessions], budget: int) -> Closing | None:
    free = cells.get((closed.rule, "off"))
    if free is None:
        return None
    mine, theirs = _paired(closed, free)
    if not len(mine) or mine.right is None:
        return None
    after, before = mine.right, theirs.right_within(budget)
    pairs = _pairs(mine, theirs, before)
    assert pairs is not None
    traces = theirs.column("think_tokens")
    bound = [(a, b) for a, b, think in zip(after, before, traces, strict=True) if think >= BOUND * budget]
    numbers = [n for n, think in zip(theirs.by_number, traces, strict=True) if think >= BOUND * budget]
    fixed = cells.get((closed.rule, "fixed")) if closed.close == "adaptive" else None
    both = [n for n in numbers if fixed is not None and n in fixed.by_number]
    minus_fixed = None
    if fixed is not None and both:
        one, other = mine.on(both).right, fixed.on(both).right
        assert one is not None
        assert other is not None
        minus_fixed = difference([float(r) for r in one], [float(r) for r in other])
    reasons = Counter(r.steps[0].finished.closed or "none" for r in mine.records)
    return Closing(
        budget=budget,
        right_off=sum(before),
        right=sum(after),
        rescued=pairs.gained,
        regressed=pairs.lost,
        p=pairs.p,
        difference=pairs.difference,
        bound=len(bound),
        bound_right_off=sum(b for _, b in bound),
        bound_right=sum(a for a, _ in bound),
        bound_rescued=sum(a and not b for a, b in bound),
        bound_regressed=sum(b and not a for a, b in bound),
        empty=sum(r.steps[0].finished.empty_answer for r in mine.records),
        closed=dict(sorted(reasons.items())),
        minus_fixed=minus_fixed,
    )
