"""The reference pair's tokenizer: one token per number 0-99 and per word of the suite, bytes for everything else.

A BPE model without merges: `ignore_merges` turns a pre-token that is in the vocabulary into one token, anything else falls back to
its UTF-8 bytes (``<0xNN>``), so every text can be a prompt and every id decodes.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>")
WORDS = ("system", "user", "assistant", "tool", "check", "ans", " ok", " no", "no")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz+-=;?!., \n"
NUMBERS = tuple(str(i) for i in range(100))
BYTES = tuple(f"<0x{i:02X}>" for i in range(256))
VOCABULARY = (*CONTROL, *MARKERS, *WORDS, *CHARACTERS, *NUMBERS, *BYTES)
# the embedding is padded to a multiple of 32 rows; the rows after the vocabulary are never produced
EMBEDDING_ROWS = -(-len(VOCABULARY) // 32) * 32

# Think blocks of earlier turns are dropped from the history, as Qwen3's template does; the prompt opens the new block.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def build() -> PreTrainedTokenizerFast:
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(VOCABULARY)}, merges=[], byte_fallback=True, ignore_merges=True))
    words = "|".join(sorted(WORDS, key=len, reverse=True))
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[1-9]\d(?!\d)|[\s\S]"), "isolated")
    tok.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    # not special, as in Qwen3's tokenizer: vLLM's reasoning parsers look for the markers in the text and lose the answer without
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )
