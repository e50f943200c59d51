"""The V1 seam on vLLM's own `rejection_sample`, without an engine: laws, forced rows, masks, phases and what stays untouched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentguard.events import RowFlag
from agentguard.rulespec import RuleSpec
from engine_plugins import rules
from engine_plugins.vllm.phase import ThinkMarkers
from engine_plugins.vllm.seam_v1 import SeamV1
from tests import stock_kernels
from tests.test_rules import distributions, enumerate_law

stock = stock_kernels.stock.rejection_sample
V, END = 6, 5


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square test; what cannot happen must not have happened."""
    possible = expected > 0
    assert observed[~possible].sum() == 0
    observed, expected = observed[possible], expected[possible]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2), statistic.float() / 2))


class FakeTap:
    wanted = True

    def __init__(self) -> None:
        self.frames: list[Any] = []

    def publish(self, t: float, step: int, requests: list[Any]) -> None:
        self.frames.append(requests)


def call(
    specs: list[str], p: torch.Tensor, q: torch.Tensor | None, drafts: torch.Tensor, *, k: int = 1, seed: int = 0,
    temperature: float = 1.0, logits: torch.Tensor | None = None, prompt: list[int] | None = None, phase: str = "both",
    markers: ThinkMarkers | None = None,
) -> tuple[torch.Tensor, FakeTap, torch.Tensor]:  # fmt: skip
    """One step of len(specs) requests with k drafts each; p, q: [rows, V].

    Returns the output, the tap, and the logits as the caller holds them.
    """
    n = len(specs)
    ids = [f"r{i}" for i in range(n)]
    params = [SimpleNamespace(extra_args={"ag_rule": s, "ag_phase": phase}) for s in specs]
    requests = {
        i: SimpleNamespace(sampling_params=s, prompt_token_ids=prompt or [], output_token_ids=[])
        for i, s in zip(ids, params, strict=True)
    }
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=ids), requests=requests)
    tap = FakeTap()
    seam = SeamV1(stock, runner, default=RuleSpec("strict"), markers=markers, tap=tap)  # type: ignore[arg-type]
    greedy = temperature == 0
    metadata = SimpleNamespace(all_greedy=greedy, all_random=not greedy, temperature=torch.full((n,), temperature), generators={})
    held = p.float().log() if logits is None else logits
    torch.manual_seed(seed)
    counts = [k] * n
    out = seam(
        drafts.to(torch.int32), counts, k, torch.arange(k, n * k + 1, k, dtype=torch.int32), None if q is None else q.float(), held,
        torch.zeros((n, 1), dtype=torch.int32), metadata,
    )  # fmt: skip
    return out, tap, held


@pytest.mark.parametrize("spec", ["strict", "cactus:0.3", "interp:w=0.5", "cactus:0.3,p_min=0.1,top_k=3"])
def test_the_stock_kernel_on_our_rows_draws_from_the_exact_law(spec: str) -> None:
    """Chi-square over 20,000 single-draft requests, p > 1e-3; the same test rejects strict's law for a relaxed rule."""
    n = 20_000
    p, q = distributions(11)
    generator = torch.Generator().manual_seed(2)
    drafts = torch.multinomial(q, n, replacement=True, generator=generator)
    out, _, _ = call([spec] * n, p.repeat(n, 1), q.repeat(n, 1), drafts, seed=5)
    counts = torch.bincount(out[:, 0].long(), minlength=V).double()
    law, acceptance = enumerate_law(p, q, spec)
    assert p_value(counts, law * n) > 1e-3
    accepted = (out[:, 1] >= 0).double().mean()
    assert float(accepted) == pytest.approx(acceptance, abs=4 * (0.25 / n) ** 0.5)
    if spec != "strict":
        assert p_value(counts, p * n) < 1e-3


def test_strict_is_passed_on_untouched() -> None:
    p, q = distributions(3)
    drafts = torch.multinomial(q, 64, replacement=True, generator=torch.Generator().manual_seed(1))
    with_seam, _, _ = call(["strict"] * 64, p.repeat(64, 1), q.repeat(64, 1), drafts, seed=9)
    torch.manual_seed(9)
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(64), generators={})
    alone = stock(
        drafts.to(torch.int32), [1] * 64, 1, torch.arange(1, 65, dtype=torch.int32), q.float().repeat(64, 1),
        p.float().log().repeat(64, 1), torch.zeros((64, 1), dtype=torch.int32), metadata,
    )  # fmt: skip
    assert torch.equal(with_seam, alone)


def test_strict_rows_of_a_mixed_batch_draw_what_they_draw_alone() -> None:
    p, q = distributions(3)
    drafts = torch.multinomial(q, 64, replacement=True, generator=torch.Generator().manual_seed(1))
    rows = (p.repeat(64, 1), q.repeat(64, 1))
    mixed, _, held = call(["strict", "interp:w=1"] * 32, *rows, drafts, seed=9)
    strict, _, _ = call(["strict"] * 64, *rows, drafts, seed=9)
    assert torch.equal(mixed[::2], strict[::2])
    assert bool((mixed[1::2, 1] >= 0).all())
    assert torch.equal(held, p.float().log().repeat(64, 1)), "the caller's logits are reported as logprobs and must not change"


