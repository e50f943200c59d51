"""Sessions in one SQLite file (WAL): the embedded default. Several processes of one machine may share it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from agentguard.errors import loggable
from agentguard.store import StoreError, StoreRefusedError, accounts
from agentguard.store.accounts import KEPT_S, LOG, Account, Ask, Grant, Held, Key, Meters, Refusal, Settlement
from agentguard.store.migrations import connect
from agentguard.store.sessions import NOTE_S, SESSIONS_PER_CALLER

T = TypeVar("T")
logger = logging.getLogger(__name__)
WRITE_BACK = 500
"""Transactions until the log is written back; some 8 MB."""
BUSY_S = 5.0
"""How long to wait for another process's transaction; each is a few rows."""
_COLUMNS = "born, steps, tokens, think, closes, lost, seq, raised, held, boot"


class SqliteSessions:
    """One connection in one thread of its own, so that the loop never waits and calls keep their order. The log beside the file is
    written back by another one: its syncs took seconds on a busy disk, and would have held up every step."""

    def __init__(
        self, connection: sqlite3.Connection, writer: sqlite3.Connection, thread: ThreadPoolExecutor, path: str, per_caller: int
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._thread = thread
        self._back = ThreadPoolExecutor(1, thread_name_prefix="sessions-back")
        self._changes = 0
        self._writing: Future[None] | None = None
        self._path = path
        self._per_caller = per_caller
        self._boot, self._clock = accounts.boot_clock()

    @classmethod
    async def open(cls, path: str, per_caller: int = SESSIONS_PER_CALLER) -> SqliteSessions:
        thread = ThreadPoolExecutor(1, thread_name_prefix="sessions")

        def start() -> SqliteSessions:
            connection, writer = connect(path, BUSY_S), connect(path, BUSY_S)
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            return cls(connection, writer, thread, path, per_caller)

        try:
            return await asyncio.get_running_loop().run_in_executor(thread, start)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def reserve(self, key: Key, ask: Ask) -> Grant | Refusal:
        def work() -> Grant | Refusal:
            account = self._load(key)
            if self._seq_of(ask.step) is not None:
                return Refusal("ended", 0, 0, accounts.meters(account))
            answer = accounts.reserve(account, ask, self._clock())
            self._save(key, account)
            if isinstance(answer, Grant):
                since = ask.since if ask.born == account.born else 0
                if since < account.seq:
                    rows = self._connection.execute(
                        "SELECT seq, record FROM records WHERE caller = ? AND session = ? AND seq > ? ORDER BY seq", (*key, since)
                    )
                    return Grant(answer.number, answer.tokens, answer.meters, tuple(rows.fetchall()))
            return answer

        return await self._do(work)

    async def settle(self, batch: Sequence[tuple[Key, Settlement]]) -> list[int]:
        def work() -> list[int]:
            self._connection.execute("DELETE FROM settled WHERE at < ?", (time.time() - KEPT_S,))
            return [self._settle(key, settlement) for key, settlement in batch]

        return await self._do(work)

    def _settle(self, key: Key, settlement: Settlement) -> int:
        if (known := self._seq_of(settlement.step)) is not None:
            return known
        account = self._load(key)
        accounts.settle(account, settlement)
        seq = 0
        if settlement.record and not settlement.undo:
            seq = account.seq
            self._append(key, seq, settlement.record)
        self._save(key, account)
        self._connection.execute("INSERT INTO settled VALUES (?, ?, ?)", (settlement.step, seq, time.time()))
        return seq

    async def renew(self, seen: Mapping[str, tuple[Key, int]], lease_s: float) -> None:
        def work() -> None:
            until = self._clock() + lease_s
            for step, (key, tokens) in seen.items():
                account = self._load(key)
                accounts.renew(account, step, tokens, until)
                self._save(key, account)

        await self._do(work)

    async def raise_limit(self, key: Key, meter: str, limit: int | None, record: str = "") -> bool:
        def work() -> bool:
            if self._connection.execute("SELECT 1 FROM sessions WHERE caller = ? AND session = ?", key).fetchone() is None:
                return False
            account = self._load(key)
            if limit is not None:
                account.raised[meter] = limit
            if record:
                account.seq += 1
                self._append(key, account.seq, record)
            self._save(key, account)
            return True

        return await self._do(work)

    async def sessions(self, limit: int = 1000) -> list[tuple[Key, Meters]]:
        def work() -> list[tuple[Key, Meters]]:
            rows = self._connection.execute(
                f"SELECT caller, session, {_COLUMNS} FROM sessions ORDER BY used DESC LIMIT ?",  # noqa: S608  # nosec B608  # a constant's names
                (limit,),
            )
            return [(Key(row[0], row[1]), accounts.meters(_account(row[2:]))) for row in rows]

        return await self._do(work)

    async def forget(self, caller: str, session: str | None = None) -> int:
        def work() -> int:
            rows = self._connection.execute(
                "SELECT session FROM sessions WHERE caller = ? AND (? IS NULL OR session = ?)", (caller, session, session)
            ).fetchall()
            for (name,) in rows:
                self._delete(Key(caller, name))
            return len(rows)

        # what is forgotten is overwritten in the file, and the log beside it is emptied; other deletions need not pay for that
        await self._pragma("secure_delete = ON")
        gone = await self._do(work)
        await self._pragma("secure_delete = OFF")
        if gone:
            await self._pragma("wal_checkpoint(TRUNCATE)")
        return gone

    async def _pragma(self, pragma: str) -> None:
        await self._do(lambda: self._connection.execute(f"PRAGMA {pragma}").fetchone(), transaction=False)

    async def sweep(self, older_than_s: float) -> int:
        def work() -> int:
            rows = self._connection.execute(
                "SELECT caller, session, held FROM sessions WHERE used < ? LIMIT 1000", (time.time() - older_than_s,)
            ).fetchall()
            old = [Key(caller, session) for caller, session, held in rows if held == "{}"]
            for key in old:
                self._delete(key)
            return len(old)

        return await self._do(work)

    async def recall(self, name: str) -> str:
        def work() -> str:
            row = self._connection.execute(
                "SELECT text FROM notes WHERE name = ? AND at > ?", (name, time.time() - NOTE_S)
            ).fetchone()
            return str(row[0]) if row is not None else ""

        return await self._do(work, transaction=False)

    async def note(self, name: str, text: str) -> None:
        def work() -> None:
            self._connection.execute("DELETE FROM notes WHERE at <= ?", (time.time() - NOTE_S,))
            self._connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", (name, text, time.time()))

        await self._do(work)

    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._back, self._writer.close)
        await loop.run_in_executor(self._thread, self._connection.close)
        self._back.shutdown(wait=False)
        self._thread.shutdown(wait=False)

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _load(self, key: Key) -> Account:
        row = self._connection.execute(f"SELECT {_COLUMNS} FROM sessions WHERE caller = ? AND session = ?", key).fetchone()  # noqa: S608  # nosec B608  # a constant's names; values are bound
        if row is None:
            self._make_room(key.caller)
            return Account(born=uuid.uuid4().hex[:12])
        account = _account(row)
        if row[-1] != self._boot:
            # the machine was started anew: whoever held these is gone, and the clock they were read from too
            for held in account.held.values():
                held.until = float("-inf") if not held.expired else self._clock()
        return account

    def _save(self, key: Key, account: Account) -> None:
        held = {step: [h.tokens, h.number, h.until, h.seen, h.expired] for step, h in account.held.items()}
        self._connection.execute(
            f"INSERT OR REPLACE INTO sessions (caller, session, {_COLUMNS}, used) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608  # nosec B608  # a constant's names; values are bound
            (
                *key, account.born, account.steps, account.tokens, account.think, account.closes, account.lost, account.seq,
                json.dumps(account.raised), json.dumps(held), self._boot, time.time(),
            ),
        )  # fmt: skip

    def _write_back(self) -> None:
        """Every so many changes, in the other thread, one at a time."""
        self._changes += 1
        if self._changes >= WRITE_BACK and (self._writing is None or self._writing.done()):
            self._changes = 0
            self._writing = self._back.submit(self._checkpoint)

    def _checkpoint(self) -> None:
        try:
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            logger.warning("not_written_back", extra={"path": self._path, "error": loggable(error)})

    def _append(self, key: Key, seq: int, record: str) -> None:
        self._connection.execute("INSERT INTO records VALUES (?, ?, ?, ?)", (*key, seq, record))
        self._connection.execute("DELETE FROM records WHERE caller = ? AND session = ? AND seq <= ?", (*key, seq - LOG))

    def _seq_of(self, step: str) -> int | None:
        row = self._connection.execute("SELECT seq FROM settled WHERE step = ?", (step,)).fetchone()
        return None if row is None else int(row[0])

    def _make_room(self, caller: str) -> None:
        (count,) = self._connection.execute("SELECT count(*) FROM sessions WHERE caller = ?", (caller,)).fetchone()
        if count < self._per_caller:
            return
        row = self._connection.execute(
            "SELECT session FROM sessions WHERE caller = ? AND held = '{}' ORDER BY used LIMIT 1", (caller,)
        ).fetchone()
        if row is not None:
            self._delete(Key(caller, row[0]))

    def _delete(self, key: Key) -> None:
        self._connection.execute("DELETE FROM sessions WHERE caller = ? AND session = ?", key)
        self._connection.execute("DELETE FROM records WHERE caller = ? AND session = ?", key)

    async def _do(self, work: Callable[[], T], *, transaction: bool = True) -> T:
        def run() -> T:
            with self._transaction() if transaction else contextlib.nullcontext():
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError) as error:
            raise StoreRefusedError(f"store=sqlite:{self._path}: {error}") from None
        except sqlite3.Error as error:
            raise StoreError(f"store=sqlite:{self._path}: {error}; is the disk full, or the file gone?") from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
            self._write_back()
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back by itself
                self._connection.execute("ROLLBACK")
            raise


def _account(row: tuple[object, ...]) -> Account:
    born, steps, tokens, think, closes, lost, seq, raised, held = row[:9]
    return Account(
        str(born), int(steps), int(tokens), int(think), int(closes), int(lost), int(seq),  # type: ignore[call-overload]
        json.loads(str(raised)), {step: Held(*values) for step, values in json.loads(str(held)).items()},
    )  # fmt: skip
