"""Stores and their synchronisation: a restart keeps estimates, gateways share them, and a store that is away loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from agentguard.economics.arms import STRICT
from agentguard.errors import ConfigError
from agentguard.events import RuleSwitched
from agentguard.store import Store, StoreError, open_store
from agentguard.store.sync import exchange, synced
from tests.test_economics import LEAF, RULE, ledger, traffic

REDIS = shutil.which("redis-server")


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[str]:
    """A real Redis on a free loopback port, without persistence."""
    assert REDIS is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    async with open_store(f"redis://127.0.0.1:{port}/0"):
                        break
                except StoreError:
                    await asyncio.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.skipif(REDIS is None, reason="no redis-server here"))])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:{tmp_path / 'economics.db'}"
    else:
        async with redis_server() as address:
            yield address


async def test_sums_add_up_and_texts_are_replaced(url: str) -> None:
    async with open_store(url) as one, open_store(url) as two:
        await one.add({"a": {"x": 1.5, "y": 2.0}, "b": {"x": 1.0}}, "first")
        await two.add({"a": {"x": 0.25}}, "second")
        await two.add({"a": {"x": 0.25}}, "second")  # sent again because the reply was lost
        await one.put({"s": "first"})
        await two.put({"s": "second", "t": "ö"})
        assert await one.sums() == {"a": {"x": 1.75, "y": 2.0}, "b": {"x": 1.0}}
        assert await one.states() == {"s": "second", "t": "ö"}
    async with open_store(url) as again:
        assert (await again.sums())["a"]["x"] == 1.75


async def test_concurrent_adds_lose_nothing(url: str) -> None:
    async with open_store(url) as one, open_store(url) as two:
        await asyncio.gather(
            *(store.add({"cell": {"n": 1.0}}, f"{i}-{j}") for i, store in enumerate((one, two)) for j in range(50))
        )
        assert await one.sums() == {"cell": {"n": 100.0}}


async def test_a_restart_keeps_estimates_and_verdicts(url: str) -> None:
    events: list[RuleSwitched] = []
    before = ledger(events)
    async with open_store(url) as store, synced(before, store):
        traffic(before, 1.6, range(600))
    assert [e.on for e in events] == [False]
    after = ledger()
    async with open_store(url) as store, synced(after, store):
        assert after.cells[LEAF, RULE].sums == pytest.approx(before.cells[LEAF, RULE].sums)
        assert after.switches[LEAF, RULE] == before.switches[LEAF, RULE]
        assert {after.assign(f"s{i}", LEAF).rule for i in range(20)} == {STRICT}


async def test_two_gateways_see_each_others_sums_and_switches(url: str) -> None:
    events: list[RuleSwitched] = []
    one, two = ledger(events), ledger()
    async with open_store(url) as first, open_store(url) as second:
        for part in range(6):
            traffic(one, 1.6, range(200 * part, 200 * part + 100), seed=part)
            traffic(two, 1.6, range(200 * part + 100, 200 * part + 200), seed=100 + part)
            await exchange(one, first)
            await exchange(two, second)
        await exchange(one, first)
        assert one.cells[LEAF, STRICT].sums == pytest.approx(two.cells[LEAF, STRICT].sums)
        assert one.cells[LEAF, STRICT].sessions == sum(one.arms.assign(f"s{i}") == STRICT for i in range(1200))
        assert one.switches[LEAF, RULE].on is two.switches[LEAF, RULE].on is False


class Broken:
    """A store that is away, or goes away between two calls."""

    def __init__(self, store: Store, failing: set[str]) -> None:
        self.store, self.failing = store, failing

    async def add(self, sums: Mapping[str, Mapping[str, float]], batch: str) -> None:
        self._check("add")
        await self.store.add(sums, batch)
        self._check("reply")

    async def sums(self) -> dict[str, dict[str, float]]:
        self._check("sums")
        return await self.store.sums()

    async def put(self, states: Mapping[str, str]) -> None:
        self._check("put")
        await self.store.put(states)

    async def states(self) -> dict[str, str]:
        self._check("states")
        return await self.store.states()

    async def aclose(self) -> None:
        pass

    def _check(self, name: str) -> None:
        if name in self.failing:
            raise StoreError("away")


@pytest.mark.parametrize("failing", ["add", "reply", "sums", "put", "states"])
async def test_a_store_that_is_away_loses_and_doubles_nothing(failing: str, tmp_path: Path) -> None:
    async with open_store(f"sqlite:{tmp_path / 'e.db'}") as store:
        away = Broken(store, {failing})
        book = ledger()
        traffic(book, 1.6, range(300))
        expected = dict(book.cells[LEAF, RULE].sums)
        for _ in range(3):
            with pytest.raises(StoreError):
                await exchange(book, away)
            assert book.cells[LEAF, RULE].sums == expected
        away.failing.clear()
        await exchange(book, away)
        assert (await store.sums())[f"\t{LEAF}\t{RULE}"] == pytest.approx(expected)
        assert book.cells[LEAF, RULE].sums == pytest.approx(expected)
        assert set(await store.states()) == {f"\t{LEAF}\t{RULE}"}
        assert (book.pending, book.outbox, book.moved) == ({}, None, set())


async def test_steps_during_an_exchange_are_counted_once(tmp_path: Path) -> None:
    async with open_store(f"sqlite:{tmp_path / 'e.db'}") as store:
        book, plain = ledger(), ledger()
        rng = random.Random(0)

        async def work() -> None:
            for i in range(60):
                traffic(book, 1.0, range(i, i + 1), seed=i)
                await asyncio.sleep(rng.random() / 500)

        async with synced(book, store, every_s=0.002):
            await work()
        for i in range(60):
            traffic(plain, 1.0, range(i, i + 1), seed=i)
        for key, cell in plain.cells.items():
            assert (await store.sums())["\t".join(("", *key))] == pytest.approx(cell.sums)


async def test_a_store_that_goes_away_while_running_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_store(f"sqlite:{tmp_path / 'e.db'}") as store:
        away = Broken(store, set())
        async with synced(ledger(), away, every_s=0.01):
            away.failing.add("add")
            await asyncio.sleep(0.2)
    assert caplog.text.count("store_unreachable") == 1


@pytest.mark.parametrize(
    ("url", "error", "named"),
    [
        ("mysql:x", ConfigError, "sqlite:PATH"),
        ("sqlite:", ConfigError, "sqlite:PATH"),
        ("sqlite:/no/such/folder/e.db", StoreError, "folder that exists"),
        ("redis://127.0.0.1:9/0", StoreError, "is Redis running"),
    ],
)
async def test_a_store_that_cannot_be_opened_says_why(url: str, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        async with open_store(url):
            pass


class Slow(Broken):
    """Takes its time over adding, so that a gateway's end falls into it."""

    async def add(self, sums: Mapping[str, Mapping[str, float]], batch: str) -> None:
        await asyncio.sleep(0.1)
        await self.store.add(sums, batch)


