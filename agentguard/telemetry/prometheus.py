"""The economics for Prometheus. Labels are bounded: classes by `agentguard.economics.classes.LIMIT`, arms by the recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentguard.economics.ledger import Ledger, Row
from agentguard.economics.ratios import Ratio

CONTENT_TYPE = CONTENT_TYPE_LATEST
LABELS = ("workload", "arm")
_RATIOS = {"tokens": "lambda", "think": "think_lambda", "rounds": "rounds_ratio", "ttlt": "ttlt_ratio"}


def render(ledger: Ledger) -> bytes:
    """The exposition text of this moment."""
    registry = CollectorRegistry()
    registry.register(_Economics(ledger))
    return generate_latest(registry)


class _Economics(Collector):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        rows = list(self._ledger.rows())
        yield _counter("steps", "Steps counted to the arm.", rows, lambda r: r.steps)
        yield _counter("sessions", "Sessions counted to the arm.", rows, lambda r: r.sessions)
        yield _counter("censored_steps", "Steps whose trace or answer a limit ended.", rows, lambda r: r.censored)
        yield _gauge("arm_on", "1 while new requests of the class run under the arm's rule.", rows, lambda r: float(r.on))
        yield _gauge("accepted_length", "Draft tokens accepted in a round.", rows, lambda r: r.accepted_length)
        yield _gauge("strict_accepted_length", "Had strict judged the arm's drafts.", rows, lambda r: r.strict_accepted_length)
        yield _gauge("gain", "(accepted length + 1) / (strict accepted length + 1).", rows, lambda r: r.gain)
        for quantity, name in _RATIOS.items():
            for end in ("value", "low", "high"):
                suffix = "" if end == "value" else f"_{end}"
                text = f"Ratio to strict of {quantity} a step" + (f", 95 % interval, {end} end." if suffix else ".")
                yield _gauge(name + suffix, text, rows, lambda r, q=quantity, e=end: _end(r.ratios[q], e))  # type: ignore[misc]


def _counter(name: str, text: str, rows: list[Row], value: Callable[[Row], int]) -> CounterMetricFamily:
    counter = CounterMetricFamily(f"agentguard_{name}", text, labels=LABELS)
    for row in rows:
        counter.add_metric([row.workload, row.arm], value(row))
    return counter


def _gauge(name: str, text: str, rows: list[Row], value: Callable[[Row], float | None]) -> GaugeMetricFamily:
    """What is not known has no sample; it is not 0."""
    gauge = GaugeMetricFamily(f"agentguard_{name}", text, labels=LABELS)
    for row in rows:
        if (known := value(row)) is not None:
            gauge.add_metric([row.workload, row.arm], known)
    return gauge


def _end(ratio: Ratio | None, end: str) -> float | None:
    value = getattr(ratio, end) if ratio is not None else None
    return value if value is not None and math.isfinite(value) else None
