"""The store in Redis, for several gateways: a hash of sums a cell, grown by HINCRBYFLOAT, and a hash of switches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar, cast

from redis import asyncio as redis
from redis.driver_info import DriverInfo
from redis.exceptions import RedisError

from agentguard.store import StoreError, Sums

T = TypeVar("T")
PREFIX = "agentguard:"


class RedisStore:
    def __init__(self, client: redis.Redis, url: str) -> None:
        self._client = client
        self._url = url

    @classmethod
    async def open(cls, url: str) -> RedisStore:
        # the client looks its own version up among the installed packages, which is no work for the event loop
        driver = await asyncio.to_thread(DriverInfo)
        options = {"decode_responses": True, "socket_timeout": 5, "socket_connect_timeout": 5, "driver_info": driver}
        store = cls(redis.from_url(url, **options), url)
        try:
            await store._do(store._client.ping())
        except StoreError:
            await store.aclose()
            raise
        return store

    async def add(self, sums: Sums) -> None:
        """All or nothing (MULTI)."""
        async with self._client.pipeline(transaction=True) as pipe:
            for cell, values in sums.items():
                pipe.sadd(f"{PREFIX}cells", cell)
                for name, value in values.items():
                    pipe.hincrbyfloat(f"{PREFIX}cell:{cell}", name, value)
            await self._do(pipe.execute())

    async def sums(self) -> dict[str, dict[str, float]]:
        cells = sorted(await self._do(cast("Awaitable[set[str]]", self._client.smembers(f"{PREFIX}cells"))))
        async with self._client.pipeline(transaction=True) as pipe:
            for cell in cells:
                pipe.hgetall(f"{PREFIX}cell:{cell}")
            found: list[dict[str, str]] = await self._do(pipe.execute())
        return {cell: {name: float(value) for name, value in values.items()} for cell, values in zip(cells, found, strict=True)}

    async def put(self, states: Mapping[str, str]) -> None:
        if states:
            await self._do(self._client.hset(f"{PREFIX}states", mapping=cast("Mapping[Any, Any]", states)))

    async def states(self) -> dict[str, str]:
        return await self._do(cast("Awaitable[dict[str, str]]", self._client.hgetall(f"{PREFIX}states")))

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _do(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except (RedisError, OSError) as error:
            raise StoreError(f"store={self._url}: {error}; is Redis running there?") from None
