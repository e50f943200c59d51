"""Where a gateway's economics outlive it: SQLite in a file, or Redis for several gateways that share them.

A store holds additive sums and a text a switch. Adding is atomic, so that gateways never overwrite each other's counts.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from agentguard.errors import AgentGuardError, ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Sums = Mapping[str, Mapping[str, float]]
"""Cell name -> sum name -> value."""


class StoreError(AgentGuardError):
    """The store cannot be reached or read; what was to be written is kept and tried again."""

    exit_code = 3
    code = "store_away"


class StoreRefusedError(StoreError):
    """The store answered, and will not take this one however often it is sent."""


class Store(Protocol):
    """All methods raise StoreError."""

    async def add(self, sums: Sums, batch: str) -> None:
        """Add to the stored sums, all or nothing, once: a batch of a name that was added before is known and left alone."""
        ...

    async def sums(self) -> dict[str, dict[str, float]]: ...

    async def put(self, states: Mapping[str, str]) -> None:
        """Replace the text of each of these names."""
        ...

    async def states(self) -> dict[str, str]: ...

    async def aclose(self) -> None: ...


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[Store]:
    """``sqlite:PATH`` or ``redis://HOST:PORT/DB``. Raises ConfigError for anything else, StoreError when it cannot be opened."""
    scheme, _, rest = url.partition(":")
    store: Store
    if scheme == "sqlite" and rest:
        module = await asyncio.to_thread(importlib.import_module, "agentguard.store.sqlite")
        store = await module.SqliteStore.open(rest.removeprefix("//"))
    elif scheme in ("redis", "rediss", "unix"):
        module = await asyncio.to_thread(importlib.import_module, "agentguard.store.redis")
        store = await module.RedisStore.open(url)
    else:
        raise ConfigError("store", url, "write sqlite:PATH, or redis://HOST:PORT/DB to share it between gateways")
    try:
        yield store
    finally:
        await store.aclose()
