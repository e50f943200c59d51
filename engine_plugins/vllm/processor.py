"""The `vllm.logits_processors` entry point: it validates our request keys in the front end, brings them to their slot in a worker
of runner V2, and touches no logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    # V2's base class is import-light by design, and V2 refuses a class that does not derive from it
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
except ImportError:  # a vLLM before 0.31 loads every entry point of this group too and must not break on ours
    LogitsProcessor = object

from agentguard.rulespec import RuleSpec
from engine_plugins.vllm.params import RequestParams

if TYPE_CHECKING:
    import torch

    from engine_plugins.vllm.request_slots import RequestSlots


class AgentGuardParams(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """Both runners call `validate_params` at admission; a ConfigError is a ValueError and becomes HTTP 400.

    V1 without speculative decoding also builds the class, hence the two methods of V1's interface; with speculative decoding V1
    builds no custom processor at all.
    """

    slots: RequestSlots | None = None  # set by the worker, before any request

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        RequestParams.read(sampling_params.extra_args, RuleSpec("strict"))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """V2: a request enters a slot. True has vLLM copy the step's logits in float32, which a relaxed rule then writes to."""
        return self.slots.admit(req_idx, sampling_params) if self.slots is not None else False

    def apply_staged_writes(self) -> None:
        if self.slots is not None:
            self.slots.flush()

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass
