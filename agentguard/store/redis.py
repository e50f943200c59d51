"""The store in Redis, for several gateways: a hash of sums a cell, grown by a script, and a hash of switches."""

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
_ADD = """
if not redis.call('SET', KEYS[1], 1, 'NX', 'EX', 86400) then return 0 end
for i = 2, #ARGV, 3 do
  redis.call('SADD', ARGV[1] .. 'cells', ARGV[i])
  redis.call('HINCRBYFLOAT', ARGV[1] .. 'cell:' .. ARGV[i], ARGV[i + 1], ARGV[i + 2])
end
return 1
"""


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

    async def add(self, sums: Sums, batch: str) -> None:
        """In one script, so that a reply that was lost on its way does not make a retry count twice."""
        rows = [(cell, name, repr(float(value))) for cell, values in sums.items() for name, value in values.items()]
        arguments = [part for row in rows for part in row]
        await self._do(self._client.eval(_ADD, 1, f"{PREFIX}batch:{batch}", PREFIX, *arguments))

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
        except (RedisError, OSError, RuntimeError) as error:  # uvloop's word for a connection that is closed is a RuntimeError
            raise StoreError(f"store={self._url}: {error}; is Redis running there?") from None
