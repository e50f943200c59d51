"""What the guard needs from an inference engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from agentguard.engines.facts import Facts

Chunk = dict[str, Any]
"""A streamed piece of an answer in the shape of OpenAI's `chat.completion.chunk`."""
Stream: TypeAlias = AsyncGenerator[Chunk, None]
"""Chunks as they come; `aclose` stops the work behind them."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves. ``max_model_len`` is the context window in tokens."""

    model: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a running request's trace stands in the engine: generated think tokens, and whether it is inside a block."""

    think: int
    inside: bool


class Engine(Protocol):
    """An inference engine. All methods raise EngineRequestError for a refused request and EngineDiedError when it is gone."""

    name: str
    facts: Facts

    async def info(self) -> EngineInfo:
        """The model and its window. Raises EngineError for an answer that is none."""
        ...

    async def tokenize_chat(self, body: Mapping[str, Any]) -> list[int] | None:
        """The prompt ids of a chat request, generation prompt included; None from a server that cannot tell."""
        ...

    async def tokenize_text(self, text: str) -> list[int] | None:
        """The ids of a text as it stands, without special tokens around it; None from a server that cannot tell."""
        ...

    def chat(self, body: Mapping[str, Any], request_id: str, session: str) -> Stream:
        """Stream a chat completion. Closing the iterator aborts the request in the engine."""
        ...

    def complete(self, prompt: Sequence[int], body: Mapping[str, Any], request_id: str) -> Stream:
        """Stream a completion of token ids; the chunks carry `choices[0].text`."""
        ...

    async def set_think_tokens(self, request_id: str, tokens: int) -> Standing | None:
        """Limit a running request's think tokens, at the earliest now, from the next round on. None: no such request runs, or the
        engine has no plugin."""
        ...

    async def tts(self, enabled: bool | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """How the draft's learning stands, after pausing it (``enabled`` false), letting it go on, or changing its settings. Raises
        EngineRequestError: 404 from an engine without TTS, 400 for a knob that is wrong."""
        ...

    async def metrics(self) -> str | None:
        """The text of the server's /metrics; None from a server without it."""
        ...

    async def aclose(self) -> None:
        """Let go of connections; streams that still run are aborted."""
        ...
