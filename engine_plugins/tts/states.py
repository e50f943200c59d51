"""The target's hidden states on their way into a head: taken where vLLM's runner V1 hands them to the drafter."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_plugins.tts.serving import Serving

TAKEN = ("target_positions", "target_hidden_states", "common_attn_metadata")


def install(runner: Any, serving: Serving) -> None:
    """Wrap ``runner.drafter.propose``, which gets all of a step's hidden states, rejected drafts included, request after request
    (llm_base_proposer.py). Raises KeyError where its parameters are others than those of vLLM 0.32."""
    drafter = runner.drafter
    stock = drafter.propose
    signature = inspect.signature(stock)
    for name in TAKEN:
        signature.parameters[name]

    @functools.wraps(stock)
    def propose(*args: Any, **kwargs: Any) -> Any:
        if serving.capturing:
            given = signature.bind(*args, **kwargs).arguments
            serving.hidden(runner, *(given[name] for name in TAKEN))
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
