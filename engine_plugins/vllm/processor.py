"""The `vllm.logits_processors` entry point: it validates our request keys in the front end and touches no logits."""

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


class AgentGuardParams(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """Both runners call `validate_params` at admission; a ConfigError is a ValueError and becomes HTTP 400.

    V1 without speculative decoding also builds the class, hence the two methods of V1's interface; with speculative decoding V1
    builds no custom processor at all.
    """

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        RequestParams.read(sampling_params.extra_args, RuleSpec("strict"))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return False

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass
