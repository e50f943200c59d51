from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from agentguard.errors import ConfigError
from agentguard.events import DraftRows, EngineDied, Event, StepFinished, VerificationStep, Verified, decode_json, encode_json
from agentguard.telemetry.engine_source import engine_source, our_request_id
from agentguard.telemetry.hub import Hub
from agentguard.telemetry.recorder import TELEMETRY_BACKLOG, Recorder, record, replay
from engine_plugins.vllm.tap import HIGH_WATER, Tap


def verified(request: str = "chatcmpl-abc-01234567") -> Verified:
    rows = DraftRows(token=[1, 2], p=[0.5, 0.1], q=[0.25, 0.2], rank=[0, 3], strict=[1.0, 0.5], flags=[1, 0])
    return Verified(request=request, rule_asked="strict", rule_effective="strict", drafted=2, accepted=1, rows=rows)


def frame(step: int = 1) -> VerificationStep:
    return VerificationStep(t=1.0, engine="e", step=step, dropped=0, requests=[verified()])


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
    assert our_request_id(engine_id) == ours


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
                tap.publish(1.5, 4, [verified()])
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
            tap.publish(1.0, 2, [])
            received = await events.get()
    assert isinstance(received, VerificationStep)
    assert received.step == 2
    tap.close()


def test_a_subscriber_that_stops_reading_never_blocks_the_tap(tmp_path: Path) -> None:
    """Ten times the high-water mark goes out in full; what the deaf subscriber cannot take is dropped, not kept."""
    endpoint = f"ipc://{tmp_path}/tap"
    tap = Tap(endpoint, "e")
    context = zmq.Context()
    deaf = context.socket(zmq.SUB)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.SUBSCRIBE, b"")
    deaf.connect(endpoint)
    while not tap.wanted:
        pass
    for step in range(10 * HIGH_WATER):
        tap.publish(0.0, step, [verified()] * 50)
    deaf.close(linger=0)
    context.term()
    tap.close()
