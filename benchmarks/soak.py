"""Days of agents in minutes: many sessions over real sockets through several gateway workers, with faults, and then the accounts.

    python benchmarks/soak.py --steps 40000 --faults --json FILE          scripted engines, gateway workers on Redis
    python benchmarks/soak.py --steps 200 --vllm --json FILE              the reference pair on a real vLLM

Engines, workers, Redis and the clients are processes of their own. Each session runs 20 steps, a fifth of them two at a time; a
step that was refused or broken off is asked again until it is served, as an agent does. A scripted engine notes every token it
writes in a mapped file, which survives its kill -9.

Faults, one every few seconds: kill -9 of an engine, a worker, the gateway's supervisor or Redis; an engine that is stopped for a
second. All the time: clients that hang up, clients that stop reading for a second, a reader of the event stream that never reads,
and in one stream of a hundred an engine that breaks off, sends garbage, an error, a wrong usage or no end.

What is reported:

steps             served: an answer, a finish reason, the usage and the end of the stream
empty_messages    served steps without text and without a tool call
unended_streams   streams that stopped without a last word though their worker lived
severed           streams of a worker that was killed: nobody is left to end them
account_errors    steps or sessions whose account disagrees with the engines' own counters (see `audit`)
rss_mb_per_1000_steps, fds_per_1000_steps   least squares over the longest-lived worker, with the standard error
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from agentguard.engines.vllm_process import VllmProcess, free_port, vllm_process
from agentguard.policy import Policy
from agentguard.reference import reference_model
from agentguard.store.accounts import Key, Meters

STEPS_A_SESSION = 20
CLIENTS = 48
SLOT = struct.Struct("<40s24sIB")
SIZE = 80
DONE, ENDLESS = 1, 2
ALLOWED = 512
"""Tokens a step asks for."""
WORDS = ["the", " first", " number", " is", " then", " so", " we", " add", " it", " to", " what", " came", " before", ","]
_JSON = msgspec.json.Decoder()


# -- the scripted engine: its own process, raw sockets ---------------------------------------------------------------------------


class Ledger:
    """A slot for each request: its id, session, tokens written, and whether its stream was written to its end."""

    def __init__(self, path: Path, slots: int) -> None:
        new = not path.exists()
        with path.open("a+b") as file:
            if new:
                file.truncate(8 + SIZE * slots)
            self._map = mmap.mmap(file.fileno(), 0)

    def open(self, request: str, session: str) -> int:
        (used,) = struct.unpack_from("<Q", self._map, 0)
        struct.pack_into("<Q", self._map, 0, used + 1)
        at = 8 + SIZE * used
        SLOT.pack_into(self._map, at, request.encode(), session.encode(), 0, 0)
        return at

    def wrote(self, at: int, tokens: int, state: int = 0) -> None:
        struct.pack_into("<IB", self._map, at + 64, tokens, state)

    def rows(self) -> list[tuple[str, str, int, int]]:
        (used,) = struct.unpack_from("<Q", self._map, 0)
        rows = [SLOT.unpack_from(self._map, 8 + SIZE * i) for i in range(used)]
        return [(r.rstrip(b"\0").decode(), s.rstrip(b"\0").decode(), tokens, state) for r, s, tokens, state in rows]


def chunk(ids: list[int], delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids, "logprobs": None}
    return {"id": "chatcmpl-soak", "object": "chat.completion.chunk", "created": 1, "model": "soak", "choices": [choice]}


async def engine(port: int, path: Path, slots: int, faults: bool, plain: bool, seed: int) -> None:
    ledger, rng = Ledger(path, slots), random.Random(seed * 7919 + port + time.time_ns())
    kept = [
        [_event(chunk([1000 + i], {kind: WORDS[i % len(WORDS)] + str(i * 7919 % 1000)})) for i in range(1024)]
        for kind in ("reasoning", "content")
    ]
    loop_event = _event(chunk([77], {"reasoning": " again"}))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
                length = int(headers.get("content-length", 0))
                body = json.loads(await reader.readexactly(length)) if length else {}
                path_ = head.split(" ", 2)[1]
                if path_.startswith("/v1/c"):
                    await stream(writer, body, headers, path_)
                else:
                    known = {"<think>": [1], "</think>": [2]}
                    reply = {
                        "/v1/models": {"data": [{"id": "soak", "object": "model", "max_model_len": 32_768}]},
                        "/tokenize": {"tokens": known.get(body.get("prompt", ""), [5, 6, 7, 1])},
                    }.get(path_)
                    text = json.dumps(reply or {"detail": "Not Found"}).encode()
                    status = "200 OK" if reply else "404 Not Found"
                    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def stream(writer: asyncio.StreamWriter, body: dict[str, Any], headers: dict[str, str], route: str) -> None:
        request = headers["x-request-id"]
        at, count = ledger.open(request, headers.get("x-session-id", "")), 0
        most, budget = body["max_tokens"], body.get("thinking_token_budget")
        continued = route == "/v1/completions"
        # lengths are heavy-tailed as real ones are; the mean of a step is some 70 chunks
        think = (
            0 if continued else min(int(rng.lognormvariate(3.55, 0.75)) + 4, most - 8, *([budget] if budget is not None else []))
        )
        says = min(int(rng.lognormvariate(2.9, 0.6)) + 2, most - think - 2)
        fault = rng.choice(("drop", "garbage", "error", "usage", "endless")) if faults and rng.random() < 0.01 else ""
        loops = not continued and not fault and not plain and rng.random() < 0.01
        breaks = rng.randrange(think + says) if fault in ("drop", "garbage", "error") else -1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

        def send(event: bytes, tokens: int) -> None:
            nonlocal count
            count += tokens
            ledger.wrote(at, count, ENDLESS if fault == "endless" else 0)  # first: a kill may come between the two
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))

        for i in range(2 * most if fault == "endless" else think + says):
            if i == breaks:
                if fault == "drop":
                    writer.transport.abort()
                    raise ConnectionResetError
                send(
                    b"data: {broken\n\n" if fault == "garbage" else b'data: {"error": {"message": "scripted", "code": 500}}\n\n', 0
                )
                writer.write(b"0\r\n\r\n")
                return
            if loops and i > 8:
                if i >= most - 2:
                    break
                send(loop_event, 1)
            elif i == think and not continued:
                send(_event(chunk([2, 1000 + i], {"content": "so"})), 2)
            elif continued:
                one = chunk([1000 + i], {})
                one["choices"][0]["text"] = f" answer{i}"
                send(_event(one), 1)
            else:
                send(kept[i > think][i % 1024], 1)
            await writer.drain()
            if i % 16 == 0:
                await asyncio.sleep(0)
        last = chunk([3], {}, "stop")
        if continued:
            last["choices"][0]["text"] = ""
        send(_event(last), 1)
        used = {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}
        if fault == "usage":
            used = {"prompt_tokens": -3, "completion_tokens": 10**12, "total_tokens": "many"}
        ledger.wrote(at, count, ENDLESS if fault == "endless" else DONE)
        send(_event(last | {"choices": [], "usage": used}) + b"data: [DONE]\n\n", 0)
        writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=512)
    async with server:
        await server.serve_forever()


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


# -- the clients -----------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What the clients saw."""

    steps: int = 0
    chunks: int = 0
    tokens: int = 0
    empty_messages: int = 0
    unended: list[str] = field(default_factory=list)
    severed: int = 0
    hung_up: int = 0
    ended_with_error: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    not_served: int = 0
    internal_errors: list[str] = field(default_factory=list)


