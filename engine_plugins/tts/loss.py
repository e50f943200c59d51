"""The loss of TTS and the overlap of two laws: pure torch on rows.

A row holds what is known about one law over the vocabulary: all log-probabilities, or those of its k most probable tokens, with the
rest as one bucket. KL over buckets never exceeds the full KL (data processing), so a top-k teacher gives a lower bound of it.

Laws are those verification compares: after temperature and the masks of the request, so that a smaller KL is a larger acceptance
(1 - acceptance = total variation <= sqrt(KL / 2), Pinsker) at the temperature that is served. Of a greedy request they are taken at
temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLIGHT = 1e-4  # a law that has no more than this among the possible tokens teaches nothing: what is left of it is rounding
TINY = 1e-10  # probability below which a bucket counts as empty; float32 sums of a row are not closer to 1 than 1e-7


@dataclass(frozen=True, slots=True)
class Rows:
    """Laws of n rows. logp: [n, V], or [n, k] with ids [n, k] int64 naming the tokens; -inf for impossible tokens."""

    logp: Tensor
    ids: Tensor | None = None

    @property
    def tail(self) -> Tensor:
        """[n] probability outside ``ids``; 0 for full rows."""
        if self.ids is None:
            return self.logp.new_zeros(len(self.logp))
        return (1 - self.logp.exp().sum(-1)).clamp_min(0)

    def of(self, student: Tensor) -> Tensor:
        """The values of [n, V] ``student`` at the tokens of these rows."""
        return student if self.ids is None else student.gather(-1, self.ids)

    def within(self, possible: Tensor) -> tuple[Rows, Tensor]:
        """The laws given that the token is one of ``possible`` ([V] bool), as a draft with a smaller vocabulary can follow no
        other, and the probability of that, [n]. Of a row cut to k tokens the rest counts as possible.

        Cross-entropy with the whole law is that with the first times the second (but for a constant), so that is a row's weight."""
        here = possible if self.ids is None else possible[self.ids]
        inside = (1 - torch.where(here, 0.0, self.logp.exp()).sum(-1)).clamp(0.0, 1.0)
        shift = inside.clamp_min(SLIGHT).log()[:, None]
        return Rows(torch.where(here, self.logp - shift, -torch.inf), self.ids), torch.where(inside > SLIGHT, inside, 0.0)

    def __getitem__(self, index: Tensor) -> Rows:
        return Rows(self.logp[index], None if self.ids is None else self.ids[index])


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows of the same width, one after the other."""
    ids = [r.ids for r in parts if r.ids is not None]
    return Rows(torch.cat([r.logp for r in parts]), torch.cat(ids) if ids else None)


def top_k(logits: Tensor, k: int) -> Rows:
    """The laws of [n, V] logits, or their k most probable tokens where 0 < k < V. float32."""
    logp = logits.float().log_softmax(-1)
    if not 0 < k < logp.shape[-1]:
        return Rows(logp)
    top = logp.topk(k, -1)
    return Rows(top.values, top.indices)


def kl(teacher: Rows, student: Tensor) -> Tensor:
    """[n] KL(teacher || student) in nats; student: [n, V] log-probabilities with gradient."""
    p = teacher.logp.exp()
    mine = teacher.of(student)
    # where p = 0 both factors are put to 0: 0 * -inf would be NaN, in the backward pass too
    live = p > 0
    inside = torch.where(live, p * (torch.where(live, teacher.logp, 0.0) - torch.where(live, mine, 0.0)), 0.0).sum(-1)
    if teacher.ids is None:
        return inside
    rest, mine_rest = teacher.tail, (1 - mine.exp().sum(-1)).clamp_min(TINY)
    return inside + torch.where(rest > TINY, rest * (rest.clamp_min(TINY).log() - mine_rest.log()), 0.0)


def tts_loss(student: Tensor, target: Rows, source: Rows | None, weights: Tensor, proximal: float) -> Tensor:
    """L = Σ w KL(p || q') / Σ w + μ Σ w KL(q_t || q') / Σ w (arXiv 2605.09329, its λ is μ here).

    student: [n, V] logits of q' at the request's temperature. source: the q_t each row was drafted from, stored then; with one step
    from fresh rows its gradient is 0, with several steps or stale rows it is not. weights: [n], >= 0.
    """
    logq = student.float().log_softmax(-1)
    loss = kl(target, logq)
    if proximal > 0 and source is not None:
        loss = loss + proximal * kl(source, logq)
    return (weights * loss).sum() / weights.sum().clamp_min(TINY)


def position_weights(k: Tensor, decay: float) -> Tensor:
    """w_k = exp(-k / decay) of row k = 0, 1, … of a round: what an early row loses, the whole round loses."""
    return torch.exp(-k.float() / decay)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """[n] Σ_x min(p(x), q(x)) of log-probabilities [n, width] over the same tokens: the probability that strict verification
    accepts a token drawn from q, or a lower bound of it where the rows were cut to k tokens."""
    return torch.minimum(p, q).exp().sum(-1)


def expected_length(acceptance: float, k: int) -> float:
    """ℓ of K drafts that are each accepted with the same probability: a + a² + … + a^K."""
    return sum(acceptance**i for i in range(1, k + 1))
