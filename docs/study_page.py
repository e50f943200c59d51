"""Writes the tables and the picture of docs/study.md: `python docs/study_page.py` (the picture needs the extra `report`).

They come from docs/study-full.json, the summary of `agentguard study full --suite chain --seed 1`. After a new one:
`python docs/study_page.py DIR/summary.json` keeps what the page needs of it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from agentguard.study.report.tables import papers, sheets
from agentguard.study.report.words import verdict

DOCS = Path(__file__).parent
STUDY = DOCS / "study-full.json"
PAGE = DOCS / "study.md"
PICTURE = DOCS / "study.svg"
NOT_KEPT = ("a_step", "relaxed_places", "fates")
TABLES = {
    "pays": "Which rules pay", "filter": "What the support filter changes", "close": "What closing rescues",
    "extra": "Where the extra tokens are", "tokens": "Which tokens are let through",
}  # fmt: skip


def keep(summary: dict[str, Any]) -> str:
    """A summary as it is kept: an arm a line, without what no table needs."""
    arms = [{k: v for k, v in arm.items() if k not in NOT_KEPT} for arm in summary["arms"]]
    rest = {k: v for k, v in summary.items() if k != "arms"}
    rest["provenance"] = {k: v for k, v in rest["provenance"].items() if k not in ("plan", "recipe", "command")}
    lines = ",\n".join(json.dumps(arm, ensure_ascii=False, separators=(",", ":")) for arm in arms)
    head = json.dumps(rest, ensure_ascii=False, separators=(",", ":"))
    return f'{head[:-1]},"arms":[\n{lines}\n]}}\n'


def page(text: str, document: dict[str, Any]) -> str:
    """The page with its tables written anew."""
    made = {sheet.title: sheet for sheet in sheets(document)}
    blocks = {mark: "\n".join(made[title].lines()) for mark, title in TABLES.items()}
    blocks["paper"] = "\n".join(papers(document).lines())
    blocks["words"] = "\n".join(f"- {sentence}" for sentence in verdict(document))
    for mark, block in blocks.items():
        pattern = rf"(?s)(<!-- {mark}: docs/study_page.py -->\n).*?(<!-- end -->)"
        assert re.search(pattern, text), mark
        text = re.sub(pattern, lambda m, block=block: m[1] + block + "\n" + m[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    from agentguard.study.report.plots import pictures

    if len(sys.argv) > 1:
        STUDY.write_text(keep(json.loads(Path(sys.argv[1]).read_text())))
    kept = json.loads(STUDY.read_text())
    PAGE.write_text(page(PAGE.read_text(), kept))
    PICTURE.write_text(pictures(kept | {"arms": [arm | {"relaxed_places": []} for arm in kept["arms"]]})[0][1])
