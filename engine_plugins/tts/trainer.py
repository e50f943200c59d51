"""The trainer: frames in, Adam steps, weights out. Runs as `python -m engine_plugins.tts.trainer`, a child of the control task.

Standard input carries the control task's words and standard output the trainer's, one JSON object a line. When standard input ends,
so does the process. It serves nobody: what it says may be refused, and without it the draft stays as it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
import zmq

from agentguard.errors import AgentGuardError
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts import wire
from engine_plugins.tts.capture import REQUESTS
from engine_plugins.tts.judge import Action, Judge, overhead
from engine_plugins.tts.layout import Lesson, chosen
from engine_plugins.tts.loss import overlap
from engine_plugins.tts.rounds import Sequence
from engine_plugins.tts.slots import Slots
from engine_plugins.tts.twin import NonFinite, Twin

HEARTBEAT_S = 1
HIGH_WATER = 64
RESTING = 16  # verifications without a request's rows after which it counts as ended, and is not learned from again and again
EVALUATE = 3  # updates between two looks at the frozen draft: two forward passes more, a fifth of an update's cost each


@dataclass(frozen=True, slots=True)
class Update:
    """What a step did. loss in nats a row; train_ms on the trainer's own core; rounds: verifications the
    trainer has seen since it started, over all requests."""

    loss: float
    train_ms: float
    rows: int
    rounds: int
    live: float
    frozen: float
    gain: float
    break_even: float


@dataclass(slots=True)
class Trainer:
    """Decides when to learn and from what; without IO."""

    twin: Twin
    settings: TtsSettings
    k: int
    epoch: int = -1
    number: int = 0  # of verification steps seen
    learned: int = 0  # the step up to which rounds were learned from
    updates: int = 0
    stopped: str = ""
    """Why this epoch is not learned from any more."""
    round_ms: float = 0.0
    publish_ms: float = 0.0
    sequences: OrderedDict[str, Sequence] = field(default_factory=OrderedDict)
    judge: Judge = field(init=False)
    alive: Callable[[], None] = lambda: None
    """Called within a step that takes long."""
    dropped_rows: int = 0
    dropped_frames: int = 0
    _since: int = 0  # steps with something to learn from since the last update

    def __post_init__(self) -> None:
        self.judge = Judge(self.k)

    def feed(self, frame: wire.Frame) -> None:
        """Take in a step. A new epoch forgets all: the worker has gone back to the weights at the start."""
        if frame.epoch != self.epoch:
            self.forget(frame.epoch)
        self.number += 1
        self.round_ms, self.dropped_frames = frame.round_ms, frame.dropped
        ready = False
        for round_ in frame.rounds:
            known = self.sequences.get(round_.request)
            if known is None:
                known = self.sequences[round_.request] = Sequence(self.settings.window)
                if len(self.sequences) > REQUESTS:  # the worker sends no more at once; what is too many has ended
                    self.sequences.popitem(last=False)
            self.sequences.move_to_end(round_.request)
            before = known.unusable
            known.add(round_, self.number)
            self.dropped_rows += known.unusable - before
            ready = ready or known.output >= self.settings.min_tokens
        self._since += ready

    def forget(self, epoch: int) -> None:
        self.epoch = epoch
        self.sequences.clear()
        self.judge = Judge(self.k)
        self.learned = self.number
        self.updates, self.stopped, self._since = 0, "", 0
        self.twin.reset()

    @property
    def due(self) -> bool:
        return not self.stopped and self._since >= self.settings.stride

    def train(self) -> tuple[Action, str, Update | None]:
        """One update, after a look at whether learning helps. The update is None where there was nothing to learn from.

        Raises NonFinite; the weights are then as before.
        """
        self._since = 0
        started = time.perf_counter()
        if self.updates and self.updates % EVALUATE == 0:
            self._evaluate()
            action, why = self.judge.decide(self._overhead(), auto_off=self.settings.auto_off)
            if action is not Action.GO_ON:
                self.twin.reset()
                if action is Action.STOP:
                    self.stopped = why
                return action, why, None
        batch = self._batch(self.settings.stride if self.settings.rows == "stride" else 0)
        if not batch:
            return Action.GO_ON, "", None
        loss = self.twin.step(batch, self.alive)
        self.learned = self.number
        self.updates += 1
        at = self.judge.standing(self._overhead())
        spent = (time.perf_counter() - started) * 1000
        rows = sum(len(p.k) for p in batch)
        return Action.GO_ON, "", Update(loss, spent, rows, self.number, at.live, at.frozen, at.gain, at.break_even)

    def _overhead(self) -> float:
        return overhead(self.publish_ms, self.settings.stride, self.round_ms)

    def _batch(self, newest: int) -> list[Lesson]:
        packed = []
        ended = self.number - max(RESTING, 2 * self.settings.stride)
        for sequence in self.sequences.values():
            if sequence.output >= self.settings.min_tokens and sequence.rounds[-1].number > ended:
                rounds = chosen(sequence, self.settings.window, newest)
                packed.append(self.twin.pack(sequence, rounds))
        return [p for p in packed if p is not None]

    def _evaluate(self) -> None:
        """Compare the live draft with the frozen one on row 0 of the rounds that came since the last update."""
        for packed in self._batch(0):
            new = ((packed.number > self.learned) & (packed.k == 0)).nonzero().squeeze(-1)
            if not len(new):
                continue
            live, frozen = (
                overlap(packed.target.logp[new], self.twin.log_laws(packed, frozen=frozen)[new]) for frozen in (False, True)
            )
            for pair in zip(live.tolist(), frozen.tolist(), strict=True):
                self.judge.add(*pair)


def main() -> None:
    """``argv``: one JSON object with draft and target (directories), k, settings, frames (ZMQ address), slots (file to create),
    dtype of the served weights, fixed (names of tensors that are the target's own)."""
    options = json.loads(sys.argv[1])
    keep_standard_output()
    torch.set_num_threads(1)
    os.nice(5)  # where it shares a core with the engine, the engine goes first
    settings = TtsSettings.parse(options["settings"])
    what: dict[str, Any] = {name: options[name] for name in ("method", "target", "fixed")}
    try:
        twin = Twin.load(options["draft"], settings, **what)
    except AgentGuardError as error:  # trying again would not help with this, nor with what follows
        say("impossible", reason=str(error))
        return
    except (KeyError, ValueError, OSError, RuntimeError) as error:  # what files and configurations of another kind raise
        say("impossible", reason=f"the draft cannot be loaded for training: {error!r}")
        return
    slots = Slots.create(Path(options["slots"]), twin.payload(), getattr(torch, options["dtype"]))
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(options["frames"])
    say("ready", slots=str(slots.path), slot_bytes=slots.bytes, **twin.memory)
    try:
        _Loop(Trainer(twin, settings, options["k"]), slots, socket).run()
    finally:
        slots.close()
        context.destroy(linger=0)


def keep_standard_output() -> None:
    """What a library prints must not end up among our lines: it goes to standard error from here on."""
    global _out
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


_out: TextIO = sys.stdout


def say(kind: str, **fields: Any) -> None:
    _out.write(json.dumps({"kind": kind, **fields}) + "\n")
    _out.flush()


class _Loop:
    """The process's rim: waits for frames and words, one publish under way at most."""

    def __init__(self, trainer: Trainer, slots: Slots, socket: zmq.Socket[bytes]) -> None:
        self.trainer, self.slots, self.socket = trainer, slots, socket
        self.version = 0
        self.waiting: int | None = None  # version whose answer is due
        self.words = b""
        self.beat = 0.0
        trainer.alive = self._beat

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll(HEARTBEAT_S * 1000))
            if sys.stdin.fileno() in ready and not self._listen():
                return
            self._drain()
            if self.waiting is None and self.trainer.due:
                self._update()
            self._beat()

    def _beat(self) -> None:
        if time.monotonic() - self.beat > HEARTBEAT_S:
            self.beat = time.monotonic()
            trainer = self.trainer
            say("beat", steps=trainer.number, dropped_rows=trainer.dropped_rows, dropped_frames=trainer.dropped_frames)

    def _listen(self) -> bool:
        """Read what the control task says; False when it is gone."""
        chunk = os.read(sys.stdin.fileno(), 65536)
        *lines, self.words = (self.words + chunk).split(b"\n")
        for line in lines:
            word = json.loads(line)
            if word["kind"] == "answer" and word["version"] == self.waiting:
                self.waiting = None
                self.trainer.publish_ms = word["ms"] or self.trainer.publish_ms
        return bool(chunk)

    def _drain(self) -> None:
        """Take all frames that have come: a slow step then learns from the newest rounds, and never falls behind further."""
        for _ in range(HIGH_WATER):  # no more than were waiting: words and beats must not wait for ever
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self.trainer.feed(wire.decode(raw))
            except (msgspec.DecodeError, ValueError, RuntimeError) as error:
                say("skipped", what="frame", reason=repr(error))

    def _update(self) -> None:
        try:
            action, why, update = self.trainer.train()
        except NonFinite as error:
            say("skipped", what="update", reason=str(error))
            return
        if update is None and action is Action.GO_ON:
            return
        self.version += 1
        self.waiting = self.version
        slot = 0
        if action is Action.GO_ON:
            slot = 1 + self.version % 2
            self.slots.write(slot, self.trainer.twin.payload())
        facts = {} if update is None else {f: getattr(update, f) for f in update.__slots__}
        say("publish", version=self.version, epoch=self.trainer.epoch, slot=slot, action=action, reason=why, **facts)


if __name__ == "__main__":
    main()
