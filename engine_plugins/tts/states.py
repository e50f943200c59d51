"""The target's hidden states on their way into a head: taken where vLLM hands them to the drafter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_plugins.tts.serving import Serving, Span

TAKEN_V1 = ("target_positions", "target_hidden_states", "common_attn_metadata")
TAKEN_V2 = ("input_batch", "aux_hidden_states")
_Given = Callable[..., "tuple[Callable[[], Iterable[Span]], Tensor, Tensor]"]


def install_v1(runner: Any, serving: Serving) -> None:
    """Wrap ``runner.drafter.propose``, which gets all of a step's hidden states, rejected drafts included, request after request
    (llm_base_proposer.py). Raises KeyError where its parameters are others than those of vLLM 0.32."""

    def given(positions: Tensor, hidden: Tensor, metadata: Any) -> tuple[Callable[[], Iterable[Span]], Tensor, Tensor]:
        def spans() -> Iterable[Span]:
            starts = metadata.query_start_loc_cpu.tolist()
            for request, start, stop in zip(runner.input_batch.req_ids, starts, starts[1:], strict=False):
                yield request, runner.requests[request], start, stop

        return spans, positions, hidden

    _wrap(runner.drafter, TAKEN_V1, serving, given)


def install_v2(runner: Any, serving: Serving, state_of: Callable[[int], Any]) -> None:
    """Wrap ``runner.speculator.propose``, as above (target_dependent_ar/speculator.py). state_of: a slot's record."""

    def given(batch: Any, layers: list[Tensor]) -> tuple[Callable[[], Iterable[Span]], Tensor, Tensor]:
        def spans() -> Iterable[Span]:
            starts = batch.query_start_loc_np.tolist()
            for request, slot, start, stop in zip(batch.req_ids, batch.idx_mapping_np.tolist(), starts, starts[1:], strict=False):
                yield request, state_of(slot), start, stop

        return spans, batch.positions, torch.cat(layers, -1)

    _wrap(runner.speculator, TAKEN_V2, serving, given)


def _wrap(drafter: Any, taken: tuple[str, ...], serving: Serving, given: _Given) -> None:
    stock = drafter.propose
    signature = inspect.signature(stock)
    for name in taken:
        signature.parameters[name]

    @functools.wraps(stock)
    def propose(*args: Any, **kwargs: Any) -> Any:
        if serving.capturing:
            found = signature.bind(*args, **kwargs).arguments
            if not found.get("dummy_run"):  # the runner's warm-up drafts for nobody
                serving.hidden(*given(*(found[name] for name in taken)))
        return stock(*args, **kwargs)

    drafter.propose = propose


def fixed(runner: Any) -> list[str]:
    """Names of a head's tensors that must stay: its embedding, which EAGLE does not train, and its output matrix where that is the
    target's own module, which vLLM shares to save memory (`_maybe_share_lm_head`): publishing it would change the target."""
    output = getattr(runner.get_draft_model(), "lm_head", None)
    fixed = ["embed_tokens.weight"]
    if output is not None and any(module is output for module in runner.get_model().modules()):
        fixed.append("lm_head.weight")
    return fixed
