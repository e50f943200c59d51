"""TTS in a whole engine on Model Runner V2, on a CPU under Triton's interpreter: `python -m tests.engine.tts_v2 OUT.json KIND
TOKENS`; KIND: draft, own or shared (EAGLE-3 heads, see tts_head.py).

The draft's weights stay unpacked, as they are on a GPU, so that their addresses mean what they mean there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from tests import v2_on_cpu  # before vLLM

import torch  # isort: skip
from vllm.model_executor.layers import utils as layers  # isort: skip

from agentguard.reference import reference_model
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts.slots import Slots
from engine_plugins.tts.trainer import Trainer
from engine_plugins.tts.twin import Twin
from tests.eagle_head import make_head
from tests.engine.tts_in_process import DRAFT, Engine, Learning, aligned, garbage

K, SIZE, TOKENS = 3, 3, 32


def unpacked(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def martingale(engine: Engine, between: Any, least: int) -> dict[str, Any]:
    engine.call("witness_clear")
    while engine.call("witness")["tokens"] < least:
        engine.batch(16, 80, between)
    found: dict[str, Any] = engine.call("witness")
    print(json.dumps(found), flush=True)
    return found


def laws(engine: Engine, learning: Learning, slots: Slots, least: int) -> dict[str, Any]:
    """Strict's law while the draft learns, while it gets garbage, and under a fault the witness has to see."""
    result: dict[str, Any] = {"on": martingale(engine, learning.between, least)}
    generator, count = torch.Generator().manual_seed(5), [0]

    def adversary(step: int) -> None:
        frames = engine.frames()
        if step % 5 == 3 and frames:
            slots.write(1 + engine.versions % 2, garbage(learning.trainer.twin, generator, count[0]))
            count[0] += engine.publish(1 + engine.versions % 2, frames[-1].epoch)["applied"]

    engine.call("set_mutant", lambda draft: draft * 0.5)
    result["mutant"] = martingale(engine, lambda _: None, least // 2)
    engine.call("set_mutant", None)
    result["adversarial"] = martingale(engine, adversary, least) | {"updates": count[0]}
    return result


def main(out: Path, kind: str, least: int) -> None:
    torch.manual_seed(1)
    layers.dispatch_cpu_unquantized_gemm = unpacked
    target = reference_model("target")
    knobs: dict[str, Any] = {}
    draft = DRAFT
    if kind == "draft":
        engine = Engine(k=K)
    else:
        shape: dict[str, Any] = {"words": 250, "norm_before_residual": True} if kind == "own" else {"own_output": False}
        draft = str(make_head(Path(tempfile.mkdtemp()), target, **shape))
        engine = Engine("eagle3", draft, k=K)
        knobs = {"method": "eagle3", "target": str(target), "fixed": engine.call("ag_tts_fixed")}
    settings = TtsSettings(window=1024, rate=3e-3, min_tokens=0, auto_off=False, rejected=True)
    twin = Twin.load(draft, settings, **knobs)
    slots = Slots.create(Path("/dev/shm") / f"agentguard-test-{os.getpid()}", twin.payload(), torch.float32)
    result: dict[str, Any] = {"published": sorted(twin.payload())}

    def align(*, live: bool) -> dict[str, float]:
        return aligned(engine, twin, live=live, size=SIZE, tokens=TOKENS)

    try:
        wanted = asdict(settings) | {"reset": "never", "top_k": 0}
        result["runner"] = type(engine.llm.collective_rpc(lambda worker: worker.model_runner)[0]).__mro__[1].__module__
        addresses, before = engine.call("draft_addresses"), engine.call("target_sum")
        engine.call("ag_tts_attach", str(slots.path), wanted)
        result["aligned_at_the_start"] = align(live=False)
        learning = Learning(engine, Trainer(twin, settings, K), slots)
        engine.batch(SIZE, 60, learning.between)
        engine.frames(300)
        result["losses"] = learning.losses
        slots.write(1, twin.payload())
        engine.publish(1, learning.trainer.epoch)
        result["aligned_after_learning"] = align(live=True)
        result["frozen_after_learning"] = align(live=False)
        result["target_moved"] = engine.call("target_sum") != before
        engine.call("ag_tts_detach", "paused", "")
        engine.call("capture_again")
        result["aligned_after_a_pause"] = align(live=False)
        found = engine.call("draft_addresses")
        result["addresses"] = len(found)
        result["moved"] = [name for name in addresses if found[name] != addresses[name]]
        engine.call("ag_tts_attach", str(slots.path), wanted | {"top_k": 8, "window": 16})
        engine.batch(SIZE, TOKENS)
        frames = engine.frames(300)
        result["narrow"] = {
            "width": max(row.laws.width for f in frames for row in f.rounds),
            "longest": max(len(row.tokens) for f in frames for row in f.rounds),
        }
        result["failed"] = engine.call("ag_tts_failed")
        if least:
            engine.call("ag_tts_attach", str(slots.path), wanted)
            result |= laws(engine, learning, slots, least)
    finally:
        slots.close()
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    assert v2_on_cpu.stock is not None
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
