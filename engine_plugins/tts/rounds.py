"""What the trainer remembers of a request: its last tokens, and the verified rounds among them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine_plugins.tts.loss import Rows
from engine_plugins.tts.wire import Hidden, RoundFrame


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
    """tokens: the committed ones at base … base + len - 1, at least the last ``keep`` of them. states: [n, W] the target's hidden
    states at states_base …, of a head's rounds only."""

    keep: int
    temperature: float = 1.0
    output: int = 0
    base: int = 0
    tokens: list[int] = field(default_factory=list)
    rounds: deque[Round] = field(default_factory=deque)
    states: Tensor | None = None
    states_base: int = 0
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
            self._take(piece)
        if self.states is not None:  # those of the last committed token and of the drafts behind it are not known yet
            self.states = self.states[: max(0, frame.start - 1 - self.states_base)]
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

    def _take(self, piece: Hidden) -> None:
        """A step's hidden states: behind what is known, over those of rejected drafts."""
        rows = piece.rows()
        known = self.states
        if known is None or not self.states_base <= piece.start <= self.states_base + len(known):
            self.states, self.states_base = rows, piece.start
            return
        joined = torch.cat([known[: piece.start - self.states_base], rows])
        over = max(0, len(joined) - 2 * self.keep)
        self.states, self.states_base = joined[over:], self.states_base + over
