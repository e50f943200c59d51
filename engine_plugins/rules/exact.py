"""Exact laws, by enumeration: what a rule emits at one position, and how often it accepts."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_plugins.rules.base import Pair


def acceptance_of(pair: Pair, x: Tensor) -> Tensor:
    """[rows] the probability with which stock sampling accepts x on this pair: min(1, p'(x)/q'(x)), and 0 where q'(x) = 0."""
    p, q = (m.gather(-1, x.unsqueeze(-1)).squeeze(-1) for m in pair)
    return torch.where(q > 0, (p / torch.where(q > 0, q, 1.0)).clamp_max(1), 0.0)


def recovered_of(pair: Pair) -> Tensor:
    """[rows, V] the law after a rejection: norm(max(p' - q', 0)), and p' where that is empty."""
    p, q = pair
    left = (p - q).clamp_min(0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / torch.where(mass > 0, mass, 1.0), p)


def one_hot(pair: Pair, x: Tensor) -> Pair:
    """The same verification on the draft row e_x: p'' = a e_x + (1 - a) R, q'' = e_x.

    Model Runner V2 normalises q', so a pair with a scaled or an empty q' has to be handed over in this form (rules.md, 2.3).
    Law and acceptance are those of the pair, but for a rejected `fuzzy` row (and a `typical` one with delta >= 1), where x
    drawn again counts as accepted.
    """
    at = x.unsqueeze(-1)
    a = acceptance_of(pair, x).unsqueeze(-1)
    e = torch.zeros_like(pair[0]).scatter_(-1, at, 1.0)
    return (1 - a) * recovered_of(pair) + a * e, e


def law_of(pair: Pair, q: Tensor, x: Tensor) -> tuple[Tensor, float]:
    """law = sum_x q(x) [a(x) e_x + (1 - a(x)) R_x], and sum_x q(x) a(x); row i of the pair belongs to the draft x[i], q: [V]."""
    weight = q[x]
    a = acceptance_of(pair, x)
    law = (weight * (1 - a)) @ recovered_of(pair)
    return law.index_add(0, x, weight * a), float((weight * a).sum())
