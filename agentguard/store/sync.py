"""Keeps a ledger and a store together: what is new goes out, what others added comes in."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentguard.economics.cells import Cell
from agentguard.economics.netwin import Switch
from agentguard.store import Store, StoreError
from agentguard.tasks import owned_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agentguard.economics.ledger import Ledger

logger = logging.getLogger(__name__)
EVERY_S = 1.0
_BETWEEN = "\t"


async def exchange(ledger: Ledger, store: Store, setup: str = "") -> None:
    """Send what is pending and take over everybody's sums; a switch is taken over from whoever has moved it more often.

    ``setup`` names what the sums were measured with (models, K, cutoff): others' are left alone. Raises StoreError. Whether it
    raises or is cancelled, nothing is lost or added twice: a batch goes out under one name until the store has said that it
    holds it.
    """
    if ledger.outbox is None:
        ledger.outbox = (uuid.uuid4().hex, ledger.pending)
        ledger.pending = {}
    batch, cells = ledger.outbox
    await store.add({_BETWEEN.join((setup, *key)): cell.sums for key, cell in cells.items()}, batch)
    ledger.outbox = None
    moved = {key: ledger.switches[key].moves for key in ledger.moved}
    await store.put({_BETWEEN.join((setup, *key)): json.dumps(ledger.switches[key].as_json()) for key in moved})
    ledger.moved -= {key for key, moves in moved.items() if ledger.switches[key].moves == moves}
    sums, states = await store.sums(), await store.states()
    for name, values in sums.items():
        key = _key(name, setup)
        if key is None:
            continue
        whole = Cell(values)
        if (later := ledger.pending.get(key)) is not None:
            whole.merge(later.sums)
        ledger.cells[key] = whole
    for name, text in states.items():
        key = _key(name, setup)
        if key is None:
            continue
        try:
            theirs = Switch.from_json(json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("switch_unreadable", extra={"cell": name, "error": repr(error)})
            continue
        mine = ledger.switches.get(key)
        if mine is None or theirs.moves > mine.moves:
            ledger.switches[key] = theirs


def _key(name: str, setup: str) -> tuple[str, str] | None:
    parts = name.split(_BETWEEN)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == setup else None


@asynccontextmanager
async def synced(ledger: Ledger, store: Store, setup: str = "", every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Exchange once before the block (so that a restart goes on where it ended), every ``every_s`` seconds, and at its end."""
    await exchange(ledger, store, setup)

    async def keep() -> None:
        failed = False
        while True:
            await asyncio.sleep(every_s)
            try:
                await exchange(ledger, store, setup)
                failed = False
            except StoreError as error:
                if not failed:  # once, not every second
                    logger.warning("store_unreachable", extra={"error": str(error)})
                failed = True

    async with owned_loop(keep, "store"):
        yield
    try:
        await exchange(ledger, store, setup)  # what a cancelled exchange had begun
        await exchange(ledger, store, setup)  # what came since
    except StoreError as error:
        logger.error("store_lost", extra={"error": str(error), "cells": len(ledger.pending)})
