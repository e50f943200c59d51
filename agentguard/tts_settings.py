"""The knobs of Test-Time Speculation, as they stand in a recipe and travel in `--additional-config '{"agentguard": {"tts": {…}}}'`
and over the engine's HTTP route."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_type_hints

import msgspec

from agentguard.errors import ConfigError, nearest

SCOPE = re.compile(r"full|head|last:[1-9]\d*|lora:[1-9]\d*")
BACKEND = "agentguard_shm"
"""Name of our weight transfer backend: ``--weight-transfer-config '{"backend": "agentguard_shm"}'``."""


@dataclass(frozen=True, slots=True)
class TtsSettings:
    """How the draft learns. Values that the paper leaves open (tts.md, section 3) are the measured ones of docs/tts.md.

    stride: rounds between updates (the paper's S). rate: Adam's learning rate. scope: what is trained: full, head, last:N layers,
    or lora:R on every matrix of the layers. window: tokens of context a step sees. rows: the rounds a step learns from: the
    `stride` newest, or all of the window. decay: row k of a round weighs exp(-k / decay). proximal: weight μ of the pull towards
    the draft that drafted. rejected: learn from the rows behind the first rejected token too. top_k: tokens of a teacher row that
    are kept, 0 for all; the rest is one bucket. min_tokens: output tokens before a request is learned from. reset: request: back
    to the trained weights whenever a request starts while no other runs; never: go on. clip: largest norm of a gradient.
    auto_off: stop where the gain does not pay (judge.py).
    """

    stride: int = 5
    rate: float = 1e-3
    scope: str = "full"
    window: int = 256
    rows: Literal["stride", "window"] = "window"
    decay: float = 7.0
    proximal: float = 0.0
    rejected: bool = False
    top_k: int = 512
    min_tokens: int = 64
    reset: Literal["request", "never"] = "request"
    clip: float = 1.0
    auto_off: bool = True

    def __post_init__(self) -> None:
        def check(field: str, good: bool, remedy: str) -> None:
            if not good:
                raise ConfigError(f"tts.{field}", getattr(self, field), remedy)

        check("stride", 1 <= self.stride <= 1000, "give 1 to 1000 rounds")
        check("rate", 0 < self.rate < 1, "give a learning rate between 0 and 1, such as 1e-3")
        check("scope", SCOPE.fullmatch(self.scope) is not None, "give full, head, last:N or lora:R")
        check("window", 16 <= self.window <= 8192, "give 16 to 8192 tokens")
        check("decay", self.decay > 0, "give a number greater than 0; a large one weighs all rows the same")
        check("proximal", self.proximal >= 0, "give 0 or more")
        check("top_k", self.top_k >= 0, "give the number of tokens a row keeps, or 0 for all")
        check("min_tokens", self.min_tokens >= 0, "give 0 or more tokens")
        check("clip", self.clip > 0, "give a number greater than 0")

    @classmethod
    def parse(cls, raw: dict[str, Any], *, base: TtsSettings | None = None) -> TtsSettings:
        """Settings from a mapping, over ``base``'s. Raises ConfigError naming the field, the value and the remedy."""
        known = [f.name for f in fields(cls)]
        for key in raw:
            if key not in known:
                raise ConfigError(f"tts.{key}", raw[key], nearest(key, known))
        hints = get_type_hints(cls)
        changes: dict[str, Any] = {}
        for key, value in raw.items():
            try:
                number = hints[key] is float and isinstance(value, str)  # YAML 1.1 reads 3e-4, without a dot, as a string
                changes[key] = msgspec.convert(value, hints[key], strict=not number)
            except msgspec.ValidationError as error:
                raise ConfigError(f"tts.{key}", value, f"has the wrong type: {error}") from None
        return replace(base or cls(), **changes)
