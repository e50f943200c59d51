"""Where the accounts of sessions are kept: in memory, in one SQLite file, or in Redis for several workers or machines."""

from __future__ import annotations

import asyncio
import importlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from agentguard.errors import ConfigError
from agentguard.identity import IDLE_S
from agentguard.store import accounts
from agentguard.store.accounts import Account, Ask, Grant, Key, Meters, Refusal, Settlement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SESSIONS_PER_CALLER = 10_000
NOTE_S = 2 * IDLE_S
"""How long a note on a guessed session is of use: after `IDLE_S` its next request begins a new run."""


class SessionStore(Protocol):
    """All methods raise StoreError. Each is atomic, and may be called again when its reply was lost."""

    async def reserve(self, key: Key, ask: Ask) -> Grant | Refusal: ...

    async def settle(self, batch: Sequence[tuple[Key, Settlement]]) -> list[int]:
        """Book steps that have ended; the number of each one's record, 0 for none."""
        ...

    async def renew(self, seen: Mapping[str, tuple[Key, int]], lease_s: float) -> None:
        """The leases of these steps, with the tokens counted so far, go on for ``lease_s``."""
        ...

    async def raise_limit(self, key: Key, meter: str, limit: int | None, record: str = "") -> bool:
        """A new limit (None: only the record is added); False for a session that is not known."""
        ...

    async def sessions(self, limit: int = 1000) -> list[tuple[Key, Meters]]:
        """The accounts used last, the latest first."""
        ...

    async def forget(self, caller: str, session: str | None = None) -> int:
        """Delete a session, or all of a caller's; how many there were."""
        ...

    async def sweep(self, older_than_s: float) -> int:
        """Delete sessions that nobody has used for that long and that run no step; how many."""
        ...

    async def recall(self, name: str) -> str:
        """What was noted under the name within the last `NOTE_S`, "" for nothing."""
        ...

    async def note(self, name: str, text: str) -> None: ...

    async def aclose(self) -> None: ...


@asynccontextmanager
async def open_sessions(url: str, per_caller: int = SESSIONS_PER_CALLER) -> AsyncIterator[SessionStore]:
    """``sqlite:PATH`` or ``redis://HOST:PORT/DB``. A caller's least recently used session without a running step gives way when it
    has more than ``per_caller``; other callers' are never touched.

    Raises ConfigError for another URL, StoreError when it cannot be opened.
    """
    scheme, _, rest = url.partition(":")
    store: SessionStore
    if scheme == "sqlite" and rest:
        module = await asyncio.to_thread(importlib.import_module, "agentguard.store.sessions_sqlite")
        store = await module.SqliteSessions.open(rest.removeprefix("//"), per_caller)
    elif scheme in ("redis", "rediss", "unix"):
        module = await asyncio.to_thread(importlib.import_module, "agentguard.store.sessions_redis")
        store = await module.RedisSessions.open(url, per_caller)
    else:
        raise ConfigError("store.url", url, "write sqlite:PATH, or redis://HOST:PORT/DB to share it between gateways")
    try:
        yield store
    finally:
        await store.aclose()


class MemorySessions:
    """The accounts of one process, gone with it. Bounded: past ``limit`` the caller with the most sessions gives up its oldest."""

    def __init__(self, limit: int = SESSIONS_PER_CALLER) -> None:
        self._limit = limit
        self._accounts: OrderedDict[Key, Account] = OrderedDict()
        self._settled: OrderedDict[str, int] = OrderedDict()
        self._clock = time.monotonic

    def _account(self, key: Key) -> Account:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(born=uuid.uuid4().hex[:12])
            if len(self._accounts) > self._limit:
                idle = [k for k, a in self._accounts.items() if not a.running and k != key]
                if (gone := first_of_largest(idle)) is not None:
                    del self._accounts[gone]
        self._accounts.move_to_end(key)
        return account

    async def reserve(self, key: Key, ask: Ask) -> Grant | Refusal:
        account = self._account(key)
        if ask.step in self._settled:
            return Refusal("ended", 0, 0, accounts.meters(account))
        return accounts.reserve(account, ask, self._clock())

    def settle_now(self, key: Key, settlement: Settlement) -> int:
        if (known := self._settled.get(settlement.step)) is not None:
            return known
        account = self._account(key)
        accounts.settle(account, settlement)
        seq = account.seq if settlement.record and not settlement.undo else 0
        self._settled[settlement.step] = seq
        while len(self._settled) > self._limit:
            self._settled.popitem(last=False)
        return seq

    async def settle(self, batch: Sequence[tuple[Key, Settlement]]) -> list[int]:
        return [self.settle_now(key, settlement) for key, settlement in batch]

    async def renew(self, seen: Mapping[str, tuple[Key, int]], lease_s: float) -> None:
        now = self._clock()
        for step, (key, tokens) in seen.items():
            if key in self._accounts:
                accounts.renew(self._accounts[key], step, tokens, now + lease_s)

    async def raise_limit(self, key: Key, meter: str, limit: int | None, record: str = "") -> bool:
        account = self._accounts.get(key)
        if account is None:
            return False
        if limit is not None:
            account.raised[meter] = limit
        account.seq += bool(record)
        return True

    async def sessions(self, limit: int = 1000) -> list[tuple[Key, Meters]]:
        latest = list(reversed(self._accounts.items()))[:limit]
        return [(key, accounts.meters(account)) for key, account in latest]

    async def forget(self, caller: str, session: str | None = None) -> int:
        gone = [k for k in self._accounts if k.caller == caller and session in (None, k.session)]
        for key in gone:
            del self._accounts[key]
        return len(gone)

    async def sweep(self, older_than_s: float) -> int:
        return 0  # bounded in number, and gone with the process

    async def recall(self, name: str) -> str:
        return ""  # who notes something keeps it as well, and there is nobody to share it with

    async def note(self, name: str, text: str) -> None:
        pass

    async def aclose(self) -> None:
        pass


def first_of_largest(keys: Sequence[Key]) -> Key | None:
    """The first key of the caller that has the most: whoever floods a store pushes out what is its own."""
    counts: dict[str, int] = {}
    for key in keys:
        counts[key.caller] = counts.get(key.caller, 0) + 1
    if not counts:
        return None
    largest = max(counts, key=lambda caller: counts[caller])
    return next(key for key in keys if key.caller == largest)
