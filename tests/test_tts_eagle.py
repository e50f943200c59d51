"""An EAGLE-3 head as the twin: its unrolled pass is what drafting token by token gives, and only what may learn does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentguard.errors import ConfigError
from agentguard.reference import reference_model
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts import states, wire
from engine_plugins.tts.eagle import EagleHead, Unrolled
from engine_plugins.tts.loss import Rows, kl, top_k
from engine_plugins.tts.rounds import Sequence
from engine_plugins.tts.twin import Twin
from tests.eagle_head import make_head
from tests.tts_rows import K, round_frame

TARGET = reference_model("target")
WIDTH = 3 * 192
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small vocabulary": {"words": 100, "norm_before_residual": True},
    "two layers": {"layers": 2, "norm_output": True},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    return {kind: make_head(root / kind.replace(" ", "-"), TARGET, **options) for kind, options in HEADS.items()}


def twin(path: Path, fixed: tuple[str, ...] = ("embed_tokens.weight",), **knobs: Any) -> Twin:
    return Twin.load(str(path), TtsSettings(min_tokens=0, **knobs), method="eagle3", target=str(TARGET), fixed=fixed)


def hidden(start: int, n: int) -> Tensor:
    """Hidden states that depend on the position alone, as those of a fixed text do."""
    return torch.stack([torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(start, start + n)])


def laws(seed: int) -> wire.Laws:
    """Teacher rows over the reference target's tokens."""
    p = top_k(torch.randn(K, 416, generator=torch.Generator().manual_seed(seed)) * 2, 0)
    return wire.Laws.pack(p, None)


def history(*accepted: int, start: int = 12, keep: int = 256) -> Sequence:
    """Rounds one after the other, each with the hidden states the worker would have by then."""
    sequence, known = Sequence(keep), 0
    for number, count in enumerate(accepted):
        drafted = [(7 * start + k) % 90 + 1 for k in range(K)]
        pieces = [wire.Hidden.pack(0, hidden(0, start - 1))] if number == 0 else [wire.Hidden.pack(known, hidden(known, K + 1))]
        frame = round_frame(
            start, count, since=0 if number == 0 else start - accepted[number - 1] - 1, drafted=drafted, pack=laws(number)
        )
        sequence.add(wire.RoundFrame(*(getattr(frame, f) for f in frame.__struct_fields__[:-1]), pieces), number)
        known = start - 1
        start += count + 1
    return sequence


def by_hand(head: EagleHead, sequence: Sequence, start: int, drafted: list[int]) -> Tensor:
    """[K, V] drafting as serving does: one pass over the committed text, then a token at a time, each from the last output."""
    known = start - 1
    states_, tokens = list(head.fc(hidden(0, known))), sequence.tokens[1:start]
    rows = []
    for k in range(len(drafted)):
        past: list[list[Any]] = [[] for _ in head.layers]
        ids = torch.tensor([*tokens, *drafted[:k]])
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        out = head._pass(torch.stack(states_), ids, torch.arange(len(ids)), past, causal)
        rows.append(out[-1])
        states_.append(head.norm(out[-1]) if head.norm_output else out[-1])
    logits = head.lm_head(head.norm(torch.stack(rows)))
    if head.to_target is None:
        return logits
    full = torch.full((len(rows), head.vocabulary), -torch.inf)
    full[:, head.to_target] = logits
    return full


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_the_unrolled_pass_is_drafting_token_by_token(made: dict[str, Path], kind: str) -> None:
    sequence = history(2, 0, K, 1)
    learner = twin(made[kind], rejected=True)
    lesson = learner.pack(sequence, list(sequence.rounds))
    assert isinstance(lesson, Unrolled)
    logits = learner.logits(lesson)
    assert len(logits) == 4 * K
    found = {(int(n), int(k)): row for n, k, row in zip(lesson.number, lesson.k, logits, strict=True)}
    for r in sequence.rounds:
        expected = by_hand(learner.model, sequence, r.start, r.drafted)
        for k in range(K):
            torch.testing.assert_close(found[r.number, k], expected[k], rtol=1e-4, atol=1e-4)


