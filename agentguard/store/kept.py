"""The economics of a recipe, kept in its store while something serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentguard.economics.ledger import Ledger, ledger_of, setup_of
from agentguard.events import RuleSwitched
from agentguard.policy import Policy
from agentguard.store import open_store
from agentguard.store.sync import synced


@asynccontextmanager
async def economics(policy: Policy, on_event: Callable[[RuleSwitched], None]) -> AsyncIterator[Ledger]:
    """The policy's ledger, kept in its store while the block runs; ``on_event`` gets its switches. Raises ConfigError, and
    StoreError when the store is not there."""
    ledger = await asyncio.to_thread(ledger_of, policy, on_event=on_event)
    if policy.economics.store is None:
        yield ledger
        return
    async with open_store(policy.economics.store) as store, synced(ledger, store, setup_of(policy)):
        yield ledger
