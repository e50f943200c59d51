"""What a guard keeps in its recipe's stores while something serves: the economics, and the accounts of its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentguard.economics.ledger import Ledger, ledger_of, setup_of
from agentguard.events import RuleSwitched
from agentguard.policy import Policy
from agentguard.store import open_store
from agentguard.store.books import Books
from agentguard.store.sessions import MemorySessions, open_sessions
from agentguard.store.sync import synced


@asynccontextmanager
async def session_books(policy: Policy) -> AsyncIterator[Books]:
    """The policy's sessions, in its store or in memory, while the block runs. Raises StoreError when the store is not there."""
    options = policy.store
    if options.url is None:
        yield Books(MemorySessions(policy.max_sessions))
        return
    async with open_sessions(options.url, options.sessions_per_caller) as store:
        books = Books(store, lease_s=options.lease_s, retention_s=options.retention_days * 86_400)
        async with books.open():
            yield books


@asynccontextmanager
async def economics(policy: Policy, on_event: Callable[[RuleSwitched], None]) -> AsyncIterator[Ledger]:
    """The policy's ledger, kept in its store while the block runs; ``on_event`` gets its switches. Raises ConfigError, and
    StoreError when the store is not there."""
    ledger = await asyncio.to_thread(ledger_of, policy, on_event=on_event)
    url = policy.economics.store or policy.store.url
    if url is None:
        yield ledger
        return
    async with open_store(url) as store, synced(ledger, store, setup_of(policy)):
        yield ledger
