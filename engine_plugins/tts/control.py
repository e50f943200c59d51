"""TTS in vLLM's API server: owns the trainer process and carries its publishes to the workers by collective RPC.

The trainer is started again after a crash or a stall, with the draft at its start weights meanwhile; after `RESTARTS` of them
within `RESTART_S` it stays off. Whatever happens to it, serving goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentguard.errors import PluginError
from agentguard.tts_settings import TtsSettings

logger = logging.getLogger("vllm.agentguard")
RESTARTS, RESTART_S = 3, 600.0
STALL_S = 30.0
START_S = 120.0
"""A trainer may be silent for so long before it is ready: torch and transformers take 5 s to import here, a large draft loads
longer."""
BACKOFF_S = 1.0
RPC_S = 30.0
SHARED = Path("/dev/shm")  # noqa: S108  # nosec B108  # mkdtemp in it makes a directory of 0700
PREFIX = "agentguard-tts-"

Rpc = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the trainer needs to know. draft, target: directory or name of the model; method: vLLM's, of drafting; k: drafted tokens
    a round; frames: the workers' ZMQ address; dtype: of the served draft."""

    draft: str
    target: str
    method: str
    k: int
    frames: str
    dtype: str

    def options(self, settings: TtsSettings, slots: Path, fixed: Sequence[str]) -> dict[str, Any]:
        """What `trainer.main` reads. slots: the file it creates; fixed: names of tensors that are the target's own."""
        return {
            "draft": self.draft, "target": self.target, "method": self.method, "fixed": list(fixed), "k": self.k,
            "frames": self.frames, "slots": str(slots), "dtype": self.dtype, "settings": asdict(settings),
        }  # fmt: skip


