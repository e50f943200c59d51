"""What arms are compared with when there is no live control group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agentguard.economics.cells import QUANTITIES, Mean
from agentguard.errors import ConfigError, nearest

LIVE = "live"


def baseline_of(wanted: str | Mapping[str, float]) -> tuple[dict[str, Mean] | None, str]:
    """Means a step under strict, and where they are from; None: the live control group.

    A study's means bring their variance; it has no time to the last token, which depends on the load it was measured under.
    Fixed means are taken as exact. Raises ConfigError naming the field and the remedy.
    """
    if wanted == LIVE:
        return None, "live control"
    if not isinstance(wanted, str):
        for name in wanted:
            if name not in QUANTITIES:
                raise ConfigError(f"economics.baseline.{name}", wanted[name], nearest(name, QUANTITIES))
        return {name: Mean(value, 0.0, 0) for name, value in wanted.items()}, "fixed"
    path = Path(wanted)
    try:
        arms = json.loads(path.read_text())["arms"]
        strict = next(arm for arm in arms if arm["rule"] == "strict")["a_step"]
        means = {name: Mean(**strict[name]) for name in QUANTITIES if name != "ttlt" and strict.get(name)}
    except OSError as error:
        raise ConfigError("economics.baseline", wanted, f"cannot be read ({error.strerror}); give a study's JSON file") from None
    except (ValueError, KeyError, TypeError, StopIteration):
        raise ConfigError(
            "economics.baseline", wanted, "is not the JSON of a study with a strict arm; see 'agentguard study run --json'"
        ) from None
    return means, f"study {path.name}"
