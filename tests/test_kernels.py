"""The Triton kernels against their twins, under Triton's interpreter: exact ranks, flags and verdicts, probabilities to 1e-6."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from agentguard.errors import ConfigError
from agentguard.events import RowFlag
from agentguard.rulespec import RuleSpec
from engine_plugins import kernels, rules
from engine_plugins.kernels import batch as words
from engine_plugins.kernels import launch, table, tuning, twin
from engine_plugins.kernels.batch import Batch, table_of
from engine_plugins.rules.exact import acceptance_of, recovered_of
from engine_plugins.vllm import observe, ranks

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here: run benchmarks/gpu_check.sh"),
]

RULES = (
    "strict:p_min=0.1", "cactus:0.25", "cactus:inf", "lenience:0.3", "mentored-dec:0.5", "interp:0.4", "interp:1",
    "typical:eps=0.09,delta=0.3", "typical:eps=0.5,delta=2", "fuzzy:0.3", "fuzzy:0.1", "r-fuzzy:0.2", "casc-chow:0.6",
    "casc-diff:0.1", "casc-opt:0.5", "casc-tok-v1:0.2", "casc-tok-v2:0.2", "casc-tok-v3:0.3", "casc-tok-v3:-0.1",
)  # fmt: skip
FILTERS = ("", "p_min=0.1,top_k=3", "h_max=1.5")


def texts(*filters: str) -> list[str]:
    out = []
    for rule in RULES:
        for extra in filters:
            out.append(rule if not extra or "p_min" in rule else rule + ("," if ":" in rule else ":") + extra)
    return list(dict.fromkeys(out))


def logits_of(n: int, v: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Target logits [n, v], draft logits [n, 1, v] and drafted tokens; every kind of row in turn."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(n, v, generator=generator) * 3
    draft = target + torch.randn(n, v, generator=generator) * 1.5
    x = torch.multinomial(draft.softmax(-1), 1, generator=generator).squeeze(-1)
    for i in range(n):
        match i % 8:
            case 1:  # one-hot at the drafted token
                target[i] = -torch.inf
                target[i, x[i]] = 3.0
            case 2:  # all equal
                target[i] = 0.5
            case 3:  # most tokens forbidden, as under top-k and a grammar
                target[i, torch.randperm(v, generator=generator)[: v - 5]] = -torch.inf
            case 4:  # far from 0
                target[i] += 250.0
            case 5:  # the drafted token is the argmax
                target[i, x[i]] = target[i].max() + 1
            case 6:  # the draft forbids most tokens
                draft[i, torch.randperm(v, generator=generator)[: v - 7]] = -torch.inf
                draft[i, x[i]] = 1.0
            case _:
                pass
    return target, draft.unsqueeze(1).contiguous(), x


def both(batch: Batch, names: list[str], end: int = -1) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], Batch]:
    """(statistics, verdict, target, draft) of kernel and twin."""
    specs = [RuleSpec.parse(n) for n in names]
    numbers = table_of([table.numbers(s) for s in specs])
    other = Batch(
        batch.target.clone(), None if batch.draft is None else batch.draft.clone(), batch.x, batch.want, batch.flags, batch.slot,
        batch.step, batch.temperature,
    )  # fmt: skip
    stats, verdict = launch.statistics(batch, numbers, end=end)
    launch.rewrite(batch, numbers, stats, verdict, sums=table.passes({int(c) for c in numbers[:, 0]}, filtered=True))
    expected, judged = twin.statistics(other, numbers, end=end)
    twin.rewrite(other, judged, [rules.get(s) for s in specs])
    return (stats, verdict), (expected, judged), other


def compare(batch: Batch, names: list[str], end: int = -1) -> torch.Tensor:
    """Kernel and twin agree; returns the verdicts."""
    before = batch.target.clone()
    (stats, verdict), (expected, judged), other = both(batch, names, end)
    assert batch.draft is not None
    assert other.draft is not None
    v = batch.vocab
    for column in (words.RANK, words.ARGMAX, words.ALLOWED, words.TOKEN, words.FLAGS):
        assert torch.equal(stats[:, column], expected[:, column]), column
    for column in (words.TOP, words.LOG_Z, words.LX, words.ENTROPY):
        torch.testing.assert_close(stats[:, column], expected[:, column], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats[:, words.PX], expected[:, words.PX], atol=1e-6, rtol=0)
    torch.testing.assert_close(stats[:, words.END], expected[:, words.END], atol=1e-6, rtol=0)
    reads = (batch.want & words.WANT_DRAFT) != 0
    torch.testing.assert_close(stats[reads][:, words.QX], expected[reads][:, words.QX], atol=1e-6, rtol=0)
    assert torch.equal(verdict, judged)
    untouched = verdict == 0
    assert torch.equal(batch.target[untouched], before[untouched]), "a row no rule judges keeps every bit"
    pairs = []
    for one in (batch, other):
        assert one.draft is not None
        draft = one.draft[one.slot, one.step, :v] / one.temperature[one.slot].unsqueeze(-1)
        pairs.append((one.target[:, :v].double().softmax(-1), draft.double().softmax(-1)))
    accepted = [acceptance_of(pair, batch.x.clamp_min(0)) for pair in pairs]
    torch.testing.assert_close(accepted[0], accepted[1], atol=1e-6, rtol=0)
    rejects = accepted[1] < 1 - 1e-6
    recovered = [recovered_of(pair)[rejects] for pair in pairs]
    torch.testing.assert_close(recovered[0], recovered[1], atol=1e-6, rtol=0)
    return judged


@pytest.mark.parametrize("v", [320, 49_152, 151_936])
def test_every_rule_s_pair_is_its_twin_s(v: int) -> None:
    """All rules in one launch, each in rows of every kind; at the large vocabularies fewer of them."""
    names = texts("", "p_min=0.1,top_k=3") * 3 if v == 320 else texts("")[:: 2 if v > 100_000 else 1]
    target, draft, x = logits_of(len(names), v, seed=v)
    verdicts = compare(Batch.of(target, x, draft), names)
    assert {words.INSIDE} <= set(verdicts.tolist())
    assert v > 320 or {0, words.INSIDE, words.OUTSIDE} == set(verdicts.tolist())


IN_TORCH = ("mentored:0.2", "cactus-exact:0.25", "top-k:3")


def residual_of(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """[rows, V] what vLLM draws from after a rejection, up to a factor: its `_resample_kernel` in float32, step by step."""

    def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
        top = logits.amax(-1, keepdim=True)
        return logits - (top + (logits - top).exp().sum(-1, keepdim=True).log())

    log_p, log_q = log_probabilities(target), log_probabilities(draft)
    ratio = (log_q - log_p).exp()
    return torch.where(ratio < 1, log_p + torch.log1p(-ratio), -torch.inf).exp()


def test_a_forbidden_token_has_no_probability_under_any_rule() -> None:
    """Not even by rounding: where p' = q' in the reals, float32 leaves a difference, and vLLM would draw from it. The draft is sure
    of a token that a grammar forbids, the drafted token is another one."""
    names = [n for n in texts("", "p_min=0.1,top_k=3") for _ in range(3)]
    names += [f"{n}{extra}" for n in IN_TORCH for extra in ("", ",p_min=0.1,top_k=3") for _ in range(3)]
    names += ["interp:0.9999999"] * 3
    n, v, allowed = len(names), 512, 100
    generator = torch.Generator().manual_seed(1)
    target, draft = (torch.randn(n, v, generator=generator) * 2 for _ in range(2))
    target[:, allowed:] = -torch.inf
    draft[:, allowed + 9] += 13.0
    x = torch.randint(0, allowed, (n,), generator=generator)
    specs = [RuleSpec.parse(name) for name in names]
    numbers = table_of([table.numbers(s) for s in specs])
    batch = Batch.of(target.clone(), x, draft.unsqueeze(1).clone())
    stats, verdict = launch.statistics(batch, numbers)
    launch.rewrite(batch, numbers, stats, verdict, sums=True)
    judged = [rules.get(s) for s in specs]
    twin.rewrite(batch, verdict, judged, only=frozenset(s.name for s in specs if s.name not in table.CODES))
    assert {words.INSIDE, words.OUTSIDE} <= set(verdict.tolist())
    assert batch.draft is not None
    drawn = residual_of(batch.target, batch.draft.squeeze(1))
    for row, name in enumerate(names):
        assert batch.target[row, allowed:].max() == -torch.inf, name
        assert drawn[row, allowed:].max() == 0, name
        # runner V1: its verification draws from max(p' - q', 0), without a logarithm
        logits, q = target[row : row + 1].clone(), draft[row : row + 1].softmax(-1)
        judged[row].rewrite(logits, q, x[row : row + 1])
        assert (logits.softmax(-1) - q).clamp_min(0)[:, allowed:].max() == 0, name


def test_ragged_rows_temperatures_slots_and_a_shorter_draft() -> None:
    """Rows of a wider matrix, two steps a slot, a draft vocabulary 24 tokens short, and temperatures of their own."""
    v, n = 344, 16
    target, draft, x = logits_of(n, v - 24, seed=4)
    wide = torch.nn.functional.pad(target, (0, 124), value=1.0)
    draft = draft.view(n // 2, 2, v - 24)
    slot, step = torch.arange(n) // 2, torch.arange(n) % 2
    names = [
        "lenience:0.3",
        "cactus:0.5",
        "r-fuzzy:0.3",
        "casc-tok-v3:0.3",
        "interp:0.5",
        "typical:eps=0.2,delta=0.5",
        "fuzzy:0.2",
        "casc-opt:1",
    ]
    batch = Batch(
        wide[:, :v], draft, x, torch.full((n,), 7, dtype=torch.int32), torch.zeros(n, dtype=torch.int32), slot, step,
        torch.tensor([0.6, 1.0, 1.3, 0.8, 1.0, 0.7, 1.0, 2.0]),
    )  # fmt: skip
    compare(batch, names)


def test_what_must_stay_strict_stays_to_the_bit() -> None:
    """Forced rows, forbidden tokens, no token, greedy requests, rows that close the trace, rows nobody asked for."""
    _, draft, x = logits_of(8, 320, seed=8)
    target, end = torch.randn(8, 320), 7
    target[0, 9] = 1e9
    target[1, x[1]] = -torch.inf
    x[2] = -1
    target[3, end] = 90.0
    batch = Batch.of(target, x, draft, flags=torch.tensor([0, 0, 0, 0, int(RowFlag.GREEDY), 0, 0, 0], dtype=torch.int32))
    batch.want[5] = words.WANT_TARGET | words.WANT_DRAFT
    before = target.clone(), draft.clone()
    verdict = compare(batch, ["interp:1"] * 8, end=end)
    assert verdict.tolist() == [0] * 6 + [1, 1]
    assert torch.equal(batch.target[:6], before[0][:6])
    assert torch.equal(draft, before[1])
    stats, _ = launch.statistics(batch, table_of([table.numbers(RuleSpec.parse("interp:1"))] * 8), end=end)
    flags = [RowFlag(int(f)) for f in stats[:5, words.FLAGS]]
    assert flags == [RowFlag.FORCED, RowFlag.MASKED, RowFlag.MASKED, RowFlag.END_OF_THINK, RowFlag.GREEDY]


def test_bfloat16_drafts_make_exact_pairs() -> None:
    """The one-hot form is exact in any precision; nothing else is written into a draft row."""
    names = texts("", "p_min=0.1,top_k=3")
    target, draft, x = logits_of(len(names), 96, seed=5)
    compare(Batch.of(target, x, draft.bfloat16().contiguous()), names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_row_that_is_no_law_is_found(dtype: torch.dtype) -> None:
    """By kernel and twin, over several blocks: NaN, +inf and a row of -inf alone are none; the row of another step or slot says
    nothing, and the first token of a request was drawn by nobody's draft."""
    draft = torch.randn(4, 3, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    draft[1, 0, 7], draft[2, 1, 299], draft[3, 2], draft[2, 0, :299] = torch.nan, torch.inf, -torch.inf, -torch.inf
    slot = torch.tensor([1, 2, 3, 0]).repeat_interleave(4)
    step = torch.arange(4, dtype=torch.int32).repeat(4)
    expected = [False, True, False, False] + [False, False, True, False] + [False, False, False, True] + [False] * 4
    assert launch.broken(draft, slot, step, shape=tuning.Shape(128, 1)).tolist() == expected
    assert twin.broken(draft, slot, step).tolist() == expected


def test_equal_inputs_give_equal_bits() -> None:
    names = texts("p_min=0.1,top_k=3")
    target, draft, x = logits_of(len(names), 320, seed=6)
    outcomes = []
    for _ in range(2):
        one = Batch.of(target.clone(), x, draft.clone())
        both(one, names)
        assert one.draft is not None
        outcomes.append((one.target, one.draft))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_telemetry_of_runner_v1_reads_the_same_from_the_kernel() -> None:
    """`observe.describe` takes one or the other; -1 drafts and an unknown end marker included."""
    logits, _, x = logits_of(8, 320, seed=9)
    x[3] = -1
    for end in (None, 7):
        mine, expected = (read(logits, x, x.clamp_min(0).unsqueeze(-1), end) for read in (observe._kernel, observe._twin))
        torch.testing.assert_close(mine[0][x >= 0], expected[0][x >= 0], atol=1e-6, rtol=0)
        assert torch.equal(mine[1], expected[1])
        torch.testing.assert_close(mine[2], expected[2], atol=1e-6, rtol=0)


def test_the_layout_is_model_runner_v2_s() -> None:
    """Requests of 2, 0 and 3 drafts, the last one greedy; slots in another order than the batch."""
    ends = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    slots = torch.tensor([2, 0, 1])
    slot = slots.repeat_interleave(torch.tensor([3, 1, 4]))
    step = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3])
    drafted = torch.tensor([50, 11, 12, 51, 52, 21, -1, 23])
    temperature = torch.tensor([1.0, 0.0, 0.7])
    numbers = table_of(
        [
            table.numbers(RuleSpec.parse(t), phase)
            for t, phase in (("cactus:1", "both"), ("cactus:1", "both"), ("interp:1", "think"))
        ]
    )
    inside = torch.tensor([1, 0, -1, 0, 0, 0, 0, 0], dtype=torch.int32)
    target, draft = torch.randn(8, 64), torch.randn(3, 3, 64)
    for listened in (False, True):
        args = (ends, slots, slot, step, drafted, temperature, numbers, inside, target, draft)
        mine, expected = launch.layout(*args, listened=listened), twin.layout(*args, listened=listened)
        for name in ("x", "want", "flags"):
            assert torch.equal(getattr(mine, name), getattr(expected, name)), name
        assert mine.x.tolist() == [11, 12, -1, -1, 21, -1, 23, -1]
        asked = words.RELAX | words.WANT_TARGET | words.WANT_DRAFT
        heard = words.WANT_TARGET | words.WANT_DRAFT if listened else 0
        assert mine.want.tolist() == [asked, heard, 0, 0, heard, heard, heard, 0]


