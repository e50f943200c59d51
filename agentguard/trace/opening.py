"""Did a prompt leave a think block open, so that the model begins inside it?

Two things open one: the generation prompt, which a template writes behind everything the client has said, and the client's own
last message where it asks to be continued in the middle of a trace. A start marker anywhere else is a quotation (a question about
the marker, a file, a tool's result), however many there are.

Told apart by what stands behind the last start marker. A client's words are followed by a turn's header; a generation prompt ends
with the marker, with a blank or a label behind it (all families of `agentguard.trace.markers`), or with words of the template's
own, which are the same for a chat that says something else (`tail`). ids are all that is looked at, so one server's prompt decides
for a template that nobody has read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from agentguard.trace.markers import Family
from agentguard.trace.tally import MarkerIds, find_last

BLANKS = ("\n", "\n\n")
"""What templates write behind the marker that opens a block; Gemma 4 a label too (`Family.label`)."""
ANOTHER: Mapping[str, Any] = {"role": "user", "content": "agentguard asks what stands behind this"}
"""What a chat says whose generation prompt is looked at; no client says it."""
_SHAPES = ("model", "chat_template", "chat_template_kwargs")


def behind(prompt: Sequence[int], ids: MarkerIds) -> tuple[int, ...] | None:
    """What stands behind the last start marker where no end marker follows it; None where there is no such one."""
    start = find_last(prompt, ids.start)
    rest = tuple(prompt[start + len(ids.start) :])
    return None if start < 0 or find_last(rest, ids.end) >= 0 else rest


def opens(rest: tuple[int, ...], ids: MarkerIds, tails: Collection[tuple[int, ...] | None]) -> bool:
    """Only the template can have written the marker in front of ``rest``. tails: what it is known to write there."""
    return not rest or rest in ids.blanks or rest in tails


def tail(asked: Sequence[int], bare: Sequence[int], ids: MarkerIds) -> tuple[int, ...] | None:
    """What the template writes behind the start marker it opens a block with, None where it opens none: from a chat's prompt with
    the generation prompt and without it."""
    same = next((i for i, (one, other) in enumerate(zip(asked, bare, strict=False)) if one != other), min(len(asked), len(bare)))
    return behind(asked[same:], ids)


def another_chat(body: Mapping[str, Any], *, generation: bool) -> dict[str, Any]:
    """A chat that says something else under the same template and switches, with or without the generation prompt."""
    kept = {k: body[k] for k in _SHAPES if body.get(k) is not None}
    return kept | {"messages": [dict(ANOTHER)], "add_generation_prompt": generation}


def switches(body: Mapping[str, Any]) -> str:
    """Equal for requests whose template writes the same generation prompt, as far as the request decides it. A digest, as a client
    may send a template of any size."""
    return hashlib.sha256(json.dumps({k: body.get(k) for k in _SHAPES}, sort_keys=True, default=str).encode()).hexdigest()


def ends_inside(body: Mapping[str, Any], family: Family) -> bool:
    """The client's last message is a beginning of the assistant's, to be continued, and ends inside a trace."""
    last = body["messages"][-1]
    goes_on = body.get("continue_final_message") or body.get("add_generation_prompt") is False
    if last.get("role") != "assistant" or not goes_on:
        return False
    content = last.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    starts, ends = ([str(content).rfind(marker) for marker in side] for side in zip(*family.pairs, strict=True))
    thought = last.get("reasoning") or last.get("reasoning_content")
    return max(starts) > max(ends) or bool(thought and not str(content).strip())
