"""A step's own events in its stream of chunks, for a client that asks with the header `EVENTS_HEADER`, as the SDK does.

They are server-sent events with a name, which clients that do not know it skip: `EVENT` for what the guard publishes of the
step and, at the end, the economics of its class; `STATE` for the session's account, before the first chunk and behind the last.
Each chunk has a field "agentguard" besides, with the tokens so far and the think cap.
"""

from __future__ import annotations

from typing import Any

import msgspec

from agentguard.engines.base import Chunk
from agentguard.events import encode_json
from agentguard.identity import Identity
from agentguard.middleware import Guard, Reply, economics_of

EVENTS_HEADER = "x-agentguard-events"
EVENT, STATE = "agentguard", "agentguard-session"
_encode = msgspec.json.Encoder().encode


class StepEvents:
    """One step's; the methods give server-sent events as bytes."""

    def __init__(self, guard: Guard, identity: Identity, told: Reply) -> None:
        self._guard = guard
        self._identity = identity
        self._told = told

    def begin(self) -> list[bytes]:
        """Before the first chunk."""
        return [self._state(), *self.news()]

    def news(self) -> list[bytes]:
        """What was published since the last time."""
        parts = [_named(EVENT, encode_json(event)) for event in self._told.events]
        self._told.events.clear()
        return parts

    def end(self) -> list[bytes]:
        """Behind the last chunk, when the step's accounts are made."""
        economics = encode_json(economics_of(self._guard.ledger, self._told))
        return [*self.news(), _named(EVENT, economics), self._state()]

    def failed(self) -> list[bytes]:
        """Before the error that ends the stream."""
        return [*self.news(), self._state()]

    def standing(self, chunk: Chunk) -> Chunk:
        """The chunk with where the step stands, in tokens."""
        told = self._told
        at: dict[str, Any] = {"think_tokens": told.think, "answer_tokens": told.answer, "think_cap": told.think_cap}
        return chunk | {"agentguard": at}

    def _state(self) -> bytes:
        return _named(STATE, _encode(self._guard.state(self._identity)))


def _named(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
