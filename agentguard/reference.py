"""Where the reference pair is: the small thinking target and its drafts that ship with the package."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from agentguard.errors import ConfigError

DRAFTS = ("draft", "draft-short")


def reference_model(name: str) -> Path:
    """The directory of `target`, `draft` or `draft-short`: inside the installed package, else in the source tree."""
    here = Path(__file__).parent
    for root in (here / "_recipes", here.parent / "recipes"):
        path = root / "reference_pair" / "weights" / name
        if (path / "config.json").is_file():
            return path
    raise ConfigError("model", f"reference pair: {name}", "its weights are not in this installation; install agentguard-vllm again")


def weights_hash(model: Path) -> str | None:
    """sha256 of a model's weights file; None without one. A reference model must be the committed one: ConfigError if it is not."""
    weights = model / "model.safetensors"
    if not weights.is_file():
        return None
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    sums = model.parent / "sha256.json"
    committed = json.loads(sums.read_text()).get(model.name) if sums.is_file() else None
    if committed not in (None, found):
        raise ConfigError(
            "model", str(model), f"its weights are not the committed ones (sha256 {committed}); restore them from git"
        )
    return found
