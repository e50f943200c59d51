"""The control task with a real trainer process: crashes, stalls, pauses, new settings, and the end. Only the engine is played."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq

from agentguard.reference import reference_model
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts import control, wire
from engine_plugins.tts.control import Control, Plan
from engine_plugins.tts.loss import Rows
from engine_plugins.tts.slots import Slots
from tests.tts_rows import round_frame

pytestmark = pytest.mark.timeout(120)
DRAFT, TARGET = str(reference_model("draft-short")), str(reference_model("target"))


class Worker:
    """What the engine's worker would answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.states: list[tuple[str, str]] = []
        self.fails = ""
        self.refuses = False
        self.cpus: list[int] = []
        self.fixed: list[str] = []
        self.failed = ""

    async def rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method, args))
        if method == self.fails:
            raise RuntimeError("no such layer")
        if method in ("ag_tts_note", "ag_tts_detach"):
            self.states.append((args[0], args[1]))
        if method == "ag_tts_publish":
            return [{"applied": not self.refuses, "ms": 0.0 if self.refuses else 5.0, "reason": ""}]
        if method == "ag_tts_failed":
            return [self.failed]
        return [self.fixed] if method == "ag_tts_fixed" else [{"epoch": 1, "cpus": self.cpus}]

    def called(self, method: str) -> list[tuple[Any, ...]]:
        return [args for name, args in self.calls if name == method]


class Rig:
    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.worker = Worker()
        self.endpoint = f"ipc://{tmp_path}/frames"
        plan = Plan(DRAFT, TARGET, "draft_model", 6, self.endpoint, "bfloat16")
        self.control = Control(self.worker.rpc, plan, TtsSettings.parse({"min_tokens": 0, "stride": 2, **settings}))

    async def until(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.02)

    async def live(self) -> int:
        await self.until(lambda: self.control.state == "live")
        process = self.control.process
        assert process is not None
        return process.pid


@contextlib.asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    task = asyncio.create_task(rig.control.run())
    try:
        yield rig
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def left_of(path: str) -> list[Path]:
    return list(Path(path).parent.parent.glob(Path(path).parent.name + "*"))


