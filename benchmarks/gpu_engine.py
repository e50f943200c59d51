"""The reference pair in one engine with the plugin: `python -m benchmarks.gpu_engine`, a part of `gpu_check.sh` where vLLM and
agentguard are installed. Prints RESULT and one JSON.

Whatever runner vLLM takes: strict accepts some drafts, accept-all accepts all of them, and a limit of 20 think tokens is kept to
the token, with drafts. 32 requests, 160 tokens, temperature 1.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the question which runner it is, to a worker in this process
}

from vllm import LLM, SamplingParams

from agentguard.reference import reference_model
from agentguard.study.suites.chain import make_problem

K, REQUESTS, TOKENS, LIMIT = 4, 32, 160, 20


def accepted(llm: LLM) -> tuple[int, int]:
    values = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    return int(values.get("vllm:spec_decode_num_accepted_tokens") or 0), int(values.get("vllm:spec_decode_num_draft_tokens") or 0)


def main() -> None:
    rng = random.Random(7)
    llm = LLM(
        str(reference_model("target")), seed=3, max_model_len=1024, max_num_seqs=REQUESTS, distributed_executor_backend="uni",
        disable_log_stats=False, generation_config="vllm", reasoning_parser="qwen3", gpu_memory_utilization=0.3,
        worker_cls="engine_plugins.vllm.worker.Worker", additional_config={"agentguard": {}},
        speculative_config={
            "method": "draft_model", "model": str(reference_model("draft")), "num_speculative_tokens": K,
            "draft_sample_method": "probabilistic",
        },
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    start, end = (tokenizer.convert_tokens_to_ids(marker) for marker in ("<think>", "</think>"))
    texts = [make_problem(rng, rng.randint(4, 8)).text for _ in range(REQUESTS)]
    prompts: list[Any] = [
        {
            "prompt_token_ids": tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        }
        for text in texts
    ]
    out: dict[str, Any] = {"runner": llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)[0]}
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("strict", {}),
        ("accept all", {"ag_rule": "interp:w=1,p_min=0,top_k=0", "ag_phase": "both"}),
        ("filtered", {"ag_rule": "cactus:delta=0.5", "ag_phase": "both"}),
        ("limit", {"ag_think_tokens": LIMIT}),
    )
    for name, extra in asked:
        before, started = accepted(llm), time.perf_counter()
        found = llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=TOKENS, extra_args=extra), use_tqdm=False)
        took, drafted = (after - b for after, b in zip(accepted(llm), before, strict=True))
        ids = [list(one.outputs[0].token_ids) for one in found]
        # the prompt of the reference pair may open the block or not
        thinks = [one[one.index(start) + 1 if start in one else 0 :] for one in ids]
        lengths = [one.index(end) if end in one else len(one) for one in thinks]
        out[name] = {
            "share": took / max(drafted, 1), "seconds": time.perf_counter() - started, "tokens": sum(map(len, ids)),
            "longest_trace": max(lengths),
        }  # fmt: skip
    # a draft behind an accepted end marker or at the end of a request is not taken, so accept-all stays just below 1
    out["passed"] = out["accept all"]["share"] > 0.95 > out["strict"]["share"] > 0.05 and out["limit"]["longest_trace"] <= LIMIT
    print("RESULT" + json.dumps(out))


if __name__ == "__main__":
    main()
