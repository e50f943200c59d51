"""A session's account, from this worker's side: what a step may use is reserved before it runs, and settled when it has ended."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

import msgspec

from agentguard.errors import ConfigError, SessionBusyError, SessionLimitError
from agentguard.events import StepFinished
from agentguard.identity import Identity
from agentguard.policy import Policy, SessionLimits
from agentguard.session import Record, Session, Sessions
from agentguard.store import StoreError
from agentguard.store.accounts import Ask, Grant, Key, Refusal, Settlement, keys_of
from agentguard.store.books import SETTLED_S, Books

logger = logging.getLogger(__name__)
_RECORDS = msgspec.json.Decoder(Record)


@dataclass(frozen=True, slots=True)
class Reserved:
    """A step's place in its session: the ``number`` it has, ``tokens`` it may generate, ``account``: its name in the store.
    warnings: meters near their limit, for the client to read."""

    session: Session
    number: int
    tokens: int
    account: str
    warnings: list[str]


class Accounting:
    """The worker's sessions beside the store that all workers share (`store.books`)."""

    def __init__(self, books: Books, sessions: Sessions) -> None:
        self._books = books
        self._sessions = sessions

    async def reserve(self, policy: Policy, identity: Identity, request_id: str, want: int) -> Reserved:
        """Raises SessionLimitError, SessionBusyError, and StoreError for a limited session while the store is away: nobody knows
        then what others have used. Any other session is served, and its settlement kept for later.
        """
        limits, key = policy.limits, key_of(identity)
        known = self._sessions.get(identity)
        stops = not identity.guessed
        ask = Ask(
            request_id, want, min(want, policy.cutoff.answer_floor), limits.steps if stops else None,
            limits.tokens if stops else None, self._books.lease_s, known.seq, known.born,
        )  # fmt: skip
        try:
            answer = await self._books.reserve(key, ask)
        except StoreError as error:
            if stops and (limits.steps is not None or limits.tokens is not None):
                raise StoreError(f"the session's limits cannot be checked: {error}") from error
            warnings = check(known, limits)
            known.steps_started += 1
            # the reservation that failed is taken back under its name, so the step has another one
            return Reserved(known, known.steps_started, want, f"{request_id}.late", warnings)
        session = self._synced(known, answer)
        if isinstance(answer, Refusal):
            if answer.meter == "busy":
                raise SessionBusyError(str(identity), answer.value, answer.limit)
            meter = "tokens" if answer.meter == "tokens" else "steps"
            raise SessionLimitError(str(identity), meter, answer.value, answer.limit)
        try:
            warnings = check(session, limits)
        except SessionLimitError:
            self._books.post(key, Settlement(request_id, undo=True))
            raise
        session.steps_started = max(session.steps_started, answer.number)
        return Reserved(session, answer.number, answer.tokens, request_id, warnings)

    async def settle(self, session: Session, account: str, event: StepFinished | None, fingerprint: str, *, side: bool) -> None:
        """Queue the step's settlement, and wait a moment for it: whoever asks next, here or elsewhere, finds it.

        ``event``: None for an attempt that is no step."""
        key = key_of(session.identity)
        if event is None:
            done = self._books.post(key, Settlement(account, undo=True))
        else:
            record = msgspec.json.encode(session.record(event, fingerprint, side=side)).decode()
            settlement = Settlement(account, event.tokens, event.think_tokens, int(bool(event.closed)), record)
            done = self._books.post(key, settlement, partial(session.recorded, event.request))
        if not done.is_set() and not self._books.away:
            try:
                async with asyncio.timeout(SETTLED_S):
                    await done.wait()
            except TimeoutError:
                logger.warning("settlement_late", extra={"session": str(session.identity), "account": account})

    async def refresh(self, identity: Identity) -> None:
        """Take in what other workers have added, of the sessions that were used last. Raises StoreError."""
        meters = dict(await self._books.store.sessions()).get(key_of(identity))
        if meters is not None:
            session = self._sessions.get(identity)
            session.steps_started, session.tokens, session.lost = meters.steps, meters.tokens, meters.lost
            session.think_tokens, session.closes, session.raised = meters.think, meters.closes, dict(meters.raised)

    async def raise_limit(self, session: str, meter: str, limit: int) -> bool:
        """Let a stopped session go on, in every worker: its new limit of "steps" or "tokens", or any value for "no_progress".

        False: no such one. Raises StoreError.
        """
        if meter not in ("steps", "tokens", "no_progress"):
            raise ConfigError("meter", meter, "one of steps, tokens, no_progress")
        goes_on = msgspec.json.encode(Record()).decode() if meter == "no_progress" else ""
        known = False
        for key in keys_of(session):
            known |= await self._books.store.raise_limit(key, meter, None if goes_on else limit, goes_on)
        for one in self._sessions:
            if str(one.identity) == session:
                if goes_on:
                    one.idle = 0
                else:
                    one.raised[meter] = limit
                one.warned = {key for key in one.warned if key[0] != meter}
        return known

    def _synced(self, session: Session, answer: Grant | Refusal) -> Session:
        """This worker's session, the one that was asked with, and what others have added."""
        identity, meters = session.identity, answer.meters
        if session.born != meters.born:
            if session.born:  # it was forgotten, and begins anew
                self._sessions.forget(identity)
                session = self._sessions.get(identity)
            session.born = meters.born
        if isinstance(answer, Grant):
            for number, text in answer.records:
                if number <= session.seq:
                    continue  # a step beside this one has brought it
                try:
                    session.take(_RECORDS.decode(text))
                except msgspec.DecodeError as error:
                    logger.warning("record_unreadable", extra={"session": str(identity), "error": str(error)})
            session.seq = max(session.seq, meters.seq)
        session.steps_started, session.tokens, session.lost = meters.steps, meters.tokens, meters.lost
        session.think_tokens, session.closes, session.raised = meters.think, meters.closes, dict(meters.raised)
        return session


def check(session: Session, limits: SessionLimits) -> list[str]:
    """The meters near their limit, for the client to read. Raises SessionLimitError for one at it."""
    alarms = session.alarms(limits)
    for alarm in alarms:
        if alarm.stop:
            raise SessionLimitError(str(session.identity), alarm.meter, alarm.value, alarm.limit)
    return [f"{alarm.meter} {alarm.value} of {alarm.limit}" for alarm in alarms]


def key_of(identity: Identity) -> Key:
    """The name of a session's account in the store."""
    return Key(identity.caller, identity.session)
