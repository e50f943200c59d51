"""Where the reference pair is: the small thinking target and its drafts that ship with the package."""

from __future__ import annotations

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
