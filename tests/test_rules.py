"""Every rule against its definition, by enumeration; its invariants; and what a filter or a mask must never let through."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentguard.rulespec import KNOBS, RuleSpec
from engine_plugins import rules
from engine_plugins.rules import filtered
from engine_plugins.rules.base import Rows
from engine_plugins.rules.exact import law_of, one_hot
from engine_plugins.rules.fuzzy import jensen_shannon
from tests import rule_definitions as defined

INF = math.inf
VALUES: dict[str, list[tuple[float, ...]]] = {
    "strict": [()],
    "lenience": [(0.0,), (0.2,), (0.63,), (1.0,)],
    "mentored": [(0.0,), (1e-3,), (0.05,), (0.2,), (1.0,), (INF,)],
    "mentored-dec": [(0.0,), (0.37,), (0.8,), (1.0,)],
    "cactus": [(0.0,), (0.03,), (0.25,), (1.0,), (INF,)],
    "cactus-exact": [(0.0,), (0.03,), (0.25,), (1.0,), (INF,)],
    "fuzzy": [(-INF,), (0.05,), (0.3,), (INF,)],
    "r-fuzzy": [(-INF,), (0.0,), (0.05,), (0.3,), (INF,)],
    "casc-chow": [(-0.1,), (0.3,), (0.6,), (1.0,)],
    "casc-diff": [(-1.0,), (-0.2,), (0.1,), (1.0,)],
    "casc-opt": [(-INF,), (-0.3,), (0.0,), (0.5,), (INF,)],
    "casc-tok-v1": [(-1.5,), (-0.1,), (0.2,), (1.0,)],
    "casc-tok-v2": [(-0.1,), (0.2,), (1.0,)],
    "casc-tok-v3": [(-0.1,), (0.0,), (0.3,), (0.8,), (1.0,)],
    "typical": [(0.09, 0.3), (0.0, 0.3), (0.5, 2.0), (INF, INF)],
    "top-k": [(1.0,), (2.0,), (50.0,)],
    "interp": [(0.0,), (0.3,), (1.0,)],
}
STRICT_LIMIT = {
    "lenience": 1.0, "mentored": 0.0, "mentored-dec": 0.0, "cactus": 0.0, "cactus-exact": 0.0, "r-fuzzy": 0.0, "casc-chow": -1e-9,
    "casc-diff": -1.0, "casc-opt": -INF, "casc-tok-v1": -1.1, "casc-tok-v2": -1e-9, "casc-tok-v3": -1e-9, "interp": 0.0,
}  # fmt: skip
# grids in the direction of more acceptance; the token cascades are not monotone (rules.md, 7.5)
LOOSER = {
    "lenience": [1.0, 0.8, 0.5, 0.1, 0.0], "mentored": [0.0, 0.01, 0.1, 0.5, 3.0], "mentored-dec": [0.0, 0.2, 0.5, 0.9, 1.0],
    "cactus": [0.0, 0.01, 0.1, 0.5, 2.0], "cactus-exact": [0.0, 0.01, 0.1, 0.5, 2.0], "fuzzy": [-INF, 0.01, 0.1, 0.4, 0.7],
    "r-fuzzy": [-INF, 0.01, 0.1, 0.4, 0.7], "casc-chow": [-0.1, 0.2, 0.5, 0.8, 1.0], "casc-diff": [-1.0, -0.3, 0.0, 0.3, 1.0],
    "casc-opt": [-INF, -0.3, 0.0, 0.5, INF], "top-k": [1.0, 2.0, 3.0, 5.0, 8.0], "interp": [0.0, 0.2, 0.5, 0.8, 1.0],
}  # fmt: skip
Case = tuple[Tensor, Tensor]


def spec(name: str, values: tuple[float, ...]) -> str:
    return str(RuleSpec(name, {k.name: v for k, v in zip(KNOBS[name], values, strict=True)}))


def every_spec() -> Iterator[str]:
    return (spec(name, values) for name in VALUES for values in VALUES[name])


def distribution(size: int, kind: str) -> st.SearchStrategy[list[float]]:
    """Dense, sparse or one-hot; the weights span three orders of magnitude."""
    weight = st.floats(0.001, 1.0)
    if kind == "one-hot":
        return st.integers(0, size - 1).map(lambda i: [float(j == i) for j in range(size)])
    if kind == "sparse":
        weight = st.one_of(st.just(0.0), weight)
    return st.lists(weight, min_size=size, max_size=size).filter(lambda w: sum(w) > 0).map(defined.norm)


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = ("dense", "sparse", "one-hot")) -> Case:
    size = draw(st.integers(2, 7))
    p, q = (draw(distribution(size, draw(st.sampled_from(kinds)))) for _ in range(2))
    return torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)


dense = cases(("dense",))
each_rule = pytest.mark.parametrize("name", list(VALUES))
enough = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def kl(p: Tensor, q: Tensor) -> float:
    return defined.kl(p.tolist(), q.tolist())


def tv(p: Tensor, q: Tensor) -> float:
    return float((p - q).clamp_min(0).sum())


def distributions(seed: int, sparse: bool = False) -> Case:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(6, generator=generator, dtype=torch.float64) ** 3
    q = torch.rand(6, generator=generator, dtype=torch.float64) ** 3
    if sparse:
        p[torch.randint(0, 6, (2,), generator=generator)] = 0
        q[torch.randint(0, 6, (2,), generator=generator)] = 0
    return p / p.sum(), q / q.sum()


def test_every_rule_of_the_grammar_is_there_and_tested() -> None:
    assert set(rules.names()) == set(KNOBS) == set(VALUES)


class TestExactLaw:
    @each_rule
    @given(case=cases(), data=st.data())
    @enough
    def test_equals_the_definition_with_and_without_a_filter(self, name: str, case: Case, data: st.DataObject) -> None:
        p, q = case
        values = data.draw(st.sampled_from(VALUES[name]))
        p_min, top_k = data.draw(st.sampled_from([(0.0, 0), (0.1, 10), (0.2, 0), (0.0, 1), (0.05, 2)]))
        knobs = {k.name: v for k, v in zip(KNOBS[name], values, strict=True)}
        expected, rate, gap = defined.law(name, knobs, p.tolist(), q.tolist(), p_min, top_k)
        assume(gap > 1e-9)
        if p_min or top_k or RuleSpec(name, knobs).relaxed:
            law, acceptance = rules.exact_law(rules.get(spec(name, values), p_min=p_min, top_k=top_k), p, q)
        else:
            law, acceptance = rules.exact_law(spec(name, values), p, q)
            expected, rate = p.tolist(), 1 - tv(p, q)
        torch.testing.assert_close(law, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)
        assert acceptance == pytest.approx(rate, abs=1e-9)

    @each_rule
    @given(case=cases(), data=st.data())
    @enough
    def test_float32_agrees(self, name: str, case: Case, data: st.DataObject) -> None:
        """Through `rewrite`, which is what the engine runs, on logits with an arbitrary constant added."""
        p, q = case
        text = spec(name, data.draw(st.sampled_from(VALUES[name]))) + data.draw(st.sampled_from(["", ",p_min=0.15", ",top_k=2"]))
        text = text if VALUES[name] != [()] else text.replace(",", ":", 1)
        rule = rules.get(text)
        *_, gap = defined.law(name, rule.spec.knobs, p.tolist(), q.tolist(), rule.spec.p_min or 0, rule.spec.top_k or 0)
        ranks = (p[:, None] - p[None]).abs()
        assume(gap > 1e-4 and (p - (rule.spec.p_min or 0)).abs().min() > 1e-6 and (ranks[ranks > 0] > 1e-6).all())
        size = len(p)
        x = torch.arange(size)
        shift = data.draw(st.sampled_from([0.0, 3.7, -60.0, 60.0]))  # a softmax does not see it
        logits, draft = (p.log() + shift).float().expand(size, size).clone(), q.float().expand(size, size).clone()
        rule.rewrite(logits, draft, x)
        law, acceptance = law_of((logits.softmax(-1), draft), q.float(), x)
        exact, rate = rules.exact_law(rule, p, q)
        torch.testing.assert_close(law.double(), exact, atol=1e-5, rtol=0)
        assert acceptance == pytest.approx(rate, abs=1e-5)

    @each_rule
    @given(case=cases(), data=st.data())
    @enough
    def test_the_cheap_edit_the_textbook_pair_and_the_one_hot_form_agree(self, name: str, case: Case, data: st.DataObject) -> None:
        p, q = case
        rule = rules.get(spec(name, data.draw(st.sampled_from(VALUES[name]))))
        x = (p > 0).nonzero().squeeze(-1)  # a forbidden token is taken out before a rule sees it
        size = (len(x), len(p))
        rows = Rows.of(p.expand(size), q.expand(size), x)
        expected, rate = law_of(rule.rule.definition(rows), q, x)
        pair = rule.pair(rows.p, rows.q, x)
        law, acceptance = law_of(pair, q, x)
        torch.testing.assert_close(law, expected, atol=1e-9, rtol=0)
        assert acceptance == pytest.approx(rate, abs=1e-9)
        law, acceptance = law_of(one_hot(pair, x), q, x)
        torch.testing.assert_close(law, expected, atol=1e-9, rtol=0)
        if name != "fuzzy" and not name.startswith("typical"):
            assert acceptance == pytest.approx(rate, abs=1e-9)

    def test_it_takes_a_text_and_float32_and_refuses_an_unknown_rule(self) -> None:
        p, q = distributions(1)
        law, acceptance = rules.exact_law("interp:0.5", p.float(), q.float())
        assert law.dtype == torch.float64
        assert acceptance == pytest.approx(1 - 0.5 * tv(p, q), abs=1e-6)
        with pytest.raises(ValueError, match="unknown rule"):
            rules.exact_law("cactis:0.5", p, q)


class TestStrictLimit:
    @pytest.mark.parametrize("name", list(STRICT_LIMIT))
    @given(case=cases())
    @enough
    def test_is_bitwise(self, name: str, case: Case) -> None:
        p, q = (t.float() for t in case)
        size = (len(p), len(p))
        text = spec(name, (STRICT_LIMIT[name],))
        assert not RuleSpec.parse(text).relaxed
        p_, q_ = rules.get(text).pair(p.expand(size), q.expand(size), torch.arange(len(p)))
        assert torch.equal(p_, p.expand(size))
        assert torch.equal(q_, q.expand(size))

    @pytest.mark.parametrize("name", list(STRICT_LIMIT))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @given(case=dense)
    @enough
    def test_is_reached_by_the_rule_itself_too(self, name: str, dtype: torch.dtype, case: Case) -> None:
        """Not only because the engine skips a rule that cannot relax: the rule's own edit leaves every bit."""
        p, q = (t.to(dtype) for t in case)
        size = (len(p), len(p))
        x = torch.arange(len(p))
        rows = Rows.of(p.expand(size), q.expand(size), x)
        rule = rules.get(spec(name, (STRICT_LIMIT[name],))).rule
        law, acceptance = law_of(rule.definition(rows), q, x)
        close = 1e-12 if dtype is torch.float64 else 1e-5
        torch.testing.assert_close(law, p, atol=close, rtol=0)
        assert acceptance == pytest.approx(1 - tv(p, q), abs=close)
        logits, draft = rows.logits.clone(), rows.q.clone()
        edit = rule.edit(rows)
        if edit is not None:
            filtered._write(edit, x, x, logits, draft, [])
        assert torch.equal(logits, rows.logits)
        assert torch.equal(draft, rows.q)

    @pytest.mark.parametrize("name", list(STRICT_LIMIT))
    def test_is_bitwise_behind_a_filter_that_filters_nothing(self, name: str) -> None:
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(200, 8, generator=generator)
        q = torch.softmax(torch.randn(200, 8, generator=generator), -1)
        rule = rules.get(spec(name, (STRICT_LIMIT[name],)), p_min=1e-6)
        assert rule.acts
        mine, draft = logits.clone(), q.clone()
        done = rule.rewrite(mine, draft, torch.arange(200) % 8)
        assert not done.outside.any()
        assert torch.equal(mine, logits)
        assert torch.equal(draft, q)

    @pytest.mark.parametrize("name", ["fuzzy", "top-k", "typical"])
    def test_does_not_exist_for_some(self, name: str) -> None:
        assert all(RuleSpec.parse(spec(name, values)).relaxed for values in VALUES[name])


