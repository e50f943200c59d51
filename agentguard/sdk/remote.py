"""A gateway that runs somewhere else, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2
import msgspec

from agentguard.engines.http import http_client
from agentguard.errors import (
    AgentGuardError,
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    EngineError,
    EngineRequestError,
    SessionBusyError,
    SessionLimitError,
)
from agentguard.events import (
    ArmReport,
    CompactionAdvised,
    EconomicsReport,
    Event,
    Meter,
    SessionAlarm,
    SessionState,
    StepFinished,
    StepStarted,
    TraceClosed,
    decode_json,
)
from agentguard.identity import AGENT, SESSION, identify
from agentguard.sdk.backend import Served
from agentguard.sdk.chunks import ChunkReader, Standing
from agentguard.sdk.events import Economics
from agentguard.sdk.middleware import Events
from agentguard.sdk.request import StepRequest
from agentguard.store import StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# of the gateway (gateway.step_events, economics.classes), whose modules need its web server
EVENTS_HEADER, SIDE_HEADER = "x-agentguard-events", "x-agentguard-side-call"
EVENT, STATE = "agentguard", "agentguard-session"
T = TypeVar("T")
MAX_EVENT_BYTES = 8 << 20
_JSON = msgspec.json.Decoder()
_AS_THEY_ARE: tuple[type[AgentGuardError], ...] = (
    ConfigError, ContextLengthError, SessionLimitError, SessionBusyError, StoreError, EngineDiedError, EngineError,
)  # fmt: skip
"""Errors of a gateway that are raised here as they were there."""


class RemoteBackend:
    """A gateway (`backend.Backend`). ``operator_key`` is for closing traces and raising limits, where the gateway has one."""

    def __init__(self, client: httpx2.AsyncClient, served: Served, api_key: str | None, operator_key: str | None) -> None:
        self.served = served
        self.url = str(client.base_url)
        self._client = client
        self._api_key = api_key
        self._operator_key = operator_key

    def account(self, session: str, agent: str) -> RemoteAccount:
        return RemoteAccount(self, session, agent)

    async def economics(self) -> list[ArmReport]:
        return _converted((await self.ask("GET", "/guard/v1/economics"))["rows"], list[ArmReport])

    async def events(self) -> AsyncGenerator[Event, None]:
        async with self.open("GET", "/agentguard/events", read=None) as response:
            async for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
                told = _event(event.data)
                if told is not None:
                    yield told
        raise EngineDiedError(f"the gateway at {self.url} ended its events; it was stopped")

    async def ask(self, method: str, path: str, body: object = None, *, operator: bool = False) -> dict[str, Any]:
        """One JSON answer. Raises what the gateway says went wrong."""
        headers = {"Authorization": f"Bearer {self._operator_key}"} if operator and self._operator_key else None
        try:
            response = await self._client.request(method, path, json=body, headers=headers)
        except httpx2.TransportError as error:
            raise self.failure(error) from error
        if response.status_code != 200:
            raise refusal(response.status_code, response.text, response.headers.get("retry-after"))
        try:
            reply = response.json()
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise EngineError(f"{self.url}{path} did not answer with a JSON object: {response.text[:80]!r}; is it a gateway?")
        return reply

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        headers: Mapping[str, str] | None = None,
        read: float | str | None = "",
    ) -> AsyncIterator[httpx2.Response]:
        """A response to be streamed; the connection is given back or closed at the end. ``read``: seconds of silence, "" for the
        client's own."""
        timeout = self._client.timeout
        if not isinstance(read, str):
            timeout = httpx2.Timeout(connect=timeout.connect, read=read, write=timeout.write, pool=timeout.pool)
        try:
            async with self._client.stream(method, path, json=json, headers=headers, timeout=timeout) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise refusal(response.status_code, text, response.headers.get("retry-after"))
                yield response
        except httpx2.TransportError as error:
            raise self.failure(error) from error

    def failure(self, error: httpx2.TransportError) -> EngineError:
        """Gone, or only slow?"""
        what = f"the gateway at {self.url}"
        if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
            return EngineError(
                f"{what} did not answer in time ({type(error).__name__}); it is overloaded, or the timeout too short"
            )
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return EngineDiedError(f"nobody answers at {self.url} ({said}); start a gateway or server there, or correct the URL")
        return EngineDiedError(f"{what} is gone ({said}); see its log")


