"""Sessions in Redis, for several workers or machines. Every change is one script, which Redis runs as a whole.

The scripts decide as `agentguard.store.accounts` does. Leases are read from Redis' own clock, so that workers need not agree on the
time. Keys of a session: ``s:`` its sums, ``h:`` its reservations (a JSON list each: tokens, number, until, seen, expired), ``l:``
its latest records; all end by themselves once nobody has used them for the retention time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar, cast

from redis import asyncio as redis
from redis.driver_info import DriverInfo
from redis.exceptions import RedisError, ResponseError

from agentguard.store import StoreError, StoreRefusedError
from agentguard.store.accounts import KEPT_S, LOG, Ask, Grant, Key, Meters, Refusal, Settlement
from agentguard.store.sessions import NOTE_S, SESSIONS_PER_CALLER

T = TypeVar("T")
PREFIX = "agentguard:"
VERSION = 1
RETENTION_S = 400 * 86_400
"""For what no gateway sweeps any more; a recipe's own retention is at most a year."""
TIMEOUT_S = 10.0
CONNECTIONS = 16
"""Of one worker; a command takes well under a millisecond."""
_PASSES = ("MISCONF", "OOM", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "LOADING")
"""Errors of a server's state, which another try may not meet."""
_COMMON = """
local P, KEPT, LOG = 'agentguard:', __KEPT__, __LOG__
local t = redis.call('TIME')
local now = tonumber(t[1]) + tonumber(t[2]) / 1e6
local function int(x) return string.format('%.0f', tonumber(x) or 0) end
local function names(id) return P .. 's:' .. id, P .. 'h:' .. id, P .. 'l:' .. id end
local function touch(id, caller, retention)
  local s, h, l = names(id)
  redis.call('EXPIRE', s, retention) redis.call('EXPIRE', h, retention) redis.call('EXPIRE', l, retention)
  redis.call('ZADD', P .. 'c:' .. caller, now, id)
  redis.call('SADD', P .. 'callers', caller)
end
local function drop(id, caller)
  local s, h, l = names(id)
  redis.call('DEL', s, h, l)
  redis.call('ZREM', P .. 'c:' .. caller, id)
end
local function running(h)
  for _, raw in ipairs(redis.call('HVALS', h)) do
    if cjson.decode(raw)[5] == 0 then return true end
  end
  return false
end
local function create(id, caller, born, most)
  local s = names(id)
  if redis.call('HSETNX', s, 'born', born) == 0 then return end
  local c = P .. 'c:' .. caller
  if redis.call('ZCARD', c) < most then return end
  for _, old in ipairs(redis.call('ZRANGE', c, 0, 63)) do
    local _, h = names(old)
    if old ~= id and not running(h) then drop(old, caller) return end
  end
end
local function expire(s, h)
  local reserved = 0
  local all = redis.call('HGETALL', h)
  for i = 1, #all, 2 do
    local held = cjson.decode(all[i + 1])
    if held[5] == 1 then
      if held[3] + KEPT <= now then redis.call('HDEL', h, all[i]) end
    elseif held[3] <= now then
      held[5] = 1
      redis.call('HSET', h, all[i], cjson.encode(held))
      redis.call('HINCRBY', s, 'tokens', int(held[4]))
      redis.call('HINCRBY', s, 'lost', int(held[1] - held[4]))
    else
      reserved = reserved + held[1]
    end
  end
  return reserved
end
local function append(s, l, record)
  local seq = redis.call('HINCRBY', s, 'seq', 1)
  redis.call('RPUSH', l, int(seq) .. ' ' .. record)
  redis.call('LTRIM', l, -LOG, -1)
  return seq
end
""".replace("__KEPT__", str(int(KEPT_S))).replace("__LOG__", str(LOG))
# id, caller, born, most, retention, step, want, least, steps limit or -1, tokens limit or -1, lease, since, born known
_RESERVE = (
    _COMMON
    + """
local id, caller, retention, step = ARGV[1], ARGV[2], tonumber(ARGV[5]), ARGV[6]
local want, least, lease = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[11])
local s, h, l = names(id)
create(id, caller, ARGV[3], tonumber(ARGV[4]))
local reserved = expire(s, h)
touch(id, caller, retention)
local before = redis.call('HGETALL', s)
local function value(name) return tonumber(redis.call('HGET', s, name)) or 0 end
if redis.call('EXISTS', P .. 'd:' .. step) == 1 then return {'ended', '0', '0', before} end
local known = redis.call('HGET', h, step)
if known then
  local held = cjson.decode(known)
  return {'granted', int(held[2]), int(held[1]), before, {}}
end
local limit = tonumber(ARGV[9])
if limit >= 0 then
  limit = tonumber(redis.call('HGET', s, 'raised:steps')) or limit
  if value('steps') >= limit then return {'steps', int(value('steps')), int(limit), before} end
end
local granted = want
limit = tonumber(ARGV[10])
if limit >= 0 then
  limit = tonumber(redis.call('HGET', s, 'raised:tokens')) or limit
  local used = value('tokens') + value('lost')
  least = math.min(least, want, math.max(1, math.floor(limit / 8)))
  if used + least > limit then return {'tokens', int(used), int(limit), before} end
  local free = limit - used - reserved
  if free < least then return {'busy', int(used), int(limit), before} end
  granted = math.min(want, free)
end
local number = redis.call('HINCRBY', s, 'steps', 1)
redis.call('HSET', h, step, cjson.encode({granted, number, now + lease, 0, 0}))
redis.call('EXPIRE', h, retention)
local records = {}
local since = 0
if redis.call('HGET', s, 'born') == ARGV[13] then since = tonumber(ARGV[12]) end
local behind = value('seq') - since
if behind > 0 then records = redis.call('LRANGE', l, -behind, -1) end
return {'granted', int(number), int(granted), before, records}
"""
)
# id, caller, born, most, retention, step, tokens, think, closes, undo, record
_SETTLE = (
    _COMMON
    + """
local id, caller, step, undo = ARGV[1], ARGV[2], ARGV[6], ARGV[10] == '1'
local done = P .. 'd:' .. step
local known = redis.call('GET', done)
if known then return tonumber(known) end
local s, h, l = names(id)
create(id, caller, ARGV[3], tonumber(ARGV[4]))
local raw = redis.call('HGET', h, step)
if raw then
  local held = cjson.decode(raw)
  redis.call('HDEL', h, step)
  if held[5] == 1 then
    redis.call('HINCRBY', s, 'tokens', int(0 - held[4]))
    redis.call('HINCRBY', s, 'lost', int(held[4] - held[1]))
  end
end
local seq = 0
if undo then
  if raw then redis.call('HINCRBY', s, 'steps', -1) end
else
  if not raw then redis.call('HINCRBY', s, 'steps', 1) end
  redis.call('HINCRBY', s, 'tokens', ARGV[7])
  redis.call('HINCRBY', s, 'think', ARGV[8])
  redis.call('HINCRBY', s, 'closes', ARGV[9])
  if ARGV[11] ~= '' then seq = append(s, l, ARGV[11]) end
end
redis.call('SET', done, int(seq), 'EX', KEPT)
touch(id, caller, tonumber(ARGV[5]))
return seq
"""
)
# lease, then id, step, seen of each
_RENEW = (
    _COMMON
    + """
for i = 2, #ARGV, 3 do
  local _, h = names(ARGV[i])
  local raw = redis.call('HGET', h, ARGV[i + 1])
  if raw then
    local held = cjson.decode(raw)
    if held[5] == 0 then
      held[4] = math.min(tonumber(ARGV[i + 2]), held[1])
      held[3] = now + tonumber(ARGV[1])
      redis.call('HSET', h, ARGV[i + 1], cjson.encode(held))
    end
  end
end
return 1
"""
)
# id, caller, retention, meter, limit or "", record
_RAISE = (
    _COMMON
    + """
local s, h, l = names(ARGV[1])
if redis.call('EXISTS', s) == 0 then return 0 end
if ARGV[5] ~= '' then redis.call('HSET', s, 'raised:' .. ARGV[4], ARGV[5]) end
if ARGV[6] ~= '' then append(s, l, ARGV[6]) end
touch(ARGV[1], ARGV[2], tonumber(ARGV[3]))
return 1
"""
)
# caller, then the ids
_FORGET = (
    _COMMON
    + """
local gone = 0
for i = 2, #ARGV do
  local s = names(ARGV[i])
  gone = gone + redis.call('EXISTS', s)
  drop(ARGV[i], ARGV[1])
end
if redis.call('ZCARD', P .. 'c:' .. ARGV[1]) == 0 then redis.call('SREM', P .. 'callers', ARGV[1]) end
return gone
"""
)
# older than (seconds)
_SWEEP = (
    _COMMON
    + """
local gone = 0
for _, caller in ipairs(redis.call('SMEMBERS', P .. 'callers')) do
  local c = P .. 'c:' .. caller
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', c, '-inf', now - tonumber(ARGV[1]), 'LIMIT', 0, 1000)) do
    local _, h = names(id)
    if not running(h) then drop(id, caller) gone = gone + 1 end
  end
  if redis.call('ZCARD', c) == 0 then redis.call('SREM', P .. 'callers', caller) end
end
return gone
"""
)


