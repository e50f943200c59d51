"""What TTS costs a step of the engine: the median step between publishes against the same engine with TTS paused, and a publish.

    python -m benchmarks.tts_overhead [--json FILE] [--steps 2000] [--model DIR --draft DIR]

One request at a time on the reference pair; the engine is pinned to the first CPU and the trainer to the second, in both arms,
which take turns every request. `between_publishes` is the ratio of the medians over at least ``--steps`` steps an arm; steps that
carry a publish are left out of it, and what a publish takes is `publish_ms`."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
    VLLM_USE_V2_MODEL_RUNNER="0", OMP_NUM_THREADS="1",
)  # fmt: skip

from vllm import LLM, SamplingParams

from agentguard.reference import reference_model
from agentguard.study import suites
from agentguard.tts_settings import BACKEND, TtsSettings
from engine_plugins.tts.control import Plan

TOKENS, WARM_UP = 1200, 100


class Trainer:
    """The real trainer process, driven without an API server: its publishes are carried between the steps of the engine."""

    def __init__(self, llm: LLM, plan: Plan, settings: TtsSettings) -> None:
        self.llm = llm
        options = plan.options(settings, Path(f"/dev/shm/agentguard-benchmark-{secrets.token_hex(4)}"), ())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine_plugins.tts.trainer", json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.path = json.loads(self.process.stdout.readline())["slots"]
        os.sched_setaffinity(self.process.pid, {sorted(CPUS)[-1]})
        self.publish_ms: list[float] = []

    def between_steps(self) -> bool:
        """Carry what the trainer has to say; whether a publish was loaded."""
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        published = False
        while select.select([self.process.stdout], [], [], 0)[0]:
            word = json.loads(self.process.stdout.readline())
            if word.pop("kind") != "publish":
                continue
            (answer,) = self.llm.collective_rpc("ag_tts_publish", args=(word,))
            if answer["applied"]:
                published = True
                self.publish_ms.append(answer["ms"])
            said = {"kind": "answer", "version": word["version"], "ms": answer["ms"], "applied": answer["applied"]}
            self.process.stdin.write(json.dumps(said) + "\n")
            self.process.stdin.flush()
        return published


CPUS = os.sched_getaffinity(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--model", default=str(reference_model("target")))
    parser.add_argument("--draft", default=str(reference_model("draft-short")))
    parser.add_argument("--scope", default="full")
    parser.add_argument("--top-k", type=int, default=0)
    args = parser.parse_args()
    frames = f"ipc://{tempfile.mkdtemp()}/frames"
    settings = TtsSettings(auto_off=False, scope=args.scope, top_k=args.top_k)
    llm = LLM(
        args.model, seed=3, max_model_len=2048, max_num_seqs=1, enforce_eager=True, distributed_executor_backend="uni",
        generation_config="vllm",
        speculative_config={
            "method": "draft_model", "model": args.draft, "num_speculative_tokens": 6, "draft_sample_method": "probabilistic",
        },
        worker_cls="engine_plugins.vllm.worker.Worker",
        additional_config={"agentguard": {"tts": asdict(settings), "frames": frames}},
        weight_transfer_config={"backend": BACKEND},
    )  # fmt: skip
    trainer = Trainer(llm, Plan(args.draft, args.model, "draft_model", 6, frames, "bfloat16"), settings)
    os.sched_setaffinity(0, {min(CPUS)})
    suite, tokenizer, engine = suites.get("chain-long"), llm.get_tokenizer(), llm.llm_engine
    took: dict[bool, list[float]] = {True: [], False: []}
    number = 0
    try:
        while min(map(len, took.values())) < args.steps:
            on = number % 2 == 0
            llm.collective_rpc("ag_tts_attach", args=(trainer.path, asdict(settings))) if on else llm.collective_rpc(
                "ag_tts_detach", args=("paused", "")
            )
            ask = [{"role": "user", "content": suite.problem(5, number // 2, 1, None).text}]
            ids = tokenizer.apply_chat_template(ask, add_generation_prompt=True, tokenize=True, return_dict=False)
            params = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, seed=number // 2)
            engine.add_request(f"{number}", {"prompt_token_ids": ids}, params)
            steps = 0
            while engine.has_unfinished_requests():
                published = trainer.between_steps()
                started = time.perf_counter()
                engine.step()
                spent = (time.perf_counter() - started) * 1000
                steps += 1
                if steps > WARM_UP and not published:
                    took[on].append(spent)
            number += 1
    finally:
        trainer.process.stdin.close()  # type: ignore[union-attr]
        trainer.process.wait(20)
    medians = {on: statistics.median(values) for on, values in took.items()}
    result: dict[str, Any] = {
        "requests": number,
        "steps": {"on": len(took[True]), "off": len(took[False])},
        "step_ms": {"on": round(medians[True], 3), "off": round(medians[False], 3)},
        "between_publishes": round(medians[True] / medians[False], 4),
        "publishes": len(trainer.publish_ms),
        "publish_ms": round(statistics.median(trainer.publish_ms), 2),
        "publish_ms_p95": round(sorted(trainer.publish_ms)[int(0.95 * len(trainer.publish_ms))], 2),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
