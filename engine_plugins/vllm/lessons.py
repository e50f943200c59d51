"""What TTS learns from a verification step of Model Runner V2: the laws of its drafted rows, taken on the device.

The seam calls `begin` once a step, `take` and `verified` for each chunk of its requests, and `end`. The requests that are learned
from are chosen on the host, out of the whole batch; what is known of them on the device alone (their lengths, tokens and laws) is
gathered there and goes to the host behind the step's own work. Nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine_plugins.kernels.batch import FORCED_LOGIT
from engine_plugins.tts.capture import Committed, Seen
from engine_plugins.tts.loss import joined, top_k

if TYPE_CHECKING:
    from types import ModuleType

    from engine_plugins.tts.capture import Capture
    from engine_plugins.tts.loss import Rows
    from engine_plugins.tts.serving import Serving
    from engine_plugins.vllm.request_slots import RequestSlots


@dataclass(slots=True)
class _Step:
    """A step under way. seen: the chosen requests, index and rows being those of the whole batch; slots: theirs; ends:
    [requests + 1] first rows of all; then what the chunks have brought."""

    seen: list[Seen] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    p: list[Rows] = field(default_factory=list)
    log_q: list[Tensor] = field(default_factory=list)
    drafts: list[Tensor] = field(default_factory=list)
    forced: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)

    def of(self, first: int, last: int) -> list[int]:
        """Which of the chosen ones are among requests ``first`` … ``last`` - 1 of the batch."""
        return [n for n, seen in enumerate(self.seen) if first <= seen.index < last]


class Lessons:
    """Of one worker. req_states: V2's `RequestState`."""

    def __init__(self, serving: Serving, slots: RequestSlots, req_states: Any) -> None:
        self._serving, self._slots, self._states = serving, slots, req_states
        self._step = _Step()

    @property
    def may_be_broken(self) -> bool:
        """Can a row of q be no law? Only by weights that were published; what they wrote into the draft's KV cache outlives them,
        also behind a shared prefix, so it stays true."""
        return self._serving.published

    def begin(self, input_batch: Any) -> None:
        """The runner is about to verify this batch."""
        self._step = _Step()
        if not self._serving.capturing:
            return
        slots, ends = input_batch.idx_mapping_np.tolist(), input_batch.cu_num_logits_np.tolist()
        batch = [
            Seen(n, request, self._slots.admitted[slots[n]], ends[n], ends[n + 1] - 1)
            for n, request in enumerate(input_batch.req_ids)
        ]
        seen = self._serving.chosen(batch)
        self._step = _Step(seen, [slots[one.index] for one in seen], ends)

    def take(self, given: dict[str, Any], target: Tensor, first: int, last: int) -> None:
        """Before the verification of requests ``first`` … ``last`` - 1 of the batch, and before a rule rewrites their rows. given:
        arguments of V2's `rejection_sample`; target: [rows, V], its logits."""
        mine = self._step.of(first, last)
        if mine:
            self._serving.guarded(lambda: self._gather(given, target, first, mine), "capturing a verification")

    def verified(self, sampled: Tensor, number: Tensor, first: int, last: int) -> None:
        """Behind it. sampled: [requests, K + 1]; number: [requests], how many of them count."""
        mine = self._step.of(first, last)
        if not mine:
            return
        index = self._slots.staged(np.asarray([self._step.seen[n].index - first for n in mine]))
        out, counts = sampled.index_select(0, index), number.index_select(0, index)
        self._step.out.append(out.masked_fill(torch.arange(out.shape[-1], device=out.device) >= counts[:, None], -1))

    def end(self) -> None:
        """All of the batch has been verified: its frame goes, unless a chunk is missing because something failed."""
        step, self._step = self._step, _Step()
        if not step.seen or not len(step.seen) == sum(map(len, step.lengths)) == sum(map(len, step.out)):
            return

        def send(capture: Capture, facts: dict[str, Any]) -> None:
            prompts = [int(self._states.prompt_len.np[slot]) for slot in step.slots]
            committed = Committed(torch.cat(step.lengths), prompts, torch.cat(step.tokens))
            seen, at = [], 0
            for n, one in enumerate(step.seen):
                rows = one.stop - one.start
                seen.append(Seen(n, one.request, one.state, at, at + rows))
                at += rows
            log_q = torch.cat(step.log_q) if step.log_q else None
            taken = capture.taken(seen, committed, joined(step.p), log_q, torch.cat(step.drafts), torch.cat(step.forced), **facts)
            capture.after(taken, torch.cat(step.out))

        self._serving.take(send)

    def _gather(self, given: dict[str, Any], target: Tensor, first: int, mine: list[int]) -> None:
        step, staged, states = self._step, self._slots.staged, self._states
        window, width = self._serving.shape
        began = step.ends[first]
        rows = staged(np.concatenate([np.arange(step.seen[n].start, step.seen[n].stop) for n in mine]) - began)
        draft: Tensor | None = given["draft_logits"]
        logits = target.index_select(0, rows)
        if draft is not None:  # the smaller vocabulary counts, in vLLM's verification too
            logits = logits[:, : draft.shape[-1]]
        p = top_k(logits, width)
        if draft is not None:
            slot, column = (given[name].index_select(0, rows).long() for name in ("expanded_idx_mapping", "expanded_local_pos"))
            heat = given["temperature"][slot]
            q = draft[slot, column, : logits.shape[-1]].float() / torch.where(heat == 0, 1.0, heat)[:, None]
            # a row that is no law (weights of NaN) is one without mass, as on V1
            step.log_q.append(p.of(q.log_softmax(-1)).nan_to_num(nan=-torch.inf))
        slots = staged(np.asarray([step.slots[n] for n in mine]))
        lengths = states.total_len.gpu[slots]
        at = lengths[:, None] - window + torch.arange(window, device=lengths.device)
        step.p.append(p)
        step.drafts.append(given["draft_sampled"].index_select(0, rows + 1))
        step.forced.append(logits.amax(-1) >= FORCED_LOGIT)
        step.lengths.append(lengths)
        step.tokens.append(states.all_token_ids.gpu[slots[:, None], at.clamp_min(0)])


def without_broken_rows(given: dict[str, Any], backend: ModuleType) -> Tensor:
    """V2's drafted tokens, -1 where the draft's row is no law: such a token is rejected and the target's own law is drawn from, so
    what is served stays exact (`seam_v1._without_broken_rows`). backend: `kernels.launch`, which reads the drafted rows where they
    lie, or `kernels.twin`. No host sync."""
    out: Tensor = given["draft_sampled"].masked_fill(
        backend.broken(given["draft_logits"], given["expanded_idx_mapping"], given["expanded_local_pos"]), -1
    )
    return out
