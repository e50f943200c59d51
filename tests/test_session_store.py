"""Accounts of sessions in every store: what is reserved, settled and lost, alone and by several workers at once."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from agentguard.errors import ConfigError
from agentguard.gateway.guesses import SharedGuesses
from agentguard.identity import Identity
from agentguard.store import StoreError, accounts, open_store
from agentguard.store.accounts import LOG, Account, Ask, Grant, Key, Refusal, Settlement
from agentguard.store.books import Books
from agentguard.store.migrations import MIGRATIONS
from agentguard.store.sessions import MemorySessions, SessionStore, open_sessions
from tests.test_store import redis_server

ME = Key("", "me")
NO_REDIS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server here")
LASTING = ["sqlite", pytest.param("redis", marks=NO_REDIS)]


@pytest.fixture(params=LASTING)
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:{tmp_path / 'store.db'}"
    else:
        async with redis_server() as address:
            yield address


@pytest.fixture(params=["memory", *LASTING])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SessionStore]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield MemorySessions()
            return
        url = f"sqlite:{tmp_path / 'store.db'}"
        if request.param == "redis":
            url = await stack.enter_async_context(redis_server())
        yield await stack.enter_async_context(open_sessions(url))


class Away:
    """A store that nobody reaches."""

    async def recall(self, name: str) -> str:
        raise StoreError("gone")

    async def note(self, name: str, text: str) -> None:
        raise StoreError("gone")


async def one(store: SessionStore, key: Key = ME) -> accounts.Meters:
    return dict(await store.sessions())[key]


async def test_a_step_is_reserved_settled_and_counted_once(store: SessionStore) -> None:
    first = await store.reserve(ME, Ask("a", 60, tokens=100))
    assert isinstance(first, Grant)
    assert (first.number, first.tokens, first.meters.tokens) == (1, 60, 0)
    again = await store.reserve(ME, Ask("a", 60, tokens=100))  # its reply was lost
    assert isinstance(again, Grant)
    assert (again.number, again.tokens) == (1, 60)
    second = await store.reserve(ME, Ask("b", 60, tokens=100))
    assert isinstance(second, Grant)
    assert (second.number, second.tokens) == (2, 40)  # what is left
    third = await store.reserve(ME, Ask("c", 60, tokens=100))
    assert isinstance(third, Refusal)
    assert (third.meter, third.value, third.limit) == ("busy", 0, 100)
    ended = Settlement("a", tokens=50, think=30, closes=1, record="r1")
    assert await store.settle([(ME, ended)]) == [1]
    assert await store.settle([(ME, ended)]) == [1]  # sent again
    assert (await one(store)).tokens == 50
    await store.settle([(ME, Settlement("b", tokens=40, record="r2"))])
    meters = await one(store)
    assert (meters.steps, meters.tokens, meters.think, meters.closes, meters.lost, meters.seq) == (2, 90, 30, 1, 0, 2)
    fourth = await store.reserve(ME, Ask("d", 60, tokens=100, least=20))
    assert isinstance(fourth, Refusal)
    assert (fourth.meter, fourth.value) == ("tokens", 90)  # 12 tokens are the least of a limit of 100
    assert await store.raise_limit(ME, "tokens", 300)
    assert isinstance(await store.reserve(ME, Ask("e", 60, tokens=100)), Grant)


async def test_an_undone_step_is_no_step_even_if_its_reservation_comes_later(store: SessionStore) -> None:
    await store.reserve(ME, Ask("a", 60, steps=1))
    await store.settle([(ME, Settlement("a", undo=True)), (ME, Settlement("b", undo=True))])
    assert (await one(store)).steps == 0
    late = await store.reserve(ME, Ask("b", 60, steps=1))
    assert isinstance(late, Refusal)
    assert late.meter == "ended"
    assert isinstance(await store.reserve(ME, Ask("c", 60, steps=1)), Grant)
    refused = await store.reserve(ME, Ask("d", 60, steps=1))
    assert isinstance(refused, Refusal)
    assert (refused.meter, refused.value, refused.limit) == ("steps", 1, 1)


async def test_a_dead_workers_reservation_ends_with_its_lease_and_a_slow_ones_comes_back(store: SessionStore) -> None:
    await store.reserve(ME, Ask("dead", 60, tokens=100, lease_s=0.05))
    await store.renew({"dead": (ME, 25)}, 0.05)
    await asyncio.sleep(0.1)
    refused = await store.reserve(ME, Ask("next", 60, tokens=100, least=100))
    assert isinstance(refused, Grant)
    assert refused.tokens == 40  # 25 were seen, 35 more may have been generated: all 60 count
    meters = refused.meters
    assert (meters.tokens, meters.lost) == (25, 35)
    await store.settle([(ME, Settlement("dead", tokens=31, record="r"))])  # it was only slow
    meters = await one(store)
    assert (meters.tokens, meters.lost, meters.steps) == (31, 0, 2)


async def test_what_a_slow_worker_had_not_told_of_comes_back_too(store: SessionStore) -> None:
    await store.reserve(ME, Ask("slow", 60, lease_s=0.02))
    await asyncio.sleep(0.05)
    await store.reserve(ME, Ask("next", 1))
    assert (await one(store)).lost == 60
    await store.settle([(ME, Settlement("slow", tokens=31, record="r"))])
    assert ((await one(store)).tokens, (await one(store)).lost) == (31, 0)


async def test_a_renewed_lease_does_not_end(store: SessionStore) -> None:
    await store.reserve(ME, Ask("a", 60, tokens=100, lease_s=0.05))
    await store.renew({"a": (ME, 1)}, 30.0)
    await asyncio.sleep(0.1)
    granted = await store.reserve(ME, Ask("b", 60, tokens=100))
    assert isinstance(granted, Grant)
    assert (granted.tokens, granted.meters.lost) == (40, 0)


async def test_a_settlement_without_its_reservation_counts_all_the_same(store: SessionStore) -> None:
    """The store had lost it, or was away when the step began."""
    await store.settle([(ME, Settlement("a", tokens=7, record="r"))])
    meters = await one(store)
    assert (meters.steps, meters.tokens) == (1, 7)


async def test_every_store_decides_as_the_pure_functions_do(store: SessionStore) -> None:
    """Random reservations, settlements, undos, renewals and raised limits, one after the other, against `Account`."""
    rng, model, settled = random.Random(12), Account(), set[str]()
    for i in range(400):
        step = f"s{rng.randrange(i // 4 + 1)}"
        action = rng.choice(("reserve", "reserve", "settle", "undo", "renew", "raise"))
        if action == "reserve":
            ask = Ask(step, rng.randrange(1, 90), rng.randrange(1, 9), rng.choice((None, 60)), rng.choice((None, 900)))
            expected = accounts.reserve(model, ask, 0.0) if step not in settled else None
            found = await store.reserve(ME, ask)
            if expected is None:
                assert isinstance(found, Refusal)
                assert found.meter == "ended"
            elif isinstance(expected, Refusal):
                assert isinstance(found, Refusal)
                assert (found.meter, found.value, found.limit) == (expected.meter, expected.value, expected.limit)
            else:
                assert isinstance(found, Grant)
                assert (found.number, found.tokens) == (expected.number, expected.tokens)
        elif action in ("settle", "undo"):
            settlement = Settlement(step, rng.randrange(60), 3, 1, "r", undo=action == "undo")
            if step not in settled:
                accounts.settle(model, settlement)
                settled.add(step)
            await store.settle([(ME, settlement)])
        elif action == "renew":
            accounts.renew(model, step, 5, 60.0)
            await store.renew({step: (ME, 5)}, 60.0)
        elif model.steps:
            limit = 900 + i
            model.raised["tokens"] = limit
            await store.raise_limit(ME, "tokens", limit)
        if model.steps:
            assert replace(await one(store), born="") == accounts.meters(model)
    assert model.tokens > 500


async def test_an_account_and_its_records_survive_a_restart(url: str) -> None:
    async with open_sessions(url) as store:
        for i in range(LOG + 10):
            await store.reserve(ME, Ask(f"{i}", 10, tokens=10**9))
            await store.settle([(ME, Settlement(f"{i}", tokens=3, record=f"ö{i}"))])
        await store.raise_limit(ME, "steps", 500)
    async with open_sessions(url) as store:
        grant = await store.reserve(ME, Ask("next", 10))
        assert isinstance(grant, Grant)
        assert (grant.number, grant.meters.tokens, grant.meters.raised) == (LOG + 11, 3 * (LOG + 10), {"steps": 500})
        assert grant.records == tuple((i + 1, f"ö{i}") for i in range(10, LOG + 10))
        born, seq = grant.meters.born, grant.meters.seq
        await store.settle([(ME, Settlement("next", record="new"))])
        known = await store.reserve(ME, Ask("more", 10, since=seq, born=born))
        assert isinstance(known, Grant)
        assert known.records == ((seq + 1, "new"),)


async def test_two_workers_never_overspend_together(url: str) -> None:
    """Each step uses all it was given; the sum of what was given at once and used is never above the limit."""
    limit, used, held, worst = 5000, 0, 0, 0
    async with open_sessions(url) as first, open_sessions(url) as second:

        async def work(store: SessionStore, name: str) -> None:
            nonlocal used, held, worst
            rng = random.Random(name)
            for i in range(40):
                step = f"{name}-{i}"
                grant = await store.reserve(ME, Ask(step, rng.randrange(1, 200), tokens=limit))
                if isinstance(grant, Refusal):
                    continue
                held += grant.tokens
                worst = max(worst, used + held)
                await asyncio.sleep(rng.random() / 500)
                spent = rng.randrange(grant.tokens + 1)
                held -= grant.tokens
                used += spent
                await store.settle([(ME, Settlement(step, tokens=spent, record="r"))])

        await asyncio.gather(*(work(store, f"{name}{i}") for i in range(6) for name, store in (("a", first), ("b", second))))
        meters = await one(first)
        assert meters.tokens == used
        assert meters.steps == meters.seq
        assert limit - 200 <= used <= worst <= limit


async def test_a_callers_flood_pushes_out_its_own_sessions_only(url: str) -> None:
    async with open_sessions(url, per_caller=3) as store:
        mine, busy = Key("honest", "mine"), Key("flood", "busy")
        await store.settle([(mine, Settlement("m", tokens=7, record="r"))])
        await store.reserve(busy, Ask("running", 10))
        for i in range(20):
            await store.settle([(Key("flood", f"s{i}"), Settlement(f"f{i}", tokens=1, record="r"))])
        kept = dict(await store.sessions())
        assert kept[mine].tokens == 7
        assert busy in kept  # a session that runs is not pushed out
        assert [key.session for key in kept if key.caller == "flood"][:2] == ["s19", "s18"]
        assert sum(key.caller == "flood" for key in kept) == 3


def test_in_memory_the_caller_with_the_most_gives_way() -> None:
    store = MemorySessions(limit=10)
    store.settle_now(Key("honest", "mine"), Settlement("m", tokens=7))
    for i in range(50):
        store.settle_now(Key("flood", f"{i}"), Settlement(f"f{i}", tokens=1))
    assert Key("honest", "mine") in store._accounts
    assert len(store._accounts) == 10


async def test_forgetting_leaves_nothing_and_a_session_begins_anew(url: str, tmp_path: Path) -> None:
    async with open_sessions(url) as store:
        for key in (Key("a", "x"), Key("a", "y"), Key("b", "x"), Key("", "z")):
            await store.reserve(key, Ask(f"{key}", 10))
            await store.settle([(key, Settlement(f"{key}", tokens=5, record="secret-words"))])
        assert await store.forget("a", "x") == 1
        assert await store.forget("a", "x") == 0
        assert {key for key, _ in await store.sessions()} == {Key("a", "y"), Key("b", "x"), Key("", "z")}
        assert await store.forget("a") == 1
        assert await store.forget("b") == 1
        assert await store.forget("", "z") == 1
        assert await store.sessions() == []
        if url.startswith("sqlite:"):
            files = await asyncio.to_thread(lambda: [path.read_bytes() for path in tmp_path.iterdir()])
            assert files
            assert not any(b"secret-words" in content for content in files)
        grant = await store.reserve(Key("a", "x"), Ask("again", 10))
        assert isinstance(grant, Grant)
        assert (grant.number, grant.records) == (1, ())


async def test_old_sessions_are_swept_and_running_ones_are_not(url: str) -> None:
    async with open_sessions(url) as store:
        await store.settle([(Key("", "old"), Settlement("o", tokens=5, record="r"))])
        await store.reserve(Key("", "running"), Ask("r", 10))
        await asyncio.sleep(0.05)
        assert await store.sweep(3600) == 0
        assert await store.sweep(0.01) == 1
        assert [key.session for key, _ in await store.sessions()] == ["running"]


async def test_a_session_without_an_id_is_the_same_one_at_every_gateway_and_after_a_restart(url: str) -> None:
    who = Identity("", "h-" + "0" * 16)
    first = {"messages": [{"role": "user", "content": "fix it"}]}
    later = {"messages": [*first["messages"], {"role": "assistant", "content": "done"}, {"role": "user", "content": "test it"}]}
    async with open_sessions(url) as one, open_sessions(url) as two:
        here, there = SharedGuesses(Books(one), 10), SharedGuesses(Books(two), 10)
        assert [(await place(who, first)).session[-2:] for place in (here.place, there.place)] == [".1", ".2"]
        assert (await here.place(who, later)).session[-2:] == ".2"  # whose first request the other one had
        await here.refused(who)
        assert (await there.place(who, later)).session[-2:] == ".2"
    async with open_sessions(url) as again:
        assert (await SharedGuesses(Books(again), 10).place(who, later)).session[-2:] == ".2"
        assert (await SharedGuesses(Books(again), 10).place(who, first)).session[-2:] == ".3"


async def test_a_guess_is_made_without_a_store_that_is_away() -> None:
    who, body = Identity("", "h-" + "0" * 16), {"messages": [{"role": "user", "content": "fix it"}]}
    books = Books(Away())  # type: ignore[arg-type]
    guesses = SharedGuesses(books, 10)
    assert [(await guesses.place(who, body)).session[-2:] for _ in range(2)] == [".1", ".2"]
    assert "gone" in books.away


@pytest.mark.parametrize(("bad", "named"), [("mysql:x", "sqlite:PATH"), ("sqlite:", "sqlite:PATH")])
async def test_a_url_of_another_kind_is_refused(bad: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        async with open_sessions(bad):
            pass


async def test_a_file_of_the_economics_alone_is_migrated_and_one_file_serves_both(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    for statement in MIGRATIONS[0]:
        old.execute(statement)
    old.execute("INSERT INTO sums VALUES ('cell', 'n', 3)")
    old.commit()
    old.close()
    async with open_sessions(f"sqlite:{path}") as sessions, open_store(f"sqlite:{path}") as sums:
        await sessions.settle([(ME, Settlement("a", tokens=7, record="r"))])
        await sums.add({"cell": {"n": 1.0}}, "batch")
        assert await sums.sums() == {"cell": {"n": 4.0}}
        assert (await one(sessions)).tokens == 7


async def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    new = sqlite3.connect(path)
    new.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    new.close()
    with pytest.raises(StoreError, match="update it"):
        async with open_sessions(f"sqlite:{path}"):
            pass


async def test_a_restart_of_the_machine_ends_every_lease(tmp_path: Path) -> None:
    """The clock of leases begins anew then, and may stand before or behind what was written."""
    url = f"sqlite:{tmp_path / 'store.db'}"
    async with open_sessions(url) as store:
        await store.reserve(ME, Ask("before", 60, tokens=100, lease_s=10_000))
    async with open_sessions(url) as store:
        store._boot = "another boot"  # type: ignore[attr-defined]
        grant = await store.reserve(ME, Ask("after", 60, tokens=100))
        assert isinstance(grant, Grant)
        assert (grant.tokens, grant.meters.lost) == (40, 60)
        renewed = await store.reserve(ME, Ask("next", 60, tokens=200))  # and the new one's lease holds
        assert isinstance(renewed, Grant)
        assert renewed.meters.lost == 60


class Hanging:
    """A store that answers nothing while it is away, and counts who waits for it."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self.there.set()
        self.asking = self.most = 0
        self.inner = MemorySessions()

    async def _answer(self) -> None:
        self.asking += 1
        self.most = max(self.most, self.asking)
        try:
            await self.there.wait()
        finally:
            self.asking -= 1

    async def reserve(self, key: Key, ask: Ask) -> Grant | Refusal:
        await self._answer()
        return await self.inner.reserve(key, ask)

    async def settle(self, batch: list[tuple[Key, Settlement]]) -> list[int]:
        await self._answer()
        return await self.inner.settle(batch)

    async def recall(self, _: str) -> str:
        return "a read says nothing about writes"

    async def note(self, _: str, __: str) -> None:
        await self._answer()


