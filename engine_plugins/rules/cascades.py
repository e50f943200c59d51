"""Speculative cascades: defer to the target, or trust the draft, by a rule of the two distributions. Source: arXiv 2405.19261.

Confidences and total variation are all taken on the processed rows; the authors' notebook takes the confidences at temperature
1. Equation numbers are the paper's.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from engine_plugins.rules.base import Edit, Reducible, Rows, Trusting


class Chow(Trusting):
    """Trust the draft where max q >= 1 - alpha (equation 2). alpha < 0 is strict bit for bit, 1 emits the draft alone."""

    name = "casc-chow"

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def trusted(self, rows: Rows) -> Tensor:
        if self.alpha < 0:  # max q can be 1 + 1e-7 in float32
            return torch.zeros_like(rows.x, dtype=torch.bool)
        return rows.q_max >= 1 - self.alpha


class Diff(Trusting):
    """Trust the draft where max q >= max p - alpha (equation 5). alpha <= -1 is strict bit for bit, 1 emits the draft alone."""

    name = "casc-diff"

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def trusted(self, rows: Rows) -> Tensor:
        if self.alpha <= -1:
            return torch.zeros_like(rows.x, dtype=torch.bool)
        return rows.q_max >= rows.p_max - self.alpha


class Opt(Trusting):
    """Trust the draft where max q >= max p - alpha TV(p, q) (equation 10). -inf is strict bit for bit, inf emits the draft alone.

    For alpha > 0 a larger disagreement *lowers* the bar, because verification is then expensive: drafts that are sure and wrong
    pass.
    """

    name = "casc-opt"

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def trusted(self, rows: Rows) -> Tensor:
        if self.alpha == -torch.inf:
            return torch.zeros_like(rows.x, dtype=torch.bool)
        if self.alpha == 0:
            return rows.q_max >= rows.p_max
        distance = (rows.p - rows.q).clamp_min_(0).sum(-1)
        return rows.q_max >= rows.p_max - torch.where(distance > 0, self.alpha * distance, 0.0)


class _Token(Reducible):
    """pi = q on a trusted set A plus q(not A) p: x in A is always accepted, the others are judged *more* strictly than strict. A
    token the target forbids is in no A: nothing may be drawn that a grammar rules out.

    Off A the ratio is q(not A) p(x)/q(x); on A the residual is q(not A) p. Both follow from p' = p with q' = 0 on A and q/q(not
    A) off it, so only q changes, and only in rows whose x is not in A. Acceptance is not monotone in alpha: a larger A leaves
    the rest less.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    @abstractmethod
    def trusted(self, p: Tensor, q: Tensor, p_max: Tensor) -> Tensor:
        """Which tokens are in A, if they are allowed; p, q: [rows, V] or [rows, 1], p_max: [rows, 1]."""

    def pi(self, rows: Rows) -> Tensor:
        p, q = rows.p, rows.q
        trusted = self.trusted(p, q, p.amax(-1, keepdim=True)) & (rows.logits > -torch.inf)
        off = torch.where(trusted, 0.0, q).sum(-1, keepdim=True)
        return torch.where(trusted, q, 0.0) + off * p

    def edit(self, rows: Rows) -> Edit | None:
        # everything from the same [rows, V] exponentials: p(x) from a shorter vector can differ in the last bit, and A =
        # {argmax} with it
        p, q, p_max = rows.p, rows.q, rows.p.amax(-1, keepdim=True)
        at = rows.x.unsqueeze(-1)
        inside = self.trusted(p.gather(-1, at), q.gather(-1, at), p_max).squeeze(-1) & rows.allowed
        accepted = rows.accept(torch.ones_like(rows.qx), inside)
        outside = (~inside).nonzero().squeeze(-1)
        if outside.numel() == 0:
            return accepted
        trusted = self.trusted(p[outside], q[outside], p_max[outside]) & (rows.logits[outside] > -torch.inf)
        if not bool(trusted.any()):  # A is empty, the rows are strict, bit for bit
            return accepted
        off = torch.where(trusted, 0.0, q[outside])
        off /= off.sum(-1, keepdim=True).clamp_min(1e-30)
        assert accepted.qx is not None
        qx = accepted.qx.index_copy(0, outside, off.gather(-1, at[outside]).squeeze(-1))
        return Edit(lx=accepted.lx, qx=qx, rows=outside, q=off)


class TokenV1(_Token):
    """A = tokens with q(v) >= max p - alpha (equation 13), of those with p(v) > 0. alpha < -1 is strict bit for bit, 1 emits the
    draft alone."""

    name = "casc-tok-v1"

    def trusted(self, p: Tensor, q: Tensor, p_max: Tensor) -> Tensor:
        return q >= p_max - self.alpha


class TokenV2(_Token):
    """A = tokens with p(v) >= max p - alpha (equation 14). alpha < 0 is strict bit for bit, 1 emits the draft alone."""

    name = "casc-tok-v2"

    def trusted(self, p: Tensor, q: Tensor, p_max: Tensor) -> Tensor:
        return p >= p_max - self.alpha if self.alpha >= 0 else torch.zeros_like(p, dtype=torch.bool)


class TokenV3(_Token):
    """A = tokens with p(v) >= (1 - alpha) max p (equation 15). alpha < 0 is strict bit for bit, 1 emits the draft alone.

    alpha = 0 is not strict, though the authors' notebook says so: A is then the argmax alone, and TV(law, p) can reach 0.78.
    """

    name = "casc-tok-v3"

    def trusted(self, p: Tensor, q: Tensor, p_max: Tensor) -> Tensor:
        # 1 - alpha is 1 for a tiny alpha < 0
        return p >= (1 - self.alpha) * p_max if self.alpha >= 0 else torch.zeros_like(p, dtype=torch.bool)
