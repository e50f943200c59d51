"""Several engines that serve the same model. A step runs on one of them from its first token to its last; the next may run on
another.

A session stays with its engine, whose cache holds its context: it takes the healthy engine with the highest hash of both names
(rendezvous hashing), so one that goes away moves only its own sessions, and they come back with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from agentguard.engines.base import Engine, EngineInfo, Standing, Stream
from agentguard.engines.facts import Facts
from agentguard.errors import ConfigError, EngineDiedError, EngineError, OtherModelError, loggable
from agentguard.tasks import owned_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

logger = logging.getLogger(__name__)
CHECK_S = 2.0
"""Between two looks at an engine that is away, and at all of several."""
LOOK_S = 10.0
"""An engine that does not say in this time what it serves is unwell, and one that was away stays so."""
ALONE = 5
"""The only engine, while it is well, is looked at every so many times `CHECK_S`: there is nothing to choose, and one that is gone
shows with its next step, but not one that was gone and is another now."""


class Listener(Protocol):
    """Told by a pool when one of its engines goes or comes."""

    def engine_away(self, engine: Engine, error: EngineDiedError) -> None:
        """It goes, or is found to be away for another reason than before."""
        ...

    async def engine_back(self, engine: Engine, *, proven: bool) -> None:
        """It is there and may be another process than before; or it was all the time, with another window. Not ``proven``: the step
        that comes now shows whether it works; told again, as proven, at the next look if the step has not (`EnginePool.works`)."""
        ...


class EnginePool:
    """An Engine of many. What is no step (metrics, the draft's learning) goes to the first healthy one."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.away: dict[str, EngineDiedError] = {}
        """Engines that are away, and why."""
        self.unwell: dict[str, str] = {}
        """Engines that are there and say nothing, or what cannot be read, when they are looked at; and what."""
        self.unproven: set[str] = set()
        """Engines that came back for a step which has not shown yet whether they work."""
        self.known: dict[str, EngineInfo] = {}
        """What each said it serves, the last time it was asked."""
        self.model = ""
        """What all of them serve; "" before `info`."""
        self.listener: Listener | None = None
        self.name = self.engines[0].name
        self._asking = {engine.name: asyncio.Lock() for engine in self.engines}
        self._asked: Counter[str] = Counter()

    @property
    def facts(self) -> Facts:
        return self.first.facts

    @facts.setter
    def facts(self, _: Facts) -> None:
        raise AttributeError("each engine of a pool has its own facts")

    @property
    def first(self) -> Engine:
        """The first healthy one."""
        return next(iter(self.healthy), self.engines[0])

    @property
    def healthy(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.name not in self.away]

    @property
    def serves(self) -> EngineInfo:
        """The model of all, and the smallest window."""
        return EngineInfo(self.model, min(info.max_model_len for info in self.known.values()))

    def choose(self, session: str, without: Iterable[str] = ()) -> Engine | None:
        """The session's engine; None when all that are left have failed it. Engines that are thought to be unwell or away are tried
        last."""
        left = [engine for engine in self.engines if engine.name not in without]
        known = [engine for engine in left if engine.name not in self.away] or left
        known = [engine for engine in known if engine.name not in self.unwell] or known
        return max(known, key=lambda engine: _score(session, engine.name), default=None)

    def failed(self, engine: Engine, error: EngineDiedError) -> None:
        """It is away until `look` finds it again."""
        news = type(self.away.get(engine.name)) is not type(error)
        self.away[engine.name] = error
        self.unproven.discard(engine.name)
        if news:
            logger.warning("engine_away", extra={"engine": engine.name, "error": str(error)})
            if self.listener is not None:
                self.listener.engine_away(engine, error)

    def works(self, engine: Engine) -> bool:
        """A step has shown that it works; True where that is news."""
        news = engine.name in self.unproven
        self.unproven.discard(engine.name)
        return news

    async def info(self) -> EngineInfo:
        """Of the engines that answer; all of them must serve one model. The window is the smallest."""
        found: list[tuple[Engine, EngineInfo]] = []
        for engine in self.engines:
            try:
                found.append((engine, await engine.info()))
            except EngineDiedError as error:
                self.failed(engine, error)
        if not found:
            raise EngineDiedError("; ".join(map(str, self.away.values())))
        for engine, info in found[1:]:
            if info.model != found[0][1].model:
                first, model = found[0][0].name, found[0][1].model
                raise ConfigError(
                    "upstream", engine.name, f"serves {info.model!r}, and {first} {model!r}; all have to serve one model"
                )
        self.model, self.known = found[0][1].model, {engine.name: info for engine, info in found}
        return self.serves

    def serve(self, info: EngineInfo) -> None:
        """Go by an answer that somebody else has asked for, where there is none yet."""
        if not self.known:
            self.model, self.known = info.model, {engine.name: info for engine in self.engines}

    async def look(self, engine: Engine, *, proven: bool = True) -> None:
        """Ask an engine what it serves; those who ask at the same time share the answer.

        One that was away is learned anew, since it may be another process: without our plugin, with another window, with another
        model. ``proven`` is for the listener. Raises EngineDiedError, and it is away; EngineError for an answer that is none, and
        all stays as it was.
        """
        asked = self._asked[engine.name]
        async with self._asking[engine.name]:
            if self._asked[engine.name] != asked:
                if (error := self.away.get(engine.name)) is not None:
                    raise type(error)(*error.args)
                return
            try:
                await self._ask(engine, proven=proven)
            except Exception as error:
                self._asked[engine.name] += 1
                if isinstance(error, EngineDiedError):
                    self.failed(engine, error)
                if isinstance(error, EngineError):
                    raise
                raise EngineError(f"{engine.name} answers what cannot be read ({loggable(error)})") from error
            self._asked[engine.name] += 1  # of one that was cancelled nobody knows

    async def _ask(self, engine: Engine, *, proven: bool) -> None:
        away = engine.name in self.away
        try:
            async with asyncio.timeout(LOOK_S):
                try:
                    info = await engine.info()
                except EngineDiedError:
                    if away:
                        raise
                    info = await engine.info()  # one connection that breaks is no engine that is gone
        except TimeoutError:
            silent = f"engine {engine.name} did not say within {LOOK_S:g} s what it serves; see its log"
            raise (EngineDiedError if away else EngineError)(silent) from None
        if self.model and info.model != self.model:
            raise OtherModelError(engine.name, info.model, self.model)
        before = self.known.get(engine.name)
        if away or info != before:  # in the second case it was gone and nobody saw it
            # not before it has answered: steps that still run go by the facts, and one broken stream is no other process
            facts = engine.facts.anew()
            facts.plugin = engine.facts.plugin  # `info` has just asked
            engine.facts = facts
        self.known[engine.name] = info
        if away:
            del self.away[engine.name]
            logger.info("engine_back", extra={"engine": engine.name})
        news = self.works(engine) if proven else False
        if away and not proven:
            self.unproven.add(engine.name)
        if (away or news or info != before) and self.listener is not None:
            await self.listener.engine_back(engine, proven=proven)

    @asynccontextmanager
    async def watched(self, every_s: float = CHECK_S) -> AsyncIterator[None]:
        """Look after the engines while the block runs: one that is away comes back when it answers, with its facts learned anew."""

        async def look(engine: Engine) -> None:
            wrong = ""
            try:
                await self.look(engine)
            except EngineDiedError:
                pass  # told when it went
            except Exception as error:
                wrong = loggable(error)
            before = self.unwell.pop(engine.name, "")
            if wrong:
                self.unwell[engine.name] = wrong
            if wrong and wrong != before:  # once, not at every look
                logger.warning("engine_unwell", extra={"engine": engine.name, "error": wrong})
            elif before and not wrong and engine.name not in self.away:
                logger.info("engine_well", extra={"engine": engine.name})

        async def keep(engine: Engine) -> None:
            for turn in itertools.count():
                started = time.monotonic()
                # the only one may go in between, and is then looked at as often as any
                if len(self.engines) > 1 or engine.name in self.away or engine.name in self.unwell or turn % ALONE == 0:
                    await look(engine)
                await asyncio.sleep(max(0.05, every_s - (time.monotonic() - started)))

        async with AsyncExitStack() as stack:
            for engine in self.engines:  # a loop each, so that one that hangs hides no other
                await stack.enter_async_context(owned_loop(partial(keep, engine), f"health of {engine.name}"))
            yield

    async def tokenize_chat(self, body: Mapping[str, Any]) -> list[int] | None:
        return await self.first.tokenize_chat(body)

    async def tokenize_text(self, text: str) -> list[int] | None:
        return await self.first.tokenize_text(text)

    def chat(self, body: Mapping[str, Any], request_id: str, session: str) -> Stream:
        return self.first.chat(body, request_id, session)

    def complete(self, prompt: Sequence[int], body: Mapping[str, Any], request_id: str) -> Stream:
        return self.first.complete(prompt, body, request_id)

    async def set_think_tokens(self, request_id: str, tokens: int) -> Standing | None:
        return await self.first.set_think_tokens(request_id, tokens)

    async def tts(self, enabled: bool | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self.first.tts(enabled, settings)

    async def metrics(self) -> str | None:
        return await self.first.metrics()

    async def aclose(self) -> None:
        for engine in self.engines:
            await engine.aclose()


def pool_of(engine: Engine) -> EnginePool:
    return engine if isinstance(engine, EnginePool) else EnginePool([engine])


def _score(session: str, engine: str) -> bytes:
    return hashlib.sha256(f"{engine}\0{session}".encode()).digest()
