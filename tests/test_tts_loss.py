"""The loss of TTS: its gradients by hand, its bounds, and what a row cut to k tokens may claim."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_plugins.tts.loss import Rows, expected_length, joined, kl, overlap, position_weights, top_k, tts_loss


def random_rows(n: int, v: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, v, generator=generator) * 2, torch.randn(n, v, generator=generator)


def gradient(student: torch.Tensor, target: Rows, source: Rows | None, weights: torch.Tensor, proximal: float) -> torch.Tensor:
    z = student.clone().requires_grad_()
    tts_loss(z, target, source, weights, proximal).backward()
    assert z.grad is not None
    return z.grad


def test_the_first_step_has_the_gradient_w_times_q_minus_p() -> None:
    p, z = random_rows(5, 30, 1)
    weights = position_weights(torch.arange(5), 3.0)
    got = gradient(z, top_k(p, 0), top_k(z, 0), weights, 0.0)
    by_hand = weights.unsqueeze(-1) * (z.softmax(-1) - p.softmax(-1)) / weights.sum()
    torch.testing.assert_close(got, by_hand)


def test_the_proximal_term_is_silent_at_a_fresh_source_and_speaks_at_a_stale_one() -> None:
    p, z = random_rows(4, 20, 2)
    weights = torch.ones(4)
    fresh, stale = top_k(z, 0), top_k(z + 0.5 * torch.randn(4, 20, generator=torch.Generator().manual_seed(3)), 0)
    plain = gradient(z, top_k(p, 0), fresh, weights, 0.0)
    torch.testing.assert_close(gradient(z, top_k(p, 0), fresh, weights, 5.0), plain)
    pulled = gradient(z, top_k(p, 0), stale, weights, 5.0)
    by_hand = plain + 5.0 * (z.softmax(-1) - stale.logp.exp()) / 4
    torch.testing.assert_close(pulled, by_hand)


def test_several_steps_with_the_proximal_term_go_to_the_mixed_teacher() -> None:
    """L = (1 + μ) KL(m || q') + const with m = (p + μ q_t) / (1 + μ): gradient descent from q_t ends at m, not at p."""
    p, z = random_rows(1, 12, 4)
    target, source, mu = top_k(p, 0), top_k(z, 0), 2.0
    student = z.clone().requires_grad_()
    optimizer = torch.optim.SGD([student], lr=1.0)
    for _ in range(4000):
        optimizer.zero_grad()
        tts_loss(student, target, source, torch.ones(1), mu).backward()
        optimizer.step()
    mixed = (p.softmax(-1) + mu * z.softmax(-1)) / (1 + mu)
    torch.testing.assert_close(student.softmax(-1).detach(), mixed, atol=1e-3, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 39))
def test_a_teacher_cut_to_k_tokens_never_overstates_kl(seed: int, k: int) -> None:
    p, z = random_rows(3, 40, seed)
    logq = z.log_softmax(-1)
    full, cut = kl(top_k(p, 0), logq), kl(top_k(p, k), logq)
    assert (cut <= full + 1e-5).all()
    assert (cut >= -1e-5).all()
    assert (overlap(top_k(p, k).logp, top_k(p, k).of(logq)) <= overlap(top_k(p, 0).logp, logq) + 1e-6).all()


def test_a_teacher_cut_to_all_tokens_is_the_full_one() -> None:
    p, z = random_rows(3, 40, 5)
    assert top_k(p, 40).ids is None
    torch.testing.assert_close(kl(top_k(p, 39), z.log_softmax(-1)), kl(top_k(p, 0), z.log_softmax(-1)), atol=1e-4, rtol=1e-4)


def test_impossible_tokens_give_no_nan_in_loss_or_gradient() -> None:
    p, z = random_rows(2, 10, 6)
    p[:, 3] = -torch.inf  # a banned token
    p[1, :9] = -torch.inf  # a certain one
    got = gradient(z, top_k(p, 0), top_k(p, 0), torch.ones(2), 1.0)
    assert torch.isfinite(got).all()
    assert kl(top_k(p, 0), z.log_softmax(-1))[1].item() == pytest.approx(-z.log_softmax(-1)[1, 9].item())


def test_overlap_is_the_acceptance_probability() -> None:
    p, z = random_rows(4, 30, 7)
    pp, q = p.softmax(-1), z.softmax(-1)
    accepted = (q * torch.minimum(torch.ones(()), pp / q)).sum(-1)
    torch.testing.assert_close(overlap(pp.log(), q.log()), accepted)
    torch.testing.assert_close(overlap(pp.log(), q.log()), 1 - 0.5 * (pp - q).abs().sum(-1))
    assert (1 - accepted <= (kl(top_k(p, 0), q.log()) / 2).sqrt() + 1e-6).all()  # Pinsker


def test_expected_length_is_a_geometric_sum() -> None:
    assert expected_length(1.0, 6) == 6
    assert expected_length(0.0, 6) == 0
    assert expected_length(0.5, 3) == pytest.approx(0.875)


def test_weights_favour_early_rows() -> None:
    weights = position_weights(torch.arange(3), 7.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(-1 / 7), math.exp(-2 / 7)])


def test_rows_know_their_tail_and_can_be_joined() -> None:
    cut = top_k(torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]]), 2)
    assert cut.tail.item() == pytest.approx(0.2)
    both = joined([cut, cut])
    assert both.logp.shape == (2, 2)
    assert both.ids is not None
    assert both.ids.tolist() == [[0, 1], [0, 1]]