class TestInvariants:
    @pytest.mark.parametrize("name", list(LOOSER))
    @given(case=cases())
    @enough
    def test_acceptance_is_monotone_in_the_knob(self, name: str, case: Case) -> None:
        rates = [rules.exact_law(spec(name, (value,)), *case)[1] for value in LOOSER[name]]
        assert all(b >= a - 1e-12 for a, b in pairwise(rates))

    @pytest.mark.parametrize("name", ["casc-tok-v1", "casc-tok-v2", "casc-tok-v3"])
    def test_a_token_cascade_is_not_monotone(self, name: str) -> None:
        """Some pair on which a larger alpha accepts less; there are many."""

        def falls(seed: int) -> bool:
            rates = [rules.exact_law(spec(name, (a / 20,)), *distributions(seed))[1] for a in range(-1, 20)]
            return any(b < a - 1e-3 for a, b in pairwise(rates))

        assert any(falls(seed) for seed in range(40))

    @pytest.mark.parametrize(
        "name", ["lenience", "mentored-dec", "mentored", "cactus", "cactus-exact", "r-fuzzy", "casc-opt", "interp"]
    )
    @given(case=dense)
    @enough
    def test_nothing_is_accepted_less_than_under_strict(self, name: str, case: Case) -> None:
        p, q = case
        x = torch.arange(len(p))
        size = (len(p), len(p))
        for values in VALUES[name]:
            p_, q_ = rules.get(spec(name, values)).pair(p.expand(size), q.expand(size), x)
            a = (p_[x, x] / q_[x, x].clamp_min(1e-300)).clamp_max(1)
            assert bool((a >= (p / q).clamp_max(1) - 1e-12).all())

    @given(case=cases(), scale=st.floats(0.05, 1.0))
    @enough
    def test_lenience_bounds_every_token_and_the_divergence(self, case: Case, scale: float) -> None:
        p, q = case
        law, acceptance = rules.exact_law(f"lenience:{scale!r}", p, q)
        assert bool((law <= p / scale + 1e-12).all())
        assert kl(law, p) <= math.log(1 / scale) + 1e-9
        assert acceptance == pytest.approx(float(torch.minimum(p / scale, q).sum()), abs=1e-12)

    @given(case=dense, delta=st.floats(0.01, 2.0))
    @enough
    def test_cactus_bounds_the_divergence_of_each_drafted_token(self, case: Case, delta: float) -> None:
        p, q = case
        for x in range(len(p)):
            for rule, bound in ((f"cactus:{delta!r}", math.log1p(2 * delta)), (f"cactus-exact:{delta!r}", delta)):
                row = Rows.of(p[None], q[None], torch.tensor([x]))
                h = rules.get(rule).rule.definition(row)[0][0]
                assert float(h.sum()) == pytest.approx(1.0, abs=1e-12)
                assert kl(h, p) <= bound + 1e-9

    @given(case=dense, budget=st.floats(0.01, 1.0), seed=st.integers(0, 2**31))
    @enough
    def test_mentored_uses_its_budget_and_no_other_law_accepts_more(self, case: Case, budget: float, seed: int) -> None:
        p, q = case
        law, acceptance = rules.exact_law(f"mentored:{budget!r}", p, q)
        assert kl(p, law) <= budget + 1e-9
        if kl(p, q) > budget * (1 + 1e-6):
            assert kl(p, law) == pytest.approx(budget, abs=1e-7)
        assert acceptance == pytest.approx(1 - tv(law, q), abs=1e-9)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):  # candidates near the optimum and anywhere
            noise = torch.rand(len(p), generator=generator, dtype=torch.float64)
            other = torch.lerp(law, noise / noise.sum(), float(torch.rand((), generator=generator)) ** 3)
            if kl(p, other) <= budget:
                assert 1 - tv(other, q) <= acceptance + 1e-9

    @given(case=cases(), threshold=st.floats(0.01, 0.8))
    @enough
    def test_r_fuzzy_is_one_of_the_two_and_accepts_at_least_what_fuzzy_does(self, case: Case, threshold: float) -> None:
        p, q = case
        divergence = float(jensen_shannon(p[None], q[None])[0])
        assert 0 <= divergence <= math.log(2) + 1e-12
        assert divergence == pytest.approx(defined.jsd(p.tolist(), q.tolist()), abs=1e-12)
        law, acceptance = rules.exact_law(f"r-fuzzy:{threshold!r}", p, q)
        assert acceptance >= rules.exact_law(f"fuzzy:{threshold!r}", p, q)[1] - 1e-12
        if bool((p > 0).all()):
            torch.testing.assert_close(law, q if divergence < threshold else p, atol=1e-9, rtol=0)

    def test_the_jensen_shannon_divergence_of_equal_and_of_disjoint_rows(self) -> None:
        p = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
        assert float(jensen_shannon(p, p)) == 0
        assert float(jensen_shannon(p, p.flip(-1))) == pytest.approx(math.log(2), abs=1e-6)
        # q one-hot, a = p(x): .5 [a ln(2a/(1+a)) + (1-a) ln 2 + ln(2/(1+a))] (rules.md, 4.7)
        a = 0.3
        expected = 0.5 * (a * math.log(2 * a / (1 + a)) + (1 - a) * math.log(2) + math.log(2 / (1 + a)))
        assert float(jensen_shannon(torch.tensor([[a, 1 - a]]), torch.tensor([[1.0, 0.0]]))) == pytest.approx(expected, abs=1e-6)

    @given(case=dense, alpha=st.integers(-500, 1000).map(lambda a: a / 1000))
    @enough
    def test_a_cascade_is_reducible_and_off_its_set_stricter_than_strict(self, case: Case, alpha: float) -> None:
        p, q = case
        x = torch.arange(len(p))
        size = (len(p), len(p))
        rows = Rows.of(p.expand(size), q.expand(size), x)
        for name in ("casc-chow", "casc-diff", "casc-opt", "casc-tok-v1", "casc-tok-v2", "casc-tok-v3"):
            rule = rules.get(f"{name}:{alpha!r}")
            pi = rule.rule.definition(rows)[0][0]
            assert float(pi.sum()) == pytest.approx(1.0, abs=1e-9)
            law, acceptance = rules.exact_law(rule, p, q)
            torch.testing.assert_close(law, pi, atol=1e-9, rtol=0)
            assert acceptance == pytest.approx(1 - tv(pi, q), abs=1e-9)
            if "tok" in name:
                member = defined.trusted_set(name, p.tolist(), q.tolist(), alpha, defined.Gaps())
                a = (pi / q).clamp_max(1)
                for y, inside in enumerate(member):
                    assert a[y] == pytest.approx(1.0) if inside else a[y] <= (p / q)[y] + 1e-9
        torch.testing.assert_close(rules.exact_law("casc-tok-v3:1", p, q)[0], q, atol=1e-9, rtol=0)

    @given(case=dense, other=dense, eps=st.floats(0, 1), delta=st.floats(0, 0.99))
    @enough
    def test_typical_takes_the_argmax_and_ignores_the_draft(self, case: Case, other: Case, eps: float, delta: float) -> None:
        p, q = case
        x = torch.arange(len(p))
        size = (len(p), len(p))
        rule = rules.get(f"typical:eps={eps!r},delta={delta!r}")

        def accepted(draft: Tensor) -> Tensor:
            p_, q_ = rule.pair(p.expand(size), draft.expand(size), x)
            return (q_[x, x] > 0) & (p_[x, x] >= q_[x, x])

        assert bool(accepted(q)[p.argmax()])
        if len(other[1]) == len(p):
            assert torch.equal(accepted(q), accepted(other[1]))
        for tighter in (f"typical:eps={eps + 0.1!r},delta={delta!r}", f"typical:eps={eps!r},delta={delta + 0.1!r}"):
            assert rules.exact_law(tighter, p, q)[1] <= rules.exact_law(rule, p, q)[1] + 1e-12

    @given(case=dense, w=st.floats(0, 1))
    @enough
    def test_interp_moves_by_w(self, case: Case, w: float) -> None:
        p, q = case
        law, _ = rules.exact_law(f"interp:{w!r}", p, q)
        assert tv(law, p) == pytest.approx(w * tv(p, q), abs=1e-9)