@pytest.mark.parametrize("spec", ["interp:w=1", "cactus:delta=inf", "cactus:0.5,p_min=0.1,top_k=10"])
def test_a_forced_row_emits_its_forced_token_under_every_rule(spec: str) -> None:
    p, q = distributions(3)
    logits = p.float().log().repeat(32, 1)
    logits[:, 4] = 1e9
    drafts = torch.arange(32) % V
    out, tap, _ = call([spec] * 32, p.repeat(32, 1), q.repeat(32, 1), drafts, logits=logits)
    assert out[:, 0].tolist() == [4] * 32
    assert all(r.rows.flags[0] & RowFlag.FORCED and r.rule_effective == "strict" for r in tap.frames[0])


def test_a_masked_token_is_never_emitted() -> None:
    p = torch.tensor([0.0, 0.5, 0.5, 0, 0, 0], dtype=torch.float64).repeat(64, 1)
    q = torch.full((64, V), 1 / V)
    out, tap, _ = call(["interp:w=1"] * 64, p, q, torch.zeros(64, dtype=torch.long))
    assert set(out[:, 0].tolist()) <= {1, 2}
    assert all(r.rows.flags[0] & RowFlag.MASKED for r in tap.frames[0])


def test_without_draft_probabilities_a_rule_falls_back_to_strict_and_says_so() -> None:
    p, _ = distributions(3)
    n = 5_000
    out, tap, _ = call(["interp:w=1"] * n, p.repeat(n, 1), None, torch.full((n,), 1))
    assert float((out[:, 1] >= 0).double().mean()) == pytest.approx(float(p[1]), abs=0.03)
    assert {(r.rule_asked, r.rule_effective) for r in tap.frames[0]} == {("interp:w=1", "strict")}


def test_a_greedy_request_is_the_argmax_chain() -> None:
    p, q = distributions(3)
    drafts = torch.arange(V)
    out, tap, _ = call(["cactus:delta=inf"] * V, p.repeat(V, 1), q.repeat(V, 1), drafts, temperature=0.0)
    assert out[:, 0].tolist() == [int(p.argmax())] * V
    assert all(r.rows.flags[0] & RowFlag.GREEDY for r in tap.frames[0])


def test_relaxation_is_off_outside_the_asked_phase() -> None:
    """The third draft is verified behind a drafted end marker, so under phase=think it is judged strictly."""
    p = torch.full((3, V), 1 / V, dtype=torch.float64)
    p[:, 0] += 0.01  # the argmax is not the marker
    p /= p.sum(-1, keepdim=True)
    q = torch.full((3, V), 1 / V)
    drafts = torch.tensor([1, END, 2])
    markers = ThinkMarkers((4,), (END,))
    for phase, relaxed in (("think", [True, True, False]), ("answer", [False, False, True]), ("both", [True] * 3)):
        _, tap, _ = call(["cactus:0.5"], p, q, drafts, k=3, prompt=[4], phase=phase, markers=markers)
        assert [bool(f & RowFlag.RELAXED) for f in tap.frames[0][0].rows.flags] == relaxed


def test_relaxation_is_off_where_the_target_would_close_the_trace() -> None:
    p = torch.full((1, V), 0.1, dtype=torch.float64)
    p[0, END] = 0.5
    q = torch.full((1, V), 1 / V)
    _, tap, _ = call(["cactus:0.5"], p, q, torch.tensor([1]), prompt=[4], phase="think", markers=ThinkMarkers((4,), (END,)))
    flags = tap.frames[0][0].rows.flags[0]
    assert flags & RowFlag.END_OF_THINK
    assert not flags & RowFlag.RELAXED


def test_without_known_markers_phase_think_relaxes_nothing() -> None:
    p, q = distributions(3)
    _, tap, _ = call(["cactus:0.5"], p[None], q[None], torch.tensor([1]), phase="think", markers=None)
    assert tap.frames[0][0].rule_effective == "strict"


def test_telemetry_describes_the_true_rows_not_the_substituted_ones() -> None:
    p, q = distributions(7)
    out, tap, _ = call(["interp:w=1,p_min=0.1"], p.repeat(3, 1), q.repeat(3, 1), torch.tensor([0, 1, 2]), k=3)
    (request,) = tap.frames[0]
    rows = request.rows
    assert rows.token == [0, 1, 2]
    assert rows.p == pytest.approx(p[:3].tolist(), abs=1e-6)
    assert rows.q == pytest.approx(q[:3].tolist(), abs=1e-6)
    assert rows.rank == [int((p > p[x]).sum()) for x in range(3)]
    assert rows.strict == pytest.approx([min(1.0, float(p[x] / q[x])) for x in range(3)], abs=1e-5)
    assert request.accepted == int((out[0] >= 0).sum()) - 1
    assert [bool(f & RowFlag.LOW_SUPPORT) for f in rows.flags] == [float(p[x]) < 0.1 for x in range(3)]
    assert [bool(f & RowFlag.ACCEPTED) for f in rows.flags] == [i < request.accepted for i in range(3)]


def test_rules_run_in_float32_close_to_float64() -> None:
    for seed in range(20):
        p, q = distributions(seed)
        x = torch.tensor([seed % V])
        for spec in ("cactus:0.3", "interp:w=0.3"):
            (exact, _), _ = rules.get(spec).pair(p[None], q[None], x)
            (single, _), _ = rules.get(spec).pair(p[None].float(), q[None].float(), x)
            torch.testing.assert_close(single.double(), exact, atol=1e-5, rtol=0)
