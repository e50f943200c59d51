"""Untrained EAGLE-3 heads for the reference target, as checkpoints a vLLM engine loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def make_head(
    path: Path, target: Path, *, words: int = 0, own_output: bool = True, layers: int = 1, seed: int = 0, **extra: Any
) -> Path:
    """``words``: size of a smaller draft vocabulary, every token from the second on; 0: the target's. own_output: False takes over
    the target's output matrix, which vLLM then shares."""
    theirs = json.loads((target / "config.json").read_text())
    h, heads, kv, d = (theirs[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    inner, v = 2 * h, theirs["vocab_size"]
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    weights = {"fc.weight": noise(h, 3 * h), "norm.weight": torch.ones(h)}
    for i in range(layers):
        at = "midlayer." if layers == 1 else f"layers.{i}."
        width = 2 * h if i == 0 else h
        names = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else [])]
        weights |= {f"{at}{name}.weight": 1 + noise(h) for name in names}
        weights |= {
            f"{at}self_attn.q_proj.weight": noise(heads * d, width), f"{at}self_attn.k_proj.weight": noise(kv * d, width),
            f"{at}self_attn.v_proj.weight": noise(kv * d, width), f"{at}self_attn.o_proj.weight": noise(h, heads * d),
            f"{at}mlp.gate_proj.weight": noise(inner, h), f"{at}mlp.up_proj.weight": noise(inner, h),
            f"{at}mlp.down_proj.weight": noise(h, inner),
        }  # fmt: skip
    kept = torch.arange(v) if not words else torch.arange(1, 1 + words)
    weights["lm_head.weight"] = embedding[kept] * (1.25 if own_output else 1.0)
    if words:
        weights["d2t"] = kept - torch.arange(words)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": h, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": d, "vocab_size": v,
        "draft_vocab_size": words or v, "rms_norm_eps": 1e-6, "max_position_embeddings": theirs["max_position_embeddings"],
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "dtype": "float32", "target_hidden_size": h, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], **extra,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in weights.items()}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path
