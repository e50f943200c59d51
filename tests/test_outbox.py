"""Telemetry that arrives late: in order, bounded, and a failure of one step is its own."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from engine_plugins.vllm import outbox
from engine_plugins.vllm.outbox import Outbox
from tests import fake_device


class Event:
    """A step's end on a device."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def synchronize(self) -> None:
        assert self.passed.wait(30)


def test_what_is_here_already_is_delivered_at_once() -> None:
    got: list[list[torch.Tensor]] = []
    tensor = torch.ones(2)
    Outbox().send([tensor], got.append)
    assert got == [[tensor]]


def test_steps_come_out_in_their_order_and_a_failing_one_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    box, got, events = Outbox(), [], [Event() for _ in range(3)]

    def deliver(copies: list[torch.Tensor]) -> None:
        if copies[0].item() == 1:
            raise RuntimeError("a subscriber's fault")
        got.append(copies[0].item())

    with caplog.at_level(logging.ERROR):
        for i, event in enumerate(events):
            box._hand_over(event, [torch.tensor(i)], deliver)
        assert got == [], "the step that handed them over did not wait"
        for event in reversed(events):
            event.passed.set()
        box.close()
    assert got == [0, 2]
    assert "a step's telemetry was lost" in caplog.text


def test_the_thread_waits_on_the_worker_s_device_and_sleeps() -> None:
    """A thread of its own starts on device 0, whichever the worker has."""
    got, box = list[list[float]](), Outbox()
    with fake_device.on_a_device():
        box.send([fake_device.there(torch.ones(2))], lambda copies: got.append(copies[0].tolist()))
        box.close()
    assert got == [[1.0, 1.0]]
    assert fake_device.chosen == [fake_device.DEVICE]
    assert fake_device.waits == [True]


def test_a_tap_that_falls_behind_drops_instead_of_holding_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    box, event = Outbox(), Event()
    box._hand_over(event, [], lambda _: None)
    while box._waiting.qsize():  # the thread has taken the first one and waits for it
        pass
    for _ in range(outbox.HELD):
        box._hand_over(event, [], lambda _: None)
    on_device = torch.empty(1, device="meta")  # any device but the CPU; a full box does not look at it
    box.send([on_device], lambda _: None)
    assert box.dropped == 1
    event.passed.set()
    box.close()
