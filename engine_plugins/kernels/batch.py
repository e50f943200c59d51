"""Rows to verify, and what is known of them: the words that kernels and twins share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_plugins.kernels import table

# columns of the statistics of a row
TOP, LOG_Z, LX, RANK, ARGMAX, ENTROPY, ALLOWED, PX, D_TOP, D_LOG_Z, QX, END, STRICT, COIN, TOKEN, FLAGS = range(16)
STATS = 16
# what a row is read for
WANT_TARGET, WANT_DRAFT, RELAX = 1, 2, 4
# verdicts: the rule judges x, or the support filter has rejected it; 0: the row stays as it is
INSIDE, OUTSIDE = 1, 2
FORCED_LOGIT = 1e6  # vLLM writes 1e9 before temperature; no model's logit comes near
# a logit this far above the others is the whole row in float32 (e^-200); 3e4 fits float16 and stands above any draft's logits
FAR = 200.0
ONE_HOT = 3.0e4


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to verify.

    target: [rows, V] processed target logits, float32 where they are rewritten; draft: [slots, K, Vd] draft logits before
    temperature, or None; x: [rows] int64, the drafted tokens, -1 for none; want, flags: [rows] int32 (`WANT_*`, `RELAX`;
    RowFlag); slot, step: [rows], where a row's draft lies and whose rule it has; temperature: [slots] float32. The smaller
    vocabulary counts.
    """

    target: Tensor
    draft: Tensor | None
    x: Tensor
    want: Tensor
    flags: Tensor
    slot: Tensor
    step: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, target: Tensor, x: Tensor, draft: Tensor | None = None, *, flags: Tensor | None = None) -> Batch:
        """Rows that each have a slot of their own, at temperature 1. draft: [rows, 1, V]."""
        n, device = len(x), target.device
        want = WANT_TARGET | RELAX | (WANT_DRAFT if draft is not None else 0)
        return cls(
            target, draft, x, torch.full((n,), want, dtype=torch.int32, device=device),
            torch.zeros(n, dtype=torch.int32, device=device) if flags is None else flags,
            torch.arange(n, device=device), torch.zeros(n, dtype=torch.int64, device=device), torch.ones(n, device=device),
        )  # fmt: skip

    @property
    def vocab(self) -> int:
        return self.target.shape[-1] if self.draft is None else min(self.target.shape[-1], self.draft.shape[-1])

    def at_draft(self) -> tuple[Tensor, int, int]:
        """The draft's pointer and strides; the target stands in where there is none, and is not read as such."""
        return (self.target, 0, 0) if self.draft is None else (self.draft, self.draft.stride(0), self.draft.stride(1))


def table_of(specs: list[list[float]], device: torch.device | str = "cpu") -> Tensor:
    """[slots, 8] of `table.numbers`."""
    return torch.tensor(specs, dtype=torch.float32, device=device).view(-1, table.WIDTH)
