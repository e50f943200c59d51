"""A copy of a module with a bug in it. The copy is a module of its own; the one under test is not touched."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

_number = itertools.count()


def planted(module: str, right: str, wrong: str) -> ModuleType:
    """``right`` stands in the source once and is replaced by ``wrong``; fails where it no longer does."""
    original = importlib.import_module(module)
    source = Path(str(original.__file__)).read_text()
    if source.count(right) != 1:
        raise LookupError(f"{module}: {right!r} stands there {source.count(right)} times; plant the bug anew")
    name = f"{module}__planted_{next(_number)}"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    copy.__package__, copy.__file__ = original.__package__, original.__file__
    sys.modules[name] = copy  # dataclasses look their module up
    exec(compile(source.replace(right, wrong), f"{original.__file__} with a bug", "exec"), copy.__dict__)  # that is it
    return copy
