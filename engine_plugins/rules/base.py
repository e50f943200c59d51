"""What a verification rule is.

Speculative sampling verifies a drafted token x ~ q against the target's row p: accept with probability min(1, p(x)/q(x)),
otherwise resample from norm(max(p - q, 0)) (arXiv 2211.17192). A rule is a map from (p, q, x) to a substituted pair (p', q') on
which *stock* speculative sampling does what the rule says, so the engine's kernels stay untouched. A row is only ever compared
with its own drafted token, so the pair may depend on x.

A pair is not unique, and most rules have one that differs from (p, q) in a single entry. The kernel forgives any factor in a
residual and reads p'(x) and q'(x) for nothing but their ratio, so a rule whose residual is the stock one only has to set q'(x)
= p(x)/a(x). An `Edit` says what differs; a rule gives its textbook pair (`definition`) and, where it is worth it, an equivalent
cheaper `edit`. What they cost beside the stock call is in docs/rules.md; textbook pairs cost 2.3 (Cactus) to 5.5 (r-fuzzy) times
that call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]

# q'(x) that accepts for certain: p'(x)/CERTAIN >= 1 for any p'(x) that FLOOR lets through
CERTAIN = 1e-30
# log p'(x) of an accepted token is at least this: float32 would lose a smaller p'(x), and 9e-27 disturbs no other entry
FLOOR = -60.0


class Rows:
    """Draft rows and what several rules ask of them, each computed once.

    logits: [rows, V] processed target logits, p up to a factor; -inf marks a token the target forbids. q: [rows, V] draft
    distributions; x: [rows] int64, the drafted tokens. ``exact``: the target came as distributions, which are then read as they
    are.
    """

    def __init__(self, logits: Tensor, q: Tensor, x: Tensor, *, p: Tensor | None = None) -> None:
        self.logits, self.q, self.x = logits, q, x
        self.exact = p is not None
        if p is not None:
            self.p = p

    @classmethod
    def of(cls, p: Tensor, q: Tensor, x: Tensor) -> Rows:
        """Rows given as distributions p, in p's precision."""
        return cls(p.log(), q.to(p.dtype), x, p=p)

    def take(self, index: Tensor) -> Rows:
        """Some of the rows, in copies; [rows]-sized results already known come along."""
        if index.numel() == self.x.numel():
            return self
        rows = Rows(self.logits[index], self.q[index], self.x[index], p=self.p[index] if self.exact else None)
        for name in ("top", "log_z", "lx"):
            if name in self.__dict__:
                rows.__dict__[name] = self.__dict__[name][index]
        return rows

    def at_x(self, matrix: Tensor) -> Tensor:
        return matrix.gather(-1, self.x.unsqueeze(-1)).squeeze(-1)

    @cached_property
    def top(self) -> Tensor:
        return self.logits.amax(-1)

    @cached_property
    def log_z(self) -> Tensor:
        """[rows] logsumexp of the logits less their maximum: small numbers, so that logits far from 0 lose nothing."""
        return (self.logits - self.top.unsqueeze(-1)).exp_().sum(-1).log_()

    @property
    def lse(self) -> Tensor:
        return self.top + self.log_z

    @cached_property
    def p(self) -> Tensor:
        """[rows, V] the target distribution."""
        return self.logits.softmax(-1)

    @cached_property
    def lx(self) -> Tensor:
        return self.at_x(self.logits)

    @cached_property
    def allowed(self) -> Tensor:
        """[rows] bool: the target does not forbid x."""
        return self.lx > -torch.inf

    @cached_property
    def px(self) -> Tensor:
        # from p where p was given, so that p(x) = p_min is not moved by a logarithm and back
        return self.at_x(self.p) if self.exact else (self.lx - self.top - self.log_z).exp()

    @cached_property
    def qx(self) -> Tensor:
        return self.at_x(self.q)

    @cached_property
    def p_max(self) -> Tensor:
        return self.p.amax(-1) if self.exact else (-self.log_z).exp()

    @cached_property
    def q_max(self) -> Tensor:
        return self.q.amax(-1)

    def accept(self, probability: Tensor, where: Tensor) -> Edit:
        """The edit that accepts x with this probability in the rows of ``where`` and leaves the stock residual.

        Right whenever probability >= min(1, p(x)/q(x)): then q'(x) >= p(x) after a rejection, so x is not resampled. A token too
        improbable for float32 is lifted to exp(FLOOR) first, where it disturbs no other entry.
        """
        floor = self.lse + FLOOR
        lx = torch.where(where & self.allowed & (self.lx < floor), floor, self.lx)
        asked = torch.where(lx > self.lx, math.exp(FLOOR), self.px) / probability
        return Edit(lx=lx, qx=torch.where(where, torch.where(probability >= 1, CERTAIN, asked), self.qx))


@dataclass(frozen=True, slots=True)
class Edit:
    """How (p', q') differs from (p, q); None: not at all.

    lx, qx: [rows] the logit of x and q'(x), an unchanged one keeping its value; the rest of a target row keeps its proportions,
    so -inf removes x and renormalises. rows: [m] int64, the rows whose logits and/or q' are replaced in whole, before lx and qx
    are written. logits: [m, V] log p' up to a constant a row; q: [m, V].
    """

    lx: Tensor | None = None
    qx: Tensor | None = None
    rows: Tensor | None = None
    logits: Tensor | None = None
    q: Tensor | None = None


class Rule(ABC):
    """A verification rule. One class a rule, one file a family; instances are immutable and hold the knobs.

    ``name`` and the knobs' names and ranges are those of `agentguard.rulespec.KNOBS`. All probabilities are those of the
    processed rows, after temperature, top-k and top-p. At temperature 0 the engine's greedy kernel decides and no rule applies.
    A rule may assume p(x) > 0: a row whose x is forbidden stays strict (`filtered`).
    """

    name: ClassVar[str]
    keeps_target: ClassVar[bool] = False
    """The textbook p' is p up to its entry at x, so a filtered row needs no more than x removed."""

    @abstractmethod
    def definition(self, rows: Rows) -> Pair:
        """The textbook pair (p', q'), [rows, V] each; p' sums to one. Must not write into ``rows``."""

    def edit(self, rows: Rows) -> Edit | None:
        """A pair with the same law and acceptance as `definition`, as a change of (p, q)."""
        p, q = self.definition(rows)
        return Edit(rows=torch.arange(len(rows.x), device=rows.x.device), logits=p.log(), q=None if q is rows.q else q)


class Reducible(Rule):
    """A rule that samples from one distribution pi: p' = pi, q' = q, hence law pi and acceptance 1 - TV(pi, q) (rules.md, 1.1)."""

    @abstractmethod
    def pi(self, rows: Rows) -> Tensor:
        """[rows, V], sums to one."""

    def definition(self, rows: Rows) -> Pair:
        return self.pi(rows), rows.q


class Trusting(Reducible):
    """pi = q where the draft is trusted, else p: a trusted row accepts any x, the others are strict."""

    @abstractmethod
    def trusted(self, rows: Rows) -> Tensor:
        """[rows] bool."""

    def pi(self, rows: Rows) -> Tensor:
        return torch.where(self.trusted(rows).unsqueeze(-1), rows.q, rows.p)

    def edit(self, rows: Rows) -> Edit | None:
        return rows.accept(torch.ones_like(rows.qx), self.trusted(rows))
