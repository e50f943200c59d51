"""Sums of verification rounds: what a monitor needs of `VerificationStep`s, without sending it every row.

500 requests at 5 rounds a second with 6 drafted tokens are 15,000 rows a second; their sums are one event an interval.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator

from agentguard.economics.cells import POSITIONS
from agentguard.events import (
    DraftUpdated,
    Event,
    Fate,
    RequestRounds,
    RoundSums,
    RowFlag,
    StepStarted,
    TtsChanged,
    VerificationStep,
    Verified,
)

PROBABILITY_BINS = 20
"""Bins of the target's probability, of equal width from 0 to 1."""
RANK_EDGES = (0, 1, 2, 3, 4, 5, 10, 20, 50, 100, 1000)
"""Lower edges of the bins of the rank; the last one is open."""
OUTPUT_BIN = 64
"""Output tokens a bin of the curve over output positions."""
OUTPUT_BINS = 64
"""Bins told apart; what is beyond them counts to the last."""
RULES = 16
"""Rules told apart; further ones are summed together, as rule ""."""
REQUESTS = 4096
"""Requests whose output position is known; the one that began first is forgotten first."""
_STRICT, _RELAXED, _CUT, _REJECTED = range(4)
_COLUMN = {Fate.STRICT: _STRICT, Fate.RELAXED: _RELAXED, Fate.LOW_SUPPORT: _CUT, Fate.COIN: _REJECTED}


class RoundCollector:
    """Collects the rounds of a hub's engines between two takes. Bounded: sums, and one small row a request that ran."""

    def __init__(self) -> None:
        self._engines: dict[str, _EngineSums] = {}
        self._output: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        self._learning = False

    def held(self) -> int:
        """Objects kept."""
        sums = (one for engine in self._engines.values() for one in engine.rules.values())
        return len(self._output) + sum(1 + len(one.requests) for one in sums)

    def see(self, event: Event) -> None:
        """Take what else the sums depend on: where a request's output begins, and whether the draft learns."""
        if isinstance(event, StepStarted):
            self._output[event.request] = (0, self._learning)
            while len(self._output) > REQUESTS:
                self._output.popitem(last=False)
        elif isinstance(event, DraftUpdated):
            self._learning = True
        elif isinstance(event, TtsChanged):
            self._learning = event.state in ("live", "skipped", "stopped")

    def add(self, frame: VerificationStep) -> None:
        engine = self._engines.get(frame.engine)
        if engine is None:
            engine = self._engines[frame.engine] = _EngineSums()
        engine.frames += 1
        engine.lost += frame.lost
        for verified in frame.requests:
            # by the rule that was asked for, as the arms are: a round in which no row could relax is the arm's all the same
            sums = engine.of(verified.rule_asked) if verified.drafted else None
            if sums is not None:
                sums.add(verified)
            self._place(sums, verified)

    def _place(self, sums: _Sums | None, verified: Verified) -> None:
        known = self._output.get(verified.request)
        if known is None:
            return
        at, learning = known
        self._output[verified.request] = (at + verified.accepted + 1, learning)
        if sums is None:
            return
        curve = sums.live if learning else sums.frozen
        place = curve.setdefault(min(at // OUTPUT_BIN, OUTPUT_BINS - 1), [0, 0])
        place[0] += 1
        place[1] += verified.accepted

    def take(self, t: float, span_s: float) -> list[RoundSums]:
        """The sums since the last take, one event for each engine and rule that verified something."""
        taken, self._engines = self._engines, {}
        return [event for name, engine in taken.items() for event in engine.events(name, t, span_s)]


class _EngineSums:
    __slots__ = ("frames", "lost", "rules")

    def __init__(self) -> None:
        self.frames = self.lost = 0
        self.rules: dict[str, _Sums] = {}

    def of(self, rule: str) -> _Sums:
        if rule not in self.rules and len(self.rules) >= RULES:
            rule = ""
        return self.rules.setdefault(rule, _Sums())

    def events(self, name: str, t: float, span_s: float) -> Iterator[RoundSums]:
        frames, lost = self.frames, self.lost
        for rule, sums in (self.rules or {"": _Sums()}).items():
            yield sums.event(name, rule, t, span_s, frames, lost)
            frames = lost = 0


class _Sums:
    __slots__ = (
        "accepted", "by_position", "drafted", "fates", "frozen", "live", "probability", "rank", "requests", "rounds", "strict",
        "strict_by_position",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = 0
        self.strict = 0.0
        self.by_position = [0] * POSITIONS
        self.strict_by_position = [0.0] * POSITIONS
        self.probability = [[0, 0, 0, 0] for _ in range(PROBABILITY_BINS)]
        self.rank = [[0, 0, 0, 0] for _ in RANK_EDGES]
        self.fates: dict[str, int] = {}
        self.live: dict[int, list[int]] = {}
        self.frozen: dict[int, list[int]] = {}
        self.requests: dict[str, list[int]] = {}

    def add(self, verified: Verified) -> None:
        self.rounds += 1
        self.drafted += verified.drafted
        self.accepted += verified.accepted
        own = self.requests.setdefault(verified.request, [0, 0, 0])
        own[0] += 1
        own[1] += verified.drafted
        own[2] += verified.accepted
        for position in range(min(verified.accepted, POSITIONS)):
            self.by_position[position] += 1
        through, rows = 1.0, verified.rows
        for position, probability in enumerate(rows.strict[:POSITIONS]):
            if not math.isfinite(probability):
                break
            through *= probability
            self.strict_by_position[position] += through
            self.strict += through
        fates = rows.fate or [_fate(flags, position < verified.accepted) for position, flags in enumerate(rows.flags)]
        for position, fate in enumerate(fates):
            self.fates[fate] = self.fates.get(fate, 0) + 1
            column = _COLUMN.get(fate)
            if column is not None:
                p, rank = rows.p[position], rows.rank[position]
                self.probability[min(PROBABILITY_BINS - 1, max(0, int(p * PROBABILITY_BINS)))][column] += 1
                self.rank[max(0, bisect_right(RANK_EDGES, rank) - 1)][column] += 1

    def event(self, engine: str, rule: str, t: float, span_s: float, frames: int, lost: int) -> RoundSums:
        deepest = max((i + 1 for i in range(POSITIONS) if self.by_position[i] or self.strict_by_position[i] > 0), default=0)
        return RoundSums(
            t=t, engine=engine, span_s=span_s, frames=frames, lost=lost, rounds=self.rounds, drafted=self.drafted,
            accepted=self.accepted, strict=self.strict, rule=rule, by_position=self.by_position[:deepest],
            strict_by_position=self.strict_by_position[:deepest], probability=self.probability, rank=self.rank, fates=self.fates,
            live={str(place): sums for place, sums in self.live.items()},
            frozen={str(place): sums for place, sums in self.frozen.items()},
            requests=[RequestRounds(request=r, rounds=n, drafted=d, accepted=a) for r, (n, d, a) in self.requests.items()],
        )  # fmt: skip


def _fate(flags: int, accepted: bool) -> Fate:
    """What became of a row of a recording that does not say it; a relaxed row's acceptance counts as relaxed."""
    if accepted:
        return Fate.RELAXED if flags & RowFlag.RELAXED else Fate.STRICT
    return Fate.LOW_SUPPORT if flags & RowFlag.LOW_SUPPORT else Fate.UNREAD
