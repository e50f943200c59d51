"""One session's account, as pure decisions: what a step may use is reserved before it starts and settled once it has ended.

    used     = tokens + lost
    reserved = what the running steps may still use
    used + reserved <= limit                 always, however many steps and workers there are

A worker that dies leaves a reservation behind. Its lease ends, and then what the worker had last told of (``seen``) is settled and
the rest counts as ``lost``: the engine may have generated it and nobody saw it, so a hard limit has to count it. A worker that was
only slow settles later all the same, and what was lost comes back. The Redis store does the same in Lua (sessions_redis.py); one
test drives all stores and compares them.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agentguard.lengths import KEPT

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLER = re.compile(r"[0-9a-f]{12}")
KEPT_S = 86_400.0
"""How long a step is remembered after its settlement, or after its lease ended: a settlement that is sent again counts once."""
LOG = KEPT
"""Records of a session that are kept; its sums go on for its whole life."""


class Key(NamedTuple):
    """A session: ids come from clients, so the caller is always part of it."""

    caller: str
    session: str

    def __str__(self) -> str:
        return f"{self.caller}/{self.session}" if self.caller else self.session


def keys_of(name: str) -> list[Key]:
    """The sessions a name on a screen may mean, ``str`` of its key: a client's id may hold a slash itself."""
    keys = [Key("", name)]
    caller, slash, session = name.partition("/")
    if slash and session and _CALLER.fullmatch(caller):
        keys.insert(0, Key(caller, session))
    return keys


@dataclass(slots=True)
class Held:
    """A reservation. ``until``: the end of its lease, in the store's own seconds; ``number``: which step of the session it is."""

    tokens: int
    number: int
    until: float
    seen: int = 0
    expired: bool = False


@dataclass(slots=True)
class Account:
    """``seq`` counts the records, ``born`` tells an account from one that was forgotten before; ``raised``: limits an operator
    raised."""

    born: str = ""
    steps: int = 0
    tokens: int = 0
    think: int = 0
    closes: int = 0
    lost: int = 0
    seq: int = 0
    raised: dict[str, int] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        return sum(h.tokens for h in self.held.values() if not h.expired)

    @property
    def running(self) -> int:
        return sum(not h.expired for h in self.held.values())


@dataclass(frozen=True, slots=True)
class Ask:
    """What a step wants before it starts. want: tokens it may generate at most; least: fewer are no use; steps, tokens: the
    recipe's limits, None for none; since: the last record its worker knows of the account ``born``."""

    step: str
    want: int
    least: int = 1
    steps: int | None = None
    tokens: int | None = None
    lease_s: float = 60.0
    since: int = 0
    born: str = ""


@dataclass(frozen=True, slots=True)
class Meters:
    """An account's sums, without its reservations."""

    born: str
    steps: int
    tokens: int
    think: int
    closes: int
    lost: int
    seq: int
    raised: dict[str, int]


@dataclass(frozen=True, slots=True)
class Grant:
    """number: which step of the session it is, from 1; tokens: what it may generate; meters: before it; records: what other workers
    have settled since the asked record."""

    number: int
    tokens: int
    meters: Meters
    records: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """meter: "steps" or "tokens" at its limit, "busy" where only running steps hold what is left, "ended" for a step that was given
    up before its reservation arrived."""

    meter: str
    value: int
    limit: int
    meters: Meters


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a step has used. undo: it never reached the engine, so it is no step; record: what the session remembers of it."""

    step: str
    tokens: int = 0
    think: int = 0
    closes: int = 0
    record: str = ""
    undo: bool = False


def meters(account: Account) -> Meters:
    return Meters(
        account.born, account.steps, account.tokens, account.think, account.closes, account.lost, account.seq, dict(account.raised)
    )  # fmt: skip


def expire(account: Account, now: float) -> None:
    """Settle reservations whose lease has ended with what is known of them."""
    for step, held in list(account.held.items()):
        if held.expired:
            if held.until + KEPT_S <= now:
                del account.held[step]
        elif held.until <= now:
            held.expired = True
            account.tokens += held.seen
            account.lost += held.tokens - held.seen


def reserve(account: Account, ask: Ask, now: float) -> Grant | Refusal:
    """Reserve for a step that starts; the same step asked again gets the same answer."""
    expire(account, now)
    before = meters(account)
    if (known := account.held.get(ask.step)) is not None:
        return Grant(known.number, known.tokens, before)
    if ask.steps is not None:
        limit = account.raised.get("steps", ask.steps)
        if account.steps >= limit:
            return Refusal("steps", account.steps, limit, before)
    granted = ask.want
    if ask.tokens is not None:
        limit = account.raised.get("tokens", ask.tokens)
        used = account.tokens + account.lost
        least = min(ask.least, ask.want, max(1, limit // 8))
        if used + least > limit:
            return Refusal("tokens", used, limit, before)
        free = limit - used - account.reserved
        if free < least:
            return Refusal("busy", used, limit, before)
        granted = min(ask.want, free)
    account.steps += 1
    account.held[ask.step] = Held(granted, account.steps, now + ask.lease_s)
    return Grant(account.steps, granted, before)


def settle(account: Account, settlement: Settlement) -> None:
    """Book a step that has ended. The caller makes sure that it is booked once, and keeps the record under the new ``seq``."""
    held = account.held.pop(settlement.step, None)
    if held is not None and held.expired:
        account.tokens -= held.seen
        account.lost -= held.tokens - held.seen
    if settlement.undo:
        account.steps -= held is not None
        return
    account.steps += held is None  # its reservation was lost with the store, or never reached it
    account.tokens += settlement.tokens
    account.think += settlement.think
    account.closes += settlement.closes
    if settlement.record:
        account.seq += 1


def renew(account: Account, step: str, seen: int, until: float) -> None:
    """The step's worker is alive, and has counted ``seen`` tokens of it."""
    held = account.held.get(step)
    if held is not None and not held.expired:
        held.seen, held.until = min(seen, held.tokens), until


def boot_clock() -> tuple[str, Callable[[], float]]:
    """A clock that nobody can set, the same for all processes of a machine, and the name of this boot: leases in a file outlive
    neither. Where the system tells no boot apart, a lease may last too long after a restart of the machine, never too short."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "?"
    return boot, time.monotonic
