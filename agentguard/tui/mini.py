"""Six lines below the prompt: the verdict and the fleet (`agentguard tui --mini`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.app import ComposeResult
from textual.widget import Widget

from agentguard.tui.frame import Page, Panel, View, verdict_lines
from agentguard.tui.overview import FLEET, FleetRow, fleet
from agentguard.tui.table import Table

LINES = 6


class Mini(Page):
    NAME = "mini"

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[FleetRow] = Table(FLEET, lambda row: row.row.key, empty="no server yet", id="fleet")

    def compose(self) -> ComposeResult:
        yield Panel(verdict_lines, id="verdict")
        yield self.table

    def body(self) -> Sequence[Widget]:
        return ()

    @property
    def main_table(self) -> Table[Any] | None:
        return self.table

    def show(self, view: View) -> None:
        self.table.show_rows(fleet(view.snapshot))
        super().show(view)

    def rows_for_export(self) -> Sequence[object]:
        return [row.row for row in self.table.rows]
