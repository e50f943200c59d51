"""The way to an app without a socket: pieces as they come, an app that is held back, ended, broken or silent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentguard.engines import asgi, vllm_inprocess
from agentguard.engines.asgi import AsgiTransport
from agentguard.engines.http import http_client
from tests.sdk.conftest import until


class Log:
    """What the app did."""

    def __init__(self) -> None:
        self.sent = 0
        self.closed = 0


def app(log: Log) -> Starlette:
    async def echo(request: Request) -> Response:
        return JSONResponse(
            {"body": (await request.body()).decode(), "query": request.url.query, "header": request.headers["x-one"]}
        )

    async def pieces(_: Request) -> Response:
        async def stream() -> AsyncIterator[bytes]:
            try:
                while log.sent < 1000:
                    log.sent += 1
                    yield b"%d\n" % log.sent
                    await asyncio.sleep(0)
            finally:
                log.closed += 1

        return StreamingResponse(stream())

    async def breaks(_: Request) -> Response:
        async def stream() -> AsyncIterator[bytes]:
            yield b"one"
            raise LookupError("in the middle")

        return StreamingResponse(stream())

    async def fails(_: Request) -> Response:
        raise LookupError("at once")

    async def silent(_: Request) -> Response:
        try:
            await asyncio.sleep(60)
        finally:
            log.closed += 1
        return Response()

    async def no(_: Request) -> Response:
        return Response("no", 503)

    routes = [Route("/echo", echo, methods=["POST"]), *(Route(f"/{f.__name__}", f) for f in (pieces, breaks, silent, no))]
    return Starlette(routes=[*routes, Route("/fails", fails)])


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def transport(log: Log) -> AsgiTransport:
    return AsgiTransport(app(log))


def client_of(transport: AsgiTransport) -> Any:
    return http_client("http://app", timeout=0.3, transport=transport)


async def test_a_request_arrives_whole(transport: AsgiTransport) -> None:
    async with client_of(transport) as client:
        reply = await client.post("/echo?a=1&b=%20", content=b"hello", headers={"x-one": "1"})
        assert reply.json() == {"body": "hello", "query": "a=1&b=%20", "header": "1"}
        await until(lambda: transport.running == 0)


async def test_pieces_come_as_they_are_sent_and_hold_the_app_back(transport: AsgiTransport, log: Log) -> None:
    async with client_of(transport) as client:
        async with client.stream("GET", "/pieces") as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "1"
            await asyncio.sleep(0.1)
            assert log.sent <= asgi.AHEAD + 3
            assert [await anext(lines) for _ in range(50)] == [str(n) for n in range(2, 52)]
        await until(lambda: transport.running == 0)
        assert log.closed == 1
        assert log.sent < 200
        assert len((await client.get("/pieces")).text.splitlines()) > 800  # and whole where it is read whole
        assert log.closed == 2


async def test_a_broken_app_is_a_broken_connection(transport: AsgiTransport) -> None:
    async with client_of(transport) as client:
        with pytest.raises(httpx2.ReadError, match="at once"):
            await client.get("/fails")
        async with client.stream("GET", "/breaks") as response:
            parts = response.aiter_raw()
            assert await anext(parts) == b"one"
            with pytest.raises(httpx2.ReadError, match="in the middle"):
                await anext(parts)


async def test_a_silent_app_times_out_and_is_ended(transport: AsgiTransport, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not listen for the end of the connection, so it is cancelled after the grace."""
    monkeypatch.setattr(asgi, "GRACE_S", 0.05)
    async with client_of(transport) as client:
        with pytest.raises(httpx2.ReadTimeout, match="sent nothing in time"):
            await client.get("/silent")
        assert (transport.running, log.closed) == (0, 1)
        waiting = asyncio.create_task(client.get("/silent"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (transport.running, log.closed) == (0, 2)
        left = asyncio.create_task(client.get("/silent", timeout=60))
        await asyncio.sleep(0.05)
    assert (transport.running, log.closed) == (0, 3)  # with the client's end
    with pytest.raises(httpx2.ReadError):
        await left


async def test_an_answer_of_an_engine_that_is_gone_is_a_broken_connection(log: Log) -> None:
    gone = False
    async with client_of(AsgiTransport(app(log), dead=lambda: gone)) as client:
        assert (await client.get("/no")).status_code == 503
        gone = True
        with pytest.raises(httpx2.ReadError, match="engine behind the app is gone"):
            await client.get("/no")


def test_the_environment_of_an_engine_in_this_process_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set by the user stays, but for a key, which the app would ask us for."""
    for name, value in (("VLLM_API_KEY", "mine"), ("VLLM_LOGGING_STREAM", "ext://sys.stdout"), ("VLLM_PLUGINS", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.delenv("AG_NEW", raising=False)
    before = dict(os.environ)
    with vllm_inprocess._environment({"VLLM_API_KEY": "", "VLLM_PLUGINS": "agentguard", "AG_NEW": "1"}):
        assert "VLLM_API_KEY" not in os.environ
        wanted = {"VLLM_PLUGINS": "agentguard", "AG_NEW": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        assert {name: os.environ[name] for name in wanted} == wanted
        assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stdout"
    assert dict(os.environ) == before
