"""Which proxy of ours runs at a port, and in front of which gateway: `agentguard proxy` says so in a file, `wrap` reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from agentguard.dirs import state_dir
from agentguard.proxy.listeners import held_by_group


@dataclass(frozen=True, slots=True)
class Running:
    """url, gateway: without /v1; group: LiteLLM's process group."""

    url: str
    gateway: str
    group: int


def _file(port: int) -> Path:
    return state_dir() / f"proxy-{port}.json"


@contextmanager
def announced(port: int, running: Running) -> Iterator[None]:
    """Say that it runs while the block does. Blocks for as long as a small file takes."""
    path = _file(port)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(asdict(running)))
    aside.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_at(port: int) -> Running | None:
    """The proxy that was announced for this port, if the port is still that process group's: whoever else answers there, a LiteLLM
    of the user's own on its usual port or another user's server, must not be sent our key, nor an agent that is to be guarded."""
    try:
        found = Running(**json.loads(_file(port).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if held_by_group(port, found.group) else None
