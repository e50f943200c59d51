"""From a study's recording to its numbers. Everything a report shows is computed here, and only from recorded sessions.

An arm is a rule under one way of closing. It is compared with strict under the same way, on the same problems; an arm with the
support filter also with its rule without it, and with strict behind the same filter; a closed arm also with its rule's free runs
cut at the budget. Ratios are of sums over sessions; sessions are the unit of every interval and test (inference.py).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentguard import __version__
from agentguard.economics.cells import Mean
from agentguard.economics.ratios import share
from agentguard.errors import AgentGuardError
from agentguard.rulespec import RuleSpec
from agentguard.study.anatomy import OUTPUT_BIN
from agentguard.study.inference import Estimate, bootstrap, difference, holm, mcnemar, median, quantiles, ratio
from agentguard.study.records import Header, SessionRecord, load
from agentguard.study.results import a_step

SIGNIFICANT = 0.05
FEW = 20
"""Sessions below which there is no verdict: of three pairs a bootstrap says too much."""
BOUND = 0.85
"""A free run is budget-bound when its trace passes this share of the budget (arXiv 2610.23818)."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Word = Literal["baseline", "win", "loss", "undecided"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sessions that are right under one arm and wrong under the other, and McNemar's exact p. ``difference``: of the shares."""

    gained: int
    lost: int
    p: float
    difference: Estimate


@dataclass(frozen=True, slots=True)
class Extra:
    """Where the tokens are that an arm writes beyond strict, in tokens a session, over pairs in which both traces state the right
    answer: before its first statement, or after. ``after_share``: None unless the arm is significantly longer there. ``proved``:
    sessions of the arm that state it at all, ``proved_strict`` of strict; ``place``: median tokens up to it, where it is stated."""

    pairs: int
    before: Estimate
    after: Estimate
    after_share: Estimate | None
    proved: int
    proved_strict: int
    place: Estimate | None
    place_strict: Estimate | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Accepted draft tokens of one kind: how many, the mean of the target's probability, and the median of its rank (1 is best)."""

    n: int
    p: Estimate | None
    rank: Estimate | None


@dataclass(frozen=True, slots=True)
class Against:
    """An arm against another one than strict."""

    arm: str
    inflation: Estimate | None
    rounds_ratio: Estimate | None
    accuracy: Pairs | None


@dataclass(frozen=True, slots=True)
class Closing:
    """A closed arm against its rule's free runs cut at the budget, over all sessions: no run is selected by its length, so what
    chance alone rescues it also regresses. ``bound``: free runs whose trace passes 85 % of the budget, and what became of them."""

    budget: int
    right_off: int
    right: int
    rescued: int
    regressed: int
    p: float
    difference: Estimate
    bound: int
    bound_right_off: int
    bound_right: int
    bound_rescued: int
    bound_regressed: int
    empty: int
    closed: dict[str, int]
    minus_fixed: Estimate | None = None
    """Of the budget-bound runs: share of right ones minus that under the fixed close."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm's numbers; None is unknown. Lengths are tokens a session. ``accepted_length`` (ℓ) never counts the bonus token."""

    rule: str
    filter: bool
    close: str
    sessions: int
    steps: int
    right: int | None
    accuracy: Estimate | None
    against_strict: Pairs | None
    tokens: int
    think_tokens: int
    rounds: int
    length: Estimate
    think_length: Estimate
    answer_length: Estimate
    accepted_length: Estimate | None
    gain: Estimate | None
    inflation: Estimate | None
    """λ."""
    rounds_ratio: Estimate | None
    ttlt_ratio: Estimate | None
    ttlt_s: float
    tokens_per_s: Estimate | None
    think_share_of_extra: Estimate | None
    """None unless the arm is significantly longer than strict."""
    truncated: int
    """Steps that ended at the client's limit."""
    closes: int
    empty_answers: int
    extra: Extra | None
    strict_tokens: Tokens
    """Accepted, and strict would have accepted them on the same coin."""
    relaxed_tokens: Tokens
    """Accepted only because the rule relaxes."""
    relaxed_places: list[float]
    """Quantiles of their places in the output (`QUANTILES`)."""
    hesitations: dict[str, int]
    """Hesitation words among ``relaxed_tokens``."""
    hesitation_share: Estimate | None
    """Of ``relaxed_tokens``."""
    hesitation_share_strict: Estimate | None
    """Of ``strict_tokens``."""
    by_position: list[float]
    """Share of the rounds that drafted position i which accepted it."""
    by_output: list[tuple[int, int, float]]
    """(output position, rounds, ℓ) for each bin."""
    lengths: list[float]
    """Quantiles of the tokens a session (`QUANTILES`)."""
    fates: dict[str, int]
    telemetry: float | None
    """Rounds the telemetry told of, over those the engine counted."""
    a_step: dict[str, Mean | None]
    without_filter: Against | None = None
    strict_same_filter: Against | None = None
    closing: Closing | None = None
    verdict: Word = "undecided"
    reason: str = ""
    p_rounds: float | None = None
    """Of the rounds ratio, adjusted after Holm over the arms of the same close."""
    p_accuracy: float | None = None
    """McNemar's, adjusted in the same way."""

    @property
    def name(self) -> str:
        return self.rule if self.close == "off" else f"{self.rule}, close {self.close}"

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = flat(self)
        for suffix in ("", "_ci", "_p"):
            if "inflation" + suffix in row:
                row["lambda" + suffix] = row.pop("inflation" + suffix)
        return row


