"""A rule with its support filter, applied to rows of an engine or enumerated exactly: what a request's `ag_rule` becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from agentguard.rulespec import RuleSpec
from engine_plugins.rules.base import Edit, Pair, Rows, Rule
from engine_plugins.rules.support import entropy, outside_support, reject

# elements of a chunk of rows: on CPU 4 MiB, so that the passes of a rule meet their rows in the cache (logsumexp of 384 rows of
# 151,936: 35 ms in chunks, 95 ms in one piece); on a GPU large enough to fill it, and some temporaries of a chunk stay within
# 256 MiB
CPU_CHUNK = 1 << 20
GPU_CHUNK = 1 << 23


@dataclass(slots=True)
class Rewritten:
    """What `FilteredRule.rewrite` did to the rows it was given, in their order.

    outside: [m] bool, x is outside the support and cannot be accepted; unsure: [m] bool, the row's entropy is above h_max and it
    stayed strict. Holds the original of every row that was replaced in whole until `restore`.
    """

    outside: Tensor
    unsure: Tensor
    _saved: list[tuple[tuple[Tensor, ...], Tensor]] = field(default_factory=list, repr=False)

    def restore(self, logits: Tensor) -> None:
        """Put back the logits, bit for bit."""
        for index, values in reversed(self._saved):
            logits[index] = values
        self._saved.clear()


@dataclass(frozen=True, slots=True)
class FilteredRule:
    """A rule, and the support filter of its specification.

    A drafted token the target forbids (-inf, p(x) = 0) is never accepted: its row is strict, under every rule and filter.
    """

    spec: RuleSpec
    rule: Rule

    @property
    def acts(self) -> bool:
        """False for strict without a filter, and for a rule at its strict limit: no row is read."""
        return self.spec.relaxed or self.spec.filtered

    def pair(self, p: Tensor, q: Tensor, x: Tensor) -> Pair:
        """The pair (p', q') to verify with, in new tensors of p's precision.

        p, q: [rows, V] distributions; x: [rows] int64. Rows the rule leaves alone keep their bits.
        """
        logits = p.log()
        changed, draft = logits.clone(), q.to(p.dtype, copy=True)
        none = torch.zeros_like(x, dtype=torch.bool)
        if self.acts:
            everything = torch.arange(len(x), device=x.device)
            self._apply(Rows.of(p, q, x), everything, slice(0, len(x)), changed, draft, Rewritten(none, none.clone()))
        touched = (changed != logits).any(-1, keepdim=True)
        return torch.where(touched, changed.softmax(-1), p), draft

    def rewrite(self, logits: Tensor, q: Tensor, x: Tensor, index: Tensor | None = None) -> Rewritten:
        """Turn rows ``index`` (all by default) of (p, q) into the pair, in place, in chunks that bound the memory.

        logits: [rows, V] float32 processed target logits, given back by `Rewritten.restore`, or at once when anything is raised; q:
        [rows, V] float32 draft distributions, not restored; x: [rows] int64. The law is exact to 1e-5 while logits are within some
        +-300, beyond which float32 itself spaces them too wide.
        """
        index = torch.arange(len(x), device=x.device) if index is None else index
        outside = torch.zeros(len(index), dtype=torch.bool, device=x.device)
        result = Rewritten(outside, outside.clone())
        if not self.acts:
            return result
        size = max(1, (CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK) // logits.shape[-1])
        try:
            for start in range(0, len(index), size):
                chunk = index[start : start + size]
                rows = Rows(_read(logits, chunk), _read(q, chunk), x[chunk])
                self._apply(rows, chunk, slice(start, start + len(chunk)), logits, q, result)
        except BaseException:
            result.restore(logits)
            raise
        return result

    def _apply(self, rows: Rows, index: Tensor, into: slice, logits: Tensor, q: Tensor, result: Rewritten) -> None:
        """Write the edits of one chunk to rows ``index`` of logits and q."""
        x = rows.x
        strict = ~rows.allowed
        if self.spec.h_max < torch.inf:
            unsure = rows.allowed & (entropy(rows) > self.spec.h_max)
            result.unsure[into] = unsure
            strict |= unsure
        outside = outside_support(rows, self.spec.p_min or 0.0, self.spec.top_k or 0) & ~strict
        result.outside[into] = outside
        for some, edit in ((~(strict | outside), self.rule.edit), (outside, partial(reject, self.rule))):
            local = some.nonzero().squeeze(-1)
            change = edit(rows.take(local)) if local.numel() else None
            if change is not None:
                _write(change, index[local], x[local], logits, q, result._saved)


def _read(matrix: Tensor, index: Tensor) -> Tensor:
    """Rows of a matrix: a view where they follow one another, as a request's do, else a copy."""
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index) and bool((torch.diff(index) == 1).all()):
        return matrix[first : last + 1]
    return matrix[index]


def _write(edit: Edit, index: Tensor, x: Tensor, logits: Tensor, q: Tensor, saved: list[tuple[tuple[Tensor, ...], Tensor]]) -> None:
    if edit.rows is not None and edit.rows.numel():
        whole = index[edit.rows]
        if edit.logits is not None:
            saved.append(((whole,), logits[whole]))
            logits[whole] = edit.logits.to(logits.dtype)
        if edit.q is not None:
            q[whole] = edit.q.to(q.dtype)
    if edit.lx is not None:
        saved.append(((index, x), logits[index, x]))
        logits[index, x] = edit.lx.to(logits.dtype)
    if edit.qx is not None:
        q[index, x] = edit.qx.to(q.dtype)