@pytest.mark.parametrize("fails_first", ["reserve", "note"])
async def test_of_a_store_that_is_away_one_asks_and_the_others_are_told_at_once(
    fails_first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentguard.store.books.PATIENCE_S", 0.2)
    monkeypatch.setattr("agentguard.store.books.RETRY_S", 0.05)
    store = Hanging()
    books = Books(store)  # type: ignore[arg-type]
    numbers = iter(range(10_000))

    async def reserve() -> float:
        """Seconds until it was told that the store is away."""
        began = asyncio.get_running_loop().time()
        with pytest.raises(StoreError):
            await books.reserve(ME, Ask(f"s{next(numbers)}", 60, tokens=100))
        return asyncio.get_running_loop().time() - began

    async with books.open(), asyncio.timeout(20):
        store.there.clear()
        if fails_first == "reserve":
            assert await reserve() > 0.1
        else:
            await books.note("a", "b")
        store.most = store.asking
        waited = []
        for _ in range(30):
            waited += await asyncio.gather(*(reserve() for _ in range(5)))
            assert await books.recall("a") == ""
            assert books.away
            await asyncio.sleep(0.02)
        assert store.most == 1
        assert len([seconds for seconds in waited if seconds > 0.1]) <= (fails_first == "note")  # nobody asks but the queue
        store.there.set()
        while books.away or books.waiting:
            await asyncio.sleep(0.02)
        assert isinstance(await books.reserve(ME, Ask("last", 60, tokens=100)), Grant)


async def test_a_reservation_that_is_cancelled_while_it_asks_leaves_the_question_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentguard.store.books.RETRY_S", 0.0)
    store = Hanging()
    books = Books(store)  # type: ignore[arg-type]
    async with books.open(), asyncio.timeout(20):
        books._failed(StoreError("gone"))
        store.there.clear()
        asking = asyncio.create_task(books.reserve(ME, Ask("one", 60, tokens=100)))
        await asyncio.sleep(0.01)
        assert store.asking == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        store.there.set()
        while books.away:  # the cancelled one's reservation is taken back, and that asks
            await asyncio.sleep(0.01)
        assert isinstance(await books.reserve(ME, Ask("two", 60, tokens=100)), Grant)
