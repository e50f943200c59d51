"""Rules against an independent enumeration of speculative sampling's one-step law."""

from __future__ import annotations

import pytest
import torch

from engine_plugins import rules


def enumerate_law(p: torch.Tensor, q: torch.Tensor, spec: str) -> tuple[torch.Tensor, float]:
    """Law and acceptance of stock sampling on the rule's pair: law(y) = q(y) a(y) + sum_x q(x)(1 - a(x)) R_x(y)."""
    rule, vocabulary = rules.get(spec), p.numel()
    law, acceptance = torch.zeros_like(p), 0.0
    for x in range(vocabulary):
        if q[x] == 0:
            continue
        (accept, draft), _ = rule.pair(p[None], q[None], torch.tensor([x]))
        a = min(1.0, float(accept[0, x] / draft[0, x])) if draft[0, x] > 0 else 0.0
        residual = (accept[0] - draft[0]).clamp_min(0)
        law[x] += q[x] * a
        acceptance += float(q[x]) * a
        if a < 1:
            law += q[x] * (1 - a) * residual / residual.sum()
    return law, acceptance


def distributions(seed: int, sparse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(6, generator=generator, dtype=torch.float64) ** 3
    q = torch.rand(6, generator=generator, dtype=torch.float64) ** 3
    if sparse:
        p[torch.randint(0, 6, (2,), generator=generator)] = 0
        q[torch.randint(0, 6, (2,), generator=generator)] = 0
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sparse", [False, True])
class TestLaws:
    def test_strict_keeps_the_target(self, seed: int, sparse: bool) -> None:
        p, q = distributions(seed, sparse)
        law, acceptance = enumerate_law(p, q, "strict")
        torch.testing.assert_close(law, p, atol=1e-12, rtol=0)
        assert acceptance == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)

    def test_cactus_is_the_mixture_of_its_definition(self, seed: int, sparse: bool) -> None:
        """law = sum_x q(x) [min(1, g/q) e_x + (1 - min(1, g/q)) norm((h^x - q)+)], from the paper's g, not from the code's pair."""
        p, q = distributions(seed, sparse)
        delta, expected = 0.3, torch.zeros_like(p)
        for x in range(6):
            px = float(p[x])
            g = min(1.0, px + (2 * delta * px * (1 - px)) ** 0.5)
            h = p * ((1 - g) / (1 - px) if px < 1 else 0.0)
            h[x] = g
            a = min(1.0, g / float(q[x])) if q[x] > 0 else 0.0
            expected[x] += q[x] * a
            if a < 1 and q[x] > 0:
                left = (h - q).clamp_min(0)
                expected += q[x] * (1 - a) * left / left.sum()
        law, acceptance = enumerate_law(p, q, f"cactus:{delta}")
        torch.testing.assert_close(law, expected, atol=1e-9, rtol=0)
        assert acceptance >= float(torch.minimum(p, q).sum()) - 1e-12

    def test_interp_is_reducible(self, seed: int, sparse: bool) -> None:
        p, q = distributions(seed)
        law, acceptance = enumerate_law(p, q, "interp:w=0.4")
        torch.testing.assert_close(law, 0.4 * q + 0.6 * p, atol=1e-12, rtol=0)
        assert acceptance == pytest.approx(float(torch.minimum(0.4 * q + 0.6 * p, q).sum()), abs=1e-12)

    @pytest.mark.parametrize("spec", ["cactus:delta=inf", "interp:w=1", "cactus:0.5"])
    def test_a_filtered_token_is_neither_accepted_nor_resampled_at_its_position(self, seed: int, sparse: bool, spec: str) -> None:
        p, q = distributions(seed, sparse)
        for x in range(6):
            (accept, draft), outside = rules.get(spec, p_min=0.1, top_k=2).pair(p[None], q[None], torch.tensor([x]))
            rank = int((p > p[x]).sum())
            assert bool(outside[0]) == (p[x] < 0.1 or rank >= 2)
            if outside[0]:
                assert accept[0, x] == 0
                assert draft[0, x] == 0
            assert float(accept.sum()) == pytest.approx(1.0, abs=1e-9)

    @pytest.mark.parametrize("spec", ["cactus:0", "interp:0"])
    def test_the_strict_limit_is_bitwise(self, seed: int, sparse: bool, spec: str) -> None:
        p, q = (t.float() for t in distributions(seed, sparse))
        for x in range(6):
            if p[x] == 0:
                continue
            (accept, draft), _ = rules.get(spec).pair(p[None], q[None], torch.tensor([x]))
            assert torch.equal(accept[0], p)
            assert torch.equal(draft[0], q)


@pytest.mark.parametrize("seed", range(20))
def test_the_filter_never_hands_a_forbidden_token_the_place_of_a_filtered_one(seed: int) -> None:
    """A mixture has mass where p = 0; behind the filter that mass must not be resampled."""
    p, q = distributions(seed, sparse=True)
    for spec in ("interp:w=1,p_min=0.2", "interp:w=0.9,top_k=1", "cactus:delta=inf,p_min=0.2"):
        law, _ = enumerate_law(p, q, spec)
        assert float(law[p == 0].sum()) == 0
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-9)


def test_a_forbidden_token_is_never_accepted() -> None:
    p, q = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    for spec in ("cactus:delta=inf", "interp:w=1"):
        (accept, draft), outside = rules.get(spec).pair(p, q, torch.tensor([0]))
        assert bool(outside[0])
        assert accept.tolist() == [[0.0, 1.0, 0.0]]
        assert draft[0, 0] == 0


def test_cactus_accepts_more_with_a_larger_delta() -> None:
    p, q = distributions(3)
    rates = [enumerate_law(p, q, f"cactus:{delta}")[1] for delta in (0, 0.01, 0.1, 0.5, 2)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_inputs_are_not_written_to() -> None:
    p, q = (t.float()[None] for t in distributions(1))
    before = p.clone(), q.clone()
    for spec in ("cactus:0.5,p_min=0.1", "interp:0.5,top_k=1"):
        rules.get(spec).pair(p, q, torch.tensor([2]))
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])
