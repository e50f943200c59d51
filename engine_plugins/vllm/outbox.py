"""Results on their way from the device to the host: a step never waits for them.

`send` starts the copies into pinned memory behind the step's own work and returns; a thread waits for them and hands them on. Steps
come out in their order. More than `HELD` under way drop the newest, as a tap that falls behind must not hold memory.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("vllm.agentguard")
HELD = 32


class Outbox:
    """``deliver`` is called with the host copies, on the thread where there is a device, at once where the tensors are here."""

    def __init__(self) -> None:
        self.dropped = 0
        self._waiting: queue.Queue[tuple[Any, list[Tensor], Callable[[list[Tensor]], None]] | None] = queue.Queue(HELD)
        self._thread: threading.Thread | None = None
        self._device: torch.device | None = None

    def send(self, tensors: Sequence[Tensor], deliver: Callable[[list[Tensor]], None]) -> None:
        if tensors[0].device.type == "cpu":
            deliver(list(tensors))
            return
        if self._waiting.full():
            self.dropped += 1
            return
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        self._device = tensors[0].device
        # blocking: the thread sleeps until the device is there; spinning, it would take a core from the worker
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._hand_over(event, copies, deliver)

    def _hand_over(self, event: Any, copies: list[Tensor], deliver: Callable[[list[Tensor]], None]) -> None:
        """``event``: its `synchronize` returns when the copies are here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agentguard-outbox", daemon=True)
            self._thread.start()
        self._waiting.put_nowait((event, copies, deliver))

    def _run(self) -> None:
        if self._device is not None:  # a thread begins on device 0, where a wait would make a context of half a gigabyte
            torch.cuda.set_device(self._device)
        while (item := self._waiting.get()) is not None:
            event, copies, deliver = item
            try:
                event.synchronize()
                deliver(copies)
            except Exception:
                # telemetry must not end the worker, and the next step's may be whole again
                logger.exception("agentguard: a step's telemetry was lost")

    def close(self) -> None:
        """Deliver what is under way and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