async def test_a_gateway_that_ends_in_the_middle_of_an_exchange_loses_nothing(tmp_path: Path) -> None:
    async with open_store(f"sqlite:{tmp_path / 'e.db'}") as store:
        book = ledger()
        async with synced(book, Slow(store, set()), every_s=0.01):
            traffic(book, 1.6, range(200))
            await asyncio.sleep(0.05)  # the exchange has begun
            traffic(book, 1.6, range(200, 300), seed=1)
        for key, cell in book.cells.items():
            assert (await store.sums())["\t".join(("", *key))] == pytest.approx(cell.sums)
        assert set(await store.states()) == {f"\t{LEAF}\t{RULE}"}


async def test_a_state_that_cannot_be_read_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_store(f"sqlite:{tmp_path / 'e.db'}") as store:
        await store.put({f"\t{LEAF}\t{RULE}": '{"on": true}', f"\tm/chat/follow_up\t{RULE}": "no json"})
        book = ledger()
        async with synced(book, store):
            traffic(book, 1.0, range(20))
        assert f"\t{LEAF}\t{STRICT}" in await store.sums()
    assert caplog.text.count("switch_unreadable") >= 2


async def test_what_another_setup_measured_is_left_alone(tmp_path: Path) -> None:
    async with open_store(f"sqlite:{tmp_path / 'e.db'}") as store:
        one, two = ledger(), ledger()
        async with synced(one, store, "K=6"):
            traffic(one, 1.6, range(300))
        async with synced(two, store, "K=3"):
            assert two.cells == {}
            assert two.switches == {}
