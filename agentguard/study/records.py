"""What a study keeps of each session, and the file it grows in: one line a session, so that a killed study goes on.

The first line says what is run (`Header`), every other line is one finished session (`SessionRecord`). A line is written when its
session has ended, in one write, so a killed study loses the sessions that ran, and at most tears its last line; `Recording.resume`
cuts that off. A recording of another plan is refused. Prompts and outputs are not kept.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentguard.errors import ConfigError
from agentguard.events import StepFinished

FORMAT = 1


class RelaxedToken(msgspec.Struct, frozen=True, array_like=True):
    """A drafted token that was accepted only because the rule relaxes: its id, the target's probability, its rank (1 is the most
    probable), and its place in the output, counted from 0 in tokens."""

    token: int
    p: float
    rank: int
    place: int


class RoundStats(msgspec.Struct, kw_only=True):
    """One session's verification rounds, from the engine's telemetry (anatomy.py).

    rounds: of which drafted and accepted are sums. by_position: rounds that accepted draft position i; drafted_at: rounds that
    drafted it. fates: drafted tokens by what became of them. strict_*: tokens that strict accepts on the same coin, their number,
    the sum of their p, and their ranks' histogram. relaxed: those that only the rule let through. strict_words, relaxed_words:
    hesitation words (anatomy.py) among these and those. by_output: [rounds, accepted] for each `OUTPUT_BIN`
    tokens of output. unjudged: tokens for which the draft kept no probability. effective: the rules the rounds really ran under.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = msgspec.field(default_factory=list)
    drafted_at: list[int] = msgspec.field(default_factory=list)
    fates: dict[str, int] = msgspec.field(default_factory=dict)
    strict_n: int = 0
    strict_p: float = 0.0
    strict_rank: dict[int, int] = msgspec.field(default_factory=dict)
    relaxed: list[RelaxedToken] = msgspec.field(default_factory=list)
    strict_words: dict[str, int] = msgspec.field(default_factory=dict)
    relaxed_words: dict[str, int] = msgspec.field(default_factory=dict)
    by_output: list[list[int]] = msgspec.field(default_factory=list)
    unjudged: int = 0
    effective: dict[str, int] = msgspec.field(default_factory=dict)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A step's accounts and its grade. ``right``: None where nothing is graded; ``proved``: tokens generated when the trace first
    stated the right answer, None where it never did or the suite cannot tell."""

    finished: StepFinished
    right: bool | None
    proved: int | None = None


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session under one cell. ``close`` is "pilot" for the sessions that fix the budget of the closed ones."""

    rule: str
    close: str
    number: int
    steps: list[StepRecord]
    stats: RoundStats
    t: float = 0.0

    @property
    def key(self) -> tuple[str, str, int]:
        return self.rule, self.close, self.number


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """``plan``: all that decides what is run; two recordings with equal plans may be joined. ``provenance``: of its first start."""

    plan: dict[str, Any]
    provenance: dict[str, Any]
    format: int = FORMAT


_encode = msgspec.json.Encoder().encode
_record = msgspec.json.Decoder(SessionRecord).decode
_header = msgspec.json.Decoder(Header).decode


class Recording:
    """An open recording. `append` may be called from many tasks; lines are written whole, one after the other."""

    def __init__(self, path: Path, header: Header, records: list[SessionRecord]) -> None:
        self.path = path
        self.header = header
        self.records = records
        self._lock = asyncio.Lock()

    @classmethod
    def new(cls, path: Path, header: Header) -> Recording:
        """Begin a recording. Raises ConfigError where one exists already, or the file cannot be written."""
        try:
            with path.open("xb") as file:
                file.write(_encode(header) + b"\n")
        except FileExistsError:
            raise ConfigError("recording", str(path), "exists already; go on with --resume, or choose another --out") from None
        except OSError as error:
            raise ConfigError("recording", str(path), f"cannot be written ({error.strerror}); choose another --out") from None
        return cls(path, header, [])

    @classmethod
    def resume(cls, path: Path, plan: Mapping[str, Any]) -> Recording:
        """Go on with a recording. A torn last line is cut off; one of another plan is refused (ConfigError names what differs)."""
        header, records, whole = _read(path)
        for key in sorted(set(plan) | set(header.plan)):
            if plan.get(key) != header.plan.get(key):
                there, now = _short(header.plan.get(key)), _short(plan.get(key))
                raise ConfigError(
                    "--resume", path.name,
                    f"is a recording of another plan: {key} is {there} there and {now} now; "
                    "give the same options, or another --out",
                )  # fmt: skip
        if whole < path.stat().st_size:
            os.truncate(path, whole)
        return cls(path, header, records)

    async def append(self, record: SessionRecord) -> None:
        line = _encode(record) + b"\n"
        async with self._lock:
            await asyncio.to_thread(self._write, line)
            self.records.append(record)

    def _write(self, line: bytes) -> None:
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(
                "recording", str(self.path), f"cannot be written ({error.strerror}); free space and go on with --resume"
            ) from None


def load(path: Path) -> tuple[Header, list[SessionRecord]]:
    """A recording, whole or torn. Raises ConfigError."""
    header, records, _ = _read(path)
    return header, records


def _read(path: Path) -> tuple[Header, list[SessionRecord], int]:
    """Header, sessions, and the bytes up to the end of the last whole line."""
    try:
        lines = list(_lines(path))
    except OSError as error:
        raise ConfigError("recording", str(path), f"cannot be read ({error.strerror}); is it the --out of a study?") from None
    if not lines or not lines[0].endswith(b"\n"):
        raise ConfigError("recording", str(path), "holds no study; start it without --resume")
    try:
        header = _header(lines[0])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path.name}:1", lines[0][:80], f"is not a study's header ({error})") from None
    if header.format != FORMAT:
        raise ConfigError("recording", path.name, f"has format {header.format}, this version reads {FORMAT}; run the study again")
    records: dict[tuple[str, str, int], SessionRecord] = {}
    whole = len(lines[0])
    for number, line in enumerate(lines[1:], 2):
        if not line.endswith(b"\n") and number == len(lines):
            break  # torn: the session is run again
        try:
            record = _record(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path.name}:{number}", line[:80], f"is not a session ({error}); the file is damaged") from None
        records[record.key] = record
        whole += len(line)
    return header, list(records.values()), whole


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