class RemoteAccount:
    """A session of a gateway (`backend.Account`)."""

    def __init__(self, backend: RemoteBackend, session: str, agent: str) -> None:
        self._backend = backend
        self._session = session
        self._headers = {SESSION: session} | ({AGENT: agent} if agent else {})
        key = {"authorization": f"Bearer {backend._api_key}"} if backend._api_key else {}
        self._name = str(identify(key | self._headers, {}))
        self.state = SessionState(session=self._name)
        self.complete = False

    async def refresh(self) -> None:
        rows = (await self._backend.ask("GET", f"/agentguard/sessions?{_query(session=self._session)}"))["sessions"]
        (self.state,) = _converted(rows, list[SessionState])
        self.complete = True

    async def step(self, request: StepRequest) -> Events:
        body = request.body() | {"stream": True, "stream_options": {"include_usage": True}}
        headers = self._headers | {EVENTS_HEADER: "1"} | ({SIDE_HEADER: "1"} if request.side else {})
        reader, finished, rows = ChunkReader(), None, None
        alarms: list[SessionAlarm] = []
        last: SessionState | None = None
        try:
            async with self._backend.open("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                async for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
                    if event.event == EVENT:
                        told = _event(event.data)
                        if isinstance(told, StepFinished):
                            finished = told
                        elif isinstance(told, EconomicsReport):
                            rows = told.rows
                        elif isinstance(told, SessionAlarm):
                            alarms.append(told)
                        elif isinstance(told, StepStarted | CompactionAdvised | TraceClosed):
                            yield told
                    elif event.event == STATE and finished is None:
                        self._learn(_state(event.data))
                    elif event.event == STATE:
                        last = _state(event.data)
                    elif event.data != "[DONE]":
                        chunk = _chunk(event.data)
                        at = chunk.get("agentguard") or {}
                        standing = Standing(at.get("think_tokens", 0), at.get("answer_tokens", 0), at.get("think_cap", 0))
                        for delta in reader.feed(chunk, standing):
                            yield delta
            if finished is None or rows is None:
                where = self._backend.url
                raise EngineDiedError(f"the gateway at {where} ended the stream too early; it was stopped, or is another version")
        finally:
            # at once with the summary, so that no step is counted twice in between
            if last is not None:
                self._learn(last)
            else:
                self.complete = False
        yield reader.summary(finished)
        for alarm in alarms:
            yield alarm
        yield Economics(workload=finished.workload, arm=finished.arm, rows=rows)

    def _learn(self, state: SessionState) -> None:
        """Of steps that run side by side, one's state may be read after a later one's; counts only grow."""
        if (state.steps, state.tokens) >= (self.state.steps, self.state.tokens):
            self.state = state
        self.complete = True

    async def close(self, request_id: str, why: str) -> int:
        what = {"request": request_id} if request_id else {"session": self._name}
        try:
            told = await self._backend.ask("POST", "/agentguard/close", {**what, "why": why}, operator=True)
        except EngineRequestError as error:
            if error.status == 404:
                return 0
            raise
        return int(told["told"])

    async def raise_limit(self, meter: Meter, limit: int) -> bool:
        asked = {"session": self._name, "meter": meter, "limit": limit}
        try:
            await self._backend.ask("POST", "/agentguard/sessions/limit", asked, operator=True)
        except EngineRequestError as error:
            if error.status == 404:
                return False
            raise
        await self.refresh()
        return True


def refusal(status: int, text: str, retry_after: str | None = None) -> AgentGuardError:
    """The gateway's error as the one it raised, by the name it gives; of others an EngineRequestError with the status."""
    try:
        told = json.loads(text)["error"]
        message, name = str(told["message"]), told.get("agentguard", "")
    except (ValueError, KeyError, TypeError):
        told, message, name = {}, text[:500] or f"HTTP status {status}", ""
    kind = next((kind for kind in _AS_THEY_ARE if kind.__name__ == name), None)
    if status in (401, 403):
        return EngineRequestError(status, f"{message}; give the key as connect(…, api_key=…), an operator's as operator_key=…")
    if kind is not None:
        error: AgentGuardError = kind.__new__(kind, message)  # its message is whole, and its parts are not sent
        if isinstance(error, ConfigError):
            error.field, error.value, error.remedy = str(told.get("param", "")), None, message
        error.retry_after = retry_after
        return error
    return EngineRequestError(status, message, retry_after)


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = _JSON.decode(data)
    except msgspec.DecodeError:
        raise EngineError(f"the gateway streamed something that is not JSON: {data[:80]!r}") from None
    if not isinstance(chunk, dict):
        raise EngineError(f"the gateway streamed {type(chunk).__name__}, expected a chunk: {data[:80]!r}")
    if "error" in chunk:
        code = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
        raise refusal(code if isinstance(code, int) else 502, data)
    return chunk


def _event(data: str) -> Event | None:
    """None for an event this version does not know."""
    try:
        return decode_json(data)
    except msgspec.ValidationError:
        return None


def _state(data: str) -> SessionState:
    return _converted(_JSON.decode(data), SessionState)


def _converted(value: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise EngineError(f"the gateway's answer cannot be read ({error}); is it of this version?") from None


def _query(**values: str) -> str:
    return str(httpx2.QueryParams(values))


def client_of(url: str, api_key: str | None, *, connect_s: float, read_s: float) -> httpx2.AsyncClient:
    """The HTTP client of a gateway."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    return http_client(url, headers=headers, timeout=httpx2.Timeout(connect=connect_s, read=read_s, write=30.0, pool=None))
