"""What each request slot of Model Runner V2 was admitted with: its rule, its phase, its limits; on the host and on the device.

A slot is a request's place in the runner's arrays from admission until it ends or is preempted; a preempted request comes back in
another one, admitted anew with its first parameters. What was changed since then is kept by request id (`changed`) and applied
again. Writes are staged and go to the device before the next step (`flush`), from pinned memory and without waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentguard.rulespec import RuleSpec
from engine_plugins import rules
from engine_plugins.kernels import phase as phases
from engine_plugins.kernels import table
from engine_plugins.vllm.params import RequestParams
from engine_plugins.vllm.phase import ThinkMarkers

NO_LIMIT = -1
LARGEST = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A request as it entered its slot; another one where the slot, or the id, is used again. asked: its rule's text, which costs
    1.4 us to write, for every request of a step."""

    params: RequestParams
    sampling_params: Any
    asked: str


class RequestSlots:
    """Host arrays, indexed by slot, and their copies on the device.

    req_states: V2's `RequestState`; markers: None where the think markers are unknown. acting: [slots] bool, the rule can change a
    row; phased: it asks for a phase. known: ids that were admitted and have not ended; a preempted one among them has no slot.
    """

    def __init__(self, req_states: Any, *, default: RuleSpec, markers: ThinkMarkers | None) -> None:
        n, device = req_states.max_num_reqs, req_states.device
        self._states, self._default, self.markers = req_states, default, markers
        self.device = device
        self.admitted: list[Admitted | None] = [None] * n
        self.rules: list[rules.FilteredRule | None] = [None] * n
        self.acting, self.phased = (np.zeros(n, dtype=bool) for _ in range(2))
        self.changed: dict[str, int] = {}
        self.known: set[str] = set()
        self._table = np.zeros((n, table.WIDTH), dtype=np.float32)
        self._limits = np.full((n, 2), NO_LIMIT, dtype=np.int32)
        self.table = torch.zeros(n, table.WIDTH, device=device)
        self.limits = torch.full((n, 2), NO_LIMIT, dtype=torch.int32, device=device)
        self.close_at = torch.full((n,), NO_LIMIT, dtype=torch.int32, device=device)
        self.trace = torch.zeros(n, phases.WIDTH, dtype=torch.int32, device=device)
        self.on_device = phases.Markers(markers.start, markers.end, device) if markers else None
        self._new: list[int] = []
        self._dirty = False

    def admit(self, slot: int, sampling_params: Any) -> bool:
        """A request enters the slot; returns whether its logits rows may be rewritten, so that vLLM hands out copies of them."""
        asked = RequestParams.read(sampling_params.extra_args, self._default)
        found = rules.get(asked.rule)
        acts = found.acts and (asked.phase == "both" or self.markers is not None)
        self.admitted[slot], self.rules[slot] = Admitted(asked, sampling_params, str(asked.rule)), found if acts else None
        self.known.add(self._states.index_to_req_id[slot])
        self.acting[slot], self.phased[slot] = acts, acts and asked.phase != "both"
        self._table[slot] = table.numbers(asked.rule, asked.phase) if acts else 0.0
        self._new.append(slot)
        self._dirty = True
        return bool(acts)

    def limit(self, slot: int, sampling_params: Any) -> bool:
        """Take a request's think limits, changed ones included; returns whether it has any."""
        request = self._states.index_to_req_id[slot]
        block = sampling_params.thinking_token_budget
        total = self.changed.get(request, (sampling_params.extra_args or {}).get("ag_think_tokens"))
        self._limits[slot] = [NO_LIMIT if limit is None else min(limit, LARGEST) for limit in (block, total)]
        self._dirty = True
        return block is not None or total is not None

    def set_total(self, slot: int, request: str, tokens: int) -> None:
        """A new limit of a running request, in force from the next step on."""
        self.changed[request] = tokens
        self._limits[slot, 1] = min(tokens, LARGEST)
        self._dirty = True

    def forget(self, finished: Iterable[str]) -> None:
        for request in finished:
            self.changed.pop(request, None)
            self.known.discard(request)

    def flush(self) -> None:
        """Bring staged writes to the device, in the order of the stream."""
        if self._new:
            self.trace.index_fill_(0, self.staged(np.asarray(self._new, dtype=np.int64)), 0)
            self._new.clear()
        if self._dirty:
            self.table.copy_(self.staged(self._table), non_blocking=True)
            self.limits.copy_(self.staged(self._limits), non_blocking=True)
            self._dirty = False

    def warm_up(self, steps: int) -> None:
        """Compile the kernels of the phase for requests of ``steps`` drafts; nothing that a request has is written to."""
        slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        ends = torch.tensor([0, steps + 1], dtype=torch.int32, device=self.device)
        held = self.trace, self.close_at
        self.trace, self.close_at = self.trace.clone(), self.close_at.clone()
        try:
            self.advance(slot)
            self.ahead(slot, ends, torch.zeros(steps + 1, dtype=torch.int32, device=self.device))
        finally:
            self.trace, self.close_at = held

    def advance(self, slots: Tensor) -> None:
        """Read what these slots' requests have committed since the last call; sets `close_at`."""
        assert self.on_device is not None
        states = self._states
        phases.advance(
            self.trace, slots, states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu, self.on_device, self.limits,
            self.close_at,
        )  # fmt: skip

    def ahead(self, slots: Tensor, ends: Tensor, drafted: Tensor) -> Tensor:
        """[rows] int32: is the request inside a think block when the row is verified? Behind `advance`."""
        assert self.on_device is not None
        states = self._states
        return phases.ahead(
            self.trace, slots, ends, states.all_token_ids.gpu, states.total_len.gpu, drafted, self.on_device, len(drafted)
        )

    def standing(self, slot: int) -> tuple[int, bool, int]:
        """Generated think tokens, whether the request is inside a block, and how long that block is. Waits for the device."""
        self.flush()
        self.advance(torch.tensor([slot], device=self.device))
        _, inside, began, before, given, *_ = self.trace[slot].tolist()
        block = int(self._states.total_len.gpu[slot]) - began if inside else 0
        return before + block - given, bool(inside), block

    def staged(self, values: np.ndarray[Any, Any]) -> Tensor:
        """A copy on the device, in the order of the stream and without waiting for it."""
        held = torch.from_numpy(values.copy())
        return held.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else held.to(self.device)
