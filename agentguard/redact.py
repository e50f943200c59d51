"""A prompt's words out of messages that go to other eyes than its client's: events, recordings and logs.

Servers quote what they refuse ("input_value='…'"), each in its own way, so no pattern of theirs is looked for. What a message has
in common with the request's texts, `RUN` characters or more in a row, is cut out, however it is quoted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

RUN = 12
"""Characters in a row; an error's own phrase that stands in the prompt too ("context length") is lost with it."""
MESSAGE_CHARACTERS = 600
TEXT_CHARACTERS = 2_000_000
"""Of a request that is compared: 0.1 s at worst. Of a larger one no message is kept."""
_PIECE, _STRIDE = 8, 4
"""A run of `RUN` holds a whole piece at a multiple of the stride, so only there the texts are looked through."""
_CUT = "…"


def without_content(message: str, body: Mapping[str, Any]) -> str:
    """``message``, at most `MESSAGE_CHARACTERS` of it, without what it quotes from the request ``body``."""
    message = message[:MESSAGE_CHARACTERS]
    texts = [text for text in _texts(body) if len(text) >= RUN]
    if not texts or len(message) < RUN:
        return message
    if sum(map(len, texts)) > TEXT_CHARACTERS:
        return "not shown: the request is too large to see what of it the message quotes"
    # what stands in JSON or in a repr is escaped; the words are the same
    texts += [escaped for text in texts if (escaped := text.encode("unicode_escape").decode()) != text]
    quoted = [False] * len(message)
    for at in range(0, len(message) - _PIECE + 1, _STRIDE):
        piece = message[at : at + _PIECE]
        found = [text for text in texts if piece in text]
        for start in range(max(0, at + _PIECE - RUN), min(at, len(message) - RUN) + 1) if found else ():
            if any(message[start : start + RUN] in text for text in found):
                quoted[start : start + RUN] = [True] * RUN
    out: list[str] = []
    for character, cut in zip(message, quoted, strict=True):
        if not cut:
            out.append(character)
        elif not out or out[-1] != _CUT:
            out.append(_CUT)
    return "".join(out)


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    """Every text of the messages and tools, nested ones too; names of models and roles are nobody's secret."""
    level: list[Any] = [body.get("messages"), body.get("tools"), body.get("prompt"), body.get("input"), body.get("instructions")]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                yield item
            elif isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = inner
