"""The V1 seam on vLLM's own `rejection_sample`, without an engine: laws, forced rows, masks, phases and what stays untouched."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentguard.events import Fate, RowFlag
from agentguard.rulespec import RuleSpec
from engine_plugins import rules
from engine_plugins.rules.base import Rows
from engine_plugins.vllm.observe import Coins, Rounds, describe
from engine_plugins.vllm.phase import ThinkMarkers
from engine_plugins.vllm.seam_v1 import SeamV1
from tests import stock_kernels
from tests.chi_square import p_value
from tests.test_rules import distributions, every_spec, tv

stock = stock_kernels.stock.rejection_sample
V, END = 6, 5


class FakeTap:
    wanted = True

    def __init__(self) -> None:
        self.frames: list[Any] = []

    def publish(self, t: float, step: int, rounds: Rounds) -> None:
        self.frames.append(rounds.packed(t, "e", step).unpacked().requests)


def call(
    specs: list[str], p: torch.Tensor, q: torch.Tensor | None, drafts: torch.Tensor, *, k: int | list[int] = 1, seed: int = 0,
    temperature: float | list[float] = 1.0, logits: torch.Tensor | None = None, prompt: list[int] | None = None,
    phase: str = "both", markers: ThinkMarkers | None = None, function: Callable[..., torch.Tensor] = stock,
) -> tuple[torch.Tensor, FakeTap, torch.Tensor]:  # fmt: skip
    """One step of len(specs) requests with k drafts each, no default filter; p, q: [rows, V].

    Returns the output, the tap, and the logits as the caller holds them.
    """
    n = len(specs)
    ids = [f"r{i}" for i in range(n)]
    texts = [str(RuleSpec.parse(s).as_it_stands()) for s in specs]
    params = [SimpleNamespace(extra_args={"ag_rule": s, "ag_phase": phase}) for s in texts]
    requests = {
        i: SimpleNamespace(sampling_params=s, prompt_token_ids=prompt or [], output_token_ids=[])
        for i, s in zip(ids, params, strict=True)
    }
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=ids), requests=requests)
    tap = FakeTap()
    coins = Coins.record(stock_kernels.stock)
    seam = SeamV1(function, runner, default=RuleSpec("strict"), markers=markers, tap=tap, coins=coins)  # type: ignore[arg-type]
    counts = [k] * n if isinstance(k, int) else k
    temperatures = torch.tensor([temperature] * n if isinstance(temperature, float) else temperature)
    greedy = temperatures == 0
    metadata = SimpleNamespace(
        all_greedy=bool(greedy.all()), all_random=not bool(greedy.any()), temperature=temperatures, generators={}
    )
    held = p.float().log() if logits is None else logits
    torch.manual_seed(seed)
    ends = torch.tensor(counts).cumsum(0).int()
    out = seam(
        drafts.to(torch.int32), counts, max(counts), ends, None if q is None else q.float(), held,
        torch.zeros((n, 1), dtype=torch.int32), metadata,
    )  # fmt: skip
    return out, tap, held


def draws_of(p: torch.Tensor, q: torch.Tensor, n: int, seed: int, rewrite: Callable[..., Any]) -> tuple[torch.Tensor, float]:
    """Counts of the first emitted token over n one-draft requests of the stock function, and the share of accepted drafts."""
    x = torch.multinomial(q, n, replacement=True, generator=torch.Generator().manual_seed(seed))
    logits, draft = p.float().log().repeat(n, 1), q.float().repeat(n, 1)
    rewrite(logits, draft, x)
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(n), generators={})
    torch.manual_seed(seed + 1)
    out = stock(
        x.int(),
        [1] * n,
        1,
        torch.arange(1, n + 1, dtype=torch.int32),
        draft,
        logits,
        torch.zeros((n, 1), dtype=torch.int32),
        metadata,
    )
    return torch.bincount(out[:, 0].long(), minlength=V).double(), float((out[:, 1] >= 0).double().mean())


LAWS = [*every_spec(), *(text + ("," if ":" in text else ":") + "p_min=0.1,top_k=3" for text in every_spec())]
DRAWS = 200_000


@pytest.mark.parametrize("text", LAWS)
def test_the_stock_function_on_our_rows_draws_from_the_exact_law(text: str) -> None:
    """Chi-square, p > 1e-3 after Bonferroni over all of them."""
    p, q = distributions(11)
    counts, accepted = draws_of(p, q, DRAWS, 5, rules.get(text).rewrite)
    law, acceptance = rules.exact_law(text, p, q)
    assert p_value(counts, law * DRAWS) > 1e-3 / len(LAWS)
    assert accepted == pytest.approx(acceptance, abs=4.5 * (0.25 / DRAWS) ** 0.5)
    if tv(law, p) > 0.02:
        assert p_value(counts, p * DRAWS) < 1e-9, "the test cannot tell this law from strict"


def test_the_same_test_rejects_a_cactus_that_leaves_its_residual_at_strict() -> None:
    p = torch.tensor([0.02, 0.3, 0.25, 0.2, 0.15, 0.08], dtype=torch.float64)
    q = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64)
    rule = rules.get("cactus:0.25")
    law, acceptance = rules.exact_law(rule, p, q)
    assert p_value(draws_of(p, q, DRAWS, 5, rule.rewrite)[0], law * DRAWS) > 1e-3

    def accept_only(logits: torch.Tensor, draft: torch.Tensor, x: torch.Tensor) -> None:
        rows = Rows(logits, draft, x)
        g = rule.rule.definition(rows)[0].gather(-1, x[:, None])[:, 0]
        draft[torch.arange(len(x)), x] = rows.px / (g / rows.qx).clamp_max(1)

    counts, accepted = draws_of(p, q, DRAWS, 5, accept_only)
    assert accepted == pytest.approx(acceptance, abs=4.5 * (0.25 / DRAWS) ** 0.5)
    assert p_value(counts, law * DRAWS) < 1e-3 / len(LAWS)


FORBIDDING = (
    torch.tensor([0.0, 0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64),
    torch.tensor([0.4, 0.05, 0.25, 0.1, 0.1, 0.1], dtype=torch.float64),
)


@pytest.mark.parametrize("text", LAWS)
def test_the_seam_draws_from_the_exact_law(text: str) -> None:
    """Here where the target forbids what the draft proposes (top-k, top-p, a grammar)."""
    n = 2_000
    p, q = FORBIDDING
    drafts = torch.multinomial(q, n, replacement=True, generator=torch.Generator().manual_seed(2))
    out, _, _ = call([text] * n, p.repeat(n, 1), q.repeat(n, 1), drafts, seed=5)
    law, _ = rules.exact_law(text, p, q)
    assert p_value(torch.bincount(out[:, 0].long(), minlength=V).double(), law * n) > 1e-3 / len(LAWS)


def test_uneven_counts_and_greedy_neighbours() -> None:
    """Three requests: 2 drafts, no draft, 3 drafts at temperature 0."""
    p, q = distributions(7)
    best = int(p.argmax())
    drafts = torch.tensor([1, 2, best, best, (best + 1) % V])
    out, tap, _ = call(
        ["interp:w=1", "interp:w=1", "cactus:inf"], p.repeat(5, 1), q.repeat(5, 1), drafts, k=[2, 0, 3], temperature=[1.0, 1.0, 0.0]
    )
    first, last = tap.frames[0]
    assert out[0].tolist() == [1, 2, 0, -1]
    assert (first.accepted, first.rows.token) == (2, [1, 2])
    assert out[1].tolist() == [0, -1, -1, -1], "a request without drafts gets its bonus token"
    assert out[2].tolist() == [best, best, best, -1]
    assert last.rows.strict == [1.0, 1.0, 0.0]
    assert last.rule_effective == "strict"
    assert all(f & RowFlag.GREEDY for f in last.rows.flags)


def test_a_row_without_a_drafted_token_says_nothing_about_token_0() -> None:
    p, q = (t.float().repeat(2, 1) for t in distributions(7))
    described = describe(p.log(), q, torch.tensor([0, -1]), torch.tensor([False, False]))
    assert described.p.tolist() == [pytest.approx(float(p[0, 0])), 0.0]
    assert described.strict[1] == 0
    columns = [
        torch.tensor([0, -1]), described.p, described.q, described.rank, described.strict, torch.full((2,), 0.5),
        torch.tensor([0, int(RowFlag.MASKED)]), described.end, described.end,
    ]  # fmt: skip
    rounds = Rounds(["r"], ["strict"], [2], [1], torch.stack([c.float() for c in columns]).numpy())
    (request,) = rounds.packed(0.0, "e", 1).unpacked().requests
    assert request.rows.token == [0, -1]
    assert (request.rows.fate[1], request.rows.would[1]) == (Fate.MASKED, False)


def test_the_logits_come_back_when_anything_fails() -> None:
    p, q = distributions(7)

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("kernel")

    broken.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    held = p.float().log().repeat(4, 1)
    with pytest.raises(RuntimeError, match="kernel"):
        call(["cactus:1,p_min=0.2"] * 4, p.repeat(4, 1), q.repeat(4, 1), torch.arange(4), logits=held, function=broken)
    assert torch.equal(held, p.float().log().repeat(4, 1))


def test_an_id_that_is_used_again_gets_the_rule_of_its_new_request() -> None:
    seam = SeamV1(stock, SimpleNamespace(requests={}), default=RuleSpec("strict"), markers=None, tap=None, coins=Coins(stock))
    for rule in ("cactus:delta=1", "interp:w=1"):
        params = SimpleNamespace(extra_args={"ag_rule": rule})
        seam._runner.requests["r"] = SimpleNamespace(sampling_params=params, prompt_token_ids=[])
        assert seam._request("r") is seam._request("r")
        assert str(seam._request("r").params.rule).startswith(rule)


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


@pytest.mark.parametrize("spec", LAWS)
def test_a_forced_row_emits_its_forced_token_under_every_rule(spec: str) -> None:
    p, q = distributions(3)
    logits = p.float().log().repeat(32, 1)
    logits[:, 4] = 1e9
    drafts = torch.arange(32) % V
    out, tap, _ = call([spec] * 32, p.repeat(32, 1), q.repeat(32, 1), drafts, logits=logits)
    assert out[:, 0].tolist() == [4] * 32
    assert all(r.rows.flags[0] & RowFlag.FORCED and r.rule_effective == "strict" for r in tap.frames[0])


@pytest.mark.parametrize("spec", LAWS)
def test_a_masked_token_is_never_emitted(spec: str) -> None:
    p = torch.tensor([0.0, 0.5, 0.4, 0.1, 0, 0], dtype=torch.float64).repeat(600, 1)
    q = torch.full((600, V), 1 / V)
    out, tap, _ = call([spec] * 600, p, q, torch.arange(600) % V)
    assert set(out[:, 0].tolist()) <= {1, 2, 3}
    assert all(bool(r.rows.flags[0] & RowFlag.MASKED) == (r.rows.token[0] in (0, 4, 5)) for r in tap.frames[0])
    assert all(r.rows.fate == [Fate.MASKED] for r in tap.frames[0] if r.rows.token[0] in (0, 4, 5))


@pytest.mark.parametrize("spec", [text for text in LAWS if text.endswith("top_k=3")])
def test_a_filtered_token_is_neither_accepted_nor_resampled(spec: str) -> None:
    p, q = distributions(11)
    drafts = torch.arange(600) % V
    out, tap, _ = call([spec] * 600, p.repeat(600, 1), q.repeat(600, 1), drafts)
    outside = (p < 0.1) | ((p[None] > p[:, None]).sum(-1) >= 3)
    low = outside[drafts]
    assert low.any()
    assert not bool((out[:, 0] == drafts)[low].any())
    assert all((r.rows.fate == [Fate.LOW_SUPPORT]) == bool(outside[r.rows.token[0]]) for r in tap.frames[0])


def test_a_coin_of_zero_does_not_open_a_closed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """V1 accepts where the ratio is not below the coin, and 0 is not below 0."""
    monkeypatch.setattr(stock_kernels.stock, "generate_uniform_probs", Coins(lambda n, *_: torch.zeros(n, dtype=torch.float64)))
    p, q = distributions(3)
    logits = p.float().log().repeat(V, 1)
    logits[:, 4] = 1e9
    q = q.repeat(V, 1)
    out, _, _ = call(["cactus:0.3,p_min=0.1"] * V, p.repeat(V, 1), q, torch.arange(V), logits=logits)
    assert out[:, 0].tolist() == [4] * V
    logits = p.float().log().repeat(V, 1)
    logits[:, 3:] = -torch.inf
    out, _, _ = call(["cactus:0.3"] * V, p.repeat(V, 1), q, torch.arange(V), logits=logits)
    assert set(out[:, 0].tolist()) <= {0, 1, 2}


def test_each_fate_is_what_happened() -> None:
    """The counterfactual is judged on the coin that was thrown: a token is `relaxed` exactly when strict would not."""
    p, q = distributions(11)
    n, k = 500, 4
    drafts = torch.multinomial(q, n * k, replacement=True, generator=torch.Generator().manual_seed(1))
    out, tap, _ = call(["cactus:0.3,p_min=0.05"] * n, p.repeat(n * k, 1), q.repeat(n * k, 1), drafts, k=k, seed=3)
    torch.manual_seed(3)
    coins = torch.rand(n * k, dtype=torch.float64).float().view(n, k)
    seen = set()
    for i, request in enumerate(tap.frames[0]):
        rows = request.rows
        assert request.accepted == int((out[i] >= 0).sum()) - 1
        for j, (token, fate, would) in enumerate(zip(rows.token, rows.fate, rows.would, strict=True)):
            assert would == (rows.strict[j] >= float(coins[i, j]))
            if j < request.accepted:
                assert fate == (Fate.STRICT if would else Fate.RELAXED)
            elif j == request.accepted:
                assert fate == (Fate.LOW_SUPPORT if float(p[token]) < 0.05 else Fate.COIN)
            else:
                assert fate == Fate.UNREAD
            seen.add(fate)
    assert seen == {Fate.STRICT, Fate.RELAXED, Fate.LOW_SUPPORT, Fate.COIN, Fate.UNREAD}


def test_strict_verification_never_calls_a_token_relaxed() -> None:
    p, q = distributions(11)
    drafts = torch.multinomial(q, 600, replacement=True, generator=torch.Generator().manual_seed(1))
    _, tap, _ = call(["strict"] * 200, p.repeat(600, 1), q.repeat(600, 1), drafts, k=3, seed=3)
    for request in tap.frames[0]:
        assert all(f is Fate.STRICT for f in request.rows.fate[: request.accepted])
        assert all(w for w in request.rows.would[: request.accepted])
        assert all(not w for w in request.rows.would[request.accepted : request.accepted + 1])


def test_above_the_entropy_limit_a_row_is_strict_and_says_so() -> None:
    p, q = distributions(3)
    _, tap, _ = call(["interp:w=1,h_max=0.1"] * 3, p.repeat(3, 1), q.repeat(3, 1), torch.tensor([0, 1, 2]))
    assert all(r.rows.flags[0] & RowFlag.UNSURE and r.rule_effective == "strict" for r in tap.frames[0])


def test_every_rule_in_one_batch_leaves_the_strict_rows_alone() -> None:
    p, q = distributions(3)
    texts = [text for text in every_spec() if RuleSpec.parse(text).relaxed]
    mixed = [t for text in texts for t in ("strict", text)]
    n = len(mixed)
    drafts = torch.multinomial(q, n, replacement=True, generator=torch.Generator().manual_seed(1))
    out, tap, held = call(mixed, p.repeat(n, 1), q.repeat(n, 1), drafts, seed=9)
    alone, _, _ = call(["strict"] * n, p.repeat(n, 1), q.repeat(n, 1), drafts, seed=9)
    assert torch.equal(out[::2], alone[::2])
    assert torch.equal(held, p.float().log().repeat(n, 1))
    assert [r.rule_effective for r in tap.frames[0]][1::2] == [str(RuleSpec.parse(t).as_it_stands()) for t in texts]
    assert {r.rule_effective for r in tap.frames[0]} - {"strict"} == {r.rule_asked for r in tap.frames[0]} - {"strict"}


def test_without_draft_probabilities_a_rule_falls_back_to_strict_and_says_so() -> None:
    p, _ = distributions(3)
    n = 5_000
    out, tap, _ = call(["interp:w=1"] * n, p.repeat(n, 1), None, torch.full((n,), 1))
    assert float((out[:, 1] >= 0).double().mean()) == pytest.approx(float(p[1]), abs=0.03)
    assert {(r.rule_asked, r.rule_effective) for r in tap.frames[0]} == {("interp:w=1,p_min=0,top_k=0", "strict")}


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
