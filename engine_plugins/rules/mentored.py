"""Mentored decoding, exact: the most acceptance within a divergence budget."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_plugins.rules.base import Edit, Reducible, Rows

SOLVER_STEPS = 100  # of safeguarded Newton; 10 to 15 are usual
BINS = 2048  # of log(p/q) between -RANGE and RANGE
RANGE = 20.0


class Mentored(Reducible):
    """pi = clip(q, p/beta, p/alpha), the law of largest acceptance with KL(p || pi) <= D.

    alpha <= 1 <= beta solve KL = D and sum pi = 1. Source: Tran-Thien 2023 (vivien000/mentored_decoding, proof.pdf), in the
    closed form of rules.md, 4.5. As a change of q alone: a(x) = min(1, p(x)/(alpha q(x))) and the residual is proportional to
    max(p - beta q, 0), so q' = beta q with alpha q(x) at x. ``D`` >= 0 in nats: 0 is strict bit for bit, D >= KL(p || q) emits
    the draft alone; below 1e-4 float32 does not resolve it (the law is then off by up to 2e-4). A truncated p with most of q's
    mass on its support passes wrong tokens easily: another reason why p(x) = 0 is never accepted.
    """

    name = "mentored"

    def __init__(self, D: float) -> None:
        self.budget = D

    def pi(self, rows: Rows) -> Tensor:
        p, q = rows.p, rows.q
        if self.budget == 0:
            return p
        alpha, beta = solve(p, q, self.budget)
        clipped = torch.minimum(torch.maximum(q, p / beta.unsqueeze(-1)), p / alpha.unsqueeze(-1))
        return torch.where((alpha == 0).unsqueeze(-1), q, clipped)

    def edit(self, rows: Rows) -> Edit | None:
        # where p(x) >= q(x) every alpha accepts x
        open_ = (rows.px < rows.qx).nonzero().squeeze(-1)
        if self.budget == 0 or open_.numel() == 0:
            return None
        some = rows.take(open_)
        alpha, beta = solve(some.p, some.q, self.budget)
        ones = torch.ones_like(some.qx)
        everything = some.accept(ones, alpha == 0)
        assert everything.lx is not None
        assert everything.qx is not None
        qx = torch.where(alpha > 0, alpha * some.qx, everything.qx)
        return Edit(
            lx=rows.lx.index_copy(0, open_, everything.lx),
            qx=rows.qx.index_copy(0, open_, qx),
            rows=open_,
            q=some.q * torch.where(alpha > 0, beta, ones).unsqueeze(-1),
        )


def solve(p: Tensor, q: Tensor, budget: float) -> tuple[Tensor, Tensor]:
    """alpha, beta of each row, [rows]; alpha = 0 where KL(p || q) <= budget, so that q itself will do.

    p, q: [rows, V]. With the tie sum max(q - p/alpha, 0) = sum max(p/beta - q, 0), the divergence D(alpha) falls as alpha
    rises, and its derivative by log alpha is P(p <= alpha q)(1 - beta/alpha). Newton, bisecting whenever a step leaves the
    bracket. A large vocabulary is solved on bins of the ratio first, which leaves two or three passes over the tokens.
    ``budget`` > 0.
    """
    tiny = torch.finfo(p.dtype).tiny
    ratio = p.clamp_min(tiny).log_() - q.clamp_min(tiny).log_()
    u = torch.full_like(p[:, 0], -0.1, dtype=torch.float64)
    s = torch.ones_like(u)
    if p.shape[-1] > 4 * BINS:
        into = ((ratio + RANGE) * (BINS / (2 * RANGE))).clamp_(0, BINS - 1).long()
        none = torch.zeros_like(p[:, :BINS])
        alpha, beta = solve(none.scatter_add(-1, into, p), none.scatter_add(-1, into, q), budget)
        started = alpha > 0
        u = torch.where(started, alpha.double().log(), u)
        s = torch.where(started, 1 / beta.double(), s)
    weighted = torch.where((p > 0) & (q > 0), ratio.mul_(p), 0.0)
    uncovered = ((p > 0) & (q <= 0)).any(-1)
    divergence = torch.where(uncovered, torch.inf, weighted.sum(-1))
    enough = divergence <= budget
    # u = log alpha; D(0) = 0, and below the smallest ratio D no longer changes
    low, high = torch.full_like(u, -700.0), torch.zeros_like(u)
    converged = enough.clone()
    exact = torch.finfo(p.dtype).eps
    for _ in range(SOLVER_STEPS):
        divergence, derivative, s = _divergence(p, q, weighted, u, s)
        excess = divergence - budget
        low, high = torch.where(excess > 0, u, low), torch.where(excess > 0, high, u)
        newton = u - excess / derivative
        step = torch.where((newton > low) & (newton < high), newton, (low + high) / 2)
        converged |= ((step - u).abs() <= exact) | (excess.abs() <= exact * min(1.0, budget))
        if bool(converged.all()):
            break
        u = torch.where(converged, u, step)
    # s = 0: nothing is left of the draft but x; any large beta empties the residual, and inf * 0 would be nan
    return torch.where(enough, 0.0, u.exp()).to(p.dtype), (1 / s).clamp_max(1e30).to(p.dtype)


def _divergence(p: Tensor, q: Tensor, weighted: Tensor, u: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """D(alpha), its derivative by log alpha, and 1/beta, for alpha = exp(u); [rows] float64 each. ``s``: a guess of 1/beta."""
    alpha = u.exp()
    below = p <= alpha.unsqueeze(-1).to(p.dtype) * q  # pi = p/alpha there
    p_below = _sum(below, p)
    surplus = (_sum(below, q) - p_below / alpha).clamp_min(0)
    # s = 1/beta solves sum max(s p - q, 0) = surplus: convex and piecewise linear in s, so Newton ends exactly, falling after
    # its first step
    for _ in range(SOLVER_STEPS):
        above = s.unsqueeze(-1).to(p.dtype) * p > q
        p_above = _sum(above, p)
        nxt = torch.where(p_above > 0, (surplus + _sum(above, q)) / p_above, torch.where(surplus > 0, 1.0, s)).clamp_max(1)
        done = bool(((s - nxt).abs() <= torch.finfo(p.dtype).eps * s).all())
        s = nxt
        if done:
            break
    middle = _sum(~(below | above), weighted)
    # s = 0: nothing is taken from the draft, and a token it does not cover gets nothing
    divergence = torch.where(s > 0, u * p_below + middle - s.log() * p_above, torch.inf)
    return divergence, p_below * (1 - 1 / (s * alpha)), s


def _sum(mask: Tensor, values: Tensor) -> Tensor:
    """[rows] float64."""
    return (values * mask).sum(-1).double()
