"""Verification rows out of the worker, for the trainer: laws of target and draft over the target's top k, tokens, what was
accepted.

On CUDA the copies to the host are asynchronous: a step's frame leaves with a later step, when its event has passed. Nothing waits:
a full queue, or more than `HELD` steps under way, drop a frame, and the next one carries the tokens it had.

Runner V1 knows a request's tokens on the host (`before`). V2 has them on the device, where they come along with the laws
(`Committed`), and which of them the trainer lacks is found out when they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from torch import Tensor

from engine_plugins.tts import wire
from engine_plugins.tts.loss import Rows, top_k

HIGH_WATER = 16
HELD = 16
REQUESTS = 8
"""Of a batch that are learned from, the same ones until they end; more would only make a step slower. With `top_k` 512 and K = 6 a
frame has at most 300 kB, so a trainer that hangs holds 5 MB here."""
HIDDEN_BYTES = 4 << 20
"""Hidden states a frame takes along for a head, the newest ones: a prompt's window of eight requests of an 8B target would be 50
MB, and packing it a stop of 70 ms. The frame of a round of eight requests has 1.4 MB of them."""


_Facts = tuple[int, int, list[int], int]  # position of the first drafted token, since, tokens since then, output tokens


@dataclass(frozen=True, slots=True)
class Seen:
    """One request in a step: its place in the batch, and rows start … stop of the step's tensors."""

    index: int
    request: str
    state: (
        Any  # the runner's record, another one where an id is used again: sampling_params; on V1 prompt_token_ids, output_token_ids
    )
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step's requests had committed before it, on its way to the host: lengths [n], prompt and output together; prompts, of
    which so many are the prompt's; tokens [n, window], the last ones, behind which nothing is left out."""

    lengths: Tensor
    prompts: list[int]
    tokens: Tensor

    def facts(self, n: int, known: int) -> _Facts:
        """Of request n, of which the trainer has ``known`` tokens."""
        start, window = int(self.lengths[n]), self.tokens.shape[-1]
        since = max(known, start - window, 0)
        return start, since, self.tokens[n, window - (start - since) :].tolist(), start - self.prompts[n]


@dataclass(frozen=True, slots=True)
class Piece:
    """A request's hidden states of one step, on their way to the host. at: [1] position of the first; rows: [n, W]."""

    at: Tensor
    rows: Tensor


@dataclass(slots=True)
class _States:
    """The hidden states of a request's window, in the pieces they came in; ``sent`` counts those, from the first on, that went into
    a frame."""

    state: Any
    pieces: deque[Piece] = field(default_factory=deque)
    rows: int = 0
    dropped: int = 0
    sent: int = 0

    def add(self, piece: Piece, window: int) -> None:
        self.pieces.append(piece)
        self.rows += len(piece.rows)
        while self.rows - len(self.pieces[0].rows) >= window:
            self.rows -= len(self.pieces.popleft().rows)
            self.dropped += 1

    def unsent(self) -> list[Piece]:
        return list(self.pieces)[max(0, self.sent - self.dropped) :]


@dataclass(slots=True)
class Step:
    """A step on its way to the host. event: None where the tensors are there already."""

    seen: Sequence[Seen]
    facts: list[_Facts] | Committed
    p: Rows
    q: Tensor | None
    drafts: Tensor
    forced: Tensor
    out: Tensor | None
    epoch: int
    version: int
    round_ms: float
    hidden: list[tuple[list[Piece], int]]  # a request's pieces, and how many had been sent before
    event: Any = None


