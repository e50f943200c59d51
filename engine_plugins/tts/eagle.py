"""An EAGLE-3 head as the twin's model: it drafts from the target's hidden states, so its rows are unrolled instead of packed.

At position i the head sees the target's hidden states of token i and the embedding of token i + 1, and predicts token i + 2. Row 0
of a round that starts at position s therefore comes from position s - 2. Rows k > 0 come from a chain behind it: the head's own
output takes the place of the target's hidden states there, as in serving (vllm/v1/spec_decode/llm_base_proposer.py), and gradients
flow through the chain. The weights carry the names vLLM's `llama_eagle3.py` loads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from agentguard.errors import ConfigError
from engine_plugins.tts.layout import Lesson, lesson
from engine_plugins.tts.rounds import Round, Sequence

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
UNKNOWN = ("fc_norm", "norm_before_fc")
"""Settings of a head that change its forward pass and are not built here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrolled(Lesson):
    """states: [T, W] target's hidden states at the trunk's positions [T]; ids: [T] the token behind each. roots: [R] the place in T
    that predicts a round's row 0, the rounds with the longest chains first; chain: [R, D] drafted tokens on it; depths: [R] how far
    it is needed. at: [n] as row k * R + r."""

    states: Tensor
    ids: Tensor
    positions: Tensor
    roots: Tensor
    chain: Tensor
    depths: Tensor
    at: Tensor


def unroll(sequence: Sequence, rounds: Items[Round], window: int, *, rejected: bool = False) -> Unrolled | None:
    """The trunk and chains that give the head's laws at the rounds' rows; None without a row to learn from. Rounds whose hidden
    states have not come, or have left the window, are passed over."""
    if sequence.states is None or not len(sequence.states):
        return None
    low = max(sequence.states_base, sequence.states_base + len(sequence.states) - window, sequence.base - 1)
    stop = sequence.states_base + len(sequence.states)
    picked: list[tuple[Round, list[int]]] = []
    for r in rounds:
        wanted = r.rows(rejected=rejected)
        if wanted and low <= r.start - 2 < stop:
            picked.append((r, wanted))
    if not picked:
        return None
    picked.sort(key=lambda one: -one[1][-1])
    depth = picked[0][1][-1]
    n = len(picked)
    first = sequence.tokens[low + 1 - sequence.base : stop + 1 - sequence.base]
    chain = torch.zeros(n, depth, dtype=torch.long)
    for i, (r, wanted) in enumerate(picked):
        chain[i, : wanted[-1]] = torch.tensor(r.drafted[: wanted[-1]], dtype=torch.long)
    return Unrolled(
        **lesson(picked, sequence.temperature),
        states=sequence.states[low - sequence.states_base :].float(),
        ids=torch.tensor(first),
        positions=torch.arange(low, stop),
        roots=torch.tensor([r.start - 2 - low for r, _ in picked]),
        chain=chain,
        depths=torch.tensor([wanted[-1] for _, wanted in picked]),
        at=torch.tensor([k * n + i for i, (_, wanted) in enumerate(picked) for k in wanted]),
    )


