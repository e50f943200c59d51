"""What the tap says about draft rows: p, q, rank and the strict verdict of each drafted token. What became of it follows from these
numbers, and is worked out where they are read (`agentguard.events.PackedStep`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentguard.events import PackedStep
from engine_plugins import kernels

# elements a pass works on, so that it meets its rows in the CPU's cache (rank of 384 rows of 151,936: 40 ms against 150 ms in
# one piece)
CHUNK = 1 << 20


class Coins:
    """The uniform numbers of the last verification, [rows] or None: one throw decides a row, under the rule and under strict.

    Wraps `generate_uniform_probs` of vLLM's V1 sampler, which hands its result to nobody else, and keeps exact zeros out of it:
    a coin of 0 accepts a token of probability 0, that is a filtered or a forbidden one. No other decision changes, as the
    smallest coin above 0 is 2^-53.
    """

    def __init__(self, stock: Callable[..., Tensor]) -> None:
        self.stock = stock
        self.last: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.last = self.stock(*args, **kwargs).clamp_min_(2.0**-60)
        return self.last

    @classmethod
    def record(cls, sampler_module: Any) -> Coins:
        """Start recording, once a process."""
        known = sampler_module.generate_uniform_probs
        if not isinstance(known, cls):
            sampler_module.generate_uniform_probs = known = cls(known)
        return known

    def take(self) -> Tensor | None:
        coins, self.last = self.last, None
        return coins


@dataclass(frozen=True, slots=True)
class Described:
    """[rows] each, on the true rows: probabilities of the drafted token, its rank, and strict's acceptance probability min(1, p/q).

    A row without a drafted token (-1) has p = strict = 0.

    q is -1 where the drafter kept no probabilities; strict verification then accepts with probability p(x). end: the probability
    of the end-of-think marker, -1 where it is unknown.
    """

    p: Tensor
    q: Tensor
    rank: Tensor
    strict: Tensor
    end: Tensor


def describe(logits: Tensor, q: Tensor | None, x: Tensor, greedy: Tensor, end: int | None = None) -> Described:
    """logits: [rows, V] processed target logits; q: [rows, V] or None; x: [rows] int64, -1 for no token; greedy: [rows] bool; end:
    the end-of-think marker's (first) token."""
    at = x.clamp_min(0).unsqueeze(-1)
    drafted = x >= 0
    read = _kernel if _on_kernels(logits.device.type) else _twin
    p, rank, closing = read(logits, x, at, end)
    p = torch.where(drafted, p, 0.0)
    if q is None:
        qx, strict = torch.full_like(p, -1.0), p
    else:
        qx = q.gather(-1, at).squeeze(-1).to(p.dtype)
        strict = torch.where(qx > 0, p / qx, 0.0).clamp_max(1)
    return Described(p, qx, rank, torch.where(greedy & drafted, (rank == 0).to(p.dtype), strict), closing)


@functools.cache
def _on_kernels(device: str) -> bool:
    return kernels.choose(device).kernels


def _kernel(logits: Tensor, x: Tensor, at: Tensor, end: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """p(x), the rank of x, p(end marker) or -1, in one pass."""
    from engine_plugins.kernels import batch, launch

    stats, _ = launch.statistics(batch.Batch.of(logits, x), end=-1 if end is None else end)
    return stats[:, batch.PX], stats[:, batch.RANK].long(), stats[:, batch.END]


def _twin(logits: Tensor, x: Tensor, at: Tensor, end: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """As `_kernel`; p(x) relative to the row's maximum, as softmax does it: logits far from 0 lose nothing then."""
    lx = logits.gather(-1, at)
    size = max(1, CHUNK // logits.shape[-1])
    relative, rank = torch.empty_like(lx), torch.empty_like(x)
    closing = torch.full_like(lx, -1.0)
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        top = logits[part].amax(-1, keepdim=True)
        total = (logits[part] - top).exp_().sum(-1, keepdim=True).log_()
        relative[part] = lx[part] - top - total
        if end is not None:
            closing[part] = (logits[part, end, None] - top - total).exp_()
        rank[part] = (logits[part] > lx[part]).sum(-1)
    return relative.exp().squeeze(-1), rank, closing.squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """[rows] in nats, of [rows, V] logits; forbidden tokens (-inf) count nothing."""
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1)


def at_end(end: Sequence[float], accepted: int) -> int:
    """Which of a request's decided rows gives the end marker most; -1 where the marker is unknown."""
    decided = end[: accepted + 1]
    return max(range(len(decided)), key=decided.__getitem__) if decided and max(decided) >= 0 else -1


@dataclass(frozen=True, slots=True)
class Rounds:
    """What a step's requests did with their drafts. requests, rules, drafted, accepted: as in `PackedStep`; columns: [9, rows],
    those of `PackedStep.COLUMNS` in their order, on the host."""

    requests: list[str]
    rules: list[str]
    drafted: list[int]
    accepted: list[int]
    columns: np.ndarray[Any, Any]

    def packed(self, t: float, engine: str, step: int) -> PackedStep:
        return PackedStep(
            t=t, engine=engine, step=step, requests=self.requests, rules=self.rules, drafted=self.drafted, accepted=self.accepted,
            values=self.columns.astype("<f4").tobytes(),
        )  # fmt: skip
