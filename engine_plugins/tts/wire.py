"""What the worker tells the trainer: one msgpack frame a verification step, and how laws lie in it."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from engine_plugins.tts.loss import Rows


class Laws(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of target and draft at the drafted positions, over the target's most probable tokens.

    p, q: float32 [rows, width]; q is empty where the drafter kept none. ids: int32 [rows, width], empty where width is the
    vocabulary."""

    width: int
    p: bytes
    q: bytes
    ids: bytes

    @classmethod
    def pack(cls, p: Rows, q: Tensor | None) -> Laws:
        return cls(p.logp.shape[-1], _bytes(p.logp), b"" if q is None else _bytes(q), b"" if p.ids is None else _bytes(p.ids))

    def target(self) -> Rows:
        return Rows(self._floats(self.p), self._ids())

    def draft(self) -> Rows | None:
        return Rows(self._floats(self.q), self._ids()) if self.q else None

    def _floats(self, raw: bytes) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(-1, self.width)

    def _ids(self) -> Tensor | None:
        return torch.frombuffer(bytearray(self.ids), dtype=torch.int32).view(-1, self.width).long() if self.ids else None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


class Hidden(msgspec.Struct, frozen=True, array_like=True):
    """The target's hidden states at the positions from ``start`` on, as a head gets them: [n, width] of the served type."""

    start: int
    width: int
    dtype: str
    data: bytes

    @classmethod
    def pack(cls, start: int, rows: Tensor) -> Hidden:
        return cls(start, rows.shape[-1], str(rows.dtype).removeprefix("torch."), _bytes(rows.contiguous().view(torch.uint8)))

    def rows(self) -> Tensor:
        return torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype)).view(-1, self.width)


class RoundFrame(msgspec.Struct, frozen=True, array_like=True):
    """One request's round. Positions count from the start of the prompt.

    start: position of the first drafted token. since, tokens: the committed tokens at since … start - 1, those the trainer has not
    been sent (of a long prompt only the end). output: output tokens before this round. drafted: the K tokens, -1 for none.
    out: what the round committed, accepted drafts first. forced: rows that are not the target's own law. temperature: 0 is greedy.
    hidden: for a head, what the trainer has not been sent of its window's hidden states, rejected drafts included.
    """

    request: str
    start: int
    since: int
    tokens: list[int]
    output: int
    drafted: list[int]
    out: list[int]
    forced: list[bool]
    temperature: float
    laws: Laws
    hidden: list[Hidden] = []


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A step's rounds. epoch: how often the serving draft went back to its trained weights for a new request. version: of the
    weights that drafted. round_ms: median time of late between two verifications without a publish between them. dropped: frames
    that found the queue full, so far."""

    epoch: int
    version: int
    round_ms: float
    dropped: int
    rounds: list[RoundFrame]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode
