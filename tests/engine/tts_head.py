"""An EAGLE-3 head that learns, in one process: `python -m tests.engine.tts_head OUT.json KIND`; kinds: own, shared, deep."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from agentguard.reference import reference_model
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts.slots import Slots
from engine_plugins.tts.trainer import Trainer
from engine_plugins.tts.twin import Twin
from tests.eagle_head import make_head
from tests.engine.tts_in_process import Engine, K, Learning, aligned

KINDS: dict[str, dict[str, Any]] = {
    "own": {"words": 250, "norm_before_residual": True},
    "shared": {"own_output": False},
    "deep": {"layers": 2, "norm_output": True},
}


def main(out: Path, kind: str) -> None:
    torch.manual_seed(1)
    target = reference_model("target")
    head = make_head(Path(tempfile.mkdtemp()), target, **KINDS[kind])
    engine = Engine("eagle3", str(head))
    settings = TtsSettings(window=1024, rate=3e-3, min_tokens=0, auto_off=False, rejected=True)
    fixed = engine.call("ag_tts_fixed")
    twin = Twin.load(str(head), settings, method="eagle3", target=str(target), fixed=fixed)
    slots = Slots.create(Path("/dev/shm") / f"agentguard-test-{os.getpid()}", twin.payload(), torch.float32)
    result: dict[str, Any] = {"fixed": fixed, "published": sorted(twin.payload())}
    try:
        knobs = asdict(settings) | {"reset": "never", "top_k": 0}
        before = engine.call("target_sum")
        engine.call("ag_tts_attach", str(slots.path), knobs)
        result["aligned_at_the_start"] = aligned(engine, twin, live=False)
        learning = Learning(engine, Trainer(twin, settings, K), slots)
        engine.batch(8, 150, learning.between)
        engine.frames(300)
        result["losses"] = learning.losses
        slots.write(1, twin.payload())
        engine.publish(1, learning.trainer.epoch)
        result["aligned_after_learning"] = aligned(engine, twin, live=True)
        result["frozen_after_learning"] = aligned(engine, twin, live=False)
        result["target_moved"] = engine.call("target_sum") != before
        engine.call("ag_tts_detach", "paused", "")
        engine.call("capture_again")
        result["aligned_after_a_pause"] = aligned(engine, twin, live=False)
    finally:
        slots.close()
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