class TestFilter:
    @pytest.mark.parametrize("text", list(every_spec()))
    @pytest.mark.parametrize("seed", range(3))
    def test_a_filtered_token_is_neither_accepted_nor_resampled_at_its_position(self, text: str, seed: int) -> None:
        p, q = distributions(seed)
        x = torch.arange(6)
        rule = rules.get(text, p_min=0.1, top_k=2)
        p_, _ = rule.pair(p.expand(6, 6), q.expand(6, 6), x)
        rank = (p[None] > p[:, None]).sum(-1)
        outside = (p < 0.1) | (rank >= 2)
        assert outside.any()
        assert not outside.all()
        assert bool((p_[x, x][outside] == 0).all())
        torch.testing.assert_close(p_.sum(-1), torch.ones(6, dtype=torch.float64), atol=1e-9, rtol=0)

    @pytest.mark.parametrize("text", list(every_spec()))
    @pytest.mark.parametrize("seed", range(5))
    def test_a_forbidden_token_is_never_emitted(self, text: str, seed: int) -> None:
        """A mixture has mass where p = 0; neither the rule nor the filter may let it out."""
        p, q = distributions(seed, sparse=True)
        for rule in (rules.get(text), rules.get(text, p_min=0.2, top_k=1)):
            law, _ = rules.exact_law(rule, p, q)
            assert float(law[p == 0].sum()) == 0
            assert float(law.sum()) == pytest.approx(1.0, abs=1e-9)

    def test_the_default_rank_follows_from_the_default_probability(self) -> None:
        """p(x) >= 0.1 leaves room for at most 8 more probable tokens, so top_k = 10 only acts with a smaller p_min."""
        p, q = torch.full((1, 12), 1 / 12, dtype=torch.float64), torch.full((1, 12), 1 / 12, dtype=torch.float64)
        p[0, :11] += torch.linspace(0, 1e-6, 11, dtype=torch.float64)
        p /= p.sum()
        x = torch.tensor([11])
        assert rules.get("interp:1,top_k=10").pair(p, q, x)[0][0, 11] == 0
        assert rules.get("interp:1,top_k=12").pair(p, q, x)[1][0, 11] > 0
        assert rules.get("interp:1,p_min=0.1").pair(p, q, x)[0][0, 11] == 0

    @pytest.mark.parametrize("text", list(every_spec()))
    def test_a_token_with_all_of_the_mass_is_inside(self, text: str) -> None:
        p, q = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.3, 0.4, 0.3]])
        p_, _ = rules.get(text, p_min=1.0, top_k=1).pair(p, q, torch.tensor([1]))
        assert p_[0].tolist() == [0, 1, 0]

    @pytest.mark.parametrize("name", [n for n in VALUES if n != "strict"])
    def test_above_its_entropy_limit_a_rule_is_strict(self, name: str) -> None:
        p, q = distributions(4)
        entropy = float(-(p * p.log()).sum())
        text = spec(name, VALUES[name][-1])
        loose, tight = (rules.get(f"{text},p_min=0.1,h_max={h}") for h in (entropy + 0.01, entropy - 0.01))
        torch.testing.assert_close(rules.exact_law(tight, p, q)[0], p, atol=1e-12, rtol=0)
        assert tv(rules.exact_law(loose, p, q)[0], p) > 1e-3


