"""The event log: bounded, and what happens again within a minute is counted on its line instead of told again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from agentguard.monitor.snapshot import EventLine, Severity

KEPT = 500
DEDUPE_S = 60.0


class Log:
    def __init__(self) -> None:
        self._lines: OrderedDict[int, EventLine] = OrderedDict()
        self._open: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()
        self._next = 1
        self._shown: tuple[EventLine, ...] | None = None

    def __len__(self) -> int:
        return len(self._lines) + len(self._open)

    def say(
        self, t: float, severity: Severity, kind: str, text: str, *, same: str = "", engine: str = "", session: str = "",
        request: str = "",
    ) -> None:  # fmt: skip
        """``same``: events of one kind and engine with the same word here are one line for `DEDUPE_S` from the first; its text is
        the latest's."""
        key = (kind, engine, same or text)
        first, number = self._open.get(key, (0.0, 0))
        line = self._lines.get(number)
        self._shown = None
        if line is not None and t - first < DEDUPE_S:
            self._lines[number] = replace(
                line, last_t=t, text=text, severity=severity, session=session, request=request, n=line.n + 1
            )  # fmt: skip
            return
        self._lines[self._next] = EventLine(self._next, t, severity, kind, text, engine, session, request, 1, t)
        self._open.pop(key, None)
        self._open[key] = (t, self._next)
        self._next += 1
        while len(self._lines) > KEPT:
            self._lines.popitem(last=False)
        while len(self._open) > KEPT:
            self._open.popitem(last=False)

    def lines(self) -> tuple[EventLine, ...]:
        if self._shown is None:
            self._shown = tuple(self._lines.values())
        return self._shown