def flat(part: Any) -> dict[str, Any]:
    """A dataclass as JSON: an estimate x becomes x, x_ci and, if it was tested, x_p."""
    row: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Estimate):
            row[field.name] = value.value
            row[field.name + "_ci"] = [value.low, value.high]
            if value.p is not None:
                row[field.name + "_p"] = value.p
        elif isinstance(value, dict):
            row[field.name] = {k: flat(v) if is_dataclass(v) else v for k, v in value.items()}
        else:
            row[field.name] = flat(value) if is_dataclass(value) else value
    return row


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole study. ``planned``: sessions of its plan, of which ``found`` were recorded."""

    header: Header
    arms: list[Arm]
    budget: int
    planned: int
    found: int

    def arm(self, rule: str, close: str = "off") -> Arm | None:
        return next((arm for arm in self.arms if (arm.rule, arm.close) == (rule, close)), None)

    def as_json(self) -> dict[str, Any]:
        plan = self.header.plan
        document = {
            "agentguard": __version__,
            "suite": plan["suite"],
            "seed": plan["seed"],
            "temperature": plan["temperature"],
            "engine": self.header.provenance.get("engine"),
            "budget": self.budget or None,
            "sessions": {"planned": self.planned, "recorded": self.found},
            "arms": [arm.as_json() for arm in self.arms],
            "provenance": self.header.provenance,
        }
        closed = [arm for arm in self.arms if arm.rule == "strict" and arm.closing is not None]
        if closed:
            document["close"] = _close(closed)
        rounded: dict[str, Any] = finite(document)
        return rounded

    def to_json(self) -> str:
        return json.dumps(self.as_json(), indent=1) + "\n"


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null. Floats keep six digits, more than any interval here warrants."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def _close(arms: list[Arm]) -> dict[str, Any]:
    """What closing does under strict, over the budget-bound runs; the last way of closing, and with what it was compared."""
    rows = []
    for arm in sorted(arms, key=lambda arm: arm.close == "adaptive"):
        closing = arm.closing
        assert closing is not None
        compared: dict[str, Any] = {}
        if closing.minus_fixed is not None:
            found = closing.minus_fixed
            compared = {"right_minus_fixed": found.value, "right_minus_fixed_ci": [found.low, found.high]}
        rows.append(
            {
                "mode": arm.close, "budget": closing.budget, "n": closing.bound, "rescued": closing.bound_rescued,
                "regressed": closing.bound_regressed, "empty": closing.empty, "right": closing.bound_right,
                "right_off": closing.bound_right_off, "closed": closing.closed,
                **compared,
            }
        )  # fmt: skip
    return rows[-1] | {"compared": rows[:-1]}


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
    return Summary(header, _judged(arms), budget, planned, len(records))


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


def _judged(arms: list[Arm]) -> list[Arm]:
    """The arms with their verdicts; tests are adjusted over the arms of the same close."""
    judged: dict[tuple[str, str], Arm] = {}
    for close in dict.fromkeys(arm.close for arm in arms):
        family = [arm for arm in arms if arm.close == close and arm.rule != "strict"]
        rounds = holm({a.rule: a.rounds_ratio.p for a in family if a.rounds_ratio is not None and a.rounds_ratio.p is not None})
        accuracy = holm({a.rule: a.against_strict.p for a in family if a.against_strict is not None})
        for arm in arms:
            if arm.close == close:
                judged[arm.rule, close] = judge(replace(arm, p_rounds=rounds.get(arm.rule), p_accuracy=accuracy.get(arm.rule)))
    return [judged[arm.rule, arm.close] for arm in arms]


def judge(arm: Arm) -> Arm:
    """The verdict in a word and its reason. A rule wins when it needs fewer rounds than strict, significantly, and is neither less
    often right nor slower to the last token; it loses when it needs more, or answers wrongly more often, or is slower."""
    if arm.rule == "strict":
        return replace(arm, verdict="baseline", reason="what the others are compared with")
    found = arm.rounds_ratio
    if found is None or arm.p_rounds is None or arm.gain is None or arm.inflation is None:
        return replace(arm, verdict="undecided", reason="no session of strict to compare with")
    if found.n < FEW:
        return replace(arm, reason=f"{found.n} sessions are too few for a verdict, take at least {FEW}; rounds ×{found}")
    sure = arm.p_rounds < SIGNIFICANT
    pairs, p_right = arm.against_strict, arm.p_accuracy
    wrong = pairs is not None and p_right is not None and p_right < SIGNIFICANT and pairs.lost > pairs.gained
    slower = arm.ttlt_ratio is not None and arm.ttlt_ratio.low > 1
    why = [f"rounds ×{found}"]
    if wrong:
        assert pairs is not None
        why.append(f"right answers {pairs.difference.value:+.0%}")
    if sure and found.value > 1:
        if arm.gain.low > 1:
            why.insert(0, f"longer although ℓ rises (gain {arm.gain.value:.2f}, λ {arm.inflation.value:.2f})")
        else:
            why.insert(0, f"longer (λ {arm.inflation.value:.2f}), and ℓ does not rise (gain {arm.gain.value:.2f})")
        return replace(arm, verdict="loss", reason="; ".join(why))
    if wrong:
        return replace(arm, verdict="loss", reason="; ".join(["wrong more often" + (" though shorter" if sure else ""), *why]))
    if sure and slower:
        return replace(arm, verdict="loss", reason="; ".join(["slower to the last token though fewer rounds", *why]))
    if sure:
        return replace(arm, verdict="win", reason="; ".join(["fewer rounds, answers as often right", *why]))
    return replace(arm, verdict="undecided", reason="; ".join(["no difference that this n can show", *why]))