def _environment() -> dict[str, str]:
    """Without the engine's OpenMP: its settings would bind the trainer to the very core the engine computes on (measured: a round
    of the reference pair took 21 ms instead of 13)."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_")) and k != "LD_PRELOAD"}


def _beside(pid: int, taken: set[int]) -> None:
    """Put the trainer on the CPUs the workers are not bound to, if there are any."""
    free = os.sched_getaffinity(0) - taken
    if taken and free:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(pid, free)


def own_directory() -> Path:
    """A directory in shared memory that only this user can look into; those of processes that were killed are removed."""
    for left in SHARED.glob(f"{PREFIX}*-*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if left.stat().st_uid == os.getuid() and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=SHARED))


class _ImpossibleError(Exception):
    """The trainer cannot train this draft; another one could not either."""


@dataclass(slots=True)
class Control:
    """``rpc(method, args)`` calls every worker and returns what each said."""

    rpc: Rpc
    plan: Plan
    settings: TtsSettings
    stall_s: float = STALL_S
    enabled: bool = True
    state: str = "starting"
    reason: str = ""
    process: asyncio.subprocess.Process | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    updates: int = 0
    refused: int = 0
    _ends: deque[float] = field(default_factory=deque)
    _ready: bool = False
    """A trainer runs that has said so."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until cancelled. Ends the trainer with it."""
        while True:
            self._wake.clear()
            if self.state == "off":
                await self._wake.wait()
                continue
            try:
                why = await self._one_trainer()
            except _ImpossibleError as error:
                await self._say("off", str(error), detach=True)
                continue
            except Exception as error:  # whatever it is, the draft must not stay as it happens to be
                logger.exception("agentguard: tts failed")
                why = f"the control task failed: {error!r}"
            if not self._wake.is_set():
                await self._failed(why)

    async def configure(self, *, enabled: bool | None = None, settings: TtsSettings | None = None) -> None:
        """Pause, go on, or go on with other settings: for these the trainer is started afresh. TTS that was off gets another
        chance."""
        self.enabled = self.enabled if enabled is None else enabled
        if settings in (None, self.settings) and self._ready:
            await self._attach_or_pause()
            return
        self.settings = settings or self.settings
        self._ends.clear()
        await self._say("starting", "", detach=True)
        self._wake.set()

    async def settled(self, timeout_s: float) -> None:
        """Until the trainer is live, or TTS is paused or off."""
        async with asyncio.timeout(timeout_s):
            await self._settled.wait()

    async def look(self) -> dict[str, Any]:
        """The status, after asking the worker whether a step of the engine has switched TTS off. Raises PluginError where it does
        not answer."""
        if self.state == "live" and (failed := await self._failure()):
            await self._say("off", failed, detach=True)  # on every rank, as only one of them may have failed
            self._wake.set()  # ends the trainer
        return self.status()

    async def _failure(self) -> str:
        return "; ".join(filter(None, await self._call("ag_tts_failed")))

    def status(self) -> dict[str, Any]:
        process = self.process
        return {
            "state": self.state, "reason": self.reason, "enabled": self.enabled, "updates": self.updates, "refused": self.refused,
            "trainer_pid": process.pid if process is not None and process.returncode is None else None,
            "settings": asdict(self.settings), "trainer": self.facts,
        }  # fmt: skip

    async def _one_trainer(self) -> str:
        """Run one trainer to its end; why it ended."""
        fixed = (await self._call("ag_tts_fixed"))[0]
        directory = await asyncio.to_thread(own_directory)
        options = self.plan.options(self.settings, directory / "slots", fixed)
        process = self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine_plugins.tts.trainer", json.dumps(options),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
        )  # fmt: skip
        listening = asyncio.create_task(self._listen(process), name="tts trainer")
        waking = asyncio.create_task(self._wake.wait(), name="tts wake")
        try:
            await asyncio.wait((listening, waking), return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                return "settings changed"
            return listening.result()
        finally:
            self._ready = False
            for task in (listening, waking):
                task.cancel()
            await asyncio.gather(listening, waking, return_exceptions=True)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _listen(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        while True:
            limit = self.stall_s if self._ready else max(START_S, self.stall_s)
            try:
                line = await asyncio.wait_for(process.stdout.readline(), limit)
            except TimeoutError:
                return f"the trainer said nothing for {limit:g} s"
            if not line:
                return f"the trainer ended with status {await process.wait()}"
            word = json.loads(line)
            try:
                await self._heard(word, process)
            except PluginError as error:
                return str(error)

    async def _heard(self, word: dict[str, Any], process: asyncio.subprocess.Process) -> None:
        kind = word.pop("kind")
        if kind == "ready":
            self.facts, self._ready = word, True
            await self._attach_or_pause()
        elif kind == "publish":
            answers = await self._call("ag_tts_publish", word)
            good = all(a["applied"] for a in answers)
            if not good and (failed := await self._failure()):
                raise _ImpossibleError(failed)
            self.updates += good
            self.refused += not good
            if good and word["action"] == "stop":
                self.reason = f"not learning from the requests that run: {word['reason']}"
            elif good and word["action"] == "go_on":
                self.reason = ""
            answer = {"kind": "answer", "version": word["version"], "ms": max(a["ms"] for a in answers), "applied": good}
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):  # it has ended meanwhile, which the next line says
                process.stdin.write(json.dumps(answer).encode() + b"\n")
                await process.stdin.drain()
        elif kind == "impossible":
            raise _ImpossibleError(word["reason"])
        elif kind == "beat":
            lost = word["dropped_frames"] - self.facts.get("dropped_frames", 0)
            self.facts = self.facts | word
            if lost > 0:
                await self._say("skipped", f"{lost} frames found the trainer's queue full", keep=True)
        else:
            await self._say("skipped", f"{word['what']}: {word['reason']}", keep=True)

    async def _attach_or_pause(self) -> None:
        if not self.enabled:
            await self._say("paused", "", detach=True)
            return
        answers = await self._call("ag_tts_attach", self.facts["slots"], asdict(self.settings))
        if self.process is not None:
            _beside(self.process.pid, {cpu for a in answers for cpu in a["cpus"]})
        await self._say("live", "")

    async def _call(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self.rpc(method, args)
        except Exception as error:  # the engine wraps whatever the worker raised, in several types
            raise PluginError(f"{method} failed in the worker: {error!r}") from error

    async def _failed(self, why: str) -> None:
        now = time.monotonic()
        self._ends.append(now)
        while self._ends and self._ends[0] < now - RESTART_S:
            self._ends.popleft()
        if len(self._ends) > RESTARTS:
            await self._say("off", f"{why}; the trainer ended {len(self._ends)} times within {RESTART_S:g} s", detach=True)
            return
        await self._say("restarting", why, detach=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), BACKOFF_S * 2 ** len(self._ends))

    async def _say(self, state: str, reason: str, *, detach: bool = False, keep: bool = False) -> None:
        if not keep:
            self.state, self.reason = state, reason
            if state in ("live", "paused", "off"):
                self._settled.set()
            else:
                self._settled.clear()
        try:
            await self._call("ag_tts_detach" if detach else "ag_tts_note", state, reason)
        except PluginError as error:
            logger.error("agentguard: tts %s (%s), which the engine could not be told: %s", state, reason, error)
