"""`agentguard proxy` and `agentguard wrap` as commands, and the hook in somebody else's LiteLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml

import agentguard
from agentguard.dirs import cache_dir
from agentguard.engines.vllm_process import free_port, stop
from agentguard.errors import EngineDiedError
from agentguard.events import StepFinished
from tests.proxy.conftest import guarded
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, thinking, upstream

pytestmark = [pytest.mark.proxy, pytest.mark.usefixtures("litellm"), pytest.mark.timeout(900)]
ANSWERS = [chunk([A, END, B], reasoning="a", content="b"), chunk([STOP], finish="stop"), USAGE]
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "PYTHONPATH")}
    # what a shell may hold and LiteLLM must not act on
    own = {"DATABASE_URL": "postgresql://nobody@127.0.0.1:9/x", "OPENAI_API_KEY": "sk-the-user-s-own-key"}
    return kept | own | {"HOME": str(home), "XDG_CACHE_HOME": str(cache_dir().parent)} | more


def group_of(parent: int) -> list[int]:
    """The processes whose parent is ``parent``, and theirs."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            rest = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(rest[1]), []).append(int(path.parent.name))
    found, waiting = [], [parent]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


def said_by(pids: list[int]) -> str:
    return "".join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in pids)


async def test_the_command_serves_keeps_its_secrets_and_leaves_no_process(tmp_path: Path) -> None:
    port, gateway_key, upstream_key = free_port(), secrets.token_hex(20), secrets.token_hex(20)
    script = Script(chat=ANSWERS)
    async with upstream(script) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentguard", "proxy", "--upstream", url, "--port", str(port), "--gateway-port", "0",
            stderr=asyncio.subprocess.PIPE,
            env=environment(tmp_path, AGENTGUARD_API_KEY=gateway_key, AGENTGUARD_UPSTREAM_KEY=upstream_key),
        )  # fmt: skip
        assert process.stderr is not None
        said = ""
        try:
            async with asyncio.timeout(120):
                while "Anthropic base URL" not in said:
                    line = (await process.stderr.readline()).decode()
                    assert line, said
                    said += line
            key_file = Path(re.findall(r"key: (\S+);", said)[0])
            assert key_file.is_relative_to(tmp_path)
            key = await asyncio.to_thread(key_file.read_text)
            assert stat.S_IMODE(key_file.stat().st_mode) == 0o600  # noqa: ASYNC240
            async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key.strip(), max_retries=0) as client:
                reply = await client.chat.completions.create(**ASK)  # type: ignore[call-overload]
            assert reply.choices[0].message.content == "b"
            assert script.seen[0][2]["authorization"] == f"Bearer {upstream_key}"
            children = await asyncio.to_thread(group_of, process.pid)
            assert children
            log = Path(re.findall(r"log: (\S+)\)", said)[0])
            # a proxy that runs is found by its port, the gateway behind it too, and the agent sees no secret but its own
            seen = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agentguard", "wrap", "--port", str(port), "--", sys.executable, "-c", SDK + LISTED,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
                env=environment(tmp_path, AGENTGUARD_API_KEY=gateway_key, AGENTGUARD_UPSTREAM_KEY=upstream_key),
            )  # fmt: skip
            out, told = await seen.communicate()
            assert seen.returncode == 0, told.decode()
            assert "starting the proxy" not in told.decode()
            assert "agentguard: 2 steps" in told.decode()
            for secret in (key.strip(), gateway_key, upstream_key):
                assert secret not in out.decode() + told.decode()
            public = said + await asyncio.to_thread(said_by, [process.pid, *children]) + await asyncio.to_thread(log.read_text)
            for secret in (key.strip(), gateway_key, upstream_key, "sk-the-user-s-own-key"):
                assert secret not in public
            assert "postgresql" not in public  # LiteLLM was told of no database
        finally:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                said += (await process.stderr.read()).decode()
                await process.wait()
    assert process.returncode == 130, said
    assert not [pid for pid in children if await asyncio.to_thread(Path(f"/proc/{pid}").exists)]
    assert not log.parent.exists()


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_a_killed_litellm_ends_its_streams_the_engine_s_work_and_the_command(tmp_path: Path) -> None:
    """By kill -9 in the middle of a stream; the step is settled, and nothing of us stays behind."""
    script = Script(chat=thinking(20), hold=asyncio.Event(), aborted=asyncio.Event())
    async with guarded(script) as (guard, events, gateway):
        port, key = free_port(), f"sk-{secrets.token_hex(32)}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentguard", "proxy", "--gateway", gateway, "--port", str(port),
            stderr=asyncio.subprocess.PIPE, env=environment(tmp_path, AGENTGUARD_PROXY_KEY=key),
        )  # fmt: skip
        assert process.stderr is not None
        said = ""
        async with asyncio.timeout(120):
            while "Anthropic base URL" not in said:
                line = (await process.stderr.readline()).decode()
                assert line, said
                said += line
        children = await asyncio.to_thread(group_of, process.pid)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
        try:
            stream = await client.chat.completions.create(**ASK, stream=True)  # type: ignore[call-overload]
            await anext(aiter(stream))
            for child in children:
                os.kill(child, signal.SIGKILL)
            with pytest.raises((openai.APIError, httpx2.TransportError)):
                await asyncio.wait_for(read(stream), 30)
        finally:
            await client.close()
        async with asyncio.timeout(60):
            await script.aborted.wait()
            said += (await process.stderr.read()).decode()
            await process.wait()
        assert process.returncode == EngineDiedError.exit_code, said
        assert "LiteLLM ended with status -9" in said
        assert not guard.running
        finished = [e for e in events if isinstance(e, StepFinished)]
        assert len(finished) == 1
        assert finished[0].error
    assert not (tmp_path / ".local" / "state" / "agentguard" / f"proxy-{port}.json").exists()


