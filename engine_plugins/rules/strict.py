"""The rule that keeps the target's law exactly."""

from __future__ import annotations

from engine_plugins.rules.base import Edit, Pair, Rows, Rule


class Strict(Rule):
    """p' = p, q' = q: the output's law is p. Source: arXiv 2211.17192, algorithm 1. Temperature 0: accept iff x = argmax p."""

    name = "strict"
    keeps_target = True

    def definition(self, rows: Rows) -> Pair:
        return rows.p, rows.q

    def edit(self, rows: Rows) -> Edit | None:
        return None
