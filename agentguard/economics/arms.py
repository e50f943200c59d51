"""Which session runs under which rule: strict control or a relaxed arm, decided by a keyed hash of the session's identity.

The same identity gets the same arm after a restart and on every gateway with the same key, and nobody can choose their arm
without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Arms:
    """The arms of an experiment. ``control``: share of sessions under strict; the others by weight.

    Without a relaxed arm everything is control.
    """

    key: bytes
    control: float
    rules: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    def assign(self, identity: str) -> str:
        """The arm of a session: `STRICT` or one of ``rules``."""
        at = _unit(self.key, "arm", identity)
        if not self.rules or at < self.control:
            return STRICT
        return self.rules[_pick((at - self.control) / (1 - self.control), self.weights)]

    def explores(self, identity: str, share: float) -> bool:
        """Does this session keep running a rule that was switched off? Independent of its arm."""
        return _unit(self.key, "explore", identity) < share


def _unit(key: bytes, purpose: str, identity: str) -> float:
    """A number in [0, 1) from a keyed hash."""
    digest = hashlib.blake2b(identity.encode(), key=key[:64], person=purpose.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _pick(at: float, weights: Sequence[float]) -> int:
    total, through = sum(weights), 0.0
    for i, weight in enumerate(weights):
        through += weight / total
        if at < through:
            return i
    return len(weights) - 1