SDK = """
import sys, openai, anthropic
print(sys.stdin.read().strip(), file=sys.stderr)
asked = [{"role": "user", "content": "hi"}]
print(openai.OpenAI().chat.completions.create(model="any", messages=asked).choices[0].message.content)
print(anthropic.Anthropic().messages.create(model="any", messages=asked, max_tokens=99).content[-1].text)
"""
LISTED = """
import pathlib
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        print(path.read_bytes())
    except OSError:
        pass
print({k: v for k, v in __import__("os").environ.items() if k.startswith("AGENTGUARD")})
"""


async def test_wrap_starts_what_is_missing_for_any_sdk_program(tmp_path: Path) -> None:
    async with guarded(Script(chat=ANSWERS)) as (_, events, gateway):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentguard", "wrap", "--gateway", gateway, "--", sys.executable, "-c", SDK + "sys.exit(7)",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=environment(tmp_path),
        )  # fmt: skip
        async with asyncio.timeout(120):
            out, said = await process.communicate(b"from the shell")
    assert (process.returncode, out.decode()) == (7, "b\nb\n"), said.decode()
    assert "from the shell" in said.decode()
    assert said.decode().splitlines()[-1].startswith("agentguard: 2 steps, 8 tokens (25% thinking), 0 closes, λ —")
    assert len({e.session for e in events if isinstance(e, StepFinished)}) == 2  # no ids: two beginnings


AUTH = """
from litellm.proxy._types import UserAPIKeyAuth, hash_token

async def auth(request, api_key):
    return UserAPIKeyAuth(api_key=hash_token(api_key))
"""
RECIPES = Path(__file__).parents[2] / "recipes"


@asynccontextmanager
async def their_litellm(command: Path, folder: Path, settings: dict[str, Any], **more: str) -> AsyncIterator[str]:
    """LiteLLM as somebody else runs it: their configuration, with our package beside theirs (pip install --no-deps)."""
    port = free_port()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "packages").mkdir()
    (folder / "packages" / "agentguard").symlink_to(Path(agentguard.__file__).parent)
    env = {k: os.environ[k] for k in ("PATH", "LANG") if k in os.environ}
    env |= {"HOME": str(folder), "PYTHONPATH": str(folder / "packages"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env |= {"LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(32)}", **more}
    process = await asyncio.create_subprocess_exec(
        command, "--config", folder / "config.yaml", "--port", str(port), "--host", "127.0.0.1", env=env,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(90), httpx2.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get(f"http://127.0.0.1:{port}/health/liveliness")).status_code == 200:
                        break
                assert process.returncode is None
                await asyncio.sleep(0.25)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        await stop(process)


async def test_one_line_in_somebody_else_s_proxy_is_enough_and_its_callers_share_no_budget(litellm: Path, tmp_path: Path) -> None:
    """The Compose recipe's configuration; two callers, one session id, a limit of two steps for each."""
    settings = yaml.safe_load((RECIPES / "litellm-compose" / "config.yaml").read_text())
    async with guarded(Script(chat=ANSWERS)) as (guard, events, gateway):
        guard.policy = guard.policy.model_copy(update={"limits": guard.policy.limits.model_copy(update={"steps": 2})})
        settings["general_settings"]["custom_auth"] = "own_auth.auth"
        settings["model_list"][0]["litellm_params"]["api_base"] = f"{gateway}/v1"
        (tmp_path / "own_auth.py").write_text(AUTH)
        told = {"SERVED_MODEL": "hosted_vllm/scripted", "AGENTGUARD_API_KEY": "none"}
        async with their_litellm(litellm, tmp_path, settings, **told) as url, httpx2.AsyncClient() as client:
            codes = []
            for key in ("sk-one", "sk-two", "sk-one", "sk-two", "sk-one", "sk-two"):
                # the lie is the other caller's hash, which an attacker might know from a log
                steps = [e for e in events if isinstance(e, StepFinished)]
                lie = {"x-agentguard-caller": steps[-1].session.partition("/")[0]} if steps else {}
                headers = {"authorization": f"Bearer {key}", "x-session-id": "same-session", **lie}
                codes.append((await client.post(url, json=ASK, headers=headers)).status_code)
        sessions = {e.session for e in events if isinstance(e, StepFinished)}
    assert codes == [200, 200, 200, 200, 429, 429]
    assert [session.partition("/")[2] for session in sessions] == ["same-session"] * 2


async def test_the_replicas_recipe_keeps_a_session_on_its_replica(litellm: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load((RECIPES / "replicas" / "config.yaml").read_text())
    for name in ("redis_host", "redis_port"):  # one worker needs none
        del settings["router_settings"][name]
    async with (
        guarded(Script(chat=ANSWERS)) as (_, one, first),
        guarded(Script(chat=ANSWERS)) as (_, two, second),
    ):
        for model, gateway in zip(settings["model_list"], (first, second), strict=True):
            model["litellm_params"] |= {"api_base": f"{gateway}/v1", "model": "hosted_vllm/scripted"}
        key = f"sk-{secrets.token_hex(32)}"
        told = their_litellm(litellm, tmp_path, settings, LITELLM_MASTER_KEY=key)
        async with told as url, httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
            for _ in range(3):
                for session in range(8):
                    reply = await client.post(url, json=ASK | {"model": "local"}, headers={"x-session-id": f"session-{session}"})
                    assert reply.status_code == 200, reply.text
        here, there = ({e.session for e in events if isinstance(e, StepFinished)} for events in (one, two))
    assert not here & there
    assert len(here | there) == 8