class RedisSessions:
    def __init__(self, client: redis.Redis, url: str, per_caller: int) -> None:
        self._client = client
        self._url = url
        self._per_caller = per_caller
        self._scripts = {
            name: client.register_script(text)
            for name, text in {
                "reserve": _RESERVE, "settle": _SETTLE, "renew": _RENEW, "raise": _RAISE, "forget": _FORGET, "sweep": _SWEEP,
            }.items()
        }  # fmt: skip

    @classmethod
    async def open(cls, url: str, per_caller: int = SESSIONS_PER_CALLER) -> RedisSessions:
        # the client looks its own version up among the installed packages, which is no work for the event loop
        driver = await asyncio.to_thread(DriverInfo)
        options = {"decode_responses": True, "socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        # a pool without a bound keeps a connection for every step of the busiest moment
        pool = redis.BlockingConnectionPool.from_url(
            url, max_connections=CONNECTIONS, timeout=TIMEOUT_S, driver_info=driver, **options
        )
        store = cls(redis.Redis.from_pool(pool), url, per_caller)
        try:
            await store._do(store._client.set(f"{PREFIX}version", VERSION, nx=True))
            found = int(await store._do(store._client.get(f"{PREFIX}version")) or VERSION)
            if found > VERSION:
                raise StoreError(
                    f"store={url}: has layout {found}, this agentguard knows {VERSION}; update it, or give another database"
                )
        except StoreError:
            await store.aclose()
            raise
        return store

    async def reserve(self, key: Key, ask: Ask) -> Grant | Refusal:
        limits = [-1 if limit is None else limit for limit in (ask.steps, ask.tokens)]
        reply = await self._run(
            "reserve", *self._head(key), ask.step, ask.want, ask.least, *limits, ask.lease_s, ask.since, ask.born
        )
        word, first, second, before = reply[:4]
        if word != "granted":
            return Refusal(word, int(first), int(second), _meters(before))
        records = [record.split(" ", 1) for record in reply[4]]
        return Grant(int(first), int(second), _meters(before), tuple((int(seq), text) for seq, text in records))

    async def settle(self, batch: Sequence[tuple[Key, Settlement]]) -> list[int]:
        """In one round trip."""
        script = self._scripts["settle"]
        async with self._client.pipeline(transaction=False) as pipe:
            for key, s in batch:
                record = "" if s.undo else s.record
                arguments: list[str | int | float] = [*self._head(key), s.step, s.tokens, s.think, s.closes, int(s.undo), record]
                await script(keys=[], args=arguments, client=pipe)
            return [int(number) for number in await self._do(pipe.execute())]

    async def renew(self, seen: Mapping[str, tuple[Key, int]], lease_s: float) -> None:
        rows = [part for step, (key, tokens) in seen.items() for part in (str(key), step, tokens)]
        for start in range(0, len(rows), 3 * 256):
            await self._run("renew", lease_s, *rows[start : start + 3 * 256])

    async def raise_limit(self, key: Key, meter: str, limit: int | None, record: str = "") -> bool:
        told = "" if limit is None else limit
        return bool(await self._run("raise", str(key), key.caller, RETENTION_S, meter, told, record))

    async def sessions(self, limit: int = 1000) -> list[tuple[Key, Meters]]:
        callers = await self._do(cast("Awaitable[set[str]]", self._client.smembers(f"{PREFIX}callers")))
        found: list[tuple[float, str, str]] = []
        for caller in sorted(callers):
            ranked = self._client.zrevrange(f"{PREFIX}c:{caller}", 0, limit - 1, withscores=True)
            latest = await self._do(cast("Awaitable[list[tuple[str, float]]]", ranked))
            found += [(score, caller, name) for name, score in latest]
        found = sorted(found, reverse=True)[:limit]
        async with self._client.pipeline(transaction=False) as pipe:
            for _, _, name in found:
                pipe.hgetall(f"{PREFIX}s:{name}")
            rows: list[dict[str, str]] = await self._do(pipe.execute())
        keys = [Key(caller, name.removeprefix(f"{caller}/") if caller else name) for _, caller, name in found]
        return [(key, _meters([part for item in row.items() for part in item])) for key, row in zip(keys, rows, strict=True) if row]

    async def forget(self, caller: str, session: str | None = None) -> int:
        if session is not None:
            names = [str(Key(caller, session))]
        else:
            ranked = self._client.zrange(f"{PREFIX}c:{caller}", 0, -1)
            names = await self._do(cast("Awaitable[list[str]]", ranked))
        gone = 0
        for start in range(0, len(names), 256):
            gone += int(await self._run("forget", caller, *names[start : start + 256]))
        return gone

    async def sweep(self, older_than_s: float) -> int:
        return int(await self._run("sweep", older_than_s))

    async def recall(self, name: str) -> str:
        return await self._do(cast("Awaitable[str | None]", self._client.get(f"{PREFIX}n:{name}"))) or ""

    async def note(self, name: str, text: str) -> None:
        await self._do(self._client.set(f"{PREFIX}n:{name}", text, ex=int(NOTE_S)))

    async def aclose(self) -> None:
        await self._client.aclose()

    def _head(self, key: Key) -> tuple[str, str, str, int, int]:
        return str(key), key.caller, uuid.uuid4().hex[:12], self._per_caller, RETENTION_S

    async def _run(self, script: str, *arguments: Any) -> Any:
        return await self._do(self._scripts[script](keys=[], args=list(arguments)))

    async def _do(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except ResponseError as error:
            if type(error) is ResponseError and not str(error).startswith(_PASSES):
                raise StoreRefusedError(f"store={self._url}: {error}") from None
            raise StoreError(f"store={self._url}: {error}") from None
        except (RedisError, OSError, RuntimeError) as error:  # uvloop's word for a connection that is closed is a RuntimeError
            raise StoreError(f"store={self._url}: {error}; is Redis running there?") from None


def _meters(flat: Sequence[str]) -> Meters:
    row = dict(zip(flat[::2], flat[1::2], strict=True))
    steps, tokens, think, closes, lost, seq = (
        int(row.get(name, 0)) for name in ("steps", "tokens", "think", "closes", "lost", "seq")
    )
    raised = {name.removeprefix("raised:"): int(value) for name, value in row.items() if name.startswith("raised:")}
    return Meters(row.get("born", ""), steps, tokens, think, closes, lost, seq, raised)
