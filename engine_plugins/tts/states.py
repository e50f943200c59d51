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


def shared(runner: Any) -> list[str]:
    """Names of the draft's tensors that are the target's own modules in serving, which vLLM shares to save memory
    (`_maybe_share_lm_head`): publishing them would change the target."""
    target, draft = runner.get_model(), runner.get_draft_model()
    theirs = {id(m) for m in target.modules()} if draft is not target else set()
    found = []
    for place, name in (("lm_head", "lm_head.weight"), ("model.embed_tokens", "embed_tokens.weight")):
        module = draft
        for part in place.split("."):
            module = getattr(module, part, None)
        if module is not None and id(module) in theirs:
            found.append(name)
    return found
