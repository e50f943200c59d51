"""A request that does not fit into the context window: is its prompt too long, or only the limit on its answer too large?

The two have different remedies. A prompt that is too long has to be compacted by its client; a limit that is too large is lowered
by the guard, which asks again. Servers refuse both with the same status and nearly the same words, so the words are read here:
those of vLLM, SGLang, llama.cpp, TGI and of services that speak as OpenAI's does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentguard.errors import EngineRequestError

TRIES = 8
"""Lower limits that are tried for one request; halving reaches 1/256 of the first."""
_OVERFLOW = re.compile(
    r"maximum context length|context length exceeded|context_length_exceeded|longer than the maximum model length"
    r"|longer than the model'?s context length|context length is only|exceeds the maximum allowed length"
    r"|exceeds? (?:the )?(?:available )?(?:model'?s? )?(?:maximum )?context|max(?:imum)? model length|prompt is too long"
    r"|max_(?:completion_|new_)?tokens\W.{0,60}(?:too large|cannot be greater than|must be <=)",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    r"(\d+) in the (?:messages|prompt)|(\d+) tokens from the input|(?:has|passed|contains(?: at least)?) (\d+) input tokens"
    r"|(?:input|prompt|request)(?: length)? \((?:length )?(\d+)(?: tokens)?\)|given: (\d+) `inputs` tokens",
    re.IGNORECASE,
)
"""How many tokens the prompt has."""
_WINDOW = re.compile(
    r"(?:context length|model length|allowed length|context size|max_model_len)(?: is| of| only)*[ =(]+(\d+)"
    r"|`inputs` tokens \+ `max_new_tokens` must be <= (\d+)",
    re.IGNORECASE,
)
"""How many tokens the window has."""
_LIMIT = re.compile(r"max_(?:completion_|new_|output_)?tokens|output tokens|completion", re.IGNORECASE)
_PROMPT_FIELDS = (
    "messages", "tools", "max_tokens", "max_completion_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fit:
    """What is known of a request's size once a server has refused it. prompt: its tokens as the server counted them, None where it
    said nothing; most: the largest limit worth sending, None for any; tries: limits refused so far."""

    prompt: int | None = None
    most: int | None = None
    tries: int = 0


class LimitTooLargeError(EngineRequestError):
    """The limit does not fit beside this prompt, and a smaller one may (``fit``). The guard asks again; no caller sees it."""

    def __init__(self, refused: EngineRequestError, fit: Fit) -> None:
        super().__init__(refused.status, str(refused), refused.retry_after, "max_tokens")
        self.fit = fit


def is_overflow(error: EngineRequestError) -> bool:
    """Does the server say that the request does not fit?"""
    return error.status in (400, 413, 422) and _OVERFLOW.search(str(error)) is not None


def prompt_told(message: str) -> int | None:
    """The prompt's tokens in a server's refusal, None where it does not tell them."""
    return _told(_PROMPT, message)


def window_told(message: str) -> int | None:
    """The context window in a server's refusal in tokens, None where it does not tell it."""
    return _told(_WINDOW, message)


def _told(what: re.Pattern[str], message: str) -> int | None:
    found = what.search(message)
    return None if found is None else int(next(number for number in found.groups() if number is not None))


def smaller(window: int, message: str) -> int:
    """The window that a refused request has to fit into: a server's own may be smaller than the one we know."""
    told = window_told(message)
    return window if told is None else min(window, told)


def refit(message: str, known: Fit, *, window: int, sent: int | None, least: int, margin: int) -> Fit | None:
    """What to ask instead, None where the prompt itself is too long.

    window: the context window, the server's where its refusal names a smaller one (`smaller`); sent: the limit that was refused,
    None for none; least: an answer with less room is no use; margin: tokens of the window that stay free. Where the server tells
    the prompt's tokens, what is left beside them is the limit. Where it does not, or its window is smaller than we know, half of
    the limit is tried, and never more than half of the window.
    """
    prompt = prompt_told(message)
    half = None if sent is None else min(sent, window) // 2
    if prompt is not None:
        room = window - prompt - margin
        most = room if sent is None or room < sent else half
        if room < least:
            return None
    else:
        most = half if _LIMIT.search(message) else None
    if most is None or most < least or known.tries >= TRIES:
        return None
    return Fit(prompt, most, known.tries + 1)


def digest(body: Mapping[str, Any], model: str, window: int) -> str:
    """Equal for requests with the same prompt and limit to the same model in the same window: what did not fit into one window may
    fit into the next."""
    asked = {k: body.get(k) for k in _PROMPT_FIELDS} | {"model": model, "window": window}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]
