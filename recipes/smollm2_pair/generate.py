"""Let the target write the draft's training text: temperature 1, no truncation, offline vLLM.

    python generate.py TARGET OUT.jsonl --sequences 400 --seed 1
    python generate.py TARGET HELD.jsonl --sequences 64 --seed 2 --held-out
    python generate.py TARGET LONG.jsonl --sequences 8 --seed 3 --held-out --length 1024 --no-stop

A line holds the token ids of prompt and answer and the prompt's length; every second prompt opens a think block. The engine runs
in float32, on a CPU without AMX faster than bfloat16 (one core, 576 × 1536 matrices: 164 against 87 GFLOP/s).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

# before vLLM is imported: in this process, on the runner the CPU wheel supports, without others' plugins
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")  # GiB

from prompts import prompts
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams, TokensPrompt

BATCH = 128


def generate(target: Path, out: Path, *, sequences: int, seed: int, length: int, held_out: bool, stop: bool) -> None:
    """Write ``sequences`` lines of at most ``length`` tokens, prompt included; without ``stop`` the end token is masked."""
    tok = AutoTokenizer.from_pretrained(target)
    templates = (None, (target / "chat_template_think.jinja").read_text())
    heads = []
    for number, prompt in zip(range(sequences), prompts(seed, held_out=held_out), strict=False):
        turn = [{"role": "user", "content": prompt}]
        text = tok.apply_chat_template(turn, add_generation_prompt=True, tokenize=False, chat_template=templates[number % 2])
        heads.append(tok(text, add_special_tokens=False).input_ids)
    llm = LLM(
        str(target), dtype="float32", enforce_eager=True, max_model_len=length, max_num_seqs=BATCH, generation_config="vllm",
        disable_log_stats=True, seed=seed,
    )  # fmt: skip
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=length - len(head),
            min_tokens=0 if stop else length - len(head),
            detokenize=False,
        )
        for head in heads
    ]
    started = time.time()
    answers = llm.generate([TokensPrompt(prompt_token_ids=head) for head in heads], params, use_tqdm=False)
    made = sum(len(a.outputs[0].token_ids) for a in answers)
    print(json.dumps({"sequences": len(heads), "tokens": made, "s": round(time.time() - started)}), flush=True)
    with out.open("w") as file:
        for head, answer in zip(heads, answers, strict=True):
            file.write(json.dumps({"prompt": len(head), "ids": [*head, *answer.outputs[0].token_ids]}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--length", type=int, default=192, help="tokens of prompt and answer together")
    parser.add_argument("--held-out", action="store_true", help="topics the training prompts do not name")
    parser.add_argument("--no-stop", action="store_true", help="mask the end token, for text of exactly --length tokens")
    args = parser.parse_args()
    generate(
        args.target, args.out, sequences=args.sequences, seed=args.seed, length=args.length, held_out=args.held_out,
        stop=not args.no_stop,
    )  # fmt: skip
