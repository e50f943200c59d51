"""Draft weights in shared memory: one mapped file, the trainer writes and the worker reads.

Slot 0 holds the weights the draft was trained to (the worker goes back to them by itself); slots 1 and 2 take turns, and the
trainer does not write to a slot before the worker has loaded the other one. Which slot is loaded when is said by collective RPC
alone."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SLOTS = 3
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place in a slot: ``offset`` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()


class Slots:
    """Three copies of the same named tensors in one file. Views share the file's memory."""

    def __init__(self, path: Path, entries: list[Entry], size: int) -> None:
        self.path, self.entries, self._size = path, entries, size
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SLOTS * size)
        self._views = [self._view(slot) for slot in range(SLOTS)]

    @classmethod
    def create(cls, path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Slots:
        """A new file for tensors of these names and shapes, stored as ``dtype``, with slot 0 filled. Owner may read and write."""
        entries, offset = [], 0
        for name, tensor in tensors.items():
            entries.append(Entry(name, tuple(tensor.shape), dtype, offset))
            offset += -(-tensor.numel() * dtype.itemsize // _ALIGN) * _ALIGN
        layout = [[e.name, e.shape, str(e.dtype).removeprefix("torch."), e.offset] for e in entries]
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, SLOTS * offset)  # a full /dev/shm is an error now, not a SIGBUS while serving
        finally:
            os.close(fd)
        with os.fdopen(os.open(path.with_suffix(".json"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"size": offset, "entries": layout}, file)
        slots = cls(path, entries, offset)
        slots.write(0, tensors)
        return slots

    @classmethod
    def open(cls, path: Path) -> Slots:
        """The file another process created."""
        known = json.loads(path.with_suffix(".json").read_text())
        entries = [Entry(name, tuple(shape), getattr(torch, dtype), offset) for name, shape, dtype, offset in known["entries"]]
        return cls(path, entries, known["size"])

    def write(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        for view, entry in zip(self._views[slot], self.entries, strict=True):
            view.copy_(tensors[entry.name].detach())

    def read(self, slot: int) -> Iterable[tuple[str, Tensor]]:
        """Name and view of each tensor of a slot."""
        return zip((e.name for e in self.entries), self._views[slot], strict=True)

    def close(self) -> None:
        """Remove the file's names; the memory goes when no process maps it any more."""
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".json").unlink(missing_ok=True)

    @property
    def bytes(self) -> int:
        return SLOTS * self._size

    def _view(self, slot: int) -> list[Tensor]:
        start = slot * self._size
        return [
            torch.frombuffer(self._map, dtype=e.dtype, count=e.count, offset=start + e.offset).view(e.shape) for e in self.entries
        ]
