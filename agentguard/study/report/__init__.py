"""A study's folder: its recording, and what is made of it.

sessions.jsonl   the recording, one session a line; all else can be made from it again (`agentguard study report DIR`)
summary.json     every number, with intervals
report.html      one file, nothing to load
report.md        the same tables
steps.parquet    a row a step
tokens.parquet   a row for each token that only relaxation let through
provenance.json  versions, hardware, seeds, recipe, state of the source
"""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentguard.errors import ConfigError
from agentguard.study.comparison import summarise_records
from agentguard.study.records import load
from agentguard.study.report import raw
from agentguard.study.report.plots import pictures
from agentguard.study.report.tables import sheets
from agentguard.study.report.words import verdict
from agentguard.study.summary import Summary

RECORDING = "sessions.jsonl"
NEEDS = ("matplotlib", "pyarrow")
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-size: 12px; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: 2px 8px; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } tbody tr:hover { background: #f3f6fa }
code { font-size: 92% } figure { margin: 1.5rem 0 } figcaption { color: #555 } svg { max-width: 100%; height: auto }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 12px }
"""


def check_report() -> None:
    """Raises ConfigError where a report could not be written: before a study of half an hour, not after it."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "--out", ", ".join(missing), "is not installed; a report needs the extra: pip install 'agentguard-vllm[report]'"
        )


def write_report(out: Path, summary: Summary | None = None) -> list[Path]:
    """Write everything that is made from the recording in ``out``. Raises ConfigError for a folder without one."""
    check_report()
    summary = summary or summarise_records(out / RECORDING)
    _, records = load(out / RECORDING)
    document = summary.as_json()
    texts = {
        "summary.json": summary.to_json(),
        "provenance.json": json.dumps(document["provenance"], indent=1) + "\n",
        "report.md": markdown(document),
        "report.html": page(document),
    }
    written = []
    for name, text in texts.items():
        path = out / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return [*written, *raw.write(out, records)]


def title(document: Mapping[str, Any]) -> str:
    engine = document["engine"]
    return f"Study of {document['suite']}: {engine['model']} with {engine['draft']}, K = {engine['K']}, seed {document['seed']}"


def markdown(document: dict[str, Any]) -> str:
    lines = [f"# {title(document)}", "", *(f"- {sentence}" for sentence in verdict(document)), ""]
    lines += [sheet.markdown() for sheet in sheets(document)]
    lines += ["## Provenance", "", "```json", json.dumps(document["provenance"], indent=1), "```", ""]
    return "\n".join(lines)


def page(document: dict[str, Any]) -> str:
    """The report as one HTML file: styles and pictures are inside, scripts there are none."""
    said = "".join(f"<li>{_code(sentence)}</li>" for sentence in verdict(document))
    drawn = "".join(
        f'<figure role="img" aria-label="{html.escape(caption)}">{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'
        for caption, svg in pictures(document)
    )
    tables = "".join(sheet.html() for sheet in sheets(document))
    source = html.escape(json.dumps(document["provenance"], indent=1))
    name = html.escape(title(document))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><h1>{name}</h1>'
        f"<ul>{said}</ul>{drawn}{tables}<h2>Provenance</h2><pre>{source}</pre></body></html>\n"
    )


def _code(text: str) -> str:
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
