"""How far a long study is, and when it will be over: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LINE_S = 30.0


class Pace:
    """Sessions over time. What a resumed study finds done counts to how far it is, not to how fast."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.done = 0
        self._from = 0
        self._clock = clock
        self._since: float | None = None

    def found(self, sessions: int) -> None:
        self.done += sessions

    def advance(self) -> None:
        """One more. The pace counts from the first one on: before it the engine starts."""
        self.done += 1
        if self._since is None:
            self._from, self._since = self.done, self._clock()

    @property
    def rate(self) -> float | None:
        """Sessions a second of this run; None before the first one."""
        spent = 0.0 if self._since is None else self._clock() - self._since
        ran = self.done - self._from
        return ran / spent if ran and spent > 0 else None

    @property
    def left_s(self) -> float | None:
        return None if self.rate is None else max(0, self.total - self.done) / self.rate

    def __str__(self) -> str:
        rate, left = self.rate, self.left_s
        speed = "" if rate is None or left is None else f", {rate:.1f}/s, {_time(left)} left"
        return f"{self.done} of {self.total} sessions{speed}"


class Progress:
    def __init__(self, title: str, pace: Pace, show: Callable[[str], None], say: Callable[[str], None]) -> None:
        self.pace = pace
        self.say = say
        self._title = title
        self._show = show

    def found(self, sessions: int) -> None:
        self.pace.found(sessions)

    def advance(self) -> None:
        self.pace.advance()
        self._show(f"{self._title}: {self.pace}")


@contextmanager
def progress_of(title: str, total: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """A bar where ``stream`` (stderr) is a terminal, else a line every `LINE_S` seconds and one at the end."""
    out = stream or sys.stderr
    pace = Pace(total)
    if not out.isatty():
        last = -LINE_S

        def line(text: str) -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_S or pace.done >= total:
                last = time.monotonic()
                print(text, file=out, flush=True)

        yield Progress(title, pace, line, lambda text: print(text, file=out, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("{task.description}"), BarColumn(), console=Console(file=out)) as bar:
        task = bar.add_task(f"{title}: starting the engine", total=total)
        yield Progress(
            title, pace, lambda text: bar.update(task, description=text, completed=pace.done), lambda text: bar.console.print(text)
        )


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