def test_rows_behind_the_first_rejected_draft_are_left_out(made: dict[str, Path]) -> None:
    sequence = history(2, 0)
    lesson = twin(made["plain"]).pack(sequence, list(sequence.rounds))
    assert lesson is not None
    assert sorted(zip(lesson.number.tolist(), lesson.k.tolist(), strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_hidden_states_of_rejected_drafts_are_written_over() -> None:
    sequence = history(2, 0, 3)
    last = sequence.rounds[-1].start
    assert (sequence.hidden.base, sequence.hidden.stop) == (0, last - 1)
    torch.testing.assert_close(sequence.hidden.rows(0), hidden(0, last - 1))


def test_hidden_states_are_bounded_and_heal_after_a_gap() -> None:
    sequence = history(*[1] * 60, keep=32)
    known = sequence.hidden
    assert known.stop == sequence.rounds[-1].start - 1
    assert 64 - K - 1 <= len(known) <= 128
    torch.testing.assert_close(known.rows(known.base), hidden(known.base, len(known)))
    at = sequence.rounds[-1].start + 40
    known.put(at, hidden(at, 8), 64)
    assert (known.base, len(known)) == (at, 8)
    known.put(at + 4, hidden(at + 4, 300), 64)
    assert known.stop == at + 304
    torch.testing.assert_close(known.rows(known.base), hidden(known.base, len(known)))
    known.cut(known.base - 5)
    assert len(known) == 0


def test_rounds_without_their_hidden_states_are_passed_over(made: dict[str, Path]) -> None:
    sequence = history(2, 1)
    sequence.hidden.cut(0)
    assert twin(made["plain"]).pack(sequence, list(sequence.rounds)) is None


def test_rounds_with_little_before_them_are_passed_over(made: dict[str, Path]) -> None:
    """Of a prompt from the prefix cache no hidden states come: the served head saw it, the twin would not."""
    sequence = history(*[1] * 20, start=100)
    learner = twin(made["plain"], window=64)
    everything = learner.pack(sequence, list(sequence.rounds))
    assert everything is not None
    cached = history(*[1] * 20, start=100)
    known = cached.hidden.rows(90)
    cached.hidden.cut(0)
    cached.hidden.put(90, known, 512)
    found = learner.pack(cached, list(cached.rounds))
    assert found is not None
    assert isinstance(found, Unrolled)
    assert 0 < len(found.k) < len(everything.k)
    assert int(found.roots.min()) >= 31


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("scope", ["full", "last:1", "lora:4", "head"])
def test_a_head_learns(made: dict[str, Path], kind: str, scope: str) -> None:
    learner = twin(made[kind], scope=scope, rate=3e-3)
    sequence = history(2, 0, K, 1, 3)
    lesson = learner.pack(sequence, list(sequence.rounds))
    assert lesson is not None
    before = {n: t.clone() for n, t in learner.payload().items()}
    losses = [learner.step([lesson]) for _ in range(15)]
    assert losses[-1] < 0.9 * losses[0]
    assert "embed_tokens.weight" not in learner.payload()
    assert any(not torch.equal(before[n], t) for n, t in learner.payload().items())
    learner.reset()
    assert all(torch.equal(before[n], t) for n, t in learner.payload().items())


def test_what_belongs_to_the_target_stays(made: dict[str, Path]) -> None:
    fixed = ("lm_head.weight", "embed_tokens.weight")
    learner = twin(made["plain"], fixed=fixed)
    assert not set(fixed) & (set(learner.payload()) | set(learner.trained))
    with pytest.raises(ConfigError, match=r"lm_head\.weight, embed_tokens\.weight belong to the target"):
        twin(made["plain"], fixed=fixed, scope="head")


def test_the_served_head_tells_what_must_stay() -> None:
    target = torch.nn.Module()
    target.lm_head = torch.nn.Linear(2, 2)
    draft = torch.nn.Module()
    draft.lm_head = torch.nn.Linear(2, 2)
    runner = SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: draft)
    assert states.fixed(runner) == ["embed_tokens.weight"]
    draft.lm_head = target.lm_head
    assert states.fixed(runner) == ["embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "extra",
    [
        {"fc_norm": True},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"architectures": ["Eagle3Qwen3ForCausalLM"]},
        {"speculators_model_type": "eagle3"},
        {"layer_types": ["sliding_attention"]},
    ],
)
def test_a_head_of_another_kind_is_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="turn tts off"):
        twin(make_head(tmp_path / "head", TARGET, **extra))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_head(tmp_path / "head", TARGET)
    weights = load_file(path / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing \['fc\.weight'\]"):
        twin(path)


@pytest.mark.parametrize("bin_file", [True, False])
def test_weights_in_either_format_and_what_comes_from_the_target(tmp_path: Path, bin_file: bool) -> None:
    from safetensors.torch import load_file, save_file

    path = make_head(tmp_path / "head", TARGET, own_output=False)
    weights = load_file(path / "model.safetensors")
    output = weights.pop("lm_head.weight")
    (path / "model.safetensors").unlink()
    if bin_file:
        torch.save(weights, path / "pytorch_model.bin")
    else:
        save_file(weights, path / "model.safetensors")
    head = EagleHead.load(path, TARGET)
    torch.testing.assert_close(head.lm_head.weight.detach(), output)  # the target's is tied to its embedding
    torch.testing.assert_close(head.embed_tokens.weight.detach(), output)


def test_a_smaller_vocabulary_needs_its_map(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_head(tmp_path / "head", TARGET, words=100)
    weights = load_file(path / "model.safetensors")
    del weights["d2t"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ConfigError, match="d2t"):
        twin(path)


def test_a_smaller_vocabulary_is_taught_the_law_within_it() -> None:
    """KL to the law given the draft's tokens is finite, and least where the draft follows it: also for a row cut to k tokens."""
    logp = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    possible = torch.tensor([True, False, True, True])
    full, inside = Rows(logp).within(possible)
    torch.testing.assert_close(full.logp.exp(), torch.tensor([[4 / 7, 0.0, 2 / 7, 1 / 7]]))
    torch.testing.assert_close(inside, torch.tensor([0.7]))
    cut, inside = Rows(logp[:, :2], torch.tensor([[0, 1]])).within(possible)
    torch.testing.assert_close(cut.logp.exp(), torch.tensor([[4 / 7, 0.0]]))
    torch.testing.assert_close((cut.tail, inside), (torch.tensor([3 / 7]), torch.tensor([0.7])))
    student = torch.tensor([[4 / 7, 0.0, 2 / 7, 1 / 7]]).log()
    torch.testing.assert_close(kl(full, student), torch.zeros(1), atol=1e-6, rtol=0)


def test_the_weight_of_a_row_makes_its_gradient_that_of_the_whole_law() -> None:
    p, possible = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([True, False, True, True])
    student = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).masked_fill(~possible, -torch.inf).requires_grad_()
    rows, inside = Rows(p.log()).within(possible)
    (inside * kl(rows, student.log_softmax(-1))).sum().backward()
    assert student.grad is not None
    torch.testing.assert_close(student.grad[:, possible], (0.7 * student.softmax(-1) - p)[:, possible].detach())


def test_a_target_sure_of_a_token_the_head_cannot_draft_teaches_nothing_and_breaks_nothing(made: dict[str, Path]) -> None:
    logits = torch.zeros(2, 4)
    logits[0, 0], logits[1, 0] = 20.0, 300.0
    rows, inside = Rows(logits.log_softmax(-1)).within(torch.tensor([False, True, True, True]))
    assert not torch.isnan(rows.logp).any()
    assert inside.tolist() == [0.0, 0.0]
    learner = twin(made["small vocabulary"], rate=3e-3)
    sequence = history(2, 0, 3)
    sequence.rounds[0].target.logp[:] = torch.full((416,), -300.0).index_fill(0, torch.tensor([300]), 0.0)
    lesson = learner.pack(sequence, list(sequence.rounds))
    assert lesson is not None
    losses = [learner.step([lesson]) for _ in range(10)]
    assert losses[-1] < losses[0]


def test_the_drafter_is_wrapped_by_name() -> None:
    """Positions or names of another vLLM's `propose` are seen when the engine starts, not when TTS learns nonsense."""
    given: list[Any] = []
    serving = SimpleNamespace(capturing=True, hidden=lambda spans, *found: given.append((list(spans()), *found)))

    def propose(count: int, target_positions: Any, target_hidden_states: Any, common_attn_metadata: Any = None) -> str:
        return "drafts"

    runner = SimpleNamespace(
        drafter=SimpleNamespace(propose=propose), input_batch=SimpleNamespace(req_ids=["a", "b"]), requests={"a": "A", "b": "B"}
    )
    states.install_v1(runner, serving)  # type: ignore[arg-type]
    metadata = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 3, 4]))
    assert runner.drafter.propose(1, "p", target_hidden_states="h", common_attn_metadata=metadata) == "drafts"
    serving.capturing = False
    assert runner.drafter.propose(1, "p", "h") == "drafts"
    assert given == [([("a", "A", 0, 3), ("b", "B", 3, 4)], "p", "h")]
    with pytest.raises(KeyError):
        states.install_v1(SimpleNamespace(drafter=SimpleNamespace(propose=lambda x: x)), serving)  # type: ignore[arg-type]