class TestChoice:
    def test_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(kernels.KERNELS_ENV, raising=False)
        assert kernels.choose("cuda", interpreted=False).kernels
        assert "TRITON_INTERPRET=1" in kernels.choose("cuda", interpreted=True).reason
        assert "need a CUDA device" in kernels.choose("cpu", interpreted=True).reason
        monkeypatch.setenv(kernels.KERNELS_ENV, "interpret")
        assert kernels.choose("cpu", interpreted=True).kernels
        monkeypatch.setenv(kernels.KERNELS_ENV, "0")
        assert "AG_KERNELS=0" in kernels.choose("cuda", interpreted=False).reason

    def test_block_sizes_are_the_same_at_every_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fixed, or as somebody said: a seeded request draws the same tokens after a restart."""
        monkeypatch.delenv(tuning.BLOCK_ENV, raising=False)
        assert tuning.shape_for("cuda") == tuning.FIXED
        monkeypatch.setenv(tuning.BLOCK_ENV, "8192x4")
        assert tuning.shape_for("cuda") == tuning.Shape(8192, 4)
        assert tuning.BLOCK_ENV in ranks.facts()
        for text in ("4096", "4000x8", "4096x7", "x", "4096x8 "):
            monkeypatch.setenv(tuning.BLOCK_ENV, text)
            with pytest.raises(ConfigError, match=r"gpu_check\.sh names, such as 4096x8"):
                tuning.shape_for("cuda")
        assert all(tuning.asked(str(shape)) == shape for shape in tuning.CANDIDATES)

    def test_the_fastest_shape_is_taken_by_its_median(self) -> None:
        spent = {tuning.CANDIDATES[0]: iter([9, 1, 9, 9, 1]), tuning.CANDIDATES[1]: iter([5, 5, 99, 5, 5])}
        assert tuning.fastest(lambda shape: next(spent[shape]), tuning.CANDIDATES[:2]) == tuning.CANDIDATES[1]


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from engine_plugins.kernels import phase, rows
types = {"part_ptr": "*fp32", "target_ptr": "*fp32", "draft_ptr": "*bf16", "x_ptr": "*i64", "want_ptr": "*i32", "slot_ptr": "*i32",
         "step_ptr": "*i32", "temperature_ptr": "*fp32", "stats_ptr": "*fp32", "verdict_ptr": "*i32", "flags_ptr": "*i32",
         "rule_ptr": "*fp32", "sums_ptr": "*fp32", "ends_ptr": "*i32", "slots_ptr": "*i32", "drafted_ptr": "*i64",
         "inside_ptr": "*i32"}
types |= {"state_ptr": "*i32", "tokens_ptr": "*i32", "prompt_ptr": "*i32", "total_ptr": "*i32", "start_ptr": "*i64", "end_ptr":
"*i64", "limits_ptr": "*i32", "close_at_ptr": "*i32"}
constants = {"advance_kernel": {"START": 1, "END": 2, "BLOCK": 1024, "HAS_LIMITS": True}, "ahead_kernel": {"START": 1, "END": 2},
             "partials_kernel": {"BLOCK": 4096, "HAS_DRAFT": True}, "sums_kernel": {"BLOCK": 4096}, "layout_kernel": {},
             "decide_kernel": {"BLOCKS": 64, "HAS_DRAFT": True, "HAS_RULES": True},
             "write_kernel": {"BLOCK": 4096, "BLOCKS": 64, "HAS_SUMS": True}}
for name, fixed in constants.items():
    kernel = getattr(rows, name, None) or getattr(phase, name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in fixed.items()})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert len(built.asm["cubin"]) > 1000
    print(name)
"""


def test_they_compile_to_machine_code_for_a_gpu_that_is_not_here() -> None:
    """With ptxas, for compute capability 9.0: the interpreter accepts what the compiler does not."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 7
