from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from agentguard.errors import ConfigError
from agentguard.events import (
    DraftRows,
    EngineDied,
    Event,
    Fate,
    PackedStep,
    RowFlag,
    StepFinished,
    VerificationStep,
    Verified,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
)
from agentguard.request_ids import client_id
from agentguard.telemetry.engine_source import engine_source
from agentguard.telemetry.hub import Hub
from agentguard.telemetry.recorder import TELEMETRY_BACKLOG, Recorder, record, replay
from engine_plugins.vllm.observe import Rounds
from engine_plugins.vllm.tap import HIGH_WATER, Tap


def verified(request: str = "chatcmpl-abc-01234567") -> Verified:
    rows = DraftRows(
        token=[1, 2], p=[0.5, 0.125], q=[0.25, 0.25], rank=[0, 3], strict=[1.0, 0.5], flags=[1, 0], would=[True, False],
        fate=[Fate.STRICT, Fate.COIN],
    )  # fmt: skip
    return Verified(request=request, rule_asked="strict", rule_effective="strict", drafted=2, accepted=1, rows=rows)


def frame(step: int = 1) -> VerificationStep:
    return VerificationStep(t=1.0, engine="e", step=step, requests=[verified()])


def rounds(number: int = 1) -> Rounds:
    """What `verified` says, of so many requests, as a worker knows it."""
    columns = [[1, 2], [0.5, 0.125], [0.25, 0.25], [0, 3], [1, 0.5], [0.5, 0.75], [0, 0], [-1, -1], [1, 1]]
    names = ["chatcmpl-abc-01234567"] * number
    return Rounds(names, ["strict"] * number, [2] * number, [1] * number, np.tile(np.array(columns, dtype=np.float32), (1, number)))


def finished(step: int = 1) -> StepFinished:
    return StepFinished(
        t=2.0, session="s", step=step, request="r", model="m", rule="strict", prompt_tokens=1, tokens=3, think_tokens=1,
        answer_tokens=1, marker_tokens=1,
    )  # fmt: skip


@pytest.mark.parametrize("event", [frame(), finished(), EngineDied(t=0.0, engine="e", reason="x")])
def test_events_survive_the_wire(event: Event) -> None:
    assert decode_json(encode_json(event)) == event


def test_a_field_we_do_not_know_is_skipped() -> None:
    assert decode_json(encode_json(finished())[:-1] + b',"from_the_future":1}') == finished()


def packed(**changes: Any) -> PackedStep:
    """Three requests: one of whose three drafts a rule let one through, one without drafts, and one that closes its trace."""
    relaxed, forced, masked = int(RowFlag.RELAXED), int(RowFlag.FORCED), int(RowFlag.MASKED)
    columns = {
        "token": [5, 6, 7, 8, -1], "p": [0.5, 0.25, 0.125, 1, 0], "q": [0.5, 0.5, 0.5, 0.5, -1], "rank": [0, 1, 2, 0, 9],
        "strict": [1, 0.5, 0.25, 1, 0], "coin": [0.5, 0.75, 0.5, 0.5, 0.5], "flags": [relaxed, relaxed, 0, forced, masked],
        "end": [0.25, 0.5, 0.75, 0.125, 0.5], "entropy": [1, 2, 3, 4, 5],
    }  # fmt: skip
    held = Rounds(
        ["a", "b", "c"], ["interp:w=1", "strict", "cactus:delta=1"], [3, 0, 2], [2, 0, 1], np.array(list(columns.values()))
    )
    return msgspec.structs.replace(held.packed(1.0, "e", 4), **changes)


def test_a_packed_step_is_read_as_what_became_of_each_row() -> None:
    step = decode_msgpack(encode_msgpack(packed()))
    assert isinstance(step, VerificationStep)
    assert (step.t, step.engine, step.step, [r.request for r in step.requests]) == (1.0, "e", 4, ["a", "c"])
    first, last = step.requests
    assert first.rows.fate == [Fate.STRICT, Fate.RELAXED, Fate.COIN]
    assert first.rows.would == [True, False, False]
    assert first.rows.flags == [RowFlag.RELAXED | RowFlag.ACCEPTED, RowFlag.RELAXED | RowFlag.ACCEPTED, 0]
    assert (first.rule_effective, first.accepted, first.end, first.entropy) == ("interp:w=1", 2, 0.75, 3.0)
    assert last.rows.fate == [Fate.FORCED, Fate.MASKED]
    assert (last.rule_asked, last.rule_effective) == ("cactus:delta=1", "strict")
    assert (last.rows.token, last.rows.rank, last.end, last.entropy) == ([8, -1], [0, 9], 0.5, 5.0)


