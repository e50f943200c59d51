"""An EAGLE-3 head as the twin's model: it drafts from the target's hidden states, so its rows are unrolled instead of packed.

At position i the head sees the target's hidden states of token i and the embedding of token i + 1, and predicts token i + 2. Row 0
of a round that starts at position s therefore comes from position s - 2. Rows k > 0 come from a chain behind it: the head's own
output takes the place of the target's hidden states there, as in serving (vllm/v1/spec_decode/llm_base_proposer.py), and gradients
flow through the chain. The weights carry the names vLLM's `llama_eagle3.py` loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""Names under which vLLM builds `Eagle3LlamaForCausalLM` with ``method: eagle3``; other heads have other layers."""
UNKNOWN = ("fc_norm", "norm_before_fc", "speculators_model_type")
"""Settings of a head that change its forward pass or its files and are not built here."""


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
    """The trunk and chains that give the head's laws at the rounds' rows; None without a row to learn from.

    Rounds with less than half a window of hidden states before them are passed over, unless these are all there are: the served
    head had more, and its law is another one. So are rounds behind a prompt from the prefix cache, until half a window is written.
    """
    hidden = sequence.hidden
    stop = hidden.stop
    low = max(hidden.base, stop - window, sequence.base - 1, 0)
    first = low if low == 0 else low + window // 2 - 1
    picked: list[tuple[Round, list[int]]] = []
    for r in rounds:
        wanted = r.rows(rejected=rejected)
        if wanted and first <= r.start - 2 < stop:
            picked.append((r, wanted))
    if not picked:
        return None
    picked.sort(key=lambda one: -one[1][-1])
    depth = picked[0][1][-1]
    n = len(picked)
    behind = sequence.tokens[low + 1 - sequence.base : stop + 1 - sequence.base]
    chain = torch.zeros(n, depth, dtype=torch.long)
    for i, (r, wanted) in enumerate(picked):
        chain[i, : wanted[-1]] = torch.tensor(r.drafted[: wanted[-1]], dtype=torch.long)
    return Unrolled(
        **lesson(picked, sequence.temperature),
        states=hidden.rows(low),
        ids=torch.tensor(behind),
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
        bias = bool(config.attention_bias)  # of all four, as in vLLM's LlamaAttention
        self.d = d
        self.q_proj = nn.Linear(width, heads * d, bias=bias)
        self.k_proj = nn.Linear(width, kv * d, bias=bias)
        self.v_proj = nn.Linear(width, kv * d, bias=bias)
        self.o_proj = nn.Linear(heads * d, config.hidden_size, bias=bias)

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
        kinds = extra.get("architectures") or []
        if not any(kind in ARCHITECTURES for kind in kinds):
            raise ConfigError("draft", kinds, f"tts knows heads of the kinds {', '.join(ARCHITECTURES)}; turn tts off")
        odd = [name for name in UNKNOWN if extra.get(name) or eagle.get(name)]
        odd += ["use_aux_hidden_state: false"] if eagle.get("use_aux_hidden_state") is False else []
        odd += ["sliding attention"] if any("sliding" in kind for kind in extra.get("layer_types") or ()) else []
        if odd:
            raise ConfigError("draft", kinds, f"tts does not know heads with {', '.join(odd)}; turn tts off")
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
        """From a checkpoint's directory. What the head does not carry itself it shares with the target: embedding, output matrix.
        Raises ConfigError naming what does not fit."""
        extra = json.loads((path / "config.json").read_text())
        theirs = json.loads((target / "config.json").read_text())
        theirs = theirs.get("text_config") or theirs
        config = LlamaConfig.from_dict(extra)
        config.head_dim = head_dim(config)  # the rotary embedding reads it there
        with torch.device("meta"):  # nothing is drawn that is loaded anyway
            head = cls(config, extra, targets=theirs["vocab_size"])
        head.rotary = LlamaRotaryEmbedding(config)
        weights = {n.removeprefix("model.").replace("midlayer.", "layers.0."): t for n, t in _tensors(path)}
        offsets = weights.pop("d2t", None)
        weights.pop("t2d", None)
        if head.to_target is not None:
            if offsets is None:
                raise ConfigError("draft", path.name, "has a vocabulary of its own and no 'd2t' that says which tokens it holds")
            head.to_target = torch.arange(len(offsets)) + offsets.long()
        if "embed_tokens.weight" not in weights:
            weights["embed_tokens.weight"] = _of_target(target, "embed_tokens.weight")
        if "lm_head.weight" not in weights:
            tied = theirs.get("tie_word_embeddings", False)
            weights["lm_head.weight"] = _of_target(target, "embed_tokens.weight" if tied else "lm_head.weight")
        wanted = {n: p.shape for n, p in head.named_parameters()}
        missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
        odd = [n for n in wanted.keys() & weights.keys() if weights[n].shape != wanted[n]]
        if missing or unknown or odd:
            what = f"missing {missing[:3]}, unknown {unknown[:3]}, of another shape {odd[:3]}"
            raise ConfigError("draft", path.name, f"is no EAGLE-3 head tts knows: {what}; turn tts off")
        for name in wanted:
            weights[name] = weights[name].float()
        head.load_state_dict(weights, strict=False, assign=True)
        return head

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

    return Path(snapshot_download(model, local_files_only=True))  # nosec B615  # the operator names the model, and where it comes from


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, in safetensors or as PyTorch saves them."""
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        with safe_open(file, "pt") as weights:
            yield from ((name, weights.get_tensor(name)) for name in weights.keys())  # noqa: SIM118
    for file in () if files else sorted(path.glob("pytorch_model*.bin")):
        yield from torch.load(file, map_location="cpu", weights_only=True, mmap=True).items()


def _of_target(path: Path, name: str) -> Tensor:
    """A tensor of the target's checkpoint, wherever in it the language model lies."""
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        with safe_open(file, "pt") as weights:
            for known in weights.keys():  # noqa: SIM118
                if known.endswith(name):
                    tensor: Tensor = weights.get_tensor(known)
                    return tensor
    where = "none of its safetensors files has it" if files else "it has no safetensors files"
    raise ConfigError("model", path.name, f"the head takes {name} from the target, and {where}; turn tts off")
