"""The attacks of SECURITY.md as code. Each is tried twice (test_attacks.py): against the code as it is, where it must fail, and
with its one defence taken away, where it must succeed. So no test here can pass without the defence it speaks of.

An attack returns what it got: "" where it failed, else a few words.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import pickle
import re
import ssl
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import yaml
import zmq
import zmq.asyncio
from starlette.middleware.cors import CORSMiddleware

from agentguard import errors, identity, middleware, policy
from agentguard.engines import http, openai_http, upstream, vllm_process
from agentguard.errors import AgentGuardError, ConfigError
from agentguard.events import StepFinished, VerificationStep, encode_json
from agentguard.gateway import access, app, auth, fetches, pages, protocol, server, watch
from agentguard.gateway.access import Access
from agentguard.telemetry import engine_source
from engine_plugins.tts import control, wire
from tests.scripted import Script
from tests.security import rig
from tests.security.certificates import authority
from tests.security.rig import ASK, JSON, QUESTION, gate, raw, script

Try = Callable[[Path, pytest.MonkeyPatch], Awaitable[str]]
Disarm = Callable[[pytest.MonkeyPatch], None]
KEYS: dict[str, tuple[auth.Scope, ...]] = {"agent": ("use",), "other": ("use",), "monitor": ("observe",), "operator": ("control",)}


@dataclass(frozen=True)
class Attack:
    name: str
    attempt: Try
    disarm: Disarm

    def __str__(self) -> str:
        return self.name


ATTACKS: list[Attack] = []


def attack(disarm: Disarm) -> Callable[[Try], Try]:
    """Register a function as the attack of its name; ``disarm`` takes away what keeps it from succeeding, and nothing else."""

    def register(attempt: Try) -> Try:
        ATTACKS.append(Attack(attempt.__name__.replace("_", "-"), attempt, disarm))
        return attempt

    return register


def swap(target: Any, name: str, value: Any) -> Disarm:
    return lambda patch: patch.setattr(target, name, value)


# -- keys ---------------------------------------------------------------------------------------------------------------------


async def _let_through(self: Any, scope: Any, receive: Any, send: Any) -> None:
    await self.app(scope, receive, send)


@attack(swap(auth.RequireKey, "__call__", _let_through))
async def no_key(tmp: Path, _: pytest.MonkeyPatch) -> str:
    async with gate(keys=KEYS, file=tmp / "keys") as g:
        for key in (None, "wrong", "ag__", "ag_000000000000_" + "x" * 43):
            async with g.client(key) as client:
                for path in ("/v1/models", "/metrics", "/agentguard/sessions", "/guard/v1/economics", "/nowhere"):
                    if (await client.get(path)).status_code != 401:
                        return f"{path} with {key!r}"
            if (await g.ask(key)).status_code != 401:
                return "a reply of the model"
        return ""


@attack(swap(auth, "scope_of", lambda path: None if path in auth.OPEN else "use"))
async def agent_acts_as_operator(tmp: Path, _: pytest.MonkeyPatch) -> str:
    async with gate(keys=KEYS, file=tmp / "keys", content=True) as g:
        assert (await g.ask("agent")).status_code == 200
        async with g.client("agent") as client:
            for path in ("/agentguard/tails", "/agentguard/sessions", "/metrics"):
                if (await client.get(path)).status_code == 200:
                    return f"read {path}"
            if (await client.post("/agentguard/close", json={"session": "other"})).status_code != 403:
                return "closed another's trace"
        return ""


@attack(swap(auth, "scope_of", lambda path: auth.ROUTES.get(path)))
async def route_nobody_thought_of(tmp: Path, patch: pytest.MonkeyPatch) -> str:
    """A route that is added without a word about who may use it."""
    made = app.create_app

    def with_new_route(*args: Any, **options: Any) -> Any:
        async def new(_: Any) -> Any:
            return app.JSONResponse({"secret": 1})

        application = made(*args, **options)
        application.router.routes.append(app.Route("/agentguard/new", new))
        return application

    patch.setattr(server, "create_app", with_new_route)
    async with gate(keys=KEYS, file=tmp / "keys") as g:
        async with g.client("operator") as client:
            assert (await client.get("/agentguard/new")).status_code == 200
        async with g.client("agent") as client, g.client() as nobody:
            replies = [await client.get("/agentguard/new"), await nobody.get("/agentguard/new")]
        return next(("read it" for reply in replies if reply.status_code == 200), "")


@attack(swap(server, "check_address", lambda host, keys: None))
async def open_address_without_key(_: Path, __: pytest.MonkeyPatch) -> str:
    """The operator's slip of the hand: a gateway for all the network, with no key or the operator's alone."""
    for keys in (auth.Keyring.of(), auth.Keyring.of(None, "o" * 40)):
        async with gate() as g:
            with server.bind("0.0.0.0", 0) as listener, contextlib.suppress(ConfigError):
                async with server.gateway(g.guard, listener, access=Access(keys)):
                    return "it serves"
    return ""


@attack(swap(access, "check_flags", lambda host, given: None))
async def key_that_can_be_guessed(_: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(access, "default_file", lambda: Path("/nonexistent"))
    with contextlib.suppress(ConfigError):
        await asyncio.to_thread(access.access_of, "0.0.0.0", api_key="secret1", operator_key=None)
        return "it would serve"
    return ""


@attack(swap(auth, "digest_of", lambda key: key))
async def stolen_key_file(tmp: Path, _: pytest.MonkeyPatch) -> str:
    """A backup of the file: does any text in it open the gateway?"""
    async with gate(keys=KEYS, file=tmp / "keys") as g:
        kept = json.loads(await asyncio.to_thread((tmp / "keys").read_text))["keys"]
        for row in kept:
            for text in (*map(str, row.values()), f"ag_{row['id']}_{row['digest']}"):
                bearer = {"authorization": f"Bearer {text}"}
                if text.isascii() and text.isprintable() and (await g.ask(headers=bearer)).status_code == 200:
                    return f"the file's {text[:8]}… is a key"
        return ""


@attack(swap(auth, "_check_owner", lambda path, status: None))
async def key_slipped_into_the_file(tmp: Path, _: pytest.MonkeyPatch) -> str:
    text, key = auth.new_key("mallory", auth.SCOPES)
    await asyncio.to_thread(auth.write_keys, tmp / "keys", [key])
    await asyncio.to_thread((tmp / "keys").chmod, 0o666)
    with contextlib.suppress(ConfigError):
        ring = await asyncio.to_thread(auth.Keyring.of, None, None, tmp / "keys")
        return "it counts" if ring.find(text) else ""
    return ""


def _first_match(self: auth.Keyring, token: str) -> auth.Key | None:
    digest = auth.digest_of(token)
    return next((key for key in (*self._kept.values(), *self.flags) if digest == key.digest), None)


@attack(swap(auth.Keyring, "find", _first_match))
async def timing_of_the_comparison(tmp: Path, patch: pytest.MonkeyPatch) -> str:
    """Does the work done tell whether an id is known, or how much of a key is right? Counted, as a clock's word is noise."""
    made = [auth.new_key(f"k{i}", ("use",)) for i in range(20)]
    await asyncio.to_thread(auth.write_keys, tmp / "keys", [key for _, key in made])
    ring = await asyncio.to_thread(auth.Keyring.of, "a" * 40, "b" * 40, tmp / "keys")
    calls = 0
    real = hmac.compare_digest

    def counted(a: Any, b: Any) -> bool:
        nonlocal calls
        calls += 1
        assert len(a) == len(b)
        return bool(real(a, b))

    patch.setattr(hmac, "compare_digest", counted)
    work = set()
    right = made[7][0]
    for token in (right, right[:-1] + "!", "ag_000000000000_" + "x" * 43, "a" * 40, "a" * 39 + "b", made[0][0], made[19][0]):
        calls = 0
        ring.find(token)
        work.add(calls)
    return "" if work == {3} else f"comparisons differ, or are not constant: {work}"


