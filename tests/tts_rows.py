"""Helpers of the TTS tests: frames as a worker would send them, and a small draft to train."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine_plugins.tts.loss import Rows, top_k
from engine_plugins.tts.wire import Laws, RoundFrame

V, K = 24, 4


def small_draft(seed: int = 0, *, tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def laws(rows: int = K, *, seed: int = 0, width: int = 0) -> tuple[Rows, Tensor]:
    """Random target rows and the draft's log-probabilities over the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    p = top_k(torch.randn(rows, V, generator=generator) * 2, width)
    q = torch.randn(rows, V, generator=generator).log_softmax(-1)
    return p, p.of(q)


def round_frame(
    start: int, accepted: int, *, request: str = "r", since: int = 0, tokens: list[int] | None = None,
    drafted: list[int] | None = None, output: int = 100, forced: list[bool] | None = None, temperature: float = 1.0, seed: int = 0,
    pack: Laws | None = None,
) -> RoundFrame:  # fmt: skip
    """A round at ``start`` whose committed tokens count on from there, so that position i holds token i % V."""
    drafted = drafted or [(start + k) % V for k in range(K)]
    out = [drafted[k] for k in range(accepted)] + [(start + accepted) % V]
    tokens = [i % V for i in range(since, start)] if tokens is None else tokens
    forced = forced or [False] * len(drafted)
    return RoundFrame(
        request, start, since, tokens, output, drafted, out, forced, temperature, pack or Laws.pack(*laws(len(drafted), seed=seed))
    )
