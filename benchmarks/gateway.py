"""What the gateway costs a stream: direct / gateway / LiteLLM / LiteLLM + gateway, against one scripted server, in one run.

    python benchmarks/gateway.py [--json FILE] [--pairs 7] [--no-litellm]

Every part is a process of its own, so that CPU can be counted apart. The server writes each chunk as one SSE event of its own; a
stream thinks for 60 % of its chunks, answers for the rest, and every chunk carries its token ids. The gateway runs with sessions,
splitter, loop detection and events on, and makes one ASGI send a chunk.

saturated: 64 streams at once, as fast as they go; `gateway_chunks_per_s` is chunks per second of the gateway's CPU.
paced: 64 streams of 50 chunks/s each; `paced_us_per_chunk` is the gateway's CPU a chunk.
added: one stream of 100 chunks/s; `added_ms_p50` is the median time from the server's write to the client's read, through the
gateway less direct.
behind LiteLLM: chunks per second with the gateway over without, 8 streams, interleaved pairs; `behind_litellm_ratio` is the median.
Both LiteLLMs have our configuration, the hook included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

TOKENS = [
    "the",
    " first",
    " number",
    " is",
    " then",
    " so",
    " we",
    " add",
    " it",
    " to",
    " what",
    " came",
    " before",
    ",",
    " and",
    ".",
]


# -- the scripted server: its own process, raw sockets, so that it is never what is measured -------------------------------------


def chunk(i: int, chunks: int, now: float | None) -> bytes:
    thinking = i < 0.6 * chunks
    word = f"{TOKENS[i % len(TOKENS)]}{i * 7919 % 1000}"
    choice: dict[str, Any] = {"index": 0, "delta": {"reasoning" if thinking else "content": word}, "logprobs": None}
    choice |= {"finish_reason": None, "token_ids": [1000 + i * 7919 % 40_000]}
    if i == int(0.6 * chunks):
        choice["token_ids"] = [2, *choice["token_ids"]]  # the end of the trace
    body: dict[str, Any] = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
    body |= {"choices": [choice]}
    if now is not None:
        choice["delta"]["t"] = now
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def serve(port: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                path = head.split(b" ", 2)[1]
                if path == b"/v1/chat/completions":
                    await stream(writer, body)
                else:
                    plain(writer, path, body)
                await writer.drain()
                if b"connection: close" in head:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def plain(writer: asyncio.StreamWriter, path: bytes, body: dict[str, Any]) -> None:
        status = "200 OK"
        if path == b"/v1/models":
            reply: Any = {"object": "list", "data": [{"id": "bench", "object": "model", "max_model_len": 131_072}]}
        elif path == b"/tokenize":
            known = {"<think>": [1], "</think>": [2]}
            reply = {"tokens": known.get(body.get("prompt", ""), [5, 6, 7, 1])}
        else:
            status, reply = "404 Not Found", {"detail": "Not Found"}
        text = json.dumps(reply).encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)

    async def stream(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        asked = json.loads(body["messages"][-1]["content"])
        chunks, rate, timed = asked["chunks"], asked.get("rate"), asked.get("timed", False)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

        def send(event: bytes) -> None:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))

        started = time.perf_counter()
        ready = [] if timed else events(chunks)
        for i in range(chunks):
            if rate:
                wait = started + i / rate - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
            send(chunk(i, chunks, time.time()) if timed else ready[i])
            await writer.drain()
            if not rate and i % 16 == 0:
                await asyncio.sleep(0)
        last = json.loads(chunk(0, 1, None)[6:])
        last["choices"][0] |= {"delta": {}, "finish_reason": "stop", "token_ids": [3]}
        send(b"data: " + json.dumps(last).encode() + b"\n\n")
        usage = {"prompt_tokens": 4, "completion_tokens": chunks + 2, "total_tokens": chunks + 6}
        send(b"data: " + json.dumps(last | {"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    kept: dict[int, list[bytes]] = {}

    def events(chunks: int) -> list[bytes]:
        if chunks not in kept:
            kept[chunks] = [chunk(i, chunks, None) for i in range(chunks)]
        return kept[chunks]

    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=512)
    async with server:
        await server.serve_forever()


# -- the client: its own loop, raw sockets too -----------------------------------------------------------------------------------


async def one(port: int, key: str, asked: dict[str, Any], times: list[float] | None = None) -> int:
    """One stream read to its end; the number of its chunks."""
    body = {"model": "bench", "messages": [{"role": "user", "content": json.dumps(asked)}], "stream": True, "max_tokens": 100_000}
    text = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n"
    head += f"x-session-id: bench-{secrets.token_hex(4)}\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + text)
    seen, rest, status = 0, b"", b""
    while data := await reader.read(1 << 16):
        now = time.time()
        status = status or data[:15]
        if times is None:
            seen += (rest + data).count(b"data: {")
            rest = data[-6:] if not data.endswith(b"\n") else b""
            continue
        rest += data
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                seen += 1
                at = line.find(b'"t":')
                if at > 0:
                    times.append(now - float(line[at + 4 :].split(b"}")[0].split(b",")[0]))
    writer.close()
    if b" 200 " not in status + b" ":
        raise SystemExit(f"port {port} answered {status!r}")
    return seen


async def many(port: int, key: str, streams: int, asked: dict[str, Any]) -> float:
    """Chunks per second of ``streams`` streams at once."""
    started = time.perf_counter()
    seen = await asyncio.gather(*(one(port, key, asked) for _ in range(streams)))
    if min(seen) < asked["chunks"]:
        raise SystemExit(f"port {port} gave {min(seen)} of {asked['chunks']} chunks: a rate of what did not arrive is none")
    return streams * asked["chunks"] / (time.perf_counter() - started)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- one run -------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def process(*arguments: str, port: int, path: str = "/health") -> AsyncIterator[subprocess.Popen[bytes]]:
    import httpx2

    with subprocess.Popen([sys.executable, *arguments]) as running:  # noqa: ASYNC220
        try:
            async with httpx2.AsyncClient() as client:
                for _ in range(400):
                    try:
                        if (await client.get(f"http://127.0.0.1:{port}{path}")).status_code == 200:
                            break
                    except httpx2.TransportError:
                        pass
                    if running.poll() is not None:
                        raise SystemExit(f"{arguments} ended with {running.returncode}")
                    await asyncio.sleep(0.1)
            yield running
        finally:
            running.terminate()


async def measure(pairs: int, with_litellm: bool) -> dict[str, Any]:
    from agentguard.engines.vllm_process import free_port

    server, gateway = free_port(), free_port()
    upstream = ["-m", "agentguard", "serve", "--upstream", f"http://127.0.0.1:{server}", "--port", str(gateway)]
    found: dict[str, Any] = {}
    async with (
        process(__file__, "--serve", str(server), port=server, path="/v1/models"),
        process(*upstream, port=gateway) as guarded,
    ):
        await many(gateway, "x", 8, {"chunks": 200})  # warm
        found["direct_chunks_per_s"] = {n: round(await many(server, "x", n, {"chunks": 2000 // n * 8})) for n in (1, 64)}
        spent, through = cpu_s(guarded.pid), {}
        per_cpu = []
        for n, chunks in ((1, 8000), (64, 1000), (64, 1000), (64, 1000)):
            spent = cpu_s(guarded.pid)
            through[n] = round(await many(gateway, "x", n, {"chunks": chunks}))
            per_cpu.append((n, n * chunks / (cpu_s(guarded.pid) - spent)))
        found["through_gateway_chunks_per_s"] = through
        found["gateway_chunks_per_s"] = round(statistics.median(v for n, v in per_cpu if n == 64))
        found["gateway_chunks_per_s_one_stream"] = round(next(v for n, v in per_cpu if n == 1))
        spent = cpu_s(guarded.pid)
        await many(gateway, "x", 64, {"chunks": 500, "rate": 50})
        found["paced_us_per_chunk"] = round(1e6 * (cpu_s(guarded.pid) - spent) / (64 * 500), 1)
        delays: dict[str, list[float]] = {"direct": [], "gateway": []}
        for _ in range(3):
            for name, port in (("direct", server), ("gateway", gateway)):
                await one(port, "x", {"chunks": 300, "rate": 100, "timed": True}, delays[name])
        median = {name: statistics.median(times) for name, times in delays.items()}
        found["added_ms_p50"] = round(1e3 * (median["gateway"] - median["direct"]), 3)
        ends = {name: statistics.quantiles(times, n=20)[-1] for name, times in delays.items()}
        found["added_ms_p95"] = round(1e3 * (ends["gateway"] - ends["direct"]), 3)
        if with_litellm:
            found |= await behind_litellm(server, gateway, pairs)
    return found


async def behind_litellm(server: int, gateway: int, pairs: int) -> dict[str, Any]:
    from contextlib import AsyncExitStack

    from agentguard.engines.vllm_process import free_port
    from agentguard.proxy.environment import prepare
    from agentguard.proxy.process import litellm_process

    command, key = await asyncio.to_thread(prepare), f"sk-{secrets.token_hex(32)}"
    ports = {"alone": free_port(), "with": free_port()}
    rates: dict[str, list[float]] = {"alone": [], "with": []}
    async with AsyncExitStack() as stack:
        for name, below in (("alone", server), ("with", gateway)):
            url = f"http://127.0.0.1:{below}"
            await stack.enter_async_context(litellm_process(command, model="bench", gateway=url, master_key=key, port=ports[name]))
            await many(ports[name], key, 4, {"chunks": 100})
        for pair in range(pairs):
            for name in ("alone", "with") if pair % 2 == 0 else ("with", "alone"):
                rates[name].append(await many(ports[name], key, 8, {"chunks": 300}))
        by_streams = {
            name: {n: round(await many(port, key, n, {"chunks": chunks})) for n, chunks in ((1, 1500), (64, 100))}
            for name, port in ports.items()
        }
        delays: dict[str, list[float]] = {"alone": [], "with": []}
        for _ in range(3):
            for name, port in ports.items():
                await one(port, key, {"chunks": 200, "rate": 100, "timed": True}, delays[name])
    ratios = [b / a for a, b in zip(rates["alone"], rates["with"], strict=True)]
    return {
        "litellm_chunks_per_s": round(statistics.median(rates["alone"])),
        "litellm_and_gateway_chunks_per_s": round(statistics.median(rates["with"])),
        "behind_litellm_ratio": round(statistics.median(ratios), 3),
        "behind_litellm_ratios": [round(r, 3) for r in ratios],
        "litellm_chunks_per_s_by_streams": by_streams["alone"],
        "litellm_and_gateway_chunks_per_s_by_streams": by_streams["with"],
        # LiteLLM may drop the server's own time from its chunks: then nothing is known
        "added_behind_litellm_ms_p50": round(1e3 * (statistics.median(delays["with"]) - statistics.median(delays["alone"])), 3)
        if all(delays.values())
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="Write the figures there.")
    parser.add_argument("--pairs", type=int, default=7, help="Interleaved pairs behind LiteLLM.")
    parser.add_argument("--no-litellm", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    found = asyncio.run(measure(options.pairs, not options.no_litellm))
    for name, value in found.items():
        print(f"{name:34} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