class Capture:
    """The sending end of the trainer's socket. ``endpoint``: a ZMQ address, normally ipc:// in a directory of mode 0700."""

    def __init__(self, endpoint: str, *, window: int, width: int) -> None:
        self.window, self.width = window, width
        self.dropped = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._members: dict[str, Any] = {}
        self._sent: dict[str, tuple[Any, int]] = {}
        self._held: deque[Step] = deque()
        self._states: dict[str, _States] = {}

    def forget(self, window: int, width: int) -> None:
        """A new trainer knows nothing: the next frames carry their whole window."""
        self.window, self.width = window, width
        self._sent.clear()
        self._held.clear()
        self._members.clear()
        self._states.clear()

    def hidden(self, request: str, state: Any, positions: Tensor, rows: Tensor) -> None:
        """The hidden states the head is about to draft from, of a request that `wants`: positions [n], rows [n, W]. They leave with
        its next frame."""
        known = self._states.get(request)
        if known is None or known.state is not state:
            known = self._states[request] = _States(state)
        rows = rows[-self.window :]
        known.add(Piece(_to_host(positions[-len(rows)][None]), _to_host(rows)), self.window)

    def wants(self, request: str) -> bool:
        """Are a request's hidden states kept? Those of requests that are learned from, and of as many that may come after them."""
        return request in self._states or request in self._members or len(self._states) < 2 * REQUESTS

    def before(
        self, seen: Sequence[Seen], logits: Tensor, q: Tensor | None, drafts: Tensor, forced: Tensor, *, epoch: int, version: int,
        round_ms: float,
    ) -> Step:  # fmt: skip
        """Take the laws before verification, which a relaxed rule rewrites. logits, q: [rows, V]; drafts, forced: [rows]."""
        seen = self.chosen(seen)
        p = top_k(logits, self.width)
        log_q = None if q is None else p.of(q).log().float()
        facts = [self._facts(s) for s in seen]
        return self.taken(seen, facts, p, log_q, drafts, forced, epoch=epoch, version=version, round_ms=round_ms)

    def taken(
        self, seen: Sequence[Seen], facts: list[_Facts] | Committed, p: Rows, log_q: Tensor | None, drafts: Tensor, forced: Tensor,
        *, epoch: int, version: int, round_ms: float,
    ) -> Step:  # fmt: skip
        """Start a step's way to the host. seen: `chosen`, with rows of these tensors; p, log_q: over the same tokens."""
        hidden = [self._pieces(s) for s in seen]
        if isinstance(facts, Committed):
            facts = Committed(_copy(facts.lengths), facts.prompts, _copy(facts.tokens))
        log_q = None if log_q is None else _copy(log_q)
        return Step(seen, facts, _host(p), log_q, _copy(drafts), _copy(forced), None, epoch, version, round_ms, hidden)

    def after(self, step: Step, out: Tensor) -> None:
        """``out``: [requests, K + 1] what the step committed, -1 behind. Sends every step whose copies have arrived."""
        step.out = _copy(out)
        if out.is_cuda:
            step.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            step.event.record()
        self._held.append(step)
        while self._held and (self._held[0].event is None or self._held[0].event.query()):
            self._send(self._held.popleft())
        if len(self._held) > HELD:
            self._drop(self._held.popleft())

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def chosen(self, seen: Sequence[Seen]) -> list[Seen]:
        """Of all of a step's requests those that are learned from, those of earlier steps first. One in the middle of its prompt
        has no rows, and sends nothing."""
        running = {s.request: s.state for s in seen}
        self._members = {r: state for r, state in self._members.items() if running.get(r) is state}
        for request in [r for r, known in self._states.items() if running.get(r) is not known.state]:
            del self._states[request]
        for one in seen:
            if len(self._members) == REQUESTS:
                break
            self._members.setdefault(one.request, one.state)
        return [s for s in seen if s.request in self._members and s.stop > s.start]

    def _known(self, seen: Seen) -> int:
        """How many of a request's tokens the trainer has been sent."""
        state, known = self._sent.get(seen.request, (None, 0))
        return known if state is seen.state else 0

    def _facts(self, seen: Seen) -> _Facts:
        prompt, output = seen.state.prompt_token_ids or (), seen.state.output_token_ids
        start = len(prompt) + len(output)
        since = max(self._known(seen), start - self.window)
        tokens = [*prompt[since:], *output[max(0, since - len(prompt)) :]]
        return start, since, tokens, len(output)

    def _pieces(self, seen: Seen) -> tuple[list[Piece], int]:
        known = self._states.get(seen.request)
        if known is None or known.state is not seen.state:
            return [], 0
        pieces, before = known.unsent(), known.sent
        known.sent = known.dropped + len(known.pieces)
        return pieces, before

    def _drop(self, step: Step) -> None:
        """What it carried goes with the next one."""
        self.dropped += 1
        for seen, (_, before) in zip(step.seen, step.hidden, strict=True):
            known = self._states.get(seen.request)
            if known is not None and known.state is seen.state:
                known.sent = min(known.sent, before)

    def _send(self, step: Step) -> None:
        assert step.out is not None
        if not self._socket.poll(0, zmq.POLLOUT):  # before any work: a full queue must not slow the step
            self._drop(step)
            return
        drafts, forced, out = step.drafts.tolist(), step.forced.tolist(), step.out.tolist()
        late = step.facts
        facts = [late.facts(n, self._known(s)) for n, s in enumerate(step.seen)] if isinstance(late, Committed) else late
        rounds = []
        for seen, (start, since, tokens, output), (pieces, _) in zip(step.seen, facts, step.hidden, strict=True):
            rows = slice(seen.start, seen.stop)
            laws = wire.Laws.pack(
                Rows(step.p.logp[rows], None if step.p.ids is None else step.p.ids[rows]), None if step.q is None else step.q[rows]
            )
            committed = [t for t in out[seen.index] if t >= 0]
            temperature = float(seen.state.sampling_params.temperature)
            hidden = [wire.Hidden.pack(int(p.at), p.rows) for p in _newest(pieces, HIDDEN_BYTES // len(step.seen))]
            rounds.append(
                wire.RoundFrame(
                    seen.request, start, since, tokens, output, drafts[rows], committed, forced[rows], temperature, laws, hidden
                )
            )
        if not rounds:
            return
        try:
            self._socket.send(wire.encode(wire.Frame(step.epoch, step.version, step.round_ms, self.dropped, rounds)), zmq.NOBLOCK)
        except zmq.Again:
            self._drop(step)
            return
        if len(self._sent) > 4096:
            self._sent.clear()  # the next frames carry their window again
        for seen, (start, *_) in zip(step.seen, facts, strict=True):
            self._sent[seen.request] = (seen.state, start)


def _newest(pieces: list[Piece], most: int) -> list[Piece]:
    """The last pieces that together have no more than ``most`` bytes; of a single one that has more, its end."""
    found: list[Piece] = []
    for piece in reversed(pieces):
        size = piece.rows.nbytes
        if size > most and not found:
            keep = max(1, most * len(piece.rows) // size)
            return [Piece(piece.at + (len(piece.rows) - keep), piece.rows[-keep:])]
        most -= size
        if most < 0:
            break
        found.append(piece)
    return found[::-1]


def _host(rows: Rows) -> Rows:
    ids = None if rows.ids is None else _copy(rows.ids.to(torch.int32))
    return Rows(_copy(rows.logp.float()), ids)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy the engine does not write over."""
    return tensor.clone() if tensor.device.type == "cpu" else _copy(tensor)


def _copy(tensor: Tensor) -> Tensor:
    """On the host, without waiting for the device; the caller's event says when it is there."""
    if tensor.device.type == "cpu":
        return tensor
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return held.copy_(tensor, non_blocking=True)