class Broken(Exception):
    """The connection ended before the reply did."""


async def ask(port: int, session: str, seed: int, rng: random.Random, tally: Tally, asked: dict[str, Any], faults: bool) -> bool:
    """One request; True when it was served."""
    whole = rng.random() < 0.1
    body = {
        "messages": [{"role": "user", "content": f"step {seed}"}],
        "seed": seed,
        "temperature": 1.0,
        "max_tokens": ALLOWED,
    } | asked
    body |= {} if whole else {"stream": True, "stream_options": {"include_usage": True}}
    text = json.dumps(body).encode()
    hangs_up = faults and rng.random() < 0.01
    pauses = faults and rng.random() < 0.005
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    except ConnectionError:
        tally.refused["no connection"] += 1
        return False
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-session-id: {session}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        reply = await reader.readuntil(b"\r\n\r\n")
        if hangs_up:
            await asyncio.sleep(rng.random() / 20)
            tally.hung_up += 1
            return False
        if pauses:
            await asyncio.sleep(1.0)
        data = await _body(reader, reply)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Broken(repr(error)) from None
    finally:
        writer.close()
    status = int(reply.split(b" ", 2)[1])
    if status != 200:
        try:
            tally.refused[f"{status} {json.loads(data)['error'].get('code')}"] += 1
        except ValueError:  # not one of the gateway's own refusals
            tally.internal_errors.append(data[:100].decode(errors="replace"))
        return False
    if whole:
        message = json.loads(data)
        said, finish, used, ended, failed = (
            bool(message["choices"][0]["message"].get("content")),
            True,
            message.get("usage"),
            True,
            "",
        )
    else:
        said, finish, used, ended, failed = _read(data, tally)
    if failed:
        tally.ended_with_error[failed] += 1
        return False
    if not (finish and ended and used):
        tally.unended.append(f"{session}: finish {finish}, usage {bool(used)}, end {ended}: {data[-200:]!r}")
        return False
    tally.steps += 1
    tally.empty_messages += not said
    tally.tokens += used["completion_tokens"]
    return True


