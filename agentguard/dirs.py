"""Where a user's own files are kept (XDG base directories)."""

from __future__ import annotations

import os
from pathlib import Path

from agentguard.errors import ConfigError


def config_dir() -> Path:
    """For what the user writes; nothing is made here."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "agentguard"


def cache_dir() -> Path:
    """For what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentguard"


def state_dir() -> Path:
    """For what belongs to this installation and to nobody else: mode 0700. Raises ConfigError where it cannot be made."""
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "agentguard"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("XDG_STATE_HOME", str(path), f"cannot be made ({error.strerror}); name a folder that can") from None
    return path
