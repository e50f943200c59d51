"""Weights in shared memory: what one process writes the other reads, and nothing of it is left behind."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_plugins.tts.slots import SLOTS, Slots


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((3, 5), value), "b": torch.full((7,), -value)}


def test_slots_hold_their_own_weights(tmp_path: Path) -> None:
    written = Slots.create(tmp_path / "w", tensors(1.0), torch.bfloat16)
    written.write(1, tensors(2.0))
    written.write(2, tensors(3.0))
    read = Slots.open(tmp_path / "w")
    for slot in range(SLOTS):
        found = dict(read.read(slot))
        assert found.keys() == {"a.weight", "b"}
        assert found["a.weight"].dtype is torch.bfloat16
        assert (found["a.weight"] == slot + 1).all()
        assert (found["b"] == -(slot + 1)).all()
    written.write(1, tensors(9.0))  # the same memory
    assert (dict(read.read(1))["b"] == -9).all()
    written.close()
    assert list(tmp_path.iterdir()) == []
    assert (dict(read.read(1))["b"] == -9).all()  # still mapped where it is used


def test_another_process_reads_them(tmp_path: Path) -> None:
    Slots.create(tmp_path / "w", tensors(4.0), torch.float32)
    code = (
        "import sys; from pathlib import Path; from engine_plugins.tts.slots import Slots;"
        "print({n: float(t.sum()) for n, t in Slots.open(Path(sys.argv[1])).read(0)})"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "w")], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "{'a.weight': 60.0, 'b': -28.0}"


def test_the_file_is_its_owners_and_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "w"
    Slots.create(path, tensors(1.0), torch.float32)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Slots.create(path, tensors(2.0), torch.float32)