def _read(data: bytes, tally: Tally) -> tuple[bool, bool, dict[str, Any] | None, bool, str]:
    said, finish, used, ended = False, False, None, False
    for event in data.split(b"\n\n"):
        if not event.startswith(b"data: "):
            continue
        if event == b"data: [DONE]":
            ended = True
            continue
        one = _JSON.decode(event[6:])
        if "error" in one:
            return said, finish, used, ended, str(one["error"].get("code"))
        tally.chunks += 1
        if one["choices"]:
            choice = one["choices"][0]
            said = said or bool(choice["delta"].get("content"))
            finish = finish or bool(choice["finish_reason"])
        used = one.get("usage") or used
    return said, finish, used, ended, ""


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in head.lower():
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return await reader.readexactly(length)
    pieces = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(pieces)


async def agent(name: str, steps: int, rng: random.Random, soak: Soak) -> None:
    """A session's steps, one after the other or two at a time."""
    together = 2 if rng.random() < 0.2 else 1

    async def step(number: int) -> None:
        for attempt in range(200):
            started = time.monotonic()
            try:
                async with asyncio.timeout(300):
                    if await ask(soak.port, name, number, rng, soak.tally, soak.asked, soak.faults):
                        return
            except Broken as error:
                if any(started <= killed + 1.0 for killed in soak.workers_killed):
                    soak.tally.severed += 1
                else:
                    soak.tally.unended.append(f"{name}: {error}")
            except TimeoutError:
                soak.tally.unended.append(f"{name}: nothing for 300 s")
            await asyncio.sleep(min(2.0, 0.05 * 2**attempt) * rng.random())
        soak.tally.not_served += 1

    for first in range(0, steps, together):
        await asyncio.gather(*(step(n) for n in range(first, min(steps, first + together))))


# -- the whole -------------------------------------------------------------------------------------------------------------------


