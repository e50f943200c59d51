"""The reference pair in one engine with the plugin: `python -m benchmarks.gpu_engine`, a part of `gpu_check.sh` where vLLM and
agentguard are installed. Prints RESULT and one JSON.

It has to be Model Runner V2. The KV cache is too small for the batch, so requests are preempted and come back. Checked: strict
takes some drafts and accept-all nearly all of them, also beside each other; at temperature 0 a rule changes nothing; a limit of
think tokens holds to the token at temperature 1 and 0, set at admission or while the request runs; `ag_phase=think` relaxes inside
the trace alone; telemetry counts what the engine counts; TTS sends the laws it drafted with, a publish takes effect behind captured
graphs, the draft's tensors stay where they were, and a pause brings the old weights back.

`--interpret`: all of it at a small size on a CPU, under Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions as questions, to a worker in this process
}
INTERPRET = "--interpret" in sys.argv[1:]
if INTERPRET:
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from tests import v2_on_cpu  # noqa: F401  # before vLLM

import torch
import zmq
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

from agentguard.events import RowFlag, VerificationStep, decode_msgpack
from agentguard.reference import reference_model
from agentguard.request_ids import client_id
from agentguard.study.suites.chain import make_problem
from agentguard.tts_settings import BACKEND
from engine_plugins.tts import wire
from engine_plugins.tts.slots import Slots
from engine_plugins.vllm.phase import PhaseTracker, ThinkMarkers

REQUESTS, TOKENS, K, BLOCK = (6, 40, 3, 32) if INTERPRET else (32, 160, 4, 16)
LIMIT = 8 if INTERPRET else 20
LONGEST = 256 if INTERPRET else 512
# enough for the longest request and for some of the batch: 32 requests of 400 tokens want 800 blocks
BLOCKS = LONGEST // BLOCK + 3 if INTERPRET else 300
ACCEPT_ALL = "interp:w=1,p_min=0,top_k=0"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of some requests that ran side by side."""

    prompts: list[list[int]]
    ids: list[list[int]]
    accepted: int
    drafted: int
    preempted: int
    seconds: float

    @property
    def share(self) -> float:
        return self.accepted / max(self.drafted, 1)


class Engine:
    def __init__(self) -> None:
        here = tempfile.mkdtemp()
        self.rng = random.Random(7)
        self.llm = LLM(
            str(reference_model("target")), seed=3, max_model_len=LONGEST, max_num_seqs=REQUESTS,
            distributed_executor_backend="uni", disable_log_stats=False, generation_config="vllm", reasoning_parser="qwen3",
            gpu_memory_utilization=0.3,
            enable_prefix_caching=False, block_size=BLOCK, num_gpu_blocks_override=BLOCKS, enforce_eager=INTERPRET,
            worker_cls="engine_plugins.vllm.worker.Worker", weight_transfer_config={"backend": BACKEND},
            additional_config={"agentguard": {"telemetry": f"ipc://{here}/tap", "tts": {}, "frames": f"ipc://{here}/frames"}},
            speculative_config={
                "method": "draft_model", "model": str(reference_model("draft")), "num_speculative_tokens": K,
                "draft_sample_method": "probabilistic",
            },
        )  # fmt: skip
        tokenizer = self.llm.get_tokenizer()
        start, end = (tokenizer.convert_tokens_to_ids(marker) for marker in ("<think>", "</think>"))
        self.markers = ThinkMarkers((start,), (end,))
        self.tap, self.frames = (zmq.Context.instance().socket(kind) for kind in (zmq.SUB, zmq.PULL))
        for socket, name in ((self.tap, "tap"), (self.frames, "frames")):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(f"ipc://{here}/{name}")

    def call(self, method: str | Callable[[Any], Any], *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def counters(self) -> tuple[int, int, int]:
        values = {m.name: getattr(m, "value", None) for m in self.llm.get_metrics()}
        names = ("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "num_preemptions")
        accepted, drafted, preempted = (int(values.get(f"vllm:{name}") or 0) for name in names)
        return accepted, drafted, preempted

    def run(
        self, extras: list[dict[str, Any]], *, heat: float = 1.0, tokens: int = TOKENS,
        between: Callable[[int], None] | None = None, prompts: list[list[int]] | None = None,
    ) -> Outcome:  # fmt: skip
        """One request for each of ``extras``, side by side, by the ids r0, r1 … as a client gives them; ``between`` is called
        before each step with its number."""
        tokenizer, engine = self.llm.get_tokenizer(), self.llm.llm_engine
        prompts = prompts or [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": make_problem(self.rng, self.rng.randint(4, 8)).text}], add_generation_prompt=True,
                    tokenize=True, return_dict=False,
                )
            )
            for _ in extras
        ]  # fmt: skip
        before, started = self.counters(), time.perf_counter()
        for n, (prompt, extra) in enumerate(zip(prompts, extras, strict=True)):
            params = SamplingParams(temperature=heat, max_tokens=tokens, extra_args=extra, seed=n, ignore_eos=True)
            engine.add_request(f"chatcmpl-r{n}", {"prompt_token_ids": prompt}, params)
        done: dict[str, list[int]] = {}
        step = 0
        while engine.has_unfinished_requests():
            if between is not None:
                between(step)
            for one in engine.step():
                if one.finished:
                    done[one.request_id] = list(one.outputs[0].token_ids)
            step += 1
        accepted, drafted, preempted = (after - b for after, b in zip(self.counters(), before, strict=True))
        ids = [done[f"chatcmpl-r{n}"] for n in range(len(extras))]
        return Outcome(prompts, ids, accepted, drafted, preempted, time.perf_counter() - started)

    def think(self, outcome: Outcome) -> list[int]:
        """Think tokens of each request, all blocks together."""
        found = []
        for prompt, ids in zip(outcome.prompts, outcome.ids, strict=True):
            tracker = PhaseTracker(self.markers, prompt)
            tracker.update(ids)
            found.append(tracker.think)
        return found


