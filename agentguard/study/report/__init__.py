"""A study's folder: its recording, and what is made of it."""

from __future__ import annotations

from pathlib import Path

from agentguard.study.summary import Summary, summarise_records

RECORDING = "sessions.jsonl"


def check_report() -> None: ...


def write_report(out: Path, summary: Summary | None = None) -> list[Path]:
    summary = summary or summarise_records(out / RECORDING)
    path = out / "summary.json"
    path.write_text(summary.to_json())
    return [path]