class Soak:
    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.faults: bool = options.faults
        self.tally = Tally()
        self.port = free_port()
        self.engines: dict[int, subprocess.Popen[bytes]] = {}
        self.redis: subprocess.Popen[bytes] | None = None
        self.redis_port = free_port()
        self.gateway: subprocess.Popen[bytes] | None = None
        self.workers_killed: list[float] = []
        self.injected: Counter[str] = Counter()
        self.samples: dict[int, list[tuple[int, float, int]]] = {}
        self.asked: dict[str, Any] = {"max_tokens": options.max_tokens} if options.max_tokens else {}
        if options.vllm:  # a problem as the pair was trained on; to a text it knows nothing of it answers in 58 tokens
            self.asked["messages"] = [{"role": "user", "content": "a=47;b=a+8;c=b-3;d=c+9;e=d-2;?e"}]
        self.vllm: VllmProcess | None = None
        self.sessions = 0
        self.log = (directory / "gateway.log").open("ab")

    # -- processes

    def start_engine(self, port: int) -> None:
        arguments = ["--engine", str(port), "--directory", str(self.directory), "--steps", str(self.options.steps)]
        arguments += ["--faults"] * self.faults + ["--seed", str(self.options.seed)]
        self.engines[port] = subprocess.Popen([sys.executable, __file__, *arguments])

    def start_redis(self) -> None:
        command = ["redis-server", "--port", str(self.redis_port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"]
        command += ["--appendfsync", "no"]  # as "everysec" may hold a write back while the disk is busy, and a kill then loses it
        self.redis = subprocess.Popen([*command, "--dir", str(self.directory)], stdout=subprocess.DEVNULL)

    @property
    def store(self) -> str:
        return (
            f"redis://127.0.0.1:{self.redis_port}/0" if self.options.store == "redis" else f"sqlite:{self.directory / 'store.db'}"
        )

    def start_gateway(self) -> None:
        upstream = [self.vllm.url] if self.vllm is not None else [f"http://127.0.0.1:{port}" for port in self.engines]
        env = os.environ | ({"AGENTGUARD_UPSTREAM_KEY": self.vllm.api_key} if self.vllm is not None else {})
        command = [sys.executable, "-m", "agentguard", "serve", *(part for url in upstream for part in ("--upstream", url))]
        command += ["--port", str(self.port), "--workers", str(self.options.workers), "--store", self.store]
        command += ["--recipe", str(self.directory / "recipe.yaml")]
        self.gateway = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=env)

    def workers(self) -> list[psutil.Process]:
        """The gateway's workers, the oldest first."""
        assert self.gateway is not None
        with contextlib.suppress(psutil.Error):
            return sorted(psutil.Process(self.gateway.pid).children(), key=lambda p: p.pid)
        return []

    def idle_fds(self) -> dict[int, int]:
        found = {}
        for process in self.workers():
            with contextlib.suppress(psutil.Error):
                found[process.pid] = process.num_fds()
        return found

    async def until_ready(self, seconds: float = 90) -> None:
        import httpx2

        deadline = time.monotonic() + seconds
        async with httpx2.AsyncClient() as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get(f"http://127.0.0.1:{self.port}/health/ready")).status_code == 200:
                        return
                assert self.gateway is not None
                if self.gateway.poll() is not None:  # the port of one that was killed may be held a moment longer
                    await asyncio.sleep(0.3)
                    self.start_gateway()
                await asyncio.sleep(0.1)
        raise SystemExit(f"the gateway was not ready after {seconds} s; see {self.directory / 'gateway.log'}")

    # -- faults

    async def inject(self) -> None:
        rng = random.Random(self.options.seed + 1)
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * self.options.every)
            early = self.tally.steps < self.options.steps // 5 and self.injected["gateway"] < 2
            kinds = (
                ["worker"]
                + ["engine", "engine", "stall"] * bool(self.engines)
                + ["redis"] * (self.redis is not None)
                + ["gateway"] * early
            )
            kind = rng.choice(kinds)
            await getattr(self, f"fault_{kind}")(rng)
            self.injected[kind] += 1

    async def fault_engine(self, rng: random.Random) -> None:
        port = rng.choice(list(self.engines))
        self.engines[port].kill()
        self.engines[port].wait()
        await asyncio.sleep(rng.random())
        self.start_engine(port)

    async def fault_stall(self, rng: random.Random) -> None:
        stopped = rng.choice(list(self.engines.values()))
        stopped.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        stopped.send_signal(signal.SIGCONT)

    async def fault_worker(self, rng: random.Random) -> None:
        others = self.workers()[1:]  # the oldest lives on: its memory is what is measured
        if others:
            self.workers_killed.append(time.monotonic())
            rng.choice(others).kill()

    async def fault_redis(self, rng: random.Random) -> None:
        assert self.redis is not None
        self.redis.kill()
        self.redis.wait()
        await asyncio.sleep(rng.random())
        self.start_redis()

    async def fault_gateway(self, _: random.Random) -> None:
        assert self.gateway is not None
        self.workers_killed.append(time.monotonic() + self.options.drain)
        self.gateway.kill()
        self.gateway.wait()
        await self.until_ready()

    # -- the run

    async def sample(self) -> None:
        while True:
            await asyncio.sleep(self.options.sample)
            for process in self.workers():
                with contextlib.suppress(psutil.Error):
                    found = (self.tally.steps, process.memory_info().rss / 2**20, process.num_fds())
                    self.samples.setdefault(process.pid, []).append(found)

    async def never_reads(self) -> None:
        """A subscriber of the event stream that stops reading; a new one when its gateway is gone."""
        head = b"GET /agentguard/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        while True:
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
                writer.write(head)
                await asyncio.sleep(20)
                writer.transport.abort()
            await asyncio.sleep(1)

    async def run(self) -> dict[str, Any]:
        options = self.options
        recipe = {
            "model": str(reference_model("target")) if options.vllm else "soak",
            "limits": {"tokens": 1_000_000}, "max_sessions": 200,
            "economics": {"arms": {"cactus:0.25": 1.0}},
            "serving": {"drain_s": options.drain}, "store": {"lease_s": options.lease},
        }  # fmt: skip
        (self.directory / "recipe.yaml").write_text(json.dumps(recipe))
        async with AsyncExitStack() as stack:
            if options.vllm:
                pair = Policy(model=str(reference_model("target")), draft=str(reference_model("draft")))
                self.vllm = await stack.enter_async_context(vllm_process(pair))
            return await self.all()

    async def all(self) -> dict[str, Any]:
        options = self.options
        started = time.monotonic()
        try:
            if options.store == "redis":
                self.start_redis()
                await asyncio.sleep(0.5)
            if not options.vllm:
                for _ in range(options.engines):
                    self.start_engine(free_port())
                await asyncio.sleep(1.5)
            self.start_gateway()
            await self.until_ready()
            await asyncio.sleep(0.5)
            idle = self.idle_fds()
            started = time.monotonic()
            background = [asyncio.create_task(self.sample())]
            if self.faults:
                background += [asyncio.create_task(self.inject()), asyncio.create_task(self.never_reads())]
            await self.clients()
            took = time.monotonic() - started
            for task in background:
                task.cancel()
            done = await asyncio.gather(*background, return_exceptions=True)
            for error in done:
                if isinstance(error, Exception):
                    raise error
            await self.until_ready()
            await asyncio.sleep(2 * options.lease + 1)  # leases of workers that were killed end
            after = self.idle_fds()
            found = await self.report(took)
            # of the workers that lived through all of it: what is open when nothing runs
            found["idle_fds"] = {str(pid): [idle[pid], after[pid]] for pid in idle if pid in after}
        finally:
            for process in (self.gateway, *self.engines.values(), self.redis):
                if process is not None and process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(60)
                    process.kill()
        return found

    async def clients(self) -> None:
        """`CLIENTS` agents at a time, until every session has had its steps."""
        each = min(STEPS_A_SESSION, self.options.steps)
        sessions = iter(range(-(-self.options.steps // each)))
        left, until = self.options.steps, time.monotonic() + self.options.seconds

        async def work() -> None:
            nonlocal left
            for number in sessions:
                if time.monotonic() > until:
                    return
                self.sessions += 1
                steps = min(each, left)
                left -= steps
                await agent(f"soak-{number}", steps, random.Random(f"{self.options.seed}-{number}"), self)

        await asyncio.gather(*(work() for _ in range(self.options.clients)))

    async def report(self, took: float) -> dict[str, Any]:
        tally = self.tally
        longest = max(self.samples.values(), key=len, default=[])
        rss, rss_error = slope([(x / 1000, y) for x, y, _ in longest])
        fds, fds_error = slope([(x / 1000, float(y)) for x, _, y in longest])
        found: dict[str, Any] = {
            "steps": tally.steps, "sessions": self.sessions,
            "chunks_per_step": round(tally.tokens / max(1, tally.steps), 1), "seconds": round(took, 1),
            "empty_messages": tally.empty_messages, "unended_streams": len(tally.unended), "severed": tally.severed,
            "not_served": tally.not_served, "hung_up": tally.hung_up, "ended_with_error": dict(tally.ended_with_error),
            "internal_errors": len(tally.internal_errors),
            "refused": dict(tally.refused), "faults": dict(self.injected), "workers": self.options.workers,
            "store": self.options.store, "clients": self.options.clients, "seed": self.options.seed,
            "rss_mb_per_1000_steps": rss, "rss_standard_error": rss_error, "fds_per_1000_steps": fds,
            "fds_standard_error": fds_error, "rss_mb": [longest[0][1], longest[-1][1]] if longest else None,
            "samples": len(longest), "what_was_unended": tally.unended[:10],
        }  # fmt: skip
        return found | (await audit_vllm(self) if self.vllm is not None else await audit(self))


def slope(points: list[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Least squares over the last three quarters, and the standard error of the slope; None for too few points."""
    points = points[len(points) // 4 :]
    if len(points) < 8 or points[0][0] == points[-1][0]:
        return None, None
    x, y = [p[0] for p in points], [p[1] for p in points]
    fit = statistics.linear_regression(x, y)
    rest = sum((b - fit.intercept - fit.slope * a) ** 2 for a, b in points)
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    return round(fit.slope, 4), round((rest / (len(points) - 2) / spread) ** 0.5, 4)


async def accounts(soak: Soak) -> list[tuple[Key, Meters, list[dict[str, Any]]]]:
    """Every session as the store has it, with the steps it remembers."""
    from agentguard.store.accounts import Ask, Grant, Settlement
    from agentguard.store.sessions import open_sessions

    found = []
    async with open_sessions(soak.store) as store:
        for key, _ in await store.sessions(100_000):
            # a reservation that is taken back tells all records, and ends what is over
            look = f"audit-{key}-{time.time_ns()}"
            grant = await store.reserve(key, Ask(look, 1))
            assert isinstance(grant, Grant)
            await store.settle([(key, Settlement(look, undo=True))])
            steps = [json.loads(text).get("step") for _, text in grant.records]
            found.append((key, grant.meters, [step for step in steps if step]))
    return found


async def audit(soak: Soak) -> dict[str, Any]:
    """The store's accounts against what the engines say they wrote, step by step.

    A step that ended by itself has exactly the engine's tokens. One that was cut, broken off or left by its client has at most
    those: what was on its way when the stream was closed is generated and unseen. A step of a worker that was killed has no record;
    what was seen of it and what is lost cover it together. And a session's tokens are the sum of its records and of what was seen.
    """
    wrote: dict[str, int] = {}
    session_of: dict[str, str] = {}
    endless: set[str] = set()
    rows = [row for path in soak.directory.glob("engine-*.bin") for row in Ledger(path, 0).rows()]
    for request, session, tokens, state in rows:
        base = request.removesuffix("-answer")
        if state == ENDLESS:
            endless.add(base)
        wrote[base] = wrote.get(base, 0) + tokens
        session_of.setdefault(base, session)
    errors: list[str] = []
    exact = inexact = unseen = records = lost = settled = dead_steps = 0
    recorded: set[str] = set()
    dead: Counter[str] = Counter()
    kept = await accounts(soak)
    for _, _, steps in kept:
        recorded |= {step["request"] for step in steps}
    for request, tokens in wrote.items():
        if request not in recorded:
            # an engine that does not end its stream writes more than it was allowed, and only that much was reserved
            dead[session_of[request]] += min(tokens, ALLOWED) if request in endless else tokens
            dead_steps += 1
    for key, meters, steps in kept:
        settled += meters.tokens
        lost += meters.lost
        if len(steps) != len({step["request"] for step in steps}):
            errors.append(f"{key}: a step is recorded twice")
        for step in steps:
            records += 1
            engine_wrote = wrote.get(step["request"], 0)
            whole = not step.get("error") and not step.get("continued") and step.get("finish_reason") != "length"
            if whole:
                exact += 1
                if step["tokens"] != engine_wrote:
                    errors.append(f"{key}: {step['request']} settled {step['tokens']}, the engine wrote {engine_wrote}")
                continue
            inexact += 1
            # the closing marker of a continuation is forced into the prompt, where the engine does not write it
            if step["tokens"] > engine_wrote + (1 if step.get("continued") else 0):
                errors.append(f"{key}: {step['request']} settled {step['tokens']} of only {engine_wrote} written")
            unseen += max(0, engine_wrote - step["tokens"])
        of_records = sum(step["tokens"] for step in steps)
        seen = meters.tokens - of_records
        if seen < 0 or (seen and not dead[key.session]):
            errors.append(f"{key}: {meters.tokens} tokens, its records hold {of_records}")
        if dead[key.session] > seen + meters.lost:
            errors.append(f"{key}: killed workers' steps wrote {dead[key.session]}, {seen} were seen and {meters.lost} are lost")
    return {
        "account_errors": len(errors), "what_was_wrong": errors[:10], "steps_recorded": records, "steps_exact": exact,
        "steps_bounded": inexact, "tokens_settled": settled, "tokens_engines": sum(wrote.values()), "tokens_unseen": unseen,
        "tokens_lost": lost, "steps_of_killed_workers": dead_steps, "tokens_of_killed_workers": sum(dead.values()),
    }  # fmt: skip


async def audit_vllm(soak: Soak) -> dict[str, Any]:
    """Against vLLM's own counter of generated tokens, and step by step against the usage it gave each stream.

    Streams that were left before their end (`hung_up`, `severed`) have tokens nobody saw, so then the counter is only a bound.
    """
    import httpx2

    assert soak.vllm is not None
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {soak.vllm.api_key}"}) as client:
        lines = (await client.get(f"{soak.vllm.url}/metrics")).text.splitlines()
    generated = round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total")))
    kept = await accounts(soak)
    settled, lost = sum(meters.tokens for _, meters, _ in kept), sum(meters.lost for _, meters, _ in kept)
    steps = [step for _, _, one in kept for step in one]
    differs = sum(step.get("estimated", False) for step in steps)
    whole = not soak.tally.hung_up + soak.tally.severed
    wrong = settled != generated if whole else not settled <= generated
    return {
        "account_errors": int(wrong) + differs, "tokens_settled": settled, "tokens_engines": generated, "tokens_lost": lost,
        "tokens_told": soak.tally.tokens, "steps_recorded": len(steps), "closed": sum(bool(step.get("closed")) for step in steps),
        "steps_differ_from_their_usage": differs,
    }  # fmt: skip


async def again(options: argparse.Namespace) -> dict[str, Any]:
    soak = Soak(options, options.again)
    try:
        if options.store == "redis":
            soak.start_redis()
            await asyncio.sleep(3)
        return await audit(soak)
    finally:
        if soak.redis is not None:
            soak.redis.terminate()
            soak.redis.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--json", type=Path, help="Write the figures there.")
    parser.add_argument("--store", choices=("redis", "sqlite"), default="redis" if shutil.which("redis-server") else "sqlite")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--every", type=float, default=4.0, help="Seconds between two faults, in the mean.")
    parser.add_argument("--lease", type=float, default=5.0, help="Seconds a dead worker's reservation lasts.")
    parser.add_argument("--drain", type=float, default=5.0)
    parser.add_argument("--sample", type=float, default=2.0, help="Seconds between two looks at memory.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="No session begins after so long.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", action="store_true", help="The reference pair on a real vLLM, instead of scripted engines.")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="Audit the kept folder of a run again.")
    parser.add_argument("--keep", action="store_true", help="Keep the run's folder.")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    slots = 6 * options.steps + 10_000
    if options.engine:
        with contextlib.suppress(KeyboardInterrupt):
            path = options.directory / f"engine-{options.engine}.bin"
            asyncio.run(engine(options.engine, path, slots, options.faults, options.plain, options.seed))
        return
    if options.again:
        print(json.dumps(asyncio.run(again(options)), indent=1))
        return
    directory = Path(tempfile.mkdtemp(prefix="agentguard-soak-"))
    try:
        found = asyncio.run(Soak(options, directory).run())
    finally:
        if options.keep:
            print(f"kept {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    found["command"] = " ".join(["python", "benchmarks/soak.py", *sys.argv[1:]])
    for name, value in found.items():
        print(f"{name:34} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    bad = (
        found["empty_messages"]
        + found["unended_streams"]
        + found["account_errors"]
        + found["not_served"]
        + found["internal_errors"]
    )
    sys.exit(1 if bad or found["steps"] < options.steps else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
