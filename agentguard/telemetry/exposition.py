"""vLLM's `/metrics` read with Prometheus' own parser: the families a monitor shows, one `EngineMetrics` an engine label.

Names are those of vllm 0.33 (`vllm/v1/metrics/loggers.py`, `vllm/v1/spec_decode/metrics.py`); they are matched whole, so that
`vllm:prompt_tokens` is not mistaken for `vllm:prompt_tokens_by_source`. Lines of other families are left out before parsing:
a full exposition has some 1,000 lines, of which these are 150.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agentguard.events import EngineMetrics

_GAUGES: dict[str, tuple[str, Callable[[float, float], float]]] = {
    "vllm:num_requests_running": ("running", lambda a, b: a + b),
    "vllm:num_requests_waiting": ("waiting", lambda a, b: a + b),
    "vllm:kv_cache_usage_perc": ("kv_use", max),  # 1 is 100 %
}
_COUNTERS = {
    "vllm:prompt_tokens": "tokens_in",
    "vllm:generation_tokens": "tokens_out",
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits": "prefix_hits",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:admission_rejections": "rejections",  # has no engine label
}
_LABELLED = {
    "vllm:request_success": ("finished", "finished_reason"),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("accepted_at", "position"),
    "vllm:prompt_tokens_by_source": ("tokens_in_from", "source"),
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "ttft_s",
    "vllm:request_time_per_output_token_seconds": "tpot_s",
    "vllm:e2e_request_latency_seconds": "e2e_s",
    "vllm:request_queue_time_seconds": "queue_s",
}
LARGEST = 1e18
"""A count or gauge beyond is none, and NaN neither; sums of these stay finite."""
ENGINES = 256
"""Engines of one server; more are a label that was not meant as one."""
FAMILIES = frozenset((*_GAUGES, *_COUNTERS, *_LABELLED, *_HISTOGRAMS))
_NAME = re.compile(r"(?:# (?:HELP|TYPE) )?([a-zA-Z_:][a-zA-Z0-9_:]*)")
_SUFFIX = re.compile(r"_(?:total|bucket|count|sum|created)$")


@dataclass(slots=True)
class _Engine:
    model: str = ""
    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


def read(text: str, t: float) -> list[EngineMetrics]:
    """What ``text`` says, engines in the order of their labels. Raises ValueError for what is no exposition.

    Samples of several models on one engine are one: counts are summed, the KV cache's use is the fullest one's.
    """
    engines: dict[str, _Engine] = {}
    for family in text_string_to_metric_families("".join(_wanted(text))):
        for sample in family.samples:
            if abs(sample.value) <= LARGEST:
                if len(engines) > ENGINES:
                    raise ValueError(f"more than {ENGINES} values of the label 'engine'; is this one server?")
                _take(engines.setdefault(sample.labels.get("engine", ""), _Engine()), family.name, sample)
    return [
        EngineMetrics(
            t=t, engine=label, model=one.model, gauges=one.gauges, counters=one.counters,
            buckets={name: _pairs(counts) for name, counts in one.buckets.items()},
        )
        for label, one in sorted(engines.items())
    ]  # fmt: skip


def _wanted(text: str) -> Iterator[str]:
    """Lines of the families read here, with their types."""
    for line in text.splitlines(keepends=True):
        found = _NAME.match(line)
        if found is None:
            if line.strip() and not line.startswith("#"):
                raise ValueError(f"line {line[:60]!r} is no sample of an exposition")
            continue
        name = found[1]
        if name in FAMILIES or _SUFFIX.sub("", name) in FAMILIES:
            yield line if line.endswith("\n") else line + "\n"


def _take(one: _Engine, family: str, sample: Sample) -> None:
    labels, value = sample.labels, sample.value
    one.model = one.model or labels.get("model_name", "")
    if family in _GAUGES:
        name, together = _GAUGES[family]
        one.gauges[name] = together(one.gauges[name], value) if name in one.gauges else value
    elif family in _HISTOGRAMS and sample.name.endswith("_bucket"):
        counts = one.buckets.setdefault(_HISTOGRAMS[family], {})
        bound = float(labels.get("le", ""))
        counts[bound] = counts.get(bound, 0.0) + value
    elif sample.name.endswith("_total") and (family in _COUNTERS or family in _LABELLED):
        name = _COUNTERS[family] if family in _COUNTERS else _labelled(family, labels)
        one.counters[name] = one.counters.get(name, 0.0) + value


def _labelled(family: str, labels: dict[str, str]) -> str:
    name, label = _LABELLED[family]
    return f"{name}/{labels.get(label, '')}"


def _pairs(counts: dict[float, float]) -> list[tuple[float | None, float]]:
    return [(None if math.isinf(bound) else bound, count) for bound, count in sorted(counts.items())]
