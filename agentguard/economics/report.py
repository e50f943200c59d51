"""The economics as plain data, for `GET /guard/v1/economics` and `agentguard status --json`."""

from __future__ import annotations

import math
from typing import Any

from agentguard.economics.ledger import Ledger


def report(ledger: Ledger) -> dict[str, Any]:
    """``rows``: every arm of every class, control first. JSON has no infinity, so an open interval's end is null."""
    return {
        "control": ledger.arms.control if ledger.arms.rules else 1.0,
        "arms": dict(zip(ledger.arms.rules, ledger.arms.weights, strict=True)),
        "rows": [finite(row.as_json()) for row in ledger.rows()],
    }


def class_report(ledger: Ledger, workload: str) -> list[dict[str, Any]]:
    """The rows of one class, as in `report`."""
    return [finite(row.as_json()) for row in ledger.rows(workload)]


def finite(value: Any) -> Any:
    """The same with null for what JSON cannot hold."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
