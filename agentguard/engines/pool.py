"""Several engines that serve the same model. A step runs on one of them from its first token to its last; the next may run on
another.

A session stays with its engine, whose cache holds its context: it takes the healthy engine with the highest hash of both names
(rendezvous hashing), so one that goes away moves only its own sessions, and they come back with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from agentguard.engines.base import Engine, EngineInfo, Standing, Stream
from agentguard.engines.facts import Facts
from agentguard.errors import ConfigError, EngineDiedError, EngineError
from agentguard.tasks import owned_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

logger = logging.getLogger(__name__)
CHECK_S = 2.0
"""Between two looks at an engine that is away, and at all of them for /health/ready."""


class EnginePool:
    """An Engine of many. What is no step (metrics, the draft's learning) goes to the first healthy one."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.away: dict[str, str] = {}
        """Engines that are away, and why."""
        self.name = self.engines[0].name

    @property
    def facts(self) -> Facts:
        return self._first.facts

    @facts.setter
    def facts(self, _: Facts) -> None:
        raise AttributeError("each engine of a pool has its own facts")

    @property
    def _first(self) -> Engine:
        return next(iter(self.healthy), self.engines[0])

    @property
    def healthy(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.name not in self.away]

    def choose(self, session: str, without: Iterable[str] = ()) -> Engine | None:
        """The session's engine; None when all that are left have failed it. Engines that are thought to be away are tried last."""
        left = [engine for engine in self.engines if engine.name not in without]
        known = [engine for engine in left if engine.name not in self.away] or left
        return max(known, key=lambda engine: _score(session, engine.name), default=None)

    def failed(self, engine: Engine, error: EngineDiedError) -> None:
        if engine.name not in self.away:
            logger.warning("engine_away", extra={"engine": engine.name, "error": str(error)})
        self.away[engine.name] = str(error)

    def answered(self, engine: Engine) -> None:
        if self.away.pop(engine.name, None) is not None:
            logger.info("engine_back", extra={"engine": engine.name})

    async def info(self) -> EngineInfo:
        """Of the engines that answer; all of them must serve one model. The window is the smallest."""
        found: list[tuple[Engine, EngineInfo]] = []
        for engine in self.engines:
            try:
                found.append((engine, await engine.info()))
            except EngineDiedError as error:
                self.failed(engine, error)
        if not found:
            raise EngineDiedError("; ".join(self.away.values()))
        for engine, info in found[1:]:
            if info.model != found[0][1].model:
                first, model = found[0][0].name, found[0][1].model
                raise ConfigError(
                    "upstream", engine.name, f"serves {info.model!r}, and {first} {model!r}; all have to serve one model"
                )
        return EngineInfo(found[0][1].model, min(info.max_model_len for _, info in found))

    @asynccontextmanager
    async def watched(self, every_s: float = CHECK_S) -> AsyncIterator[None]:
        """Look after the engines while the block runs: one that is away comes back when it answers, with its facts learned anew."""

        async def look(engine: Engine) -> None:
            try:
                await engine.info()
            except EngineDiedError as error:
                self.failed(engine, error)
            except EngineError as error:
                logger.warning("engine_unwell", extra={"engine": engine.name, "error": str(error)})
            else:
                self.answered(engine)

        async def keep() -> None:
            while True:
                started = time.monotonic()
                await asyncio.gather(
                    *(look(engine) for engine in self.engines if engine.name in self.away or len(self.engines) > 1)
                )
                await asyncio.sleep(max(0.05, every_s - (time.monotonic() - started)))

        async with owned_task(keep(), "engine health"):
            yield

    async def tokenize_chat(self, body: Mapping[str, Any]) -> list[int] | None:
        return await self._first.tokenize_chat(body)

    async def tokenize_text(self, text: str) -> list[int] | None:
        return await self._first.tokenize_text(text)

    def chat(self, body: Mapping[str, Any], request_id: str, session: str) -> Stream:
        return self._first.chat(body, request_id, session)

    def complete(self, prompt: Sequence[int], body: Mapping[str, Any], request_id: str) -> Stream:
        return self._first.complete(prompt, body, request_id)

    async def set_think_tokens(self, request_id: str, tokens: int) -> Standing | None:
        return await self._first.set_think_tokens(request_id, tokens)

    async def tts(self, enabled: bool | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self._first.tts(enabled, settings)

    async def metrics(self) -> str | None:
        return await self._first.metrics()

    async def aclose(self) -> None:
        for engine in self.engines:
            await engine.aclose()


def pool_of(engine: Engine) -> EnginePool:
    return engine if isinstance(engine, EnginePool) else EnginePool([engine])


def _score(session: str, engine: str) -> bytes:
    return hashlib.sha256(f"{engine}\0{session}".encode()).digest()