def test_a_packed_step_of_a_newer_engine_is_read_by_its_columns() -> None:
    """Columns may be added and moved."""
    old = packed()
    names, rows = list(old.columns), 5
    parts = [old.values[4 * rows * i : 4 * rows * (i + 1)] for i in range(len(names))]
    newer = msgspec.structs.replace(old, columns=("new", *reversed(names)), values=b"\0" * 4 * rows + b"".join(reversed(parts)))
    assert decode_msgpack(encode_msgpack(newer)) == old.unpacked()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"values": b"\0" * 4}, "5 rows of 9 columns"),
        ({"values": b"\xff" * 180}, "whole number"),
        ({"accepted": [1]}, "differ in length"),
        ({"drafted": [3, -1, 3]}, "drafted"),
        ({"columns": PackedStep.COLUMNS[:-1]}, "entropy.*same agentguard"),
    ],
)
def test_a_packed_step_that_does_not_fit_together_is_unreadable(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=named):
        decode_msgpack(encode_msgpack(packed(**changes)))


@pytest.mark.parametrize(
    ("engine_id", "ours"),
    [
        ("chatcmpl-3f2a-99050db9", "3f2a"),
        ("cmpl-3f2a-answer-0-99050db9", "3f2a-answer"),
        ("1_chatcmpl-3f2a-99050db9", "3f2a"),
        ("3-99050db9", "3-99050db9"),
    ],
)
def test_request_ids_of_the_engine_are_ours_again(engine_id: str, ours: str) -> None:
    assert client_id(engine_id) == ours


async def test_a_slow_subscriber_loses_the_oldest_and_knows_it() -> None:
    hub = Hub()
    with hub.subscribe(limit=2) as slow:
        for step in range(5):
            hub.publish(finished(step))
        assert slow.dropped == 3
        assert [(await slow.get()).step for _ in range(2)] == [3, 4]  # type: ignore[union-attr]
    hub.publish(finished(9))  # nobody listens any more


async def test_a_recording_replays_to_the_same_events(tmp_path: Path) -> None:
    hub, path, sent = Hub(), tmp_path / "events.jsonl", [frame(), finished(1), finished(2)]
    async with record(hub, path):
        for event in sent:
            hub.publish(event)
        await asyncio.sleep(0.3)
        hub.publish(finished(3))
    assert list(replay(path)) == [*sent, finished(3)]


def test_a_backlog_drops_telemetry_but_never_accounts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "x")
    for _ in range(TELEMETRY_BACKLOG + 5):
        recorder.take(frame())
    recorder.take(finished())
    assert recorder.dropped == 5
    assert decode_json(recorder._lines[-1]) == finished()


def test_a_broken_recording_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(encode_json(finished()) + b"\n{\n")
    with pytest.raises(ConfigError, match=r"events\.jsonl:2"):
        list(replay(path))


async def test_frames_go_from_the_tap_to_the_hub(tmp_path: Path) -> None:
    endpoint, hub = f"ipc://{tmp_path}/tap", Hub()
    tap = Tap(endpoint, "engine-7")
    assert not tap.wanted
    with hub.subscribe() as events:
        async with engine_source(hub, endpoint):
            async with asyncio.timeout(5):
                while not tap.wanted:
                    await asyncio.sleep(0.01)
                tap.publish(1.5, 4, rounds())
                received = await events.get()
        assert isinstance(received, VerificationStep)
        assert (received.engine, received.step, received.requests) == ("engine-7", 4, [verified("abc")])
    async with asyncio.timeout(5):
        while tap.wanted:
            await asyncio.sleep(0.01)
    tap.close()


