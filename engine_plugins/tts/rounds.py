"""What the trainer remembers of a request: its last tokens, and the verified rounds among them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine_plugins.tts.loss import Rows
from engine_plugins.tts.wire import RoundFrame


@dataclass(frozen=True, slots=True)
class Round:
    """start: position of the first drafted token. accepted: drafts that were committed. use: [K] rows that may be learned from.
    number: of the engine's verification step."""

    start: int
    drafted: list[int]
    accepted: int
    use: Tensor
    target: Rows
    source: Rows | None
    number: int

    @property
    def decided(self) -> int:
        """The last row that was conditioned on committed tokens: that of the first rejected draft, or the last."""
        return min(self.accepted, len(self.drafted) - 1)

    def rows(self, *, rejected: bool) -> list[int]:
        """Rows to learn from; rejected: those behind the first rejected draft too."""
        return [k for k in range(len(self.drafted)) if self.use[k] and (rejected or k <= self.decided)]


@dataclass(slots=True)
class Sequence:
    """tokens: the committed ones at base … base + len - 1, at least the last ``keep`` of them. hidden: the target's hidden states,
    of a head's rounds only."""

    keep: int
    temperature: float = 1.0
    output: int = 0
    base: int = 0
    tokens: list[int] = field(default_factory=list)
    rounds: deque[Round] = field(default_factory=deque)
    hidden: HiddenStates = field(default_factory=lambda: HiddenStates())
    unusable: int = 0
    """Rows dropped because they were not finite."""

    def add(self, frame: RoundFrame, number: int) -> Round:
        """Take in a round. What does not join on (a gap, or a window sent again) takes the place of what was known."""
        if not self.base <= frame.since <= self.base + len(self.tokens) or not self.tokens:
            self.base, self.tokens = frame.since, []
            self.rounds.clear()
        del self.tokens[frame.since - self.base :]
        self.tokens += [*frame.tokens, *frame.out]
        for piece in frame.hidden:
            self.hidden.put(piece.start, piece.rows(), 2 * self.keep)
        self.hidden.cut(frame.start - 1)  # the last committed token has been through no forward pass yet
        self.temperature, self.output = frame.temperature, frame.output
        target = frame.laws.target()
        bad = torch.isnan(target.logp).any(-1) | (target.logp.exp().sum(-1) <= 0)
        self.unusable += int(bad.sum())
        drafted = torch.tensor(frame.drafted)
        use = ~bad & ~torch.tensor(frame.forced) & (drafted >= 0)
        accepted = max(0, len(frame.out) - 1)
        round_ = Round(frame.start, frame.drafted, accepted, use, target, frame.laws.draft(), number)
        self.rounds.append(round_)
        over = len(self.tokens) - self.keep
        if over > self.keep:  # in blocks, so that a token is moved once on average
            del self.tokens[:over]
            self.base += over
        while self.rounds[0].start - 1 < self.base:
            self.rounds.popleft()
        return round_


class HiddenStates:
    """The latest hidden states of a request in one buffer, which is moved once a window and not once a round."""

    def __init__(self) -> None:
        self.base = 0
        self._count = 0
        self._rows: Tensor | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def stop(self) -> int:
        """The position behind the last one known."""
        return self.base + self._count

    def rows(self, start: int) -> Tensor:
        """[stop - start, W] a copy of those from position ``start`` on, in float32."""
        assert self._rows is not None
        return self._rows[start - self.base : self._count].float()

    def put(self, start: int, rows: Tensor, keep: int) -> None:
        """Behind what is known, over those of rejected drafts; what does not join on takes the place of all. At least the last
        ``keep`` stay."""
        at = start - self.base
        if self._rows is None or not 0 <= at <= self._count or self._rows.shape[1:] != rows.shape[1:]:
            self.base, self._count, at = start, 0, 0
            if self._rows is None or self._rows.shape[1:] != rows.shape[1:]:
                self._rows = rows.new_empty(2 * keep, *rows.shape[1:])
        over = len(rows) - len(self._rows)
        if over > 0:
            rows, self.base = rows[over:], start + over
            self._count = at = 0
        elif at + len(rows) > len(self._rows):
            drop = at + len(rows) - keep
            drop = min(max(drop, 0), at)
            self._rows[: at - drop] = self._rows[drop:at].clone()
            self.base, at = self.base + drop, at - drop
        self._rows[at : at + len(rows)] = rows
        self._count = at + len(rows)

    def cut(self, stop: int) -> None:
        """Forget those at position ``stop`` and behind it."""
        self._count = max(0, min(self._count, stop - self.base))
