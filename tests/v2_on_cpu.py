"""Model Runner V2's own classes on a CPU, under Triton's interpreter. Import this before vLLM, in a process of its own: vLLM then
takes Triton for usable, and what it chooses by that differs."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"
os.environ["AG_KERNELS"] = os.environ.get("AG_KERNELS", "interpret")

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.backends import backends
from triton.runtime import interpreter

# vLLM's CPU build turns Triton off unless a backend of that name is there (vllm/triton_utils/importing.py)
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)  # type: ignore[assignment]

from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample import thinking_budget
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils

from agentguard.rulespec import RuleSpec
from engine_plugins import kernels
from engine_plugins.vllm import budget_v2, lessons, request_slots, seam_v2
from engine_plugins.vllm.phase import ThinkMarkers

# Of the interpreter's time two thirds go into patching the language anew for each function a kernel calls, and into overflow checks
_patch = interpreter._patch_lang
_patched: list[bool] = []


def _patch_once(fn: Any) -> Any:
    if _patched:
        return SimpleNamespace(restore=lambda: None)
    scope = _patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    _patched.append(True)
    restore = scope.restore

    def done() -> None:
        _patched.clear()
        restore()

    scope.restore = done
    return scope


interpreter._patch_lang = _patch_once


def _with_masks_of_bool(access: Any, at: int) -> Any:
    """The interpreter keeps the conjunction of a vector's mask and a scalar as integers, and then refuses it as a mask. at: which
    argument the mask is."""

    def masked(builder: Any, *args: Any) -> Any:
        mask = args[at]
        return access(builder, *args[:at], interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1), *args[at + 1 :])

    return masked


for _name, _at in (("create_masked_load", 1), ("create_masked_store", 2)):
    setattr(interpreter.InterpreterBuilder, _name, _with_masks_of_bool(getattr(interpreter.InterpreterBuilder, _name), _at))
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

# the CPU platform says it has memory a device can see; torch's CPU build has no pinned memory
buffer_utils.is_uva_available = lambda: False
# a libdevice call, which the interpreter lacks
rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: (1.0 + x).log())
stock = rejection_sampler_utils.rejection_sample


class Held:
    """A device tensor of the runner, with the staged-write interface left out."""

    def __init__(self, values: torch.Tensor) -> None:
        self.gpu = self.cpu = values
        self.np = values.numpy()


class Engine:
    """The parts of a V2 runner the seam touches: request slots, a sampler, and a rejection sampler that calls vLLM's function."""

    def __init__(
        self, n: int, v: int, k: int, *, markers: ThinkMarkers | None = None, tap: Any = None, default: str = "strict",
        serving: Any = None,
    ) -> None:  # fmt: skip
        self.k, self.v = k, v
        self.states = SimpleNamespace(
            max_num_reqs=n, device=torch.device("cpu"), all_token_ids=Held(torch.zeros(n, 512, dtype=torch.int32)),
            prompt_len=Held(torch.zeros(n, dtype=torch.int32)), total_len=Held(torch.zeros(n, dtype=torch.int32)),
            req_id_to_index={}, index_to_req_id={},
        )  # fmt: skip
        self.slots = request_slots.RequestSlots(self.states, default=RuleSpec(default), markers=markers)
        self.sampler = SimpleNamespace(return_sampling_mask=False, logprobs_mode="raw_logprobs")
        self.runner = SimpleNamespace(sampler=self.sampler, rejection_sampler=self)
        self.draft = torch.full((n, k, v), -torch.inf)
        self.budget: Any = None
        choice = kernels.choose("cpu")
        rejection_sampler.rejection_sample = stock
        self.seam = seam_v2.install(
            self.runner, rejection_sampler, self.slots, tap=tap, choice=choice,
            processed_modes=("processed_logprobs",),
            lessons=None if serving is None else lessons.Lessons(serving, self.slots, self.states),
        )  # fmt: skip

    def move(self, device: torch.device, there: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put what lies on a runner's device onto one that is not there (fake_device.py)."""
        slots, states = self.slots, self.states
        self.device = slots.device = device
        for owner, names in (
            (slots, ("table", "limits", "close_at", "trace")),
            (slots.on_device, ("start", "end")),
            (self, ("draft",)),
        ):
            for name in names:
                setattr(owner, name, there(getattr(owner, name)))
        for held in (states.all_token_ids, states.prompt_len, states.total_len):
            held.gpu = there(held.gpu)
        for name, value in vars(self.budget).items():
            if isinstance(value, torch.Tensor):
                setattr(self.budget, name, there(value))

    def admit(self, slot: int, request: str, prompt: list[int], *, budget: int | None = None, **extra: Any) -> None:
        """As the runner does it: the request state first, then the sampler's parts."""
        params = SimpleNamespace(extra_args=extra, thinking_token_budget=budget, temperature=1.0)
        self.states.req_id_to_index[request] = slot
        self.states.index_to_req_id[slot] = request
        self.states.prompt_len.gpu[slot] = self.states.total_len.gpu[slot] = len(prompt)
        self.states.all_token_ids.gpu[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        if self.budget is not None:
            self.budget.add_request(slot, params)
        self.slots.admit(slot, params)

    def enable_budgets(self, *, ours: bool, forced: list[int]) -> None:
        """Give the sampler vLLM's budget state for these markers, or ours in its place."""
        markers = self.slots.markers
        assert markers is not None
        config = SimpleNamespace(
            reasoning_start_token_ids=list(markers.start), natural_reasoning_end_token_ids=list(markers.end),
            reasoning_end_token_ids=forced,
        )  # fmt: skip
        self.sampler.thinking_budget_state = thinking_budget.ThinkingBudgetState(self.states, config)
        self.sampler.needs_logits_processing = np.zeros(self.states.max_num_reqs, dtype=bool)
        self.budget = budget_v2.install(self.sampler, self.slots) if ours else self.sampler.thinking_budget_state

    def generate(self, slot: int, wants: Callable[[list[int]], int], steps: int, *, drafts: bool = True) -> list[int]:
        """What a greedy model that always ``wants`` a token writes in so many steps, its drafts being right about it; the budget's
        rows forced by the state under test."""
        assert self.budget is not None
        states = self.states
        for _ in range(steps):
            total = int(states.total_len.gpu[slot])
            committed = states.all_token_ids.gpu[slot, :total].tolist()
            ahead = list(committed)
            for _ in range(self.k if drafts else 0):
                ahead.append(wants(ahead))
            drafted = ahead[total:]
            rows = len(drafted) + 1
            logits = torch.zeros(rows, self.v)
            for j in range(rows):
                logits[j, wants(ahead[: total + j])] = 5.0
            mapping = torch.tensor([slot])
            ctx = SimpleNamespace(
                idx_mapping=mapping, idx_mapping_np=np.array([slot]), expanded_idx_mapping=mapping.repeat(rows),
                expanded_local_pos=torch.arange(rows), input_ids=torch.tensor([committed[-1], *drafted]),
            )  # fmt: skip
            self.slots.flush()
            self.budget.apply_staged_writes()
            self.budget.apply(logits, ctx)
            best = logits.argmax(-1).tolist()
            accepted = next((j for j, token in enumerate(drafted) if best[j] != token), len(drafted))
            new = [*drafted[:accepted], best[accepted]]
            states.all_token_ids.gpu[slot, total : total + len(new)] = torch.tensor(new, dtype=torch.int32)
            states.total_len.gpu[slot] = total + len(new)
        start = int(states.prompt_len.gpu[slot])
        out: list[int] = states.all_token_ids.gpu[slot, start : int(states.total_len.gpu[slot])].tolist()
        return out

    def __call__(self, logits: torch.Tensor, input_batch: Any, draft_logits: Any = None, invalid_drafts: Any = None) -> Any:
        return rejection_sampler.rejection_sample(
            logits, draft_logits, input_batch.drafted, input_batch.cu_num_logits, input_batch.pos, input_batch.idx_mapping,
            input_batch.expanded_idx_mapping, input_batch.expanded_local_pos, input_batch.temperature, input_batch.seed, self.k,
        )  # fmt: skip

    def verify(
        self, logits: torch.Tensor, drafted: list[list[int]], order: list[int], *, seed: int = 0,
        temperature: torch.Tensor | None = None, draft: bool = True, narrow: bool = False,
        there: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """One step. logits: [rows, V]; drafted: of each request in ``order`` (slots); narrow: with the index types of the runner;
        there: puts what the runner has on its device there. Returns V2's tokens and how many count."""
        counts = [len(d) + 1 for d in drafted]
        ends = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        idx = torch.tensor(order, dtype=torch.int64 if narrow else torch.int32)
        rows = int(ends[-1])
        generator = torch.Generator().manual_seed(seed)
        self.slots.flush()
        batch = SimpleNamespace(
            req_ids=[self.states.index_to_req_id[s] for s in order], idx_mapping=idx, idx_mapping_np=np.array(order),
            cu_num_logits=ends, cu_num_logits_np=ends.numpy(), expanded_idx_mapping=idx.repeat_interleave(torch.tensor(counts)),
            expanded_local_pos=torch.cat([torch.arange(c, dtype=torch.int32) for c in counts]),
            drafted=torch.tensor([t for d in drafted for t in (0, *d)], dtype=torch.int32 if narrow else torch.int64),
            pos=torch.arange(rows) + 7,
            temperature=torch.ones(self.states.max_num_reqs) if temperature is None else temperature,
            seed=torch.randint(1 << 40, (self.states.max_num_reqs,), generator=generator),
        )  # fmt: skip
        for name, value in vars(batch).items():
            if isinstance(value, torch.Tensor):
                setattr(batch, name, there(value))
        return self.runner.rejection_sampler(logits, batch, draft_logits=self.draft if draft else None)
