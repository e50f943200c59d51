"""Draws docs/demo.svg from a recorded demo: `agentguard demo --events demo.jsonl && python docs/picture.py demo.jsonl`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from agentguard.study.results import summarise
from agentguard.study.table import render
from agentguard.telemetry.recorder import replay

console = Console(record=True, width=96, file=io.StringIO())
console.print("[bold]$ make demo[/bold]")
for table in render(summarise(replay(Path(sys.argv[1]))), "12 agent sessions an arm, 6 steps each, K = 6"):
    console.print(table)
console.save_svg(str(Path(__file__).with_name("demo.svg")), title="agentguard demo")
