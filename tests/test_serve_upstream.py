"""`agentguard serve --upstream`: the command in front of a server that runs already."""

from __future__ import annotations

import asyncio
import re
import signal
import sys

import httpx2
import pytest

from agentguard.engines.vllm_process import free_port
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, upstream

COMMAND = [sys.executable, "-m", "agentguard", "serve"]


async def test_the_gateway_guards_a_server_that_runs_already_and_ends_on_sigterm() -> None:
    script = Script(chat=[chunk([A, END, B], reasoning="a", content="b"), chunk([STOP], finish="stop"), USAGE])
    port = free_port()
    async with upstream(script) as url:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--upstream", f"{url}/v1", "--port", str(port), stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(60):
                ready = (await process.stderr.readline()).decode()
                markers = (await process.stderr.readline()).decode()
            assert re.search(rf"ready: http://127\.0\.0\.1:{port}/v1 guards scripted at .*the engine has no plugin", ready)
            assert "'<think>' and '</think>' are assumed" in markers
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                reply = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
            assert reply.json()["choices"][0]["message"]["content"] == "b"
        finally:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                await process.wait()
        assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--upstream", "localhost:8000"], 2, "give a URL such as"),
        (["--upstream", "http://127.0.0.1:9"], 3, "is gone"),
        ([], 2, "or --upstream"),
    ],
)
async def test_what_cannot_be_guarded_is_said(arguments: list[str], code: int, message: str) -> None:
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        _, said = await process.communicate()
    assert (process.returncode, message in said.decode()) == (code, True), said.decode()