def laws(engine: Engine) -> dict[str, Any]:
    """Strict, accept-all and both side by side."""
    strict = engine.run([{}] * REQUESTS)
    everything = engine.run([{"ag_rule": ACCEPT_ALL, "ag_phase": "both"}] * REQUESTS)
    mixed = engine.run([{"ag_rule": ACCEPT_ALL, "ag_phase": "both"} if n % 2 else {} for n in range(REQUESTS)])
    cold = [
        engine.run([extra] * 4, heat=0.0, prompts=strict.prompts[:4])
        for extra in ({}, {"ag_rule": "cactus:delta=0.5", "ag_phase": "both"})
    ]
    return {
        "strict": strict.share, "accept_all": everything.share, "mixed": mixed.share,
        "preempted": strict.preempted + everything.preempted + mixed.preempted, "seconds": [strict.seconds, everything.seconds],
        "greedy_unchanged": cold[0].ids == cold[1].ids,
        # a draft behind an accepted end marker or at the end of a request is not taken, so accept-all stays just below 1
        "passed": 0.05 < strict.share < 0.95 < everything.share and mixed.share < everything.share
        and cold[0].ids == cold[1].ids and strict.preempted > 0,
    }  # fmt: skip


def limits(engine: Engine) -> dict[str, Any]:
    """Limits at admission, at both temperatures, through preemptions; then one set while the request runs."""
    out: dict[str, Any] = {}
    for heat in (1.0, 0.0):
        bound = engine.run([{"ag_think_tokens": LIMIT} if n % 2 == 0 else {} for n in range(REQUESTS)], heat=heat)
        thinks = engine.think(bound)
        out[f"heat {heat:g}"] = {"bound": thinks[::2], "free": thinks[1::2], "preempted": bound.preempted}
    answers: list[dict[str, Any]] = []

    def set_now(step: int) -> None:
        if step == 6:
            answers.append(engine.call("ag_set_budget", "r1", 0))

    changed = engine.run([{"ag_rule": ACCEPT_ALL}, {"ag_rule": ACCEPT_ALL}], between=set_now)
    out["set"] = {"answer": answers[0], "think": engine.think(changed)[1]}
    longest = max(max(out[f"heat {heat}"]["bound"]) for heat in (1, 0))
    out["passed"] = (
        longest <= LIMIT < max(out["heat 1"]["free"]) and answers[0]["found"] and out["set"]["think"] == answers[0]["total"]
        and out["heat 1"]["preempted"] > 0
    )  # fmt: skip
    return out


