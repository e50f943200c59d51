"""One engine and one trainer in this process, for exact statements on TTS: `python -m tests.engine.tts_in_process OUT.json
TOKENS`."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
)  # fmt: skip
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # tts_v2.py takes this engine on V2

import torch
import zmq
from vllm import LLM, SamplingParams

from agentguard.reference import reference_model
from agentguard.study.suites.chain import make_problem
from agentguard.tts_settings import BACKEND, TtsSettings
from engine_plugins.tts import wire
from engine_plugins.tts.rounds import Sequence
from engine_plugins.tts.slots import Slots
from engine_plugins.tts.trainer import Trainer
from engine_plugins.tts.twin import NonFinite, Twin

K, BATCH, TOKENS = 6, 64, 220
TEMPERATURE = 1.5  # the target is so sure at 1 that only a few tokens vary
DRAFT = str(reference_model("draft"))
FACTS = dict.fromkeys(("loss", "train_ms", "rows", "rounds", "live", "frozen", "gain", "break_even"), 0)


class Engine:
    def __init__(self, method: str = "draft_model", draft: str = DRAFT, *, k: int = K, **settings: Any) -> None:
        endpoint = f"ipc://{tempfile.mkdtemp()}/frames"
        self.llm = LLM(
            str(reference_model("target")), dtype="float32", seed=3, max_model_len=1024, max_num_seqs=BATCH, enforce_eager=True,
            distributed_executor_backend="uni", generation_config="vllm", enable_prefix_caching=False,
            speculative_config={
                "method": method, "model": draft, "num_speculative_tokens": k, "draft_sample_method": "probabilistic",
            },
            worker_cls="tests.engine.tts_worker.Worker",
            additional_config={"agentguard": {"tts": {"window": 1024}, "frames": endpoint, **settings}},
            weight_transfer_config={"backend": BACKEND},
        )  # fmt: skip
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)
        self.rng = random.Random(11)
        self.versions = 0

    def call(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def frames(self, wait_ms: int = 0) -> list[wire.Frame]:
        found = []
        while self.socket.poll(wait_ms):
            found.append(wire.decode(self.socket.recv()))
        return found

    def publish(self, slot: int, epoch: int, action: str = "go_on") -> dict[str, Any]:
        self.versions += 1
        info = {"version": self.versions, "epoch": epoch, "slot": slot, "action": action, "reason": "test", **FACTS}
        answer: dict[str, Any] = self.call("ag_tts_publish", info)
        return answer

    def batch(self, size: int, tokens: int, between: Callable[[int], None] = lambda _: None) -> None:
        """Run ``size`` requests side by side, calling ``between`` before each step with its number."""
        engine, tokenizer = self.llm.llm_engine, self.llm.get_tokenizer()
        for i in range(size):
            ask = [{"role": "user", "content": make_problem(self.rng, self.rng.randint(2, 8)).text}]
            ids = tokenizer.apply_chat_template(ask, add_generation_prompt=True, tokenize=True, return_dict=False)
            params = SamplingParams(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True)
            engine.add_request(f"{time.monotonic_ns()}-{i}", {"prompt_token_ids": ids}, params)
        step = 0
        while engine.has_unfinished_requests():
            between(step)
            engine.step()
            step += 1


def aligned(engine: Engine, twin: Twin, *, live: bool, size: int = 4, tokens: int = 80) -> dict[str, float]:
    """Largest difference between the q that vLLM stored and the twin's, over all rows of some requests."""
    engine.frames()
    engine.batch(size, tokens)
    sequences: dict[str, Sequence] = {}
    for number, frame in enumerate(engine.frames(300)):
        for row in frame.rounds:
            sequences.setdefault(row.request, Sequence(1024)).add(row, number)
    worst, rows = 0.0, 0
    for sequence in sequences.values():
        packed = twin.pack(sequence, list(sequence.rounds))
        assert packed is not None
        assert packed.source is not None
        mine = twin.log_laws(packed, frozen=not live).exp()
        worst = max(worst, float((mine - packed.source.logp.exp()).abs().max()))
        rows += len(packed.k)
    return {"worst": worst, "rows": rows, "requests": len(sequences)}


class Learning:
    """A trainer in this process, fed and published between steps."""

    def __init__(self, engine: Engine, trainer: Trainer, slots: Slots) -> None:
        self.engine, self.trainer, self.slots = engine, trainer, slots
        self.losses: list[float] = []

    def learn(self, frames: list[wire.Frame]) -> bool:
        for frame in frames:
            self.trainer.feed(frame)
        if not self.trainer.due:
            return False
        try:
            _, _, update = self.trainer.train()
        except NonFinite:
            return False
        if update is not None:
            self.losses.append(update.loss)
        return update is not None

    def between(self, _: int) -> None:
        if self.learn(self.engine.frames()):
            slot = 1 + self.engine.versions % 2
            self.slots.write(slot, self.trainer.twin.payload())
            assert self.engine.publish(slot, self.trainer.epoch)["applied"]