async def _never(self: Any) -> None:
    return None


@attack(swap(auth.Keyring, "refresh", _never))
async def revoked_key_goes_on(tmp: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(auth, "RELOAD_S", 0.0)
    async with gate(keys=KEYS, file=tmp / "keys") as g, g.client("monitor") as watching:
        assert (await g.ask("agent")).status_code == 200
        async with watching.stream("GET", "/agentguard/events") as stream:
            lines = stream.aiter_lines()
            assert "agentguard events" in await anext(lines)
            await asyncio.to_thread(auth.write_keys, tmp / "keys", [])
            if (await g.ask("agent")).status_code == 200:
                return "it still works"
            g.hub.publish(VerificationStep(t=0, engine="e", step=0, requests=[]))
            async for line in lines:
                if line.startswith("data: "):
                    return "its event stream goes on"
        return ""


def _by_count(cls: type[auth.Keyring], api_key: Any = None, operator_key: Any = None, file: Path | None = None) -> auth.Keyring:
    ring = cls((), file)
    ring._reload()
    ring.open_scopes = frozenset() if ring._kept else auth.ALL
    return ring


@attack(swap(auth.Keyring, "of", classmethod(_by_count)))
async def last_key_is_revoked(tmp: Path, _: pytest.MonkeyPatch) -> str:
    async with gate(keys={}, file=tmp / "keys") as g:
        return "open to all" if (await g.ask()).status_code == 200 else ""


def _no_caller(*_: str) -> str:
    return ""


@attack(swap(identity, "digest", _no_caller))
async def session_of_another_caller(tmp: Path, _: pytest.MonkeyPatch) -> str:
    """Both name the same session: does one use up the other's budget?"""
    async with gate(keys=KEYS, file=tmp / "keys") as g:
        for who in ("agent", "other"):
            assert (await g.ask(who, headers={"x-session-id": "shared"})).status_code == 200
        return "one account for two" if len(list(g.guard.sessions)) == 1 else ""


@attack(swap(protocol, "ONCE", ()))
async def two_hosts_in_one_request(_: Path, __: pytest.MonkeyPatch) -> str:
    async with gate() as g:
        lines = ["GET /v1/models HTTP/1.1", "host: evil.example", f"host: 127.0.0.1:{g.port}", "connection: close"]
        answer = await raw(g.port, "\r\n".join([*lines, "", ""]).encode())
        return "answered" if answer is not None and answer.startswith(b"HTTP/1.1 200") else ""


# -- pages in a browser -------------------------------------------------------------------------------------------------------

NO_REFUSAL = swap(pages, "refusal", lambda *_, **__: None)


@attack(NO_REFUSAL)
async def page_uses_the_model(_: Path, __: pytest.MonkeyPatch) -> str:
    async with gate() as g:
        page = {"content-type": "text/plain", "origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        async with g.client() as client:
            reply = await client.post("/v1/chat/completions", content=json.dumps(ASK), headers=page)
        return "the model answered" if reply.status_code == 200 else ""


@attack(NO_REFUSAL)
async def page_closes_traces(_: Path, __: pytest.MonkeyPatch) -> str:
    async with gate() as g, g.client() as client:
        body = b'{"session": "me", "why": "page"}'
        kinds = ({"content-type": "text/plain"}, JSON | {"origin": "https://evil.example"}, JSON | {"origin": "null"})
        replies = [await client.post("/agentguard/close", content=body, headers=kind) for kind in kinds]
        return "it was tried" if any(reply.status_code != 403 for reply in replies) else ""


@attack(NO_REFUSAL)
async def page_embeds_a_route(_: Path, __: pytest.MonkeyPatch) -> str:
    """<img src=…> sends no Origin; it would hold one of the few places for monitors."""
    async with gate() as g, g.client(headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}) as client:
        return "answered" if (await client.get("/agentguard/sessions")).status_code == 200 else ""


@attack(swap(pages, "_is_address", lambda host: True))
async def dns_rebinding(_: Path, __: pytest.MonkeyPatch) -> str:
    async with gate() as g, g.client(headers={"host": "evil.example", "origin": "http://evil.example"}) as client:
        for path in ("/v1/models", "/agentguard/sessions", "/metrics"):
            if (await client.get(path)).status_code == 200:
                return f"read {path}"
        return ""


def _cors(patch: pytest.MonkeyPatch) -> None:
    made = app.create_app

    def opened(*args: Any, **options: Any) -> Any:
        application = made(*args, **options)
        application.add_middleware(CORSMiddleware, allow_origins=["*"], allow_headers=["*"], allow_methods=["*"])
        return application

    patch.setattr(server, "create_app", opened)


@attack(_cors)
async def page_asks_for_leave(tmp: Path, _: pytest.MonkeyPatch) -> str:
    """The browser's preflight: no answer may allow another origin, with keys and without."""
    page = {
        "origin": "https://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    for options in ({}, {"keys": KEYS, "file": tmp / "keys"}):
        async with gate(**options) as g, g.client(headers=page) as client:  # type: ignore[arg-type]
            for path in ("/v1/chat/completions", "/agentguard/close", "/agentguard/events", "/health"):
                reply = await client.request("OPTIONS", path)
                if any(name.startswith("access-control-allow") for name in reply.headers):
                    return f"{path} allows it"
    return ""


# -- sizes and times ----------------------------------------------------------------------------------------------------------


@attack(swap(app, "MAX_BODY", 1 << 40))
async def body_without_end(_: Path, patch: pytest.MonkeyPatch) -> str:
    if app.MAX_BODY < 1 << 40:
        patch.setattr(app, "MAX_BODY", 1 << 20)  # as it is, only smaller
    async with gate() as g:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{g.port}\r\ncontent-type: application/json\r\n"
        told = await raw(g.port, f"{head}content-length: {1 << 30}\r\n\r\n".encode(), wait_s=1)
        chunks = b"10000\r\n" + b" " * 65536 + b"\r\n"
        streamed = await raw(g.port, f"{head}transfer-encoding: chunked\r\n\r\n".encode(), wait_s=1, more=chunks, times=64)
    answers = (told, streamed)
    return "" if all(a is not None and b" 413 " in a[:20] and b'"param":"body"' in a for a in answers) else f"it waits: {answers}"


@attack(swap(app, "MAX_DEPTH", 10_000))
async def body_nested_without_end(_: Path, __: pytest.MonkeyPatch) -> str:
    async with gate() as g, g.client(headers=JSON) as client:
        for depth in (900, 100_000):
            deep = "[" * depth + "]" * depth
            body = f'{{"messages": [{{"role": "user", "content": "x", "extra": {deep}}}]}}'
            reply = await client.post("/v1/chat/completions", content=body)
            if reply.status_code != 400 or g.forwarded:
                return f"{reply.status_code} at {depth}"
        return ""


def _unbounded_headers(patch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_HEADERS", "MAX_HEADERS_BYTES", "MAX_URL"):
        patch.setattr(protocol, name, 1 << 40)


@attack(_unbounded_headers)
async def headers_without_end(_: Path, __: pytest.MonkeyPatch) -> str:
    """One header that never ends, many headers, a URL; with the parser alone, memory is what ends them."""
    async with gate() as g:
        start = f"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:{g.port}\r\n".encode()
        chunked = start.replace(b"GET /v1/models", b"POST /v1/chat/completions") + b"transfer-encoding: chunked\r\n\r\n"
        tries = {
            "header": (start + b"x-one: ", b"a" * 65536, (b" 431 ",)),
            "headers": (start, b"x-many: b\r\n" * 100, (b" 431 ",)),
            "url": (b"GET /", b"c" * 4096, (b" 414 ", b" 431 ")),
            "chunk's extension": (chunked + b"1;", b"d" * 65536, (b" 431 ", b" 400 ")),
        }
        for what, (head, more, expected) in tries.items():
            answer = await raw(g.port, head, more=more, times=64, wait_s=1)
            # an answer can be lost with the reset that data still under way bring; that the server hung up is what counts
            if answer is None or (answer and not any(status in answer[:20] for status in expected)):
                return f"{what}: {answer!r}"
    return ""


@attack(swap(protocol, "HEADERS_S", 600.0))
async def headers_that_dawdle(_: Path, patch: pytest.MonkeyPatch) -> str:
    if protocol.HEADERS_S < 600:
        patch.setattr(protocol, "HEADERS_S", 0.2)
    async with gate() as g:
        for begun in (b"", b"GET /v1/models HTTP/1.1\r\nhost:"):
            if await raw(g.port, begun, wait_s=2 if protocol.HEADERS_S < 1 else 0.5) is None:
                return "the connection is held"
    return ""


@attack(swap(app, "BODY_S", 600.0))
async def body_that_dawdles(_: Path, patch: pytest.MonkeyPatch) -> str:
    if app.BODY_S < 600:
        patch.setattr(app, "BODY_S", 0.2)
    async with gate() as g:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{g.port}\r\ncontent-length: 100\r\n\r\n{{"
        answer = await raw(g.port, head.encode(), wait_s=5 if app.BODY_S < 1 else 0.5)
        return "" if answer is not None and b" 408 " in answer[:20] else "the request is held"


@attack(swap(watch, "WATCHERS", 1 << 20))
async def monitors_without_end(_: Path, patch: pytest.MonkeyPatch) -> str:
    if watch.WATCHERS < 1 << 20:
        patch.setattr(watch, "WATCHERS", 3)
    async with contextlib.AsyncExitStack() as stack:
        g = await stack.enter_async_context(gate())
        lines: list[Any] = []
        for _number in range(5):
            client = await stack.enter_async_context(g.client())
            reply = await stack.enter_async_context(client.stream("GET", "/guard/v1/watch"))
            if reply.status_code == 503:
                return ""
            lines.append(reply.aiter_lines())  # kept: a stream nobody reads is closed
            await anext(lines[-1])
        return "each gets a place"


# -- what the engine is made to do ---------------------------------------------------------------------------------------------


@attack(swap(fetches, "_check", lambda *_: None))
async def media_from_inside(_: Path, __: pytest.MonkeyPatch) -> str:
    """URLs that only the engine's machine can reach."""
    urls = [
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "https://127.0.0.1:8000/x",
        "https://cdn.example@evil.example/",
    ]
    urls += [
        "https://cdn.example\\@evil.example/",
        "http://cdn.example/",
        "https://cdn.example:22/",
        "\tfile:///etc/passwd",
        "//evil.example/x",
    ]
    async with gate(media_hosts=("cdn.example",)) as g, g.client() as client:
        for url in urls:
            for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "input_audio", "audio_url": url}):
                body = {"messages": [{"role": "user", "content": [part]}]}
                reply = await client.post("/v1/chat/completions", json=body)
                if reply.status_code != 400 or not reply.json()["error"]["param"].startswith("messages.0.content.0."):
                    return f"{url} goes to the engine"
        for url in ("data:image/png;base64,AAAA", "https://cdn.example/cat.png"):
            part = {"type": "image_url", "image_url": {"url": url}}
            assert (
                await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
            ).status_code == 200
        return ""


@attack(swap(fetches, "REFUSED", ()))
async def peer_for_kv_transfer(_: Path, __: pytest.MonkeyPatch) -> str:
    async with gate() as g, g.client() as client:
        peer = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 22}
        await client.post("/v1/chat/completions", json=ASK | {"kv_transfer_params": peer})
        return "the engine was told" if any("kv_transfer_params" in body for body in g.forwarded) else ""


def _follows(patch: pytest.MonkeyPatch) -> None:
    def following(url: str, **options: Any) -> httpx2.AsyncClient:
        client = http.http_client(url, **options)
        client.follow_redirects = True
        return client

    patch.setattr(openai_http, "http_client", following)


@attack(_follows)
async def upstream_sends_us_on(_: Path, __: pytest.MonkeyPatch) -> str:
    """A bad upstream redirects to what only the gateway can reach, with the gateway's key for it."""
    hits: list[bytes] = []

    async def inside(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hits.append(await reader.readline())
        writer.close()

    async def bad(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:{port}/secret\r\ncontent-length: 0\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        writer.close()

    secret = await asyncio.start_server(inside, "127.0.0.1", 0)
    port = secret.sockets[0].getsockname()[1]
    evil = await asyncio.start_server(bad, "127.0.0.1", 0)
    engine = openai_http.OpenAIEngine(f"http://127.0.0.1:{evil.sockets[0].getsockname()[1]}", api_key="k")
    try:
        for work in (engine.info(), engine.tokenize_text("x"), engine.metrics(), anext(engine.chat({}, "request-1", "s"))):
            with contextlib.suppress(AgentGuardError):
                await work
    finally:
        await engine.aclose()
        secret.close()
        evil.close()
    return f"it went: {hits[0]!r}" if hits else ""


def _anything(field: str, url: str) -> str:
    return url


@attack(lambda patch: patch.setattr(upstream, "check_url", _anything))
async def upstream_that_is_no_url(_: Path, __: pytest.MonkeyPatch) -> str:
    bad = [
        "file:///etc/passwd",
        "http://user:secret@host",
        "gopher://x",
        "http://a b",
        "http://",
        "http://h/?q",
        "http://h\\@evil",
        "h:80",
    ]
    for url in bad:
        with contextlib.suppress(ConfigError):
            upstream.check_url("upstream", url)
            return url
    return ""


@attack(lambda patch: patch.setattr(openai_http, "MAX_REPLY", 1 << 40))
async def upstream_answers_without_end(_: Path, patch: pytest.MonkeyPatch) -> str:
    if openai_http.MAX_REPLY < 1 << 40:
        patch.setattr(openai_http, "MAX_REPLY", 1 << 20)
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Oops\r\nconnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 16 << 20:
                writer.write(b"x" * 65536)
                sent += 65536
                await writer.drain()
        writer.close()

    evil = await asyncio.start_server(endless, "127.0.0.1", 0)
    engine = openai_http.OpenAIEngine(f"http://127.0.0.1:{evil.sockets[0].getsockname()[1]}")
    try:
        for work in (engine.info, lambda: anext(engine.chat({}, "request-1", "s"))):
            sent = 0
            with contextlib.suppress(AgentGuardError):
                await work()  # type: ignore[operator]
            if sent >= 16 << 20:
                return "all of it was read"
    finally:
        await engine.aclose()
        evil.close()
    return ""


@attack(lambda patch: patch.setattr(openai_http, "MAX_EVENT", 1 << 40))
async def upstream_event_without_end(_: Path, patch: pytest.MonkeyPatch) -> str:
    if openai_http.MAX_EVENT < 1 << 40:
        patch.setattr(openai_http, "MAX_EVENT", 1 << 20)
    async with gate(Script(chat=['data: {"choices": [], "x": "', *["y" * (1 << 20)] * 8, '"}\n\n'])) as g:
        reply = await g.ask()
    return "" if reply.status_code == 502 and "SSEError" in reply.text else f"it was read: {reply.text[:100]}"


# -- ids, files, wires ---------------------------------------------------------------------------------------------------------


@attack(swap(identity, "_SAFE", re.compile(r"(?s).*")))
async def id_with_a_header_in_it(_: Path, __: pytest.MonkeyPatch) -> str:
    async with gate() as g, g.client() as client:
        for bad in ("a\r\nx-evil: 1", "a b", "ü", "x" * 257, "\0", ""):
            reply = await client.post("/v1/chat/completions", json=ASK | {"metadata": {"session_id": bad}})
            if reply.status_code != 400 or reply.json()["error"]["param"] != "metadata.session_id":
                return f"{bad[:20]!r}: {reply.status_code}"
        return ""


_CANARY = "canary-9b1d"
_OPENED: list[str] = []
_WATCHING = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _WATCHING and event in (
        "open",
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.listdir",
        "os.scandir",
        "os.link",
        "os.symlink",
        "shutil.rmtree",
    ):
        _OPENED.extend(os.fsdecode(a) for a in arguments if isinstance(a, str | bytes) and _CANARY in os.fsdecode(a))


def _file_per_session(patch: pytest.MonkeyPatch) -> None:
    done = middleware.Session.add

    def add(self: Any, event: Any, *args: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            os.close(os.open(f"/nonexistent/{event.session}.json", os.O_RDONLY))
        done(self, event, *args, **options)

    patch.setattr(middleware.Session, "add", add)


@attack(_file_per_session)
async def id_as_a_path(tmp: Path, _: pytest.MonkeyPatch) -> str:
    """Every open, mkdir, rename and remove of the process while ids that are paths go everywhere an id can go."""
    global _WATCHING
    if not getattr(sys, "_agentguard_audited", False):
        sys.addaudithook(_audit)  # cannot be taken away again; it looks at nothing between tests
        sys._agentguard_audited = True  # type: ignore[attr-defined]
    evil = f"../../{_CANARY}/x"
    _OPENED.clear()
    _WATCHING = True
    try:
        store = f"sqlite:{tmp / 'economics.db'}"
        async with gate(content=True, economics={"store": store}) as g, g.client(headers={"x-request-id": evil}) as client:
            headers = {"x-session-id": evil, "x-agentguard-agent": evil, "x-agentguard-caller": evil}
            assert (
                await client.post("/v1/chat/completions", json=ASK | {"user": evil, "request_id": evil}, headers=headers)
            ).status_code == 200
            for path, body in (
                ("close", {"session": evil}), ("close", {"request": evil}), ("sessions/limit", {"session": evil, "meter": evil}),
                ("pin", {"arm": evil, "workload": evil, "rule": evil}), ("tts", {"settings": {evil: evil}}),
            ):  # fmt: skip
                await client.post(f"/agentguard/{path}", json=body)
            for path in (evil, f"v1/{evil}", f"agentguard/{evil}", f"%2e%2e/{_CANARY}"):
                await client.get(f"/{path}")
    finally:
        _WATCHING = False
    return f"opened {_OPENED[0]}" if _OPENED else ""


class _Boom:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def _unpickles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_source, "decode_msgpack", pickle.loads)
    patch.setattr(wire, "decode", pickle.loads)


@attack(_unpickles)
async def pickle_on_the_wires(tmp: Path, _: pytest.MonkeyPatch) -> str:
    """A pickle that makes a file when it is opened, sent where frames of the engine and of the trainer come in."""
    boom = pickle.dumps(_Boom(str(tmp / "boom")))
    address = f"ipc://{tmp}/tap"
    context = zmq.asyncio.Context()
    tap = context.socket(zmq.XPUB)
    tap.bind(address)
    try:
        async with gate() as g:
            got: list[Any] = []
            with g.hub.sink(got.append), contextlib.suppress(Exception):
                async with engine_source.engine_source(g.hub, address):
                    await tap.recv()  # it listens
                    await tap.send(boom)
                    good = VerificationStep(t=0, engine="e", step=0, requests=[])
                    await tap.send(msgspec.msgpack.encode(good))
                    for _try in range(200):
                        if got or (tmp / "boom").exists():
                            break
                        await asyncio.sleep(0.01)
        with contextlib.suppress(msgspec.DecodeError):
            wire.decode(boom)
    finally:
        tap.close(0)
        context.term()
    return "it ran" if await asyncio.to_thread((tmp / "boom").exists) else ""


@attack(swap(yaml, "safe_load", lambda text: yaml.unsafe_load(text)))
async def recipe_that_runs_code(tmp: Path, _: pytest.MonkeyPatch) -> str:
    path = tmp / "recipe.yaml"
    for code in (
        f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{tmp}/ran]]",
        "!!python/name:os.system",
    ):
        await asyncio.to_thread(path.write_text, f"model: {code}\n")
        with contextlib.suppress(ConfigError):
            raw_recipe = await asyncio.to_thread(policy.read, path)
            if callable(raw_recipe["model"]) or await asyncio.to_thread((tmp / "ran").exists):
                return "it ran"
    return ""


class _Whole:
    repr = staticmethod(repr)


@attack(swap(errors, "_SHORT", _Whole))
async def message_larger_than_the_question(tmp: Path, _: pytest.MonkeyPatch) -> str:
    """Seven lines of YAML are a list of 10^6 items; and a client's own megabyte should not come back to it and into the log."""
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for outer, inner in ("ba", "cb", "dc", "ed"):
        bomb += f"{outer}: &{outer} [{', '.join([f'*{inner}'] * 10)}]\n"
    path = tmp / "recipe.yaml"
    await asyncio.to_thread(path.write_text, f"model: m\n{bomb}")
    try:
        policy.parse(await asyncio.to_thread(policy.read, path) | {"a": None, "b": None, "c": None, "d": None})
    except ConfigError as error:
        if len(str(error)) > 10_000:
            return f"{len(str(error))} characters"
    async with gate() as g, g.client() as client:
        reply = await client.post("/v1/chat/completions", json={"messages": "x" * 1_000_000})
        return "" if reply.status_code == 400 and len(reply.content) < 2_000 else f"{len(reply.content)} bytes come back"


# -- content -------------------------------------------------------------------------------------------------------------------


@attack(swap(middleware, "without_content", lambda message, body: message))
async def words_in_events_and_logs(_: Path, patch: pytest.MonkeyPatch) -> str:
    """An upstream that quotes the prompt in its refusal, and one that streams garbage; who may observe may not read."""
    logged: list[str] = []

    class Log:
        def __getattr__(self, level: str) -> Callable[..., None]:
            return lambda event, **told: logged.append(f"{event} {told}")

    for module in (app, middleware, openai_http):
        patch.setattr(module, "logger", Log())
    quoted = f"1 validation error for ChatCompletionRequest: input_value={QUESTION!r}, type=value_error"
    for upstream_script in (
        replace(script(), status=400, message=quoted),
        replace(script(), status=500, message=f"internal: {QUESTION}"),
        Script(chat=[f"data: not json {QUESTION}\n\n"]),
        Script(chat=[f'data: {{"error": {{"message": "cannot continue {QUESTION}"}}}}\n\n']),
    ):
        async with gate(upstream_script) as g:
            await g.ask()
            assert [e for e in g.events if isinstance(e, StepFinished) and e.error]
            shown = b"".join(map(encode_json, g.events)).decode() + "".join(logged)
            if QUESTION[12:30] in shown:
                return f"{QUESTION[12:30]!r} is in an event or a log"
    return ""


def _content_unless_refused(**options: Any) -> policy.Policy:
    return policy.Policy(**{"content": True} | options)


@attack(swap(rig, "Policy", _content_unless_refused))
async def words_of_running_traces(_: Path, __: pytest.MonkeyPatch) -> str:
    """Where the recipe does not give content, not even an operator reads it."""
    async with gate() as g, g.client() as client:
        return "read" if (await client.get("/agentguard/tails")).status_code == 200 else ""


# -- other users of the machine ------------------------------------------------------------------------------------------------


def _shared_directories(patch: pytest.MonkeyPatch) -> None:
    made = tempfile.mkdtemp

    def shared(*args: Any, **options: Any) -> str:
        path = made(*args, **options)
        Path(path).chmod(0o755)
        return path

    patch.setattr(tempfile, "mkdtemp", shared)


@attack(_shared_directories)
async def sockets_of_other_users(_: Path, __: pytest.MonkeyPatch) -> str:
    """Telemetry, the trainer's frames, vLLM's own sockets and the draft's weights in shared memory: who else can get at them?"""
    recipe = policy.Policy(model="target", tts={}, draft="draft")  # type: ignore[arg-type]
    launch = await asyncio.to_thread(vllm_process._prepare, recipe, 1)
    weights = await asyncio.to_thread(control.own_directory)
    try:
        directory = launch.log.parent
        frames = json.loads(launch.arguments[launch.arguments.index("--additional-config") + 1])["agentguard"]["frames"]
        places = [Path(a.removeprefix("ipc://")).parent for a in (launch.telemetry, frames)]
        places += [Path(launch.env["VLLM_RPC_BASE_PATH"])]
        assert all(a.startswith("ipc:///") for a in (launch.telemetry, frames))
        assert all(place == directory for place in places), places
        for path in (directory, weights):
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                return f"others may look into {path.name}"
        assert stat.S_IMODE(launch.log.stat().st_mode) == 0o600
        return ""
    finally:
        os.close(launch.output)
        await asyncio.to_thread(launch.log.unlink)
        for path in (launch.log.parent, weights):
            await asyncio.to_thread(path.rmdir)


@attack(swap(vllm_process.secrets, "token_urlsafe", lambda *_: ""))
async def engine_behind_the_gateways_back(_: Path, __: pytest.MonkeyPatch) -> str:
    """The engine's port on loopback is open to every user of the machine: it has a key of its own for each start."""
    recipe = policy.Policy(model="target")
    keys = set()
    for _number in range(2):
        launch = await asyncio.to_thread(vllm_process._prepare, recipe, 1)
        os.close(launch.output)
        await asyncio.to_thread(launch.log.unlink)
        await asyncio.to_thread(launch.log.parent.rmdir)
        assert launch.env["VLLM_API_KEY"] == launch.api_key
        if launch.api_key and launch.api_key in " ".join(launch.arguments):
            return "the key is on its command line"
        keys.add(launch.api_key)
    return "" if len(keys) == 2 and all(len(key) >= 32 for key in keys) else "no key, or always the same"


# -- the network ---------------------------------------------------------------------------------------------------------------


@attack(swap(access, "_trust", lambda context, clients: None))
async def client_without_certificate(tmp: Path, _: pytest.MonkeyPatch) -> str:
    ours = await asyncio.to_thread(authority, tmp)
    tls = await asyncio.to_thread(access.tls_context, str(ours.certificate), str(ours.key), str(ours.authority))
    trust = ssl.create_default_context(cafile=str(ours.authority))
    known = ssl.create_default_context(cafile=str(ours.authority))
    known.load_cert_chain(ours.certificate, ours.key)
    async with gate(access=Access(tls=tls)) as g:
        assert g.url.startswith("https://")
        async with g.client(verify=known) as client:
            assert (await client.get("/v1/models")).status_code == 200
        with contextlib.suppress(httpx2.TransportError):
            async with g.client(verify=trust) as client:
                return f"answered with {(await client.get('/v1/models')).status_code}"
        return ""


def _plain(patch: pytest.MonkeyPatch) -> None:
    config = server.uvicorn.Config
    patch.setattr(server.uvicorn, "Config", lambda *a, **o: config(*a, **o | {"ssl_context_factory": None}))


@attack(_plain)
async def reading_along(tmp: Path, _: pytest.MonkeyPatch) -> str:
    """With a certificate, nothing is answered in the clear."""
    ours = await asyncio.to_thread(authority, tmp)
    tls = await asyncio.to_thread(access.tls_context, str(ours.certificate), str(ours.key))
    async with gate(access=Access(tls=tls)) as g:
        answer = await raw(g.port, f"GET /health HTTP/1.1\r\nhost: 127.0.0.1:{g.port}\r\n\r\n".encode(), wait_s=2)
        return "an answer in the clear" if answer and answer.startswith(b"HTTP/1.1") else ""