def head_dim(config: LlamaConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        heads, d = config.num_attention_heads, head_dim(config)
        kv = config.num_key_value_heads or heads
        bias = bool(config.attention_bias)
        self.d = d
        self.q_proj = nn.Linear(width, heads * d, bias=bias)
        self.k_proj = nn.Linear(width, kv * d, bias=bias)
        self.v_proj = nn.Linear(width, kv * d, bias=bias)
        self.o_proj = nn.Linear(heads * d, config.hidden_size, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]], attend: Tensor) -> Tensor:
        q, k, v = (p(x).view(1, len(x), -1, self.d).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *turn)
        past.append((k, v))
        keys, values = (torch.cat(parts, 2) for parts in zip(*past, strict=True))
        out = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=attend[None, None], enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(len(x), -1))
        return mixed


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, *, first: bool, norm_before_residual: bool) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config, 2 * h if first else h)
        self.mlp: nn.Module = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.input_layernorm = LlamaRMSNorm(h, eps)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps)
        self.hidden_norm = LlamaRMSNorm(h, eps) if first else None
        self.norm_before_residual = norm_before_residual

    def forward(self, embeds: Tensor, hidden: Tensor, *attention: Any) -> Tensor:
        if self.hidden_norm is None:
            residual, x = hidden, self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat([self.input_layernorm(embeds), normed], -1)
        residual = residual + self.self_attn(x, *attention)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class EagleHead(nn.Module):
    """The head's weights and its unrolled forward pass. Parameters' names are the checkpoint's, with ``midlayer`` as ``layers.0``.

    ``to_target``: [draft vocabulary] id in the target's, None where both are the same.
    """

    to_target: Tensor | None

    def __init__(self, config: LlamaConfig, extra: dict[str, Any], *, targets: int) -> None:
        super().__init__()
        h = config.hidden_size
        eagle = extra.get("eagle_config") or {}
        if any(extra.get(name) or eagle.get(name) for name in UNKNOWN) or eagle.get("use_aux_hidden_state") is False:
            raise ConfigError(
                "draft", extra.get("architectures"), f"tts does not know heads with {', '.join(UNKNOWN)}; turn tts off"
            )
        self.config = config
        self.vocabulary = targets
        self.norm_output = bool(extra.get("norm_output"))
        self.logit_scale = float(extra.get("logit_scale", 1.0))
        layer_ids = extra.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        inputs = extra.get("num_aux_hidden_states") or (len(layer_ids) if layer_ids else 3)
        self.embed_tokens = nn.Embedding(config.vocab_size, h)
        self.fc = nn.Linear(inputs * extra.get("target_hidden_size", h), h, bias=False)
        before = bool(extra.get("norm_before_residual"))
        self.layers = nn.ModuleList(
            _Layer(config, first=i == 0, norm_before_residual=before) for i in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(h, config.rms_norm_eps)
        draft = extra.get("draft_vocab_size") or config.vocab_size
        self.lm_head = nn.Linear(h, draft, bias=False)
        self.register_buffer("to_target", None if draft == targets else torch.arange(draft))
        self.rotary = LlamaRotaryEmbedding(config)

    @classmethod
    def load(cls, path: Path, target: Path) -> EagleHead:
        """From a checkpoint's directory. What the head does not carry itself it shares with the target: embedding, output
        matrix."""
        extra = json.loads((path / "config.json").read_text())
        config = LlamaConfig.from_dict(extra)
        config.head_dim = head_dim(config)  # the rotary embedding reads it there
        targets = json.loads((target / "config.json").read_text())["vocab_size"]
        head = cls(config, extra, targets=targets)
        weights = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): t for name, t in _tensors(path, lambda name: True)
        }
        offsets = weights.pop("d2t", None)
        if offsets is not None and head.to_target is not None:
            head.to_target.add_(offsets)
        weights.pop("t2d", None)
        if "embed_tokens.weight" not in weights:
            weights["embed_tokens.weight"] = _one(target, "model.embed_tokens.weight")
        if "lm_head.weight" not in weights:
            weights["lm_head.weight"] = _one(target, "lm_head.weight", "model.embed_tokens.weight")
        missing, unknown = head.load_state_dict({n: t.float() for n, t in weights.items()}, strict=False)
        missing = [n for n in missing if n != "to_target"]
        if missing or unknown:
            raise ConfigError(
                "draft", str(path.name), f"is no EAGLE-3 head tts knows: missing {missing[:3]}, unknown {unknown[:3]}"
            )
        return head.float()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def possible(self) -> Tensor | None:
        """[V] bool: tokens of the target the head can draft; None for all."""
        if self.to_target is None:
            return None
        mask = torch.zeros(self.vocabulary, dtype=torch.bool)
        mask[self.to_target] = True
        return mask

    def forward(self, lesson: Unrolled) -> Tensor:
        """[n, V] logits of the lesson's rows, -inf for tokens the head cannot draft."""
        n = len(lesson.positions)
        past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        causal = torch.ones(n, n, dtype=torch.bool).tril_()
        out = self._pass(self.fc(lesson.states), lesson.ids, lesson.positions, past, causal)
        out = out[lesson.roots]
        rows, seen = [out], [causal[lesson.roots]]
        places = lesson.positions[lesson.roots]
        for step in range(1, lesson.chain.shape[1] + 1):
            alive = int((lesson.depths >= step).sum())
            attend = torch.cat([*(s[:alive] for s in seen), torch.eye(alive, dtype=torch.bool)], 1)
            hidden = self.norm(out[:alive]) if self.norm_output else out[:alive]
            out = self._pass(hidden, lesson.chain[:alive, step - 1], places[:alive] + step, past, attend)
            seen.append(torch.eye(alive, dtype=torch.bool))
            rows.append(nn.functional.pad(out, (0, 0, 0, len(lesson.roots) - alive)))
        logits: Tensor = self.lm_head(self.norm(torch.cat(rows)[lesson.at])) * self.logit_scale
        if self.to_target is None:
            return logits
        return logits.new_full((len(logits), self.vocabulary), -torch.inf).index_copy(1, self.to_target, logits)

    def _pass(self, hidden: Tensor, ids: Tensor, positions: Tensor, past: list[Any], attend: Tensor) -> Tensor:
        embeds = self.embed_tokens(ids)
        turn = self.rotary(hidden[None], positions[None])
        for layer, kept in zip(self.layers, past, strict=True):
            hidden = layer(embeds, hidden, turn, kept, attend)
        return hidden


def directory(model: str) -> Path:
    """Where a model's files are: the directory itself, or the hub's cache of a model that was loaded by name."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def is_head(path: Path) -> bool:
    """Is the draft in this directory an EAGLE-3 head?"""
    config = path / "config.json"
    return config.is_file() and any(a in ARCHITECTURES for a in json.loads(config.read_text()).get("architectures") or ())


def _tensors(path: Path, wanted: Any) -> list[tuple[str, Tensor]]:
    found = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            found += [(name, weights.get_tensor(name)) for name in weights.keys() if wanted(name)]  # noqa: SIM118
    if not found:
        raise ConfigError("draft", path.name, "has no weights in safetensors files; tts reads no other format")
    return found


def _one(path: Path, *names: str) -> Tensor:
    """The first of the named tensors that is there."""
    found = dict(_tensors(path, lambda name: name in names))
    return next(found[name] for name in names if name in found)
