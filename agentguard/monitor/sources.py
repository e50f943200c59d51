"""Live sources: gateways over server-sent events, and plain vLLM servers by their /metrics. They go on for ever; an outage is told
to the feed and tried again, later and later and never in step with others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx2
import msgspec

from agentguard.engines.http import http_client
from agentguard.errors import ActionRefusedError
from agentguard.events import ArmReport, EconomicsReport, Event, decode_frame, decode_json
from agentguard.monitor.feed import Feed
from agentguard.telemetry import exposition

MAX_FRAME_BYTES = 64 << 20
ECONOMICS_S = 2.0
"""Between two looks at the economics of a gateway without the watch route."""
CONNECT_S = 5.0


class SourceError(Exception):
    """Why a source gives nothing; the message is shown."""


class Backoff:
    """Waits between tries: doubling from ``first_s`` to ``longest_s``, each a random part (half to all) of that."""

    def __init__(self, first_s: float = 0.5, longest_s: float = 10.0, rng: random.Random | None = None) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._rng = rng or random.Random()  # noqa: S311  # nosec B311  # seeds and jitter, no secret
        self._next_s = first_s

    def again(self) -> float:
        wait = self._next_s * (0.5 + self._rng.random() / 2)
        self._next_s = min(self._longest_s, 2 * self._next_s)
        return wait

    def worked(self) -> None:
        self._next_s = self._first_s


class _Source:
    """A server that is read in a loop. ``sleep`` and ``client`` are there for tests."""

    def __init__(
        self, url: str, feed: Feed, *, interval_s: float, api_key: str | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, client: httpx2.AsyncClient | None = None,
    ) -> None:  # fmt: skip
        self.name = url.rstrip("/").removesuffix("/v1")
        self.feed = feed
        self.interval_s = interval_s
        self.backoff = Backoff()
        self._sleep = sleep
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self.client = client or http_client(self.name, headers=headers, timeout=httpx2.Timeout(CONNECT_S))

    async def run(self) -> None:
        try:
            while True:
                try:
                    if await self._read():
                        continue
                    error = "the server ended the stream"
                except httpx2.TransportError as failure:
                    error = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
                except (SourceError, httpx2.SSEError) as failure:
                    error = str(failure)
                except Exception as failure:
                    # whatever a server answers is shown and asked for again; nothing of it may end the reading
                    error = f"it tells something that cannot be read ({_reason(failure)}); is it a gateway of another version?"
                wait = self.backoff.again()
                self.feed.trouble(self.name, error, wait)
                await self._sleep(wait)
        finally:
            await self.client.aclose()

    async def _read(self) -> bool:
        """Read until the server ends it; True to begin anew at once."""
        raise NotImplementedError


class MetricsSource(_Source):
    """A vLLM server that knows nothing of us."""

    async def _read(self) -> bool:
        while True:
            response = await self.client.get("/metrics")
            if response.status_code != 200:
                raise SourceError(f"/metrics answered {response.status_code}")
            try:
                events = await asyncio.to_thread(exposition.read, response.text, self.feed.clock())
            except ValueError as error:
                raise SourceError(f"/metrics cannot be read: {error}") from None
            if not events:
                raise SourceError("/metrics has no vLLM metric; is this a vLLM server?")
            self.feed.take(self.name, events, sample=True)
            self.backoff.worked()
            await self._sleep(self.interval_s)


class GatewaySource(_Source):
    """A gateway of ours: its watch route, or the raw events of one that does not have it yet."""

    async def _read(self) -> bool:
        asked = self.interval_s
        interval = min(10.0, max(0.25, self.interval_s))
        patience = httpx2.Timeout(CONNECT_S, read=max(15.0, 4 * interval))
        url = f"/guard/v1/watch?interval={interval:g}"
        async with self.client.stream("GET", url, timeout=patience) as response:
            if response.status_code == 404:
                found = False
            else:
                found = True
                await _check(response, "/guard/v1/watch")
                async for one in httpx2.EventSource(response, MAX_FRAME_BYTES):
                    frame = decode_frame(one.data)
                    self.feed.take(self.name, frame.events, sample=True, dropped=frame.dropped)
                    self.backoff.worked()
                    if self.interval_s != asked:
                        return True
        if not found:
            await self._read_events()
        return False

    async def _read_events(self) -> None:
        """Without the watch route: every event as it comes, and the economics beside them."""
        asking = asyncio.create_task(self._ask_economics(), name=f"economics of {self.name}")
        reading = asyncio.create_task(self._listen(), name=f"events of {self.name}")
        try:
            done, _ = await asyncio.wait((asking, reading), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (asking, reading):
                task.cancel()
            await asyncio.gather(asking, reading, return_exceptions=True)

    async def _ask_economics(self) -> None:
        while True:
            response = await self.client.get("/guard/v1/economics")
            await _check(response, "/guard/v1/economics")
            rows = msgspec.json.decode(response.content, type=_Economics).rows
            self.feed.take(self.name, [EconomicsReport(t=self.feed.clock(), rows=rows)], sample=True)
            self.backoff.worked()
            await self._sleep(ECONOMICS_S)

    async def _listen(self) -> None:
        quiet = httpx2.Timeout(CONNECT_S, read=None)
        async with self.client.stream("GET", "/agentguard/events", timeout=quiet) as response:
            await _check(response, "/agentguard/events")
            async for one in httpx2.EventSource(response, MAX_FRAME_BYTES):
                if one.data:
                    event: Event = decode_json(one.data)
                    self.feed.take(self.name, [event])


async def _check(response: httpx2.Response, route: str) -> None:
    if response.status_code in (401, 403):
        raise SourceError(f"{route} answered {response.status_code}: the key is missing or wrong; set AGENTGUARD_API_KEY")
    if response.status_code == 404:
        raise SourceError("this is no gateway of agentguard; watch a vLLM server with --metrics")
    if response.status_code != 200:
        text = (await response.aread()).decode(errors="replace")[:120]
        raise SourceError(f"{route} answered {response.status_code}: {text}")


class TailReader:
    """The latest words of a gateway's running traces, asked for every second or interval; they go into the snapshot and nowhere
    else.

    A gateway that gives none (403, or 404 of one without the route) is not asked again; all else is. What was wrong is told in the
    event log once, and no old words stay.
    """

    def __init__(
        self, source: GatewaySource, key: str | None, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:  # fmt: skip
        self._source = source
        self._key = key
        self._sleep = sleep

    async def run(self) -> None:
        source, content = self._source, self._source.feed.model.content
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        async with http_client(source.name, headers=headers, timeout=httpx2.Timeout(CONNECT_S)) as client:
            told = ""
            while True:
                ends, wrong = False, ""
                try:
                    response = await client.get("/agentguard/tails")
                    ends = response.status_code in (403, 404)
                    if response.status_code == 200:
                        content[source.name] = msgspec.json.decode(response.content, type=_Tails).tails
                    else:
                        wrong = f"{source.name} gives no content ({response.status_code}): {_said(response)}"
                except httpx2.TransportError:
                    content.pop(source.name, None)  # the stream's own outage says why
                except (httpx2.HTTPError, msgspec.MsgspecError, ValueError, RecursionError) as failure:
                    wrong = f"content of {source.name} cannot be read: {_reason(failure)}"
                if wrong:
                    content.pop(source.name, None)
                if wrong and wrong != told:
                    source.feed.model.log.say(source.feed.clock(), "info", "source", wrong)
                told = wrong
                if ends:
                    return
                await self._sleep(max(1.0, source.interval_s))


class _Tails(msgspec.Struct):
    tails: dict[str, str]


class _Economics(msgspec.Struct):
    rows: list[ArmReport]


def _reason(failure: Exception) -> str:
    """Short enough for a line; the kind where the message alone would not say what went wrong."""
    said = str(failure)[:200]
    return said if isinstance(failure, msgspec.MsgspecError) and said else f"{type(failure).__name__}: {said}".rstrip(": ")


def _said(response: httpx2.Response) -> str:
    """The message of an error of a gateway, else the beginning of what came."""
    try:
        return str(response.json()["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError, RecursionError):
        return response.text[:120]


async def act(client: httpx2.AsyncClient, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's action. Raises ActionRefusedError with what the gateway said."""
    try:
        response = await client.post(route, json=dict(body))
    except httpx2.HTTPError as error:
        raise ActionRefusedError(f"the gateway does not answer ({type(error).__name__})") from None
    if response.status_code == 404 and route in ("/agentguard/close", "/agentguard/sessions/limit"):
        raise ActionRefusedError("nothing there to act on: it has ended, or the gateway has forgotten it")
    if response.status_code != 200:
        raise ActionRefusedError(f"the gateway refused it ({response.status_code}): {_said(response)}")
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ActionRefusedError(f"the gateway answered something that cannot be read ({error})") from None
