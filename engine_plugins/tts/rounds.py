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


@dataclass(slots=True)
class Sequence:
    """tokens: the committed ones at base … base + len - 1, at least the last ``keep`` of them."""

    keep: int
    temperature: float = 1.0
    output: int = 0
    base: int = 0
    tokens: list[int] = field(default_factory=list)
    rounds: deque[Round] = field(default_factory=deque)
    unusable: int = 0
    """Rows dropped because they were not finite."""

    def add(self, frame: RoundFrame, number: int) -> Round:
        """Take in a round. What does not join on (a gap, or a window sent again) takes the place of what was known."""
        if not self.base <= frame.since <= self.base + len(self.tokens) or not self.tokens:
            self.base, self.tokens = frame.since, []
            self.rounds.clear()
        del self.tokens[frame.since - self.base :]
        self.tokens += [*frame.tokens, *frame.out]
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