class TestRewrite:
    @each_rule
    def test_chunks_and_row_subsets_change_nothing_and_the_logits_come_back(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        n, v = 40, 11
        logits = torch.randn(n, v, generator=generator) * 2
        logits[torch.rand(n, v, generator=generator) < 0.2] = -torch.inf
        q = torch.softmax(torch.randn(n, v, generator=generator), -1)
        x = torch.multinomial(q, n, generator=generator)[:, 0] if n == v else torch.multinomial(q, 1, generator=generator)[:, 0]
        index = torch.tensor([0, 1, 2, 7, 8, 11, 30, 31, 32, 39])
        rule = rules.get(spec(name, VALUES[name][len(VALUES[name]) // 2]), p_min=0.05)
        results = []
        for elements in (1, 3 * v, 1 << 20):
            monkeypatch.setattr(filtered, "CPU_CHUNK", elements)
            mine, draft = logits.clone(), q.clone()
            done = rule.rewrite(mine, draft, x, index)
            results.append((mine.clone(), draft, done.outside))
            others = torch.ones(n, dtype=torch.bool)
            others[index] = False
            assert torch.equal(mine[others], logits[others])
            assert torch.equal(draft[others], q[others])
            done.restore(mine)
            assert torch.equal(mine, logits)
        for mine, draft, outside in results[1:]:
            torch.testing.assert_close(mine.softmax(-1), results[0][0].softmax(-1), atol=1e-6, rtol=0)
            torch.testing.assert_close(draft, results[0][1], atol=1e-6, rtol=1e-5)
            assert torch.equal(outside, results[0][2])
        assert bool(results[0][2].any())

    def test_an_accepted_token_may_have_a_probability_below_float32(self) -> None:
        """Allowed by the target, though exp underflows: an accept-all rule still accepts it for certain."""
        logits = torch.tensor([[0.0, -200.0, -1.0]])
        q = torch.tensor([[0.1, 0.8, 0.1]])
        accept_all = (
            "interp:1",
            "fuzzy:inf",
            "r-fuzzy:inf",
            "casc-opt:inf",
            "mentored:inf",
            "casc-tok-v3:1",
            "lenience:0",
            "mentored-dec:1",
        )
        for text in accept_all:
            mine, draft = logits.clone(), q.clone()
            rules.get(text).rewrite(mine, draft, torch.tensor([1]))
            assert float(mine.softmax(-1)[0, 1] / draft[0, 1]) >= 1

    @pytest.mark.parametrize("name", [n for n in VALUES if n != "strict"])
    def test_no_knob_of_the_range_breaks_float32(self, name: str) -> None:
        """What the front end lets through must not raise in the worker, nor write anything a kernel cannot compare."""
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(64, 12, generator=generator) * 4
        q = torch.softmax(torch.randn(64, 12, generator=generator) * 4, -1)
        q[::2] = torch.where(q[::2] < 0.05, 0.0, q[::2])
        q[::7] = torch.eye(12)[:10]
        q /= q.sum(-1, keepdim=True)
        x = q.argmax(-1)
        for value in (-math.inf, -1e300, -1e-300, 0.0, 1e-300, 1e-8, 0.2, 1.0, 1e39, 1e300, math.inf):
            knobs = KNOBS[name]
            if any(not k.low <= value <= k.high or (k.whole and not float(value).is_integer()) for k in knobs):
                continue
            for rule in (rules.get(RuleSpec(name, {k.name: value for k in knobs}), p_min=m) for m in (0.0, 0.1)):
                mine, draft = logits.clone(), q.clone()
                rule.rewrite(mine, draft, x)
                assert bool(torch.isfinite(draft).all())
                assert bool((draft >= 0).all())
                assert not bool(mine.isnan().any())
                assert bool((mine.amax(-1) > -torch.inf).all())

    def test_a_rule_that_fails_gives_the_logits_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits, q = torch.randn(8, 6), torch.full((8, 6), 1 / 6)
        rule = rules.get("cactus:0.5", p_min=0.3)
        monkeypatch.setattr(filtered, "CPU_CHUNK", 6)
        calls = []

        def edit(self: object, rows: Rows) -> None:
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("in the middle")

        monkeypatch.setattr(type(rule.rule), "edit", edit)
        mine = logits.clone()
        with pytest.raises(RuntimeError, match="in the middle"):
            rule.rewrite(mine, q, logits.argmax(-1))
        assert torch.equal(mine, logits)

    @pytest.mark.parametrize("text", list(every_spec()))
    def test_the_caller_s_rows_are_not_written_to(self, text: str) -> None:
        p, q = (t.float()[None] for t in distributions(1))
        before = p.clone(), q.clone()
        for rule in (rules.get(text), rules.get(text, p_min=0.3)):
            rule.pair(p, q, torch.tensor([2]))
        assert torch.equal(p, before[0])
        assert torch.equal(q, before[1])