async def test_a_frame_that_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    endpoint, hub = f"ipc://{tmp_path}/tap", Hub()
    tap = Tap(endpoint, "e")
    with hub.subscribe() as events:
        async with engine_source(hub, endpoint), asyncio.timeout(5):
            while not tap.wanted:
                await asyncio.sleep(0.01)
            tap._socket.send(b"\xc1 not msgpack")
            tap.publish(1.0, 2, rounds(0))
            received = await events.get()
    assert isinstance(received, VerificationStep)
    assert received.step == 2
    tap.close()


async def test_a_slow_gateway_knows_how_many_frames_it_lost(tmp_path: Path) -> None:
    """Far more than all queues hold is sent before the loop can read: what arrives and what is reported lost add up."""
    endpoint, hub, seen = f"ipc://{tmp_path}/tap", Hub(), list[VerificationStep]()
    tap = Tap(endpoint, "e")
    sent = 4_000
    with hub.sink(lambda e: seen.append(e) if isinstance(e, VerificationStep) else None):
        async with engine_source(hub, endpoint), asyncio.timeout(60):
            while not tap.wanted:
                await asyncio.sleep(0.01)
            tap.publish(0.0, 1, rounds(0))
            while not seen:
                await asyncio.sleep(0.01)
            for step in range(2, sent + 1):
                tap.publish(0.0, step, rounds(8))
            step = sent
            while seen[-1].step < step:
                step += 1
                tap.publish(0.0, step, rounds(0))
                await asyncio.sleep(0.05)
    assert sum(1 + e.lost for e in seen) == seen[-1].step
    assert sum(e.lost for e in seen) > 0
    tap.close()


def test_a_subscriber_that_stops_reading_neither_blocks_the_tap_nor_starves_another(tmp_path: Path) -> None:
    """Four times what the queues hold goes out while one subscriber is deaf; the one that reads gets every frame."""
    endpoint = f"ipc://{tmp_path}/tap"
    tap = Tap(endpoint, "e")
    context = zmq.Context()
    deaf, keen = (context.socket(zmq.SUB) for _ in range(2))
    try:
        deaf.setsockopt(zmq.RCVHWM, 1)
        for socket in (deaf, keen):
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)
        while not tap.wanted:  # XPUB reports a topic once, whoever asks for it
            threading.Event().wait(0.01)
        while not keen.poll(50):  # until both subscriptions have arrived
            tap.publish(0.0, 0, rounds(0))
        threading.Event().wait(0.3)
        while keen.poll(50):
            keen.recv()
        received = 0
        for step in range(4 * HIGH_WATER):
            tap.publish(0.0, step, rounds(50))
            assert keen.poll(5000), f"frame {step} did not arrive"
            keen.recv()
            received += 1
        assert received == 4 * HIGH_WATER
    finally:
        deaf.close(linger=0)
        keen.close(linger=0)
        context.term()
        tap.close()


async def test_a_recording_that_ends_during_a_write_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, path = Hub(), tmp_path / "events.jsonl"
    write = Recorder._write

    def slowly(self: Recorder, lines: list[bytes]) -> None:
        threading.Event().wait(0.4)
        write(self, lines)

    monkeypatch.setattr(Recorder, "_write", slowly)
    async with record(hub, path):
        for step in range(50):
            hub.publish(finished(step))
            await asyncio.sleep(0.01)
    assert [e.step for e in replay(path) if isinstance(e, StepFinished)] == list(range(50))


async def test_a_disk_that_fails_is_reported_and_nothing_piles_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()

    def full(self: Recorder, lines: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    recording = record(hub, tmp_path / "events.jsonl")
    recorder = await recording.__aenter__()
    monkeypatch.setattr(Recorder, "_write", full)
    await asyncio.sleep(0.3)
    for step in range(10):
        hub.publish(finished(step))
    assert recorder._lines == []
    with pytest.raises(ConfigError, match="No space left on device"):
        await recording.__aexit__(None, None, None)
    with pytest.raises(ConfigError, match="No such file or directory"):
        async with record(hub, tmp_path / "none" / "events.jsonl"):
            pass
