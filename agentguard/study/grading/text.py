"""Answers that are a number or a letter, as GSM8K, AIME and LongBench-v2 ask for them.

The rule is the same for every arm, so a format that a grader does not read costs all of them the same; it is stated here because
published accuracies differ by it.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_NUMBER = r"[-+]?\$?\d[\d,]*(?:\.\d+)?"
_LAST_NUMBER = re.compile(_NUMBER)
_SAID = re.compile(rf"(?:####|answer\s*(?:is|:|=))\s*\**\s*\$?\s*({_NUMBER})", re.IGNORECASE)
_LETTER = re.compile(r"(?:answer\s*(?:is|:))\s*\**\s*\(?([A-D])\b\)?", re.IGNORECASE)
_LONE_LETTER = re.compile(r"^\W*([A-D])\W*$", re.MULTILINE)


def boxed(reply: str) -> str | None:
    r"""What the last complete ``\boxed{…}`` holds, braces inside it balanced; None without one."""
    for match in reversed(list(re.finditer(r"\\boxed\s*{", reply))):
        depth = 1
        for at in range(match.end(), len(reply)):
            depth += {"{": 1, "}": -1}.get(reply[at], 0)
            if depth == 0:
                return reply[match.end() : at]
    return None


def number(reply: str) -> Decimal | None:
    r"""The number a reply ends in: in the last ``\boxed{}``, else behind the last "####" or "the answer is", else the last one."""
    box = boxed(reply)
    if box is not None:
        found = _LAST_NUMBER.findall(box.replace("\\,", "").replace("{,}", ","))
        return _decimal(found[-1]) if found else None
    said = _SAID.findall(reply)
    found = said or _LAST_NUMBER.findall(reply)
    return _decimal(found[-1]) if found else None


def letter(reply: str) -> str | None:
    """The choice, A to D: behind the last "answer is", else the last line that holds a letter alone, else what is boxed."""
    for pattern in (_LETTER, _LONE_LETTER):
        found = pattern.findall(reply)
        if found:
            return str(found[-1]).upper()
    box = (boxed(reply) or "").strip().strip("()").upper()
    return box if box in ("A", "B", "C", "D") else None


def same_number(reply: str, truth: str) -> bool:
    """Is the reply's number the true one? 7, 7.0 and $7 are; 1,200 is 1200."""
    given, wanted = number(reply), _decimal(truth)
    return given is not None and given == wanted


def first_place(trace: str, truth: str) -> int | None:
    """Characters of ``trace`` up to the end of the first number that is the true one; None where there is none."""
    wanted = _decimal(truth)
    return next((m.end() for m in _LAST_NUMBER.finditer(trace) if _decimal(m[0]) == wanted), None)


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
