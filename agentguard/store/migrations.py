"""The schema of the SQLite file, step by step. ``PRAGMA user_version`` counts the steps a file has seen."""

from __future__ import annotations

import sqlite3

from agentguard.store import StoreError

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (  # 1: economics; files of before this numbering have these tables and version 0
        "CREATE TABLE IF NOT EXISTS sums (cell TEXT, name TEXT, value REAL NOT NULL, PRIMARY KEY (cell, name)) WITHOUT ROWID",
        "CREATE TABLE IF NOT EXISTS batches (name TEXT PRIMARY KEY, at REAL NOT NULL DEFAULT (julianday())) WITHOUT ROWID",
        "CREATE TABLE IF NOT EXISTS states (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    ),
    (  # 2: sessions
        """CREATE TABLE sessions (caller TEXT, session TEXT, born TEXT NOT NULL, steps INTEGER NOT NULL, tokens INTEGER NOT NULL,
        think INTEGER NOT NULL, closes INTEGER NOT NULL, lost INTEGER NOT NULL, seq INTEGER NOT NULL, raised TEXT NOT NULL,
        held TEXT NOT NULL, boot TEXT NOT NULL, used REAL NOT NULL, PRIMARY KEY (caller, session)) WITHOUT ROWID""",
        "CREATE INDEX sessions_used ON sessions (caller, used)",
        """CREATE TABLE records (caller TEXT, session TEXT, seq INTEGER, record TEXT NOT NULL,
        PRIMARY KEY (caller, session, seq)) WITHOUT ROWID""",
        "CREATE TABLE settled (step TEXT PRIMARY KEY, seq INTEGER NOT NULL, at REAL NOT NULL) WITHOUT ROWID",
        "CREATE INDEX settled_at ON settled (at)",
    ),
    (  # 3: notes on guessed sessions
        "CREATE TABLE notes (name TEXT PRIMARY KEY, text TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID",
        "CREATE INDEX notes_at ON notes (at)",
    ),
)


def connect(path: str, timeout_s: float) -> sqlite3.Connection:
    """The file with the newest schema. Raises StoreError for one that cannot be opened, or that a newer version has written."""
    try:
        connection = sqlite3.connect(path, timeout=timeout_s, check_same_thread=False, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            # a power cut may cost the last second, never the file; a sync a commit took 0.1 s here
            connection.execute("PRAGMA synchronous = NORMAL")
            migrate(connection, path)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise StoreError(f"store=sqlite:{path}: cannot be opened ({error}); give a file in a folder that exists") from None
    return connection


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """All or nothing; two processes may open a new file at once."""
    if _version(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection)
        if version > len(MIGRATIONS):
            raise StoreError(f"store=sqlite:{path}: has schema {version}, this agentguard knows {len(MIGRATIONS)}; update it")
        for step in MIGRATIONS[version:]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
