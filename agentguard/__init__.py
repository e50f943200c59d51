"""agentguard makes self-hosted reasoning models finish. See README.md and docs/."""

from __future__ import annotations

__version__ = "0.1.0"
