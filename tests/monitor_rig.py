"""A scripted vLLM server with several engines for the monitor's tests, and a model with a clock that is set by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentguard.events import EngineMetrics, EngineReady, StepFinished, StepStarted
from agentguard.monitor.model import Model
from agentguard.monitor.snapshot import EngineRow, Snapshot
from agentguard.telemetry import exposition

GATEWAY, SERVER = "http://gateway:8484", "http://server:8000"
TTFT = (0.1, 0.2, 0.5, 1.0)


class Clock:
    def __init__(self, t: float = 1000.0) -> None:
        self.t = t

    def __call__(self) -> float:
        return self.t


@dataclass
class Engine:
    """One engine's counters since its start."""

    running: float = 0
    waiting: float = 0
    kv: float = 0.0
    tokens_in: float = 0
    cached: float = 0
    tokens_out: float = 0
    preemptions: float = 0
    drafts: float = 0
    drafted: float = 0
    accepted_at: list[float] = field(default_factory=list)
    finished: dict[str, float] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=lambda: [0.0] * (len(TTFT) + 1))
    """Requests a bucket, not cumulative; the last one has no bound."""


def text(engines: dict[str, Engine], *, model: str = "m", rejections: float | None = None) -> str:
    """The server's /metrics, with families beside those that are read."""
    lines: list[str] = []

    def family(name: str, kind: str, samples: list[tuple[str, dict[str, str], float]]) -> None:
        told = name + ("_total" if kind == "counter" else "")  # as prometheus_client writes it
        lines.append(f"# HELP {told} {name}.")
        lines.append(f"# TYPE {told} {kind}")
        for suffix, labels, value in samples:
            inside = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
            lines.append(f"{name}{suffix}{{{inside}}} {value}")

    def each(name: str, kind: str, attribute: str) -> None:
        suffix = "_total" if kind == "counter" else ""
        family(name, kind, [(suffix, labels(e), getattr(engines[e], attribute)) for e in engines])

    def labels(engine: str, **more: str) -> dict[str, str]:
        return {"engine": engine, "model_name": model, **more}

    each("vllm:num_requests_running", "gauge", "running")
    each("vllm:num_requests_waiting", "gauge", "waiting")
    reasons = [("", labels(e, reason=r), 7.0) for e in engines for r in ("capacity", "deferred")]
    family("vllm:num_requests_waiting_by_reason", "gauge", reasons)
    each("vllm:kv_cache_usage_perc", "gauge", "kv")
    each("vllm:prompt_tokens", "counter", "tokens_in")
    sources = [("_total", labels(e, source=s), v) for e, one in engines.items() for s, v in
               (("local_compute", one.tokens_in - one.cached), ("local_cache_hit", one.cached))]  # fmt: skip
    family("vllm:prompt_tokens_by_source", "counter", sources)
    each("vllm:generation_tokens", "counter", "tokens_out")
    each("vllm:num_preemptions", "counter", "preemptions")
    ends = [("_total", labels(e, finished_reason=r), n) for e, one in engines.items() for r, n in one.finished.items()]
    family("vllm:request_success", "counter", ends)
    # a histogram, although its name ends like a counter
    iterations = [("_bucket", labels(e, le="+Inf"), 99.0) for e in engines] + [("_sum", labels(e), 1e6) for e in engines]
    family("vllm:iteration_tokens_total", "histogram", iterations)
    buckets = []
    for e, one in engines.items():
        through = 0.0
        for bound, n in zip((*map(str, TTFT), "+Inf"), one.ttft, strict=True):
            through += n
            buckets.append(("_bucket", labels(e, le=bound), through))
        buckets += [("_count", labels(e), through), ("_sum", labels(e), through)]
    family("vllm:time_to_first_token_seconds", "histogram", buckets)
    if any(one.drafts for one in engines.values()):
        each("vllm:spec_decode_num_drafts", "counter", "drafts")
        each("vllm:spec_decode_num_draft_tokens", "counter", "drafted")
        accepted = [("_total", labels(e), sum(one.accepted_at)) for e, one in engines.items()]
        family("vllm:spec_decode_num_accepted_tokens", "counter", accepted)
        places = [("_total", labels(e, position=str(i)), n) for e, one in engines.items() for i, n in enumerate(one.accepted_at)]
        family("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", places)
    if rejections is not None:
        family("vllm:admission_rejections", "counter", [("_total", {"model_name": model, "reason": "queue_full"}, rejections)])
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Watched:
    """A model that is given scrapes and events at times set by hand."""

    def __init__(
        self, *sources: str, window_s: float = 60.0, interval_s: float = 1.0, sessions: int = 1000
    ) -> None:  # fmt: skip
        self.clock = Clock()
        self.model = Model(clock=self.clock, window_s=window_s, interval_s=interval_s, sessions_kept=sessions)
        for name in sources or (GATEWAY, SERVER):
            self.model.add_source(name, "gateway" if name == GATEWAY else "metrics", can_act=name == GATEWAY)

    def scrape(self, text: str, source: str = SERVER) -> None:
        for event in exposition.read(text, self.clock.t):
            self.model.take(source, event)

    def failed(self, source: str = GATEWAY) -> None:
        self.model.take(source, EngineMetrics(t=self.clock.t, engine="", error="it is gone (ConnectError)"))

    def after(self, seconds: float) -> Snapshot:
        """Both sources stay silent for so long."""
        self.clock.t += seconds
        return self.model.snapshot()

    def row(self, key: str) -> EngineRow:
        return next(row for row in self.model.snapshot().engines if row.key == key)


def ready(model: str = "qwen3-8b", window: int = 1000) -> EngineReady:
    return EngineReady(t=0, engine="engine-0", model=model, max_model_len=window)


def started(
    session: str = "s", step: int = 1, *, prompt: int = 100, cap: int = 400, bound_by: str = "fraction", request: str = ""
) -> StepStarted:  # fmt: skip
    return StepStarted(
        t=0, session=session, step=step, request=request or f"{session}-{step}", model="qwen3-8b", rule="strict",
        prompt_tokens=prompt, budget=500, think_cap=cap, bound_by=bound_by, arm="strict", workload="w",
    )  # fmt: skip


def finished(session: str = "s", step: int = 1, *, think: int = 60, answer: int = 30, **more: object) -> StepFinished:
    given: dict[str, object] = {
        "t": 0, "session": session, "step": step, "request": f"{session}-{step}", "model": "qwen3-8b", "rule": "strict",
        "prompt_tokens": 100, "tokens": think + answer + 2, "think_tokens": think, "answer_tokens": answer, "marker_tokens": 2,
        "finish_reason": "stop", "arm": "strict", "workload": "w", "ttlt_s": 1.0,
    }  # fmt: skip
    return StepFinished(**(given | more))  # type: ignore[arg-type]
