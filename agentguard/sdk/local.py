"""A guard in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from agentguard.economics.report import report
from agentguard.events import (
    ArmReport,
    CompactionAdvised,
    Event,
    Meter,
    SessionAlarm,
    SessionState,
    StepFinished,
    StepStarted,
    TraceClosed,
    arm_reports,
)
from agentguard.identity import AGENT, SESSION, Identity, identify
from agentguard.middleware import Guard, Reply, economics_of
from agentguard.sdk.backend import Served
from agentguard.sdk.chunks import ChunkReader, Standing
from agentguard.sdk.events import Economics
from agentguard.sdk.middleware import Events
from agentguard.sdk.request import StepRequest


class LocalAccount:
    """A session of a guard in this process (`backend.Account`)."""

    complete = True

    def __init__(self, guard: Guard, identity: Identity) -> None:
        self._guard = guard
        self._identity = identity

    @property
    def state(self) -> SessionState:
        return self._guard.state(self._identity)

    async def step(self, request: StepRequest) -> Events:
        reply, reader = Reply(), ChunkReader()
        body = request.body() | {"return_token_ids": False}
        async with aclosing(self._guard.stream(body, self._identity, side=request.side, reply=reply)) as chunks:
            async for chunk in chunks:
                for told in _drained(reply):
                    if isinstance(told, StepStarted | CompactionAdvised | TraceClosed):
                        yield told
                for event in reader.feed(chunk, Standing(reply.think, reply.answer, reply.think_cap)):
                    yield event
        economics = economics_of(self._guard.ledger, reply)
        last = _drained(reply)
        # the guard ends every step it has begun with its accounts
        finished = next(event for event in last if isinstance(event, StepFinished))
        yield reader.summary(finished)
        for told in last:
            if isinstance(told, SessionAlarm):
                yield told
        yield Economics(workload=finished.workload, arm=finished.arm, rows=economics.rows)

    async def refresh(self) -> None:
        await self._guard.account(self._identity)

    async def close(self, request_id: str, why: str) -> int:
        if request_id:
            return self._guard.close(request=request_id, why=why)
        return self._guard.close(session=str(self._identity), why=why)

    async def raise_limit(self, meter: Meter, limit: int) -> bool:
        return await self._guard.raise_limit(str(self._identity), meter, limit)


def _drained(reply: Reply) -> list[Event]:
    events, reply.events = reply.events, []
    return events


class LocalBackend:
    """A guard in this process (`backend.Backend`)."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.served = Served(guard.info.model, guard.info.max_model_len)

    def account(self, session: str, agent: str) -> LocalAccount:
        return LocalAccount(self.guard, identify({SESSION: session} | ({AGENT: agent} if agent else {}), {}))

    async def economics(self) -> list[ArmReport]:
        return arm_reports(report(self.guard.ledger)["rows"])

    async def events(self) -> AsyncGenerator[Event, None]:
        with self.guard.hub.subscribe() as subscription:
            async for event in subscription:
                yield event