def martingale(engine: Engine, between: Callable[[int], None], least: int) -> dict[str, Any]:
    engine.call("witness_clear")
    while engine.call("witness")["tokens"] < least:
        engine.batch(BATCH, TOKENS, between)
    found: dict[str, Any] = engine.call("witness")
    print(json.dumps(found), flush=True)
    return found


def garbage(twin: Twin, generator: torch.Generator, number: int) -> dict[str, torch.Tensor]:
    """Weights nobody trained: noise of several sizes, weights that overflow, and NaN."""
    scale = (0.1, 1.0, 1e4, 1e30)[number % 4]
    drawn = {n: torch.randn(t.shape, generator=generator) * scale for n, t in twin.payload().items()}
    if number % 5 == 4:
        drawn["model.norm.weight"].fill_(torch.nan)
    return drawn


def main(out: Path, least: int) -> None:
    torch.manual_seed(1)
    engine = Engine()
    settings = TtsSettings(window=1024, rate=3e-3, min_tokens=0, auto_off=False, rejected=True)
    twin = Twin.load(DRAFT, settings)
    path = Path("/dev/shm") / f"agentguard-test-{os.getpid()}"
    slots = Slots.create(path, twin.payload(), torch.float32)
    result: dict[str, Any] = {}
    try:
        knobs = asdict(settings) | {"reset": "never", "top_k": 0}
        epoch = engine.call("ag_tts_attach", str(path), knobs)["epoch"]
        result["aligned_at_the_start"] = aligned(engine, twin, live=False)

        learning = Learning(engine, Trainer(twin, settings, K), slots)
        losses, between = learning.losses, learning.between

        engine.batch(8, 150, between)
        engine.frames(300)
        result["learned"] = {"updates": len(losses), "first": losses[0], "last": losses[-1]}
        slots.write(1, twin.payload())
        engine.publish(1, epoch)
        result["aligned_after_learning"] = aligned(engine, twin, live=True)
        result["frozen_after_learning"] = aligned(engine, twin, live=False)

        # a new request alone starts from the start weights, and a publish made for the old one is refused
        engine.call("ag_tts_detach", "paused", "")
        engine.call("capture_again")
        result["aligned_after_a_pause"] = aligned(engine, twin, live=False)
        epoch = engine.call("ag_tts_attach", str(path), knobs)["epoch"]
        engine.publish(1, epoch)
        engine.call("ag_tts_attach", str(path), knobs | {"reset": "request"})
        engine.publish(1, engine.call("epoch"))
        result["aligned_after_a_new_request"] = aligned(engine, twin, live=False)
        result["stale"] = engine.publish(1, epoch)

        learned = len(losses)
        result["on"] = martingale(engine, between, least)
        result["on"]["updates"] = len(losses) - learned
        engine.call("ag_tts_detach", "paused", "")
        engine.frames(300)
        result["off"] = martingale(engine, lambda _: None, least)
        result["frames_when_off"] = len(engine.frames(300))

        # last, as NaN stays in freed blocks of the draft's KV cache, where a later request's masked positions find it again
        engine.call("ag_tts_attach", str(path), knobs | {"reset": "request"})
        generator, count = torch.Generator().manual_seed(5), [0]

        def adversary(step: int) -> None:
            """Garbage, and every other time back to the start weights while requests run, whose draft KV cache stays garbage."""
            frames = engine.frames()
            if step % 7 == 3 and frames:
                slots.write(1 + engine.versions % 2, garbage(twin, generator, count[0]))
                count[0] += engine.publish(1 + engine.versions % 2, frames[-1].epoch)["applied"]
            elif step % 14 == 10 and frames:
                engine.publish(0, frames[-1].epoch, "roll_back")

        result["adversarial"] = martingale(engine, adversary, least)
        result["adversarial"]["updates"] = count[0]

        # the fault: verify with the q of the weights that came since. Both draft sets are real ones, so nothing else is odd
        other = Twin.load(str(reference_model("draft-short")), settings)

        def swap(step: int) -> None:
            frames = engine.frames()
            if step % 2 == 0 and frames:
                model = other if step % 4 == 0 else twin
                slots.write(1 + engine.versions % 2, model.payload())
                engine.publish(1 + engine.versions % 2, frames[-1].epoch)
                engine.call("set_mutant", model)

        twin.reset()
        result["mutant"] = martingale(engine, swap, 8_000)
    finally:
        slots.close()
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
