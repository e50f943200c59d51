"""Random values for fuzzers: plain `random`, seeded by target, seed and number, so that any input can be made again. One
takes 15 to 90 µs of CPU, so that 10^6 are an affair of minutes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

ODD_TEXTS = (
    "", " ", "\0", "\n", "\r\n", "\x1b[31m", "\u2028", "\ud800", "\udfff", "💥", "é", "a" * 300, "../../etc/passwd", "%s%n",
    "{{7*7}}",     "null", "NaN", "-0", "1e999", "\\g<1>", "\\", "'", '"', "`", "<think>", "</think>", "true", "0x10", "٣",
)  # fmt: skip
ODD_NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**40, -(10**40), 0.0, -0.0, 1e308, 5e-324, 0.5, True, False)


def text(rng: random.Random, words: Sequence[str] = (), longest: int = 6) -> str:
    """Some pieces in a row, of the target's own words mostly."""
    pieces = []
    for _ in range(rng.randrange(longest)):
        dice = rng.random()
        if words and dice < 0.7:
            pieces.append(rng.choice(words))
        elif dice < 0.85:
            pieces.append(rng.choice(ODD_TEXTS))
        else:
            pieces.append(
                "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x3000)))) for _ in range(rng.randrange(6)))
            )
    return "".join(pieces)


def value(rng: random.Random, words: Sequence[str] = (), depth: int = 3) -> Any:
    """Anything JSON can hold, and some of what Python's parser lets through."""
    dice = rng.random()
    if depth and dice < 0.2:
        return {text(rng, words, 3): value(rng, words, depth - 1) for _ in range(rng.randrange(4))}
    if depth and dice < 0.4:
        return [value(rng, words, depth - 1) for _ in range(rng.randrange(4))]
    if dice < 0.65:
        return text(rng, words, 3)
    if dice < 0.8:
        return rng.choice(ODD_NUMBERS)
    if dice < 0.9:
        return rng.randrange(-10, 5000)
    return rng.choice((None, True, False, rng.random()))


def bent(rng: random.Random, sample: Any, words: Sequence[str] = ()) -> Any:
    """A copy of a valid value with a few places changed: something else there, a key more, an item twice or gone."""
    if rng.random() < 0.04:
        return value(rng, words, 2)
    if isinstance(sample, dict):
        out = {k: bent(rng, v, words) for k, v in sample.items() if rng.random() > 0.04}
        if rng.random() < 0.06:
            out[rng.choice(words) if words and rng.random() < 0.7 else text(rng, words, 2)] = value(rng, words, 2)
        return out
    if isinstance(sample, list | tuple):
        out_list = [bent(rng, v, words) for v in sample if rng.random() > 0.04]
        if out_list and rng.random() < 0.05:
            out_list.append(rng.choice(out_list))
        return out_list
    if isinstance(sample, str) and rng.random() < 0.05:
        return sample + text(rng, words, 2)
    return sample


def bent_bytes(rng: random.Random, sample: bytes, words: Sequence[bytes] = ()) -> bytes:
    """A copy with a few bytes flipped, cut, doubled, or a word put in."""
    out = bytearray(sample)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        dice = rng.randrange(6)
        if dice == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif dice == 1:
            del out[at : at + rng.randrange(8)]
        elif dice == 2:
            out[at:at] = out[max(0, at - rng.randrange(16)) : at]
        elif dice == 3 and words:
            out[at:at] = rng.choice(words)
        elif dice == 4:
            out[at:at] = rng.randbytes(rng.randrange(5))
        else:
            del out[at + rng.randrange(64) :]
    return bytes(out)


def cuts(rng: random.Random, whole: Any, most: int = 8) -> list[Any]:
    """The same text or bytes in pieces; an empty one now and then."""
    places = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(most)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


def dumped(rng: random.Random, any_value: Any) -> bytes:
    """JSON as clients write it, and as they should not."""
    raw = json.dumps(any_value, ensure_ascii=rng.random() < 0.5, default=str)
    return raw.encode("utf-8", "surrogatepass" if rng.random() < 0.9 else "replace")
