"""Speculation of one engine: rounds of the window by rule, position, probability and rank, and the draft that learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from agentguard.events import DraftUpdated, RoundSums, TtsChanged
from agentguard.monitor import words
from agentguard.monitor.snapshot import ArmRow, Bin, PositionPoint, Speculation, Tts
from agentguard.monitor.windows import Ring, add_lists
from agentguard.telemetry.rounds import OUTPUT_BIN, PROBABILITY_BINS, RANK_EDGES, RULES

LOSSES = 120


class RoundsSlot:
    """Sums of one rule's rounds over a slot, or over a window."""

    __slots__ = ("accepted", "by_position", "drafted", "fates", "probability", "rank", "rounds", "strict", "strict_by_position")

    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = 0
        self.strict = 0.0
        self.by_position: list[float] = []
        self.strict_by_position: list[float] = []
        self.probability: list[list[float]] = [[] for _ in range(PROBABILITY_BINS)]
        self.rank: list[list[float]] = [[] for _ in RANK_EDGES]
        self.fates: dict[str, int] = {}

    def add(self, sums: RoundSums | RoundsSlot) -> None:
        self.rounds += sums.rounds
        self.drafted += sums.drafted
        self.accepted += sums.accepted
        self.strict += sums.strict
        add_lists(self.by_position, sums.by_position)
        add_lists(self.strict_by_position, sums.strict_by_position)
        probability: Sequence[Sequence[float]] = sums.probability
        rank: Sequence[Sequence[float]] = sums.rank
        for into, more in [*zip(self.probability, probability, strict=False), *zip(self.rank, rank, strict=False)]:
            add_lists(into, more)
        for fate, n in sums.fates.items():
            self.fates[fate] = self.fates.get(fate, 0) + n


class _Curve:
    """Rounds and accepted tokens by place in the output, with the learning draft and without."""

    __slots__ = ("frozen", "live")

    def __init__(self) -> None:
        self.live: dict[int, list[int]] = {}
        self.frozen: dict[int, list[int]] = {}


