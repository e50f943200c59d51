"""Speculation of one engine: rounds of the window by position, probability and rank, and the draft that learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agentguard.events import DraftUpdated, RoundSums, TtsChanged
from agentguard.monitor import words
from agentguard.monitor.snapshot import ArmRow, Bin, PositionPoint, Speculation, Tts
from agentguard.monitor.windows import Ring, add_lists
from agentguard.telemetry.rounds import OUTPUT_BIN, PROBABILITY_BINS, RANK_EDGES

LOSSES = 120


class RoundsSlot:
    """Sums of rounds over a slot, or over a window."""

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


class SpeculationState:
    def __init__(self, window_s: float) -> None:
        self._ring: Ring[RoundsSlot] = Ring(window_s, RoundsSlot)
        self._began_t: float | None = None
        self._live: dict[int, list[int]] = {}
        self._frozen: dict[int, list[int]] = {}
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._update: DraftUpdated | None = None
        self._changed: TtsChanged | None = None
        self._since_t: float | None = None
        self._publishes = 0
        self.rule = ""
        self.lost_frames = 0
        self.recent = [0, 0]
        """Rounds and accepted tokens since the strip chart's last point."""

    def held(self) -> int:
        return len(self._ring) + len(self._live) + len(self._frozen) + len(self._losses)

    def take(self, sums: RoundSums, now: float) -> None:
        self._began_t = now - sums.span_s if self._began_t is None else self._began_t
        self._ring.at(now).add(sums)
        self.rule = sums.rule or self.rule
        self.lost_frames += sums.lost
        self.recent[0] += sums.rounds
        self.recent[1] += sums.accepted
        for mine, theirs in ((self._live, sums.live), (self._frozen, sums.frozen)):
            for place, (rounds, accepted) in theirs.items():
                known = mine.setdefault(int(place), [0, 0])
                known[0] += rounds
                known[1] += accepted

    def learned(self, event: DraftUpdated | TtsChanged) -> None:
        if isinstance(event, DraftUpdated):
            self._update = event
            self._publishes += 1
            self._losses.append(event.loss)
            return
        if self._changed is None or event.state != self._changed.state:
            self._since_t = event.t
        self._changed = event

    def window(self, now: float) -> RoundsSlot:
        whole = RoundsSlot()
        for slot in self._ring.slots(now):
            whole.add(slot)
        return whole

    def span_s(self, now: float) -> float | None:
        return None if self._began_t is None else min(self._ring.window_s, max(0.0, now - self._began_t))

    def shown(self, engine: str, whole: RoundsSlot, now: float, arms: tuple[ArmRow, ...]) -> Speculation:
        n = whole.rounds
        p_min, top_k = words.support(self.rule)
        return Speculation(
            engine=engine, window_s=self.span_s(now), rounds=n, drafted=whole.drafted, accepted=whole.accepted,
            accepted_length=whole.accepted / n if n else None, strict_accepted_length=whole.strict / n if n else None,
            by_position=_shares(whole.by_position, n), strict_by_position=_shares(whole.strict_by_position, n),
            probability=_bins(whole.probability, [i / PROBABILITY_BINS for i in range(PROBABILITY_BINS + 1)]),
            rank=_bins(whole.rank, [*map(float, RANK_EDGES), float("inf")]), p_min=p_min, top_k=top_k, rule=self.rule or None,
            fates=tuple(sorted(whole.fates.items(), key=lambda item: -item[1])), lost_frames=self.lost_frames, tts=self.tts(),
            arms=arms,
        )  # fmt: skip

    def tts(self) -> Tts | None:
        update, changed = self._update, self._changed
        latest = update if changed is None or (update is not None and update.t >= changed.t) else changed
        if latest is None:
            return None
        return Tts(
            state="live" if changed is None else changed.state,
            since_t=self._since_t if self._since_t is not None else latest.t,
            reason="" if changed is None else changed.reason, version=latest.version, epoch=latest.epoch,
            publishes=self._publishes, losses=tuple(self._losses), by_output_position=self._curve(),
            **({} if update is None else {
                "loss": update.loss, "train_ms": update.train_ms, "publish_ms": update.publish_ms, "live_overlap": update.live,
                "frozen_overlap": update.frozen, "gain": update.gain, "break_even": update.break_even, "updated_t": update.t,
            }),
        )  # fmt: skip

    def _curve(self) -> tuple[PositionPoint, ...]:
        points = []
        for place in sorted(self._live.keys() | self._frozen.keys()):
            (live_n, live), (frozen_n, frozen) = self._live.get(place, (0, 0)), self._frozen.get(place, (0, 0))
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
