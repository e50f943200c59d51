"""The monitor's clock: UNIX seconds that only go on."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady(wall: Callable[[], float] = time.time, passed: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """The wall clock of now and what passes from now on. A wall clock that is set back in between (NTP, an operator) would leave
    windows, ages and outages that end before they begin."""
    start = wall() - passed()
    return lambda: start + passed()
