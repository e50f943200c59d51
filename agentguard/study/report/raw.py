"""The raw rows of a study as Parquet, for one's own analysis: a row a step, and a row for each token that was let through."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentguard.study.records import SessionRecord

STEP = (
    "prompt_tokens", "tokens", "think_tokens", "answer_tokens", "marker_tokens", "rounds", "drafted", "accepted", "ttlt_s",
    "closed", "finish_reason", "empty_answer",
)  # fmt: skip


def steps(records: Iterable[SessionRecord]) -> list[dict[str, Any]]:
    """A row a step. What is of a whole session (the telemetry's sums) stands in each of its steps."""
    return [
        {
            "rule": record.rule, "close": record.close, "number": record.number, "step": number, "right": step.right,
            "proved": step.proved, **{name: getattr(step.finished, name) for name in STEP},
            "telemetry_rounds": record.stats.rounds, "strict_tokens": record.stats.strict_n, "strict_p_sum": record.stats.strict_p,
            "relaxed_tokens": len(record.stats.relaxed), "t": step.finished.t,
        }
        for record in records
        for number, step in enumerate(record.steps, 1)
    ]  # fmt: skip


def relaxed(records: Iterable[SessionRecord]) -> list[dict[str, Any]]:
    """A row for each drafted token that was accepted only because the rule relaxes."""
    return [
        {
            "rule": record.rule, "close": record.close, "number": record.number, "place": token.place, "token": token.token,
            "p": token.p, "rank": token.rank,
        }
        for record in records
        for token in record.stats.relaxed
    ]  # fmt: skip


def write(out: Path, records: list[SessionRecord]) -> list[Path]:
    """steps.parquet and tokens.parquet in ``out``."""
    import pyarrow
    from pyarrow import parquet

    text, whole, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    kinds = {
        "rule": text,
        "close": text,
        "closed": text,
        "finish_reason": text,
        "right": pyarrow.bool_(),
        "empty_answer": pyarrow.bool_(),
    }
    kinds |= dict.fromkeys(("ttlt_s", "strict_p_sum", "t", "p"), real)
    written = []
    for name, rows, columns in (
        ("steps", steps(records), ("rule", "close", "number", "step", "right", "proved", *STEP, "telemetry_rounds", "strict_tokens",
                                   "strict_p_sum", "relaxed_tokens", "t")),
        ("tokens", relaxed(records), ("rule", "close", "number", "place", "token", "p", "rank")),
    ):  # fmt: skip
        schema = pyarrow.schema([(column, kinds.get(column, whole)) for column in columns])
        path = out / f"{name}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path, compression="zstd")
        written.append(path)
    return written
