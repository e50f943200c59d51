"""What is on the screen as files: the picture, the page's rows, everything."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from agentguard.economics.ratios import Ratio
from agentguard.monitor.snapshot import Snapshot

FORMS = {"svg": "a picture of the screen", "csv": "the rows of this page", "json": "everything the monitor knows now"}


def text_file(text: str) -> io.StringIO:
    return io.StringIO(text)


def to_json(snapshot: Snapshot) -> str:
    """The whole snapshot; unknown is null."""
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=1).decode() + "\n"


def to_csv(rows: Sequence[object]) -> str:
    """A line a row, a column a field; unknown is empty, a ratio takes three columns, a list is JSON."""
    flat = [_flat(row) for row in rows if dataclasses.is_dataclass(row)]
    names = list(dict.fromkeys(name for row in flat for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: Any) -> dict[str, object]:
    cells: dict[str, object] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Ratio):
            cells |= {field.name: value.value, f"{field.name}_low": value.low, f"{field.name}_high": value.high}
        elif isinstance(value, tuple | dict):
            cells[field.name] = json.dumps(msgspec.to_builtins(value))
        else:
            cells[field.name] = _harmless(value) if isinstance(value, str) else value
    return cells


def _harmless(text: str) -> str:
    """A spreadsheet must not run what a client chose as its session id."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