def telemetry(engine: Engine) -> dict[str, Any]:
    """Frames against the engine's counters, and where a rule with ag_phase=think relaxed."""
    engine.tap.setsockopt(zmq.SUBSCRIBE, b"")
    engine.tap.poll(500)  # until the subscription has arrived; nothing is sent before a step
    ran = engine.run([{"ag_rule": ACCEPT_ALL, "ag_phase": "think", "ag_think_tokens": LIMIT}] * 2)
    frames = []
    while engine.tap.poll(500):
        frame = decode_msgpack(engine.tap.recv())
        if isinstance(frame, VerificationStep):
            frames.append(frame)
    engine.tap.setsockopt(zmq.UNSUBSCRIBE, b"")
    rounds = [one for frame in frames for one in frame.requests]
    inside = outside = 0
    for n, (prompt, ids) in enumerate(zip(ran.prompts, ran.ids, strict=True)):
        tracker, at = PhaseTracker(engine.markers, prompt), 1  # the first token comes with the prompt, without a draft
        for one in (one for one in rounds if client_id(one.request) == f"r{n}"):
            tracker.update(ids[:at])
            relaxed = [bool(flags & RowFlag.RELAXED) for flags in one.rows.flags]
            there = tracker.ahead(one.rows.token)
            inside += sum(r and t for r, t in zip(relaxed, there, strict=True))
            outside += sum(r and not t for r, t in zip(relaxed, there, strict=True))
            at += one.accepted + 1
    numbers = [frame.step for frame in frames]
    accepted, drafted = sum(one.accepted for one in rounds), sum(one.drafted for one in rounds)
    return {
        "steps": len(frames), "accepted": accepted, "drafted": drafted, "engine": [ran.accepted, ran.drafted],
        "relaxed_inside": inside, "relaxed_outside": outside,
        "passed": numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        and [accepted, drafted] == [ran.accepted, ran.drafted] and inside > 0 == outside,
    }  # fmt: skip


def addresses(worker: Any) -> dict[str, int]:
    """Where the draft's tensors lie, as captured graphs know them; none for those the CPU build packs."""
    model = worker.model_runner.get_draft_model()
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters() if tensor.numel()}


def tts(engine: Engine) -> dict[str, Any]:
    """What a trainer would get and do: laws of each round, a publish of noise, and back."""
    weights = load_file(Path(reference_model("draft")) / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(t.shape, generator=generator).to(t.dtype) * 0.2 for name, t in weights.items()}
    # /dev/shm, as the control task has it; the file's name is gone with `close`
    slots = Slots.create(Path("/dev/shm") / f"agentguard-gpu-{os.getpid()}", weights, torch.bfloat16)
    facts = dict.fromkeys(("loss", "train_ms", "rows", "rounds", "live", "frozen", "gain", "break_even"), 0)
    try:
        before = engine.call(addresses)
        epoch = engine.call("ag_tts_attach", str(slots.path), {"reset": "never", "min_tokens": 0})["epoch"]
        own = engine.run([{}] * 4)
        frames = []
        while engine.frames.poll(500):
            frames.append(wire.decode(engine.frames.recv()))
        slots.write(1, noise)
        publish = {"version": 1, "epoch": epoch, "slot": 1, "action": "go_on", "reason": "", **facts}
        published = engine.call("ag_tts_publish", publish)
        noisy = engine.run([{}] * 4)
        engine.call("ag_tts_detach", "paused", "")
        back = engine.run([{}] * 4)
        after = engine.call(addresses)
    finally:
        slots.close()
    heavy = [float(row.laws.target().logp.exp().sum(-1).max()) for frame in frames for row in frame.rounds]
    drafts = [row.laws.draft() for frame in frames for row in frame.rounds]
    drawn = [float(rows.logp.exp().sum(-1).max()) for rows in drafts if rows is not None]
    return {
        "frames": len(frames), "publish_ms": published["ms"], "share": [own.share, noisy.share, back.share], "tensors": len(before),
        "moved": [name for name, at in before.items() if after.get(name) != at], "failed": engine.call("ag_tts_failed"),
        "passed": bool(published["applied"]) and len(frames) > 5 and len(drawn) == len(heavy)
        and 0.9 < min(heavy) <= max(heavy) < 1.001 and 0.5 < min(drawn) <= max(drawn) < 1.001
        and noisy.share < 0.5 * own.share and back.share > 0.7 * own.share
        and before == after and not engine.call("ag_tts_failed"),
    }  # fmt: skip


def main() -> None:
    started = time.perf_counter()
    engine = Engine()
    found = engine.call("ag_features")
    out: dict[str, Any] = {
        "runner": found["runner"], "features": found["features"], "start_seconds": time.perf_counter() - started,
        "async_scheduling": bool(engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
    }  # fmt: skip
    out["all_on"] = {"passed": all(on for _, on, _ in found["features"]) and found["runner"] == "V2"}
    for part in (laws, limits, telemetry, tts):
        begun = time.perf_counter()
        try:
            out[part.__name__] = part(engine)
        except Exception as error:  # the others still say what they find
            out[part.__name__] = {"passed": False, "error": repr(error)}
        out[part.__name__]["took"] = time.perf_counter() - begun
    out["passed"] = all(part["passed"] for part in out.values() if isinstance(part, dict))
    print("RESULT" + json.dumps(out))


if __name__ == "__main__":
    main()
