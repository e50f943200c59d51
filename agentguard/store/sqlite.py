"""The store in one SQLite file. Several processes of one machine may use it (WAL, adding in one statement)."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from agentguard.store import StoreError, Sums
from agentguard.store.migrations import connect

T = TypeVar("T")
_ADD = "INSERT INTO sums VALUES (?, ?, ?) ON CONFLICT (cell, name) DO UPDATE SET value = value + excluded.value"
_PUT = "INSERT INTO states VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"


class SqliteStore:
    """One connection, used from worker threads one at a time."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._lock = threading.Lock()

    @classmethod
    async def open(cls, path: str) -> SqliteStore:
        return cls(await asyncio.to_thread(connect, path, 30.0), path)

    async def add(self, sums: Sums, batch: str) -> None:
        rows = [(cell, name, value) for cell, values in sums.items() for name, value in values.items()]

        def once(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM batches WHERE at < julianday() - 1")
            if connection.execute("INSERT OR IGNORE INTO batches (name) VALUES (?)", (batch,)).rowcount:
                connection.executemany(_ADD, rows)

        await self._do(once)

    async def sums(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for cell, name, value in await self._do(lambda c: c.execute("SELECT cell, name, value FROM sums").fetchall()):
            found.setdefault(cell, {})[name] = value
        return found

    async def put(self, states: Mapping[str, str]) -> None:
        await self._do(lambda c: c.executemany(_PUT, list(states.items())))

    async def states(self) -> dict[str, str]:
        return dict(await self._do(lambda c: c.execute("SELECT name, value FROM states").fetchall()))

    async def aclose(self) -> None:
        def close() -> None:
            with self._lock:
                self._connection.close()

        await asyncio.to_thread(close)

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def locked() -> T:
            with self._lock:
                self._connection.execute("BEGIN IMMEDIATE")
                with self._connection:  # commits, or rolls back
                    return work(self._connection)

        try:
            return await asyncio.to_thread(locked)
        except sqlite3.Error as error:
            raise StoreError(f"store=sqlite:{self._path}: {error}") from None