@contextlib.contextmanager
def frames(endpoint: str) -> Iterator[Callable[[int], None]]:
    """A worker's sending end, on the reference draft's vocabulary."""
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDTIMEO, 30_000)  # a trainer that is live may still be connecting
    socket.bind(endpoint)

    def send(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        p = Rows(torch.randn(6, 416, generator=generator).log_softmax(-1))
        start = 40 + 3 * number
        row = round_frame(
            start, 2, since=start - 3 if number else 0, drafted=[1, 2, 3, 4, 5, 6], pack=wire.Laws.pack(p, p.logp)
        )  # fmt: skip
        socket.send(wire.encode(wire.Frame(1, 0, 10.0, 0, [row])))

    try:
        yield send
    finally:
        socket.close()


async def test_a_trainer_learns_publishes_and_ends_with_its_control(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with frames(rig.endpoint) as send:
        async with running(rig):
            pid = await rig.live()
            path, settings = rig.worker.called("ag_tts_attach")[0]
            assert settings["stride"] == 2
            start = {name: tensor.clone() for name, tensor in Slots.open(Path(path)).read(0)}
            for number in range(40):
                send(number)
                await asyncio.sleep(0.05)
            await rig.until(lambda: rig.control.updates >= 3)
            published = [info for (info,) in rig.worker.called("ag_tts_publish")]
            assert [p["version"] for p in published] == list(range(1, len(published) + 1))
            assert {p["slot"] for p in published} == {1, 2}
            assert published[0]["slot"] != published[1]["slot"]
            assert all(p["epoch"] == 1 and p["loss"] > 0 and p["rows"] > 0 for p in published)
            learned = dict(Slots.open(Path(path)).read(published[-1]["slot"]))
            assert any(not bool((learned[name] == start[name]).all()) for name in start)
            status = rig.control.status()
            assert status["trainer_pid"] == pid
            assert status["trainer"]["trained_parameters"] > 100_000
    assert not psutil.pid_exists(pid)
    assert not left_of(path)


async def test_refused_publishes_are_counted_and_learning_goes_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.worker.refuses = True
    with frames(rig.endpoint) as send:
        async with running(rig):
            await rig.live()
            for number in range(60):
                send(number)
                await asyncio.sleep(0.05)
                if rig.control.refused >= 3:
                    break
            assert rig.control.refused >= 3
            assert rig.control.updates == 0


async def test_a_killed_trainer_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BACKOFF_S", 0.01)
    rig = Rig(tmp_path)
    async with running(rig):
        first = await rig.live()
        os.kill(first, signal.SIGKILL)
        await rig.until(lambda: len(rig.worker.called("ag_tts_attach")) == 2)
        assert await rig.live() != first
        states = [state for state, _ in rig.worker.states]
        assert states == ["live", "restarting", "live"]
        assert "status -9" in rig.worker.states[1][1]
        # between the two the worker was told to go back to the start weights
        order = [name for name, _ in rig.worker.calls]
        assert order.index("ag_tts_detach") < len(order) - 1 - order[::-1].index("ag_tts_attach")
        one, two = (Path(path) for path, _ in rig.worker.called("ag_tts_attach"))
        assert one != two
        assert not left_of(str(one))


async def test_a_stalled_trainer_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BACKOFF_S", 0.01)
    rig = Rig(tmp_path)
    async with running(rig):
        first = await rig.live()
        rig.control.stall_s = 2.5
        await asyncio.sleep(1.5)  # a beat, so that the shorter limit holds from now on
        os.kill(first, signal.SIGSTOP)
        await rig.until(lambda: rig.worker.states[-1][0] == "restarting")
        rig.control.stall_s = 60
        assert "said nothing for 2.5 s" in rig.worker.states[-1][1]
        assert not psutil.pid_exists(first)


async def test_a_trainer_that_never_comes_up_leaves_tts_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BACKOFF_S", 0.01)
    monkeypatch.setattr(control, "RESTARTS", 1)
    rig = Rig(tmp_path)
    good = rig.control.plan
    rig.control.plan = replace(good, dtype="nowhere")
    async with running(rig):
        await rig.until(lambda: rig.control.state == "off")
        assert "ended with status 1; the trainer ended 2 times" in rig.control.reason
        assert rig.worker.called("ag_tts_attach") == []
        assert rig.control.status()["trainer_pid"] is None
        # an operator gives it another chance
        rig.control.plan = good
        await rig.control.configure(enabled=True)
        await rig.live()


async def test_a_worker_that_cannot_load_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RESTARTS", 0)
    rig = Rig(tmp_path)
    rig.worker.fails = "ag_tts_attach"
    async with running(rig):
        await rig.until(lambda: rig.control.state == "off")
        assert "ag_tts_attach failed in the worker: RuntimeError('no such layer')" in rig.control.reason


async def test_a_failure_in_a_step_is_known_to_who_asks(tmp_path: Path) -> None:
    """The worker has switched TTS off by itself and sends no frames; the trainer would never hear of it."""
    rig = Rig(tmp_path)
    async with running(rig):
        pid = await rig.live()
        assert (await rig.control.look())["state"] == "live"
        rig.worker.failed = "sending a verification failed in the worker: boom"
        assert (await rig.control.look())["reason"] == rig.worker.failed
        await rig.until(lambda: not psutil.pid_exists(pid))
        assert (await rig.control.look())["state"] == "off"
        assert rig.worker.called("ag_tts_detach") == [("off", rig.worker.failed)], "on every rank, back at the start weights"


async def test_a_refused_publish_of_a_worker_that_gave_up_ends_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.worker.refuses, rig.worker.failed = True, "capturing a verification failed in the worker: boom"
    with frames(rig.endpoint) as send:
        async with running(rig):
            await rig.live()
            for number in range(8):
                send(number)
            await rig.until(lambda: rig.control.state == "off")
            assert rig.control.reason == rig.worker.failed


async def test_a_draft_of_another_kind_is_not_tried_again(tmp_path: Path) -> None:
    """What transformers or the files say is wrong with it is the reason, once."""
    rig = Rig(tmp_path)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text('{"model_type": "speculators"}')
    rig.control.plan = replace(rig.control.plan, draft=str(tmp_path / "draft"))
    async with running(rig):
        await rig.until(lambda: rig.control.state == "off")
        assert "cannot be loaded for training" in rig.control.reason
        assert len(rig.worker.called("ag_tts_fixed")) == 1


async def test_a_draft_nobody_can_train_is_not_tried_again(tmp_path: Path) -> None:
    """What is wrong with the set-up is wrong the second time too: TTS is off at once, and says why."""
    rig = Rig(tmp_path, scope="last:9")
    async with running(rig):
        await rig.until(lambda: rig.control.state == "off")
        assert rig.worker.states == [("off", rig.control.reason)]
        assert "last:9" in rig.control.reason
        assert "layers" in rig.control.reason
        await rig.control.configure(settings=replace(rig.control.settings, scope="last:1"))
        await rig.live()


async def test_a_pause_keeps_the_trainer_and_new_settings_start_another(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with running(rig):
        first = await rig.live()
        await rig.control.configure(enabled=False)
        assert rig.control.state == "paused"
        assert rig.worker.calls[-1][0] == "ag_tts_detach"
        await rig.control.settled(1)
        await rig.control.configure(enabled=True)
        assert await rig.live() == first
        assert rig.worker.called("ag_tts_attach")[0] == rig.worker.called("ag_tts_attach")[1]
        await rig.control.configure(settings=replace(rig.control.settings, scope="head"))
        await rig.control.settled(60)
        assert await rig.live() != first
        assert rig.control.facts["trained_parameters"] < 30_000
        # paused while it starts: it comes up paused
        await rig.control.configure(enabled=False, settings=replace(rig.control.settings, stride=9))
        await rig.control.settled(60)
        assert rig.control.state == "paused"


async def test_frames_of_nonsense_end_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(rig.endpoint)
    async with running(rig):
        pid = await rig.live()
        socket.send(b"not msgpack")
        socket.send(
            wire.encode(wire.Frame(1, 0, 1.0, 0, [round_frame(40, 2, drafted=[1, 2, 3])]))
        )  # 3 drafts, and laws of 24 tokens
        await rig.until(lambda: any(state == "skipped" for state, _ in rig.worker.states))
        await asyncio.sleep(0.3)
        assert rig.control.state == "live"
        assert psutil.pid_exists(pid)
    socket.close()
