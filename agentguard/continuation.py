"""Going on behind a closed trace: the request that continues a step whose stream was cut, or that ended without an answer.

Three ways, the best first (litellm.md, section 3.2; vllm.md, section 14): the ids of prompt, trace and end marker on the
completions route, which is exact and independent of any template but knows no tool parser; the partial trace in the last
assistant message, where the chat template renders it; and a note to the model with thinking switched off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentguard.engines.facts import Carrier
from agentguard.trace.loops import Loop
from agentguard.trace.markers import Family
from agentguard.trace.tally import MarkerIds, find_last

# what a continuation at token level takes over from its request: how tokens are drawn and what the answer must look like
_DRAWN = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "response_format", "structured_outputs", "vllm_xargs",
    "priority", "cache_salt", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
CHARS_A_TOKEN = 3
"""A token of a note has at least so many characters, or so; used to keep it inside the window."""


@dataclass(frozen=True, slots=True)
class Behind:
    """What a continuation goes on from. prompt: ids, empty when unknown; trace: ids since the prompt, without the end marker;
    open: the trace ends inside a block, so the end marker is still to be written; text: the latest block's text; limit: tokens
    left for the answer."""

    prompt: Sequence[int]
    trace: Sequence[int]
    open: bool
    text: str
    limit: int


def without_copies(trace: list[int], text: str, loop: Loop) -> tuple[list[int], str]:
    """The trace with the first copy of its loop; a loop that is replayed goes on looping. Of a run of garbage nothing is left.

    A loop's unit is in tokens or in characters (`Loop.period`); the other of the two is shortened by the same share.
    """
    if loop.kind == "run":
        return [], ""
    if loop.kind == "period" and trace:
        end = len(trace)
        while end > loop.period and trace[end - 1] == trace[end - 1 - loop.period]:
            end -= 1
        return trace[:end], text[: len(text) * end // len(trace)]
    kept = max(0, len(text) - loop.period * (loop.repeats - 1))
    return trace[: len(trace) * kept // max(1, len(text))], text[:kept]


def without_partial(trace: list[int], end: Sequence[int]) -> list[int]:
    """The trace without the beginning of an end marker that a cut left behind."""
    for length in range(len(end) - 1, 0, -1):
        if tuple(trace[-length:]) == tuple(end[:length]):
            return trace[:-length]
    return trace


def at_token_level(upstream: Mapping[str, Any], behind: Behind, ids: MarkerIds) -> tuple[list[int], dict[str, Any]]:
    """The prompt ids and the body for the completions route."""
    body = {k: upstream[k] for k in _DRAWN if k in upstream}
    # the turn may not end at once again: a marker is followed by a newline and at least one token of the answer
    body |= {"max_tokens": behind.limit, "min_tokens": min(2, behind.limit), "return_token_ids": True}
    return [*behind.prompt, *behind.trace, *(ids.closing if behind.open else ())], body


def through_template(upstream: Mapping[str, Any], behind: Behind, family: Family, carrier: Carrier) -> dict[str, Any]:
    """A chat request whose last message is the assistant's, with the trace in ``carrier``, to be continued."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if carrier == "reasoning":
        # servers read one or the other name
        text = behind.text + family.transition
        message |= {"reasoning": text, "reasoning_content": text}
    else:
        message["content"] = f"{family.markers.start}{behind.text}{family.closing}"
    body = {**upstream, "messages": [*upstream["messages"], message], "max_tokens": behind.limit}
    return body | {"add_generation_prompt": False, "continue_final_message": True}


def as_note(upstream: Mapping[str, Any], behind: Behind) -> dict[str, Any]:
    """The request again with thinking off, and the end of the partial trace told to the model."""
    kept = behind.text[-CHARS_A_TOKEN * max(16, behind.limit // 2) :]
    said = f"Your reasoning so far, stopped at its limit:\n{kept}\n\n" if kept.strip() else ""
    note = {"role": "user", "content": f"{said}Give the final answer now, without further reasoning."}
    kwargs = {**(upstream.get("chat_template_kwargs") or {}), "enable_thinking": False}
    body = {**upstream, "messages": [*upstream["messages"], note], "max_tokens": behind.limit}
    return body | {"chat_template_kwargs": kwargs, "reasoning_effort": "none"}


Fit = Literal["exact", "fits", "lost"]


def fit(rendered: Sequence[int], behind: Behind, ids: MarkerIds) -> Fit:
    """Does a rendered continuation hold the prompt, the trace and its closed block?

    "exact": id by id; "fits": the same prompt and about the length of the trace, which a template may have trimmed or the
    tokenizer cut otherwise; "lost": the template dropped the trace, or left the block open.
    """
    wanted = [*behind.prompt, *behind.trace, *(ids.end if behind.open else ())]
    if list(rendered[: len(wanted)]) == wanted:
        return "exact"
    # what stands around the trace (newlines, markers) may differ, so the borders are left out of the comparison
    border = max(0, len(behind.prompt) - 4)
    same_prompt = list(rendered[:border]) == list(behind.prompt[:border])
    at = find_last(rendered, ids.end)
    long_enough = at >= len(behind.prompt) + 0.8 * len(behind.trace) - 4
    closed = at > find_last(rendered, ids.start)
    return "fits" if same_prompt and closed and long_enough else "lost"
