"""Telemetry frames from the engine's ZMQ socket into the hub."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from agentguard.events import VerificationStep, decode_msgpack
from agentguard.request_ids import client_id
from agentguard.tasks import owned_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agentguard.telemetry.hub import Hub

logger = logging.getLogger(__name__)
HIGH_WATER = 1024


@asynccontextmanager
async def engine_source(hub: Hub, endpoint: str) -> AsyncIterator[None]:
    """Forward frames from ``endpoint`` to the hub while the block runs. A frame that cannot be read is logged and skipped."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)

    expected: int | None = None

    async def forward() -> None:
        nonlocal expected
        while True:
            raw = await socket.recv()
            try:
                frame = decode_msgpack(raw)
            except msgspec.DecodeError as error:
                logger.warning("frame_unreadable", extra={"endpoint": endpoint, "bytes": len(raw), "error": str(error)})
                continue
            if isinstance(frame, VerificationStep):
                requests = [msgspec.structs.replace(r, request=client_id(r.request)) for r in frame.requests]
                lost = 0 if expected is None or frame.step < expected else frame.step - expected
                expected = frame.step + 1
                frame = msgspec.structs.replace(frame, requests=requests, lost=lost)
            hub.publish(frame)

    try:
        async with owned_loop(forward, "engine_source"):
            yield
    finally:
        socket.close()
        context.term()
