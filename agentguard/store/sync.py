"""Keeps a ledger and a store together: what is new goes out, what others added comes in."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from agentguard.economics.cells import Cell
from agentguard.economics.netwin import Switch
from agentguard.store import Store, StoreError
from agentguard.tasks import owned_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agentguard.economics.ledger import Ledger

logger = structlog.get_logger(__name__)
EVERY_S = 1.0
_BETWEEN = "\t"


async def exchange(ledger: Ledger, store: Store) -> None:
    """Add the pending sums to the store and take over everybody's. A switch is taken over from whoever moved it last.

    Raises StoreError; nothing is lost then, and nothing is added twice.
    """
    out, ledger.pending = ledger.pending, {}
    moved, ledger.moved = ledger.moved, set()
    try:
        await store.add({_BETWEEN.join(key): cell.sums for key, cell in out.items()})
    except StoreError:
        for key, cell in out.items():
            ledger.pending.setdefault(key, Cell()).merge(cell.sums)
        ledger.moved |= moved
        raise
    try:
        await store.put({_BETWEEN.join(key): json.dumps(ledger.switches[key].as_json()) for key in moved})
        sums, states = await store.sums(), await store.states()
    except StoreError:
        ledger.moved |= moved
        raise
    for name, values in sums.items():
        workload, _, arm = name.partition(_BETWEEN)
        whole = Cell(values)
        if (later := ledger.pending.get((workload, arm))) is not None:
            whole.merge(later.sums)
        ledger.cells[workload, arm] = whole
    for name, text in states.items():
        workload, _, arm = name.partition(_BETWEEN)
        theirs, mine = Switch.from_json(json.loads(text)), ledger.switches.get((workload, arm))
        if mine is None or theirs.at > mine.at:
            ledger.switches[workload, arm] = theirs


@asynccontextmanager
async def synced(ledger: Ledger, store: Store, every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Exchange once before the block (so that a restart goes on where it ended), every ``every_s`` seconds, and at its end."""
    await exchange(ledger, store)

    async def keep() -> None:
        failed = False
        while True:
            await asyncio.sleep(every_s)
            try:
                await exchange(ledger, store)
                failed = False
            except StoreError as error:
                if not failed:  # once, not every second
                    logger.warning("store_unreachable", error=str(error))
                failed = True

    async with owned_task(keep(), "store"):
        yield
    try:
        await exchange(ledger, store)
    except StoreError as error:
        logger.error("store_lost", error=str(error), cells=len(ledger.pending))
