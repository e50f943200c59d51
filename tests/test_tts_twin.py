"""The twin: what each scope trains and publishes, that a reset is bit for bit, and that bad numbers change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentguard.errors import ConfigError
from agentguard.reference import reference_model
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts.layout import Packed, pack
from engine_plugins.tts.loss import Rows, kl
from engine_plugins.tts.rounds import Sequence
from engine_plugins.tts.twin import NonFinite, Twin
from tests.tts_rows import V, round_frame, small_draft


def packed(seed: int = 0, temperature: float = 1.0) -> Packed:
    sequence = Sequence(256)
    for number in range(6):
        sequence.add(
            round_frame(30 + 4 * number, 3, since=26 + 4 * number if number else 0, seed=seed + number, temperature=temperature),
            number,
        )
    found = pack(sequence, list(sequence.rounds), 256)
    assert found is not None
    return found


SCOPES = ["full", "head", "last:1", "last:2", "lora:2"]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_scope_learns_and_its_payload_is_the_model(scope: str, tied: bool) -> None:
    """Learning lowers the loss; loading the payload into a fresh draft gives the twin's laws: nothing that moved is left out."""
    twin = Twin(small_draft(tied=tied), TtsSettings(scope=scope, rate=1e-2))
    batch = [packed()]
    losses = [twin.step(batch) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    fresh = small_draft(tied=tied)
    known = dict(fresh.named_parameters())
    payload = twin.payload()
    assert payload.keys() <= known.keys()
    with torch.no_grad():
        for name, tensor in payload.items():
            known[name].copy_(tensor)
    ids = torch.arange(20)[None] % V
    torch.testing.assert_close(fresh(input_ids=ids).logits, twin.model(input_ids=ids).logits)


@pytest.mark.parametrize("scope", SCOPES)
def test_whole_layers_are_published(scope: str) -> None:
    """vLLM fuses q, k, v and gate, up; a fused matrix is re-packed only from all its parts."""
    twin = Twin(small_draft(), TtsSettings(scope=scope))
    names = set(twin.payload())
    layers = {".".join(n.split(".")[:3]) for n in names if ".layers." in n}
    everything = {n for n, _ in small_draft().named_parameters()}
    for layer in layers:
        assert {n for n in everything if n.startswith(layer + ".")} <= names
    assert len(layers) == {"full": 2, "head": 0, "last:1": 1, "last:2": 2, "lora:2": 2}[scope]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_reset_is_bit_for_bit_and_forgets_the_moments(scope: str) -> None:
    twin = Twin(small_draft(), TtsSettings(scope=scope, rate=1e-2))
    before = {n: t.clone() for n, t in twin.payload().items()}
    first = [twin.step([packed()]) for _ in range(5)]
    assert any(not torch.equal(before[n], t) for n, t in twin.payload().items())
    twin.reset()
    assert all(torch.equal(before[n], t) for n, t in twin.payload().items())
    assert [twin.step([packed()]) for _ in range(5)] == first


def test_frozen_laws_stay_those_of_the_start() -> None:
    twin = Twin(small_draft(), TtsSettings(rate=1e-2))
    start = twin.log_laws(packed(), frozen=True)
    for _ in range(5):
        twin.step([packed()])
    torch.testing.assert_close(twin.log_laws(packed(), frozen=True), start)
    assert not torch.allclose(twin.log_laws(packed(), frozen=False), start)


def test_bad_numbers_change_nothing() -> None:
    twin = Twin(small_draft(), TtsSettings(rate=1e-2))
    good = packed()
    bad = replace(good, attend=None, target=Rows(torch.full_like(good.target.logp, torch.nan)), source=None)
    before = {n: t.clone() for n, t in twin.payload().items()}
    twin.trained["model.norm.weight"].data.fill_(torch.inf)
    with pytest.raises(NonFinite):
        twin.step([good])
    twin.reset()
    with pytest.raises(NonFinite):
        twin.step(
            [
                good,
                bad,
                replace(good, attend=None, target=Rows(torch.full_like(good.target.logp, torch.inf)), source=None),
            ]
        )
    assert all(torch.equal(before[n], t) for n, t in twin.payload().items())


def test_laws_are_at_the_temperature_of_the_request() -> None:
    twin = Twin(small_draft(), TtsSettings())
    hot, greedy, plain = packed(temperature=2.0), packed(temperature=0.0), packed()
    torch.testing.assert_close(twin.logits(hot), twin.logits(plain) / 2)
    torch.testing.assert_close(twin.logits(greedy), twin.logits(plain))


def test_a_step_over_several_requests_is_the_mean_over_their_rows() -> None:
    one, two = Twin(small_draft(), TtsSettings(clip=1e9)), Twin(small_draft(), TtsSettings(clip=1e9))
    batch = [packed(1), packed(2)]
    loss = one.step(batch)
    each = [Twin(small_draft(), TtsSettings()).step([p]) for p in batch]
    assert loss == pytest.approx(sum(each) / 2, rel=1e-5)
    two.step(batch[::-1])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one.payload().values(), two.payload().values(), strict=True))


def test_memory_counts_what_a_scope_holds() -> None:
    full, head = (Twin(small_draft(), TtsSettings(scope=s)).memory for s in ("full", "head"))
    count = sum(p.numel() for p in small_draft().parameters())
    assert full == {"model": 4 * count, "state": 16 * count, "trained_parameters": count}
    assert head["trained_parameters"] == V * 32
    assert head["model"] == full["model"]


def test_a_scope_the_draft_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"tts.scope='last:3'.*2 layers"):
        Twin(small_draft(), TtsSettings(scope="last:3"))


def test_the_reference_draft_learns_its_target() -> None:
    """One real row: KL to the target falls in a few steps."""
    twin = Twin.load(str(reference_model("draft-short")), TtsSettings(rate=1e-3))
    generator = torch.Generator().manual_seed(0)
    target = Rows((torch.randn(3, 416, generator=generator) * 3).log_softmax(-1))
    ids = torch.randint(5, 100, (40,), generator=generator)
    one = Packed(
        k=torch.arange(3), number=torch.zeros(3), target=target, source=None, temperature=1.0,
        ids=ids, positions=torch.arange(40), attend=None, at=torch.tensor([37, 38, 39]),
    )  # fmt: skip
    before = kl(target, twin.logits(one).log_softmax(-1)).sum().item()
    for _ in range(20):
        twin.step([one])
    assert kl(target, twin.logits(one).log_softmax(-1)).sum().item() < 0.7 * before
