"""Theme and keys of the monitor, from the command line, the environment and the user's file, in this order.

    # ~/.config/agentguard/tui.yaml, or the file that AGENTGUARD_TUI_CONFIG names
    theme: agentguard-cb
    keys: {app.quit: ctrl+x, table.up: "up,i"}

AGENTGUARD_TUI_THEME and AGENTGUARD_TUI_KEYS ("app.quit=ctrl+x;table.up=up,i") are over the file. The theme chosen with `t` is kept
in the user's state folder and counts least.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import yaml

from agentguard.errors import ConfigError, nearest
from agentguard.tui.themes import DEFAULT


@dataclass(frozen=True, slots=True)
class Settings:
    """``keys``: binding id to keys. ``state``: the file that keeps the chosen theme, None to keep none."""

    theme: str = DEFAULT
    keys: dict[str, str] = field(default_factory=dict)
    state: Path | None = None

    def check(self, themes: Iterable[str], bindings: Container[str] | Iterable[str]) -> None:
        """Raises ConfigError for a theme or a binding that is not there."""
        names = set(themes)
        if self.theme not in names:
            raise ConfigError("theme", self.theme, nearest(self.theme, names))
        known = set(bindings)  # type: ignore[arg-type]
        for name in self.keys:
            if name not in known:
                raise ConfigError("keys", name, nearest(name, known))

    def save_theme(self, theme: str) -> None:
        if self.state is not None:
            self.state.parent.mkdir(parents=True, exist_ok=True)
            self.state.write_text(theme + "\n")


def load(theme: str | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Raises ConfigError naming what is wrong in which place."""
    file = environ.get("AGENTGUARD_TUI_CONFIG")
    path = Path(file) if file else platformdirs.user_config_path("agentguard") / "tui.yaml"
    raw = _read(path, must=bool(file))
    keys = {str(k): str(v) for k, v in _mapping(raw.get("keys", {}), f"{path.name}: keys").items()}
    for pair in filter(None, environ.get("AGENTGUARD_TUI_KEYS", "").split(";")):
        name, equals, key = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError("AGENTGUARD_TUI_KEYS", pair, "write it as name=key, several with ';' between")
        keys[name.strip()] = key.strip()
    state = platformdirs.user_state_path("agentguard") / "tui-theme"
    kept = _kept(state)
    chosen = theme or environ.get("AGENTGUARD_TUI_THEME") or raw.get("theme") or environ.get("TEXTUAL_THEME") or kept or DEFAULT
    return Settings(str(chosen), keys, state)


def _kept(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _read(path: Path, must: bool) -> dict[str, object]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        if must:
            raise ConfigError("AGENTGUARD_TUI_CONFIG", str(path), "there is no such file") from None
        return {}
    except OSError as error:
        raise ConfigError("tui.yaml", str(path), f"cannot be read ({error.strerror})") from None
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("tui.yaml", str(path), f"is no YAML ({' '.join(str(error).split())})") from None
    found = _mapping(raw or {}, path.name)
    for name in found:
        if name not in ("theme", "keys"):
            raise ConfigError(path.name, name, nearest(name, ("theme", "keys")))
    return found


def _mapping(raw: object, where: str) -> dict[str, object]:
    if not isinstance(raw, dict):
        raise ConfigError(where, raw, "write it as name: value")
    return {str(k): v for k, v in raw.items()}
