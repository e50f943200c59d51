"""Telemetry out of the worker: one msgpack frame a verification step on a ZMQ XPUB socket.

It never blocks a step and holds at most `HIGH_WATER` frames a subscriber: what a slow one does not take, ZMQ drops for it
alone. Frames are numbered, so every subscriber sees its own gaps. XPUB tells the tap whether anybody listens, so a step with no
subscriber costs one non-blocking receive.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import zmq

from agentguard.events import encode_msgpack

if TYPE_CHECKING:
    from agentguard.events import DraftUpdated, TtsChanged
    from engine_plugins.vllm.observe import Rounds

HIGH_WATER = 256


class Tap:
    """The publishing end. ``endpoint`` is a ZMQ address, normally ipc:// in a directory of mode 0700."""

    def __init__(self, endpoint: str, engine: str) -> None:
        self.engine = engine
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._subscribers = 0
        # on runner V2 frames are sent by the outbox's thread, and a ZMQ socket is used by one thread at a time
        self._lock = threading.Lock()

    @property
    def wanted(self) -> bool:
        """Does anybody listen? Reads pending (un)subscriptions without waiting."""
        with self._lock, contextlib.suppress(zmq.Again):
            while True:
                self._subscribers += 1 if self._socket.recv(zmq.NOBLOCK)[:1] == b"\x01" else -1
        return self._subscribers > 0

    def publish(self, t: float, step: int, rounds: Rounds) -> None:
        frame = rounds.packed(t, self.engine, step)
        # a PUB-type socket never blocks: at a subscriber's high-water mark the frame is dropped for it
        with self._lock:
            self._socket.send(encode_msgpack(frame), zmq.NOBLOCK)

    def emit(self, event: DraftUpdated | TtsChanged) -> None:
        """An event of its own, unnumbered."""
        with self._lock:
            self._socket.send(encode_msgpack(event), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
