"""What the operator asked `agentguard tui` for; validated in the command, passed to the model and to the screen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_GATEWAY = "http://127.0.0.1:8484"


@dataclass(frozen=True, slots=True)
class Options:
    """``gateways`` and ``metrics``: URLs; ``interval_s``: between samples; ``record``, ``replay``: files; ``demo``: a scenario of
    the simulator; ``content``: show live tails of traces. Without any source the default gateway is watched."""

    gateways: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    api_key: str | None = None
    operator_key: str | None = None
    """For actions, where the gateway has a key of its own for them."""
    interval_s: float = 1.0
    window_s: float = 60.0
    record: Path | None = None
    replay: Path | None = None
    speed: float = 1.0
    demo: str | None = None
    seed: int = 0
    once: bool = False
    as_json: bool = False
    mini: bool = False
    web: bool = False
    port: int = 8485
    readonly: bool = False
    ascii: bool = False
    theme: str | None = None
    content: bool = False
