"""The think budget on Model Runner V2: vLLM's own state, with limits that count the whole step and can change meanwhile.

V2 computes each step's forced rows anew on the device from the committed tokens and the drafts, which is how ours works on V1
(`budget.py`); so its kernels stay, and only the array of limits they read is replaced. It is made on the device before each use
(`RequestSlots.close_at`): the lower of `thinking_token_budget`, which counts a block, and `ag_think_tokens` or the guard's limit,
which counts all blocks of the step.

Where V2 differs from V1: what a forced close should write behind the end marker is never written (its kernel stops at a closed
block), so the phrase belongs before the marker; a second block that begins among the drafts of one step is measured by the limit of
the first until the next step, at most K tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState, apply_thinking_budget

from agentguard.request_ids import client_id
from engine_plugins.vllm.request_slots import RequestSlots


class BudgetState(ThinkingBudgetState):  # type: ignore[misc]  # vLLM is untyped to us
    """In stock's place in V2's sampler, made from it."""

    def __init__(self, stock: ThinkingBudgetState, sampler: Any, slots: RequestSlots) -> None:
        self.__dict__.update(stock.__dict__)
        self._sampler, self._slots = sampler, slots

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._reset_reqs.append(req_idx)  # the slot's caches are another request's
        self.use_thinking_budget[req_idx] = limited = self._slots.limit(req_idx, sampling_params)
        return limited

    def apply_staged_writes(self) -> None:
        """Stock's kernel looks for markers itself, in the prompt too: where that leaves no block open, it begins behind it."""
        again = [slot for slot in self._reset_reqs if self._slots.begins[slot]]
        super().apply_staged_writes()
        if again:
            slots = self._slots.staged(np.asarray(again, dtype=np.int64))
            begins = self._slots.staged(self._slots.begins[again])
            self.cached_scan_pos.index_copy_(0, slots, begins)
            self.cached_last_end.index_copy_(0, slots, begins - 1)

    def apply(self, logits: Tensor, ctx: Any) -> None:
        if not self.use_thinking_budget[ctx.idx_mapping_np].any():
            return
        self._slots.advance(ctx.idx_mapping)
        apply_thinking_budget(
            logits=logits,
            req_ids=ctx.idx_mapping,
            expanded_idx_mapping=ctx.expanded_idx_mapping,
            thinking_token_budget=self._slots.close_at,
            all_token_ids=self.req_states.all_token_ids.gpu,
            total_len=self.req_states.total_len.gpu,
            input_ids=ctx.input_ids,
            expanded_local_pos=ctx.expanded_local_pos,
            cached_last_start=self.cached_last_start,
            cached_last_end=self.cached_last_end,
            cached_scan_pos=self.cached_scan_pos,
            reasoning_start_token_ids=self.reasoning_start_token_ids,
            natural_reasoning_end_token_ids=self.natural_reasoning_end_token_ids,
            reasoning_end_token_ids=self.reasoning_end_token_ids,
        )

    def set_total(self, request: str, tokens: int) -> dict[str, Any]:
        """See `budget.BudgetHolder.set_total`. Waits for the step in flight, as the counters are on the device. A preempted request
        has none; its limit is kept for when it comes back, as a close that was ordered must not be lost."""
        found: dict[str, Any] = {"found": False}
        for req_id, slot in self.req_states.req_id_to_index.items():
            if request not in (req_id, client_id(req_id)):
                continue
            think, inside, block = self._slots.standing(slot)
            close_at = int(self._slots.close_at[slot])
            total = max(tokens, think)
            if not (inside and 0 <= close_at < block):  # a close that has begun is carried through
                self._slots.set_total(slot, req_id, total)
                if not self.use_thinking_budget[slot]:
                    self.use_thinking_budget[slot] = self._sampler.needs_logits_processing[slot] = True
                    self._reset_reqs.append(slot)
            found = {"found": True, "think": think, "inside": inside, "total": total}
        for req_id in self._slots.known - self.req_states.req_id_to_index.keys():
            if request in (req_id, client_id(req_id)):
                self._slots.changed[req_id] = tokens
                found = {"found": True, "think": 0, "inside": False, "total": tokens}
        return found


def install(sampler: Any, slots: RequestSlots) -> BudgetState | None:
    """Replace the sampler's budget state; None where vLLM knows no think markers."""
    stock = sampler.thinking_budget_state
    if not stock.enabled or slots.markers is None:
        return None
    if isinstance(stock, BudgetState):
        return stock
    sampler.thinking_budget_state = state = BudgetState(stock, sampler, slots)
    return state