class SpeculationState:
    """Arms run side by side on one engine, so everything is kept by the rule of the request; at most `RULES`, and the others as
    ""."""

    def __init__(self, window_s: float) -> None:
        self._ring: Ring[dict[str, RoundsSlot]] = Ring(window_s, dict)
        self._began_t: float | None = None
        self._curves: dict[str, _Curve] = {}
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._update: DraftUpdated | None = None
        self._changed: TtsChanged | None = None
        self._since_t: float | None = None
        self._publishes = 0
        self.lost_frames = 0
        self.recent: dict[str, list[int]] = {}
        """Rounds and accepted tokens by rule since the strip chart's last point."""

    def held(self) -> int:
        rounds = sum(len(slot) for slot in self._ring) + len(self.recent)
        return rounds + sum(len(curve.live) + len(curve.frozen) for curve in self._curves.values()) + len(self._losses)

    @property
    def told(self) -> bool:
        """Does telemetry tell of its rounds?"""
        return self._began_t is not None

    def take(self, sums: RoundSums, now: float) -> None:
        self._began_t = now - sums.span_s if self._began_t is None else self._began_t
        self.lost_frames += sums.lost
        if not sums.rounds:
            return
        slot = self._ring.at(now)
        slot.setdefault(_known(sums.rule, slot), RoundsSlot()).add(sums)
        recent = self.recent.setdefault(_known(sums.rule, self.recent), [0, 0])
        recent[0] += sums.rounds
        recent[1] += sums.accepted
        curve = self._curves.setdefault(_known(sums.rule, self._curves), _Curve())
        for mine, theirs in ((curve.live, sums.live), (curve.frozen, sums.frozen)):
            for place, (rounds, accepted) in theirs.items():
                known = mine.setdefault(int(place), [0, 0])
                known[0] += rounds
                known[1] += accepted

    def learned(self, event: DraftUpdated | TtsChanged) -> bool:
        """Returns whether it is news: a gateway that is asked again tells the latest one again."""
        if isinstance(event, DraftUpdated):
            last = self._update
            if last is not None and (last.t, last.epoch, last.version) == (event.t, event.epoch, event.version):
                return False
            self._update = event
            self._publishes += 1
            self._losses.append(event.loss)
            return True
        if event == self._changed:
            return False
        if self._changed is None or event.state != self._changed.state:
            self._since_t = event.t
        self._changed = event
        return True

    def window(self, now: float) -> dict[str, RoundsSlot]:
        """By rule; a rule without a round is not there."""
        whole: dict[str, RoundsSlot] = {}
        for slot in self._ring.slots(now):
            for rule, sums in slot.items():
                whole.setdefault(_known(rule, whole), RoundsSlot()).add(sums)
        return whole

    def span_s(self, now: float) -> float | None:
        return None if self._began_t is None else min(self._ring.window_s, max(0.0, now - self._began_t))

    def shown(self, engine: str, rule: str | None, whole: RoundsSlot, now: float, arms: tuple[ArmRow, ...]) -> Speculation:
        """``whole``: the sums of ``rule`` over the window."""
        n = whole.rounds
        p_min, top_k = words.support(rule)
        return Speculation(
            engine=engine, window_s=self.span_s(now), rounds=n, drafted=whole.drafted, accepted=whole.accepted,
            accepted_length=whole.accepted / n if n else None, strict_accepted_length=whole.strict / n if n else None,
            by_position=_shares(whole.by_position, n), strict_by_position=_shares(whole.strict_by_position, n),
            probability=_bins(whole.probability, [i / PROBABILITY_BINS for i in range(PROBABILITY_BINS + 1)]),
            rank=_bins(whole.rank, [*map(float, RANK_EDGES), float("inf")]), p_min=p_min, top_k=top_k, rule=rule or None,
            fates=tuple(sorted(whole.fates.items(), key=lambda item: -item[1])), lost_frames=self.lost_frames, tts=self.tts(rule),
            arms=arms,
        )  # fmt: skip

    def tts(self, rule: str | None) -> Tts | None:
        """``rule``: whose curve over the output."""
        update, changed = self._update, self._changed
        latest = update if changed is None or (update is not None and update.t >= changed.t) else changed
        if latest is None:
            return None
        return Tts(
            state="live" if changed is None else changed.state,
            since_t=self._since_t if self._since_t is not None else latest.t,
            reason="" if changed is None else changed.reason, version=latest.version, epoch=latest.epoch,
            publishes=self._publishes, losses=tuple(self._losses),
            by_output_position=_points(self._curves.get(rule or "", _Curve())),
            **({} if update is None else {
                "loss": update.loss, "train_ms": update.train_ms, "publish_ms": update.publish_ms, "live_overlap": update.live,
                "frozen_overlap": update.frozen, "gain": update.gain, "break_even": update.break_even, "updated_t": update.t,
            }),
        )  # fmt: skip


def most_used(rounds: Mapping[str, int]) -> str | None:
    """The rule with most rounds; None for none."""
    return max(rounds, key=lambda rule: rounds[rule], default=None)


def _known(rule: str, among: Mapping[str, object]) -> str:
    """The rule under which it is counted there."""
    return rule if rule in among or len(among) < RULES else ""


def _points(curve: _Curve) -> tuple[PositionPoint, ...]:
    points = []
    for place in sorted(curve.live.keys() | curve.frozen.keys()):
        (live_n, live), (frozen_n, frozen) = curve.live.get(place, (0, 0)), curve.frozen.get(place, (0, 0))
        points.append(
            PositionPoint(
                place * OUTPUT_BIN, (place + 1) * OUTPUT_BIN, live / live_n if live_n else None, live_n,
                frozen / frozen_n if frozen_n else None, frozen_n,
            )
        )  # fmt: skip
    return tuple(points)


def _shares(counts: list[float], rounds: int) -> tuple[float, ...]:
    return tuple(count / rounds for count in counts) if rounds else ()


def _bins(counts: list[list[float]], edges: list[float]) -> tuple[Bin, ...]:
    if not any(map(any, counts)):
        return ()
    rows = ([*map(int, one), 0, 0, 0, 0][:4] for one in counts)
    return tuple(Bin(edges[i], edges[i + 1], *row) for i, row in enumerate(rows))
