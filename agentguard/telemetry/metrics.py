"""What the guard did, for Prometheus: a sink of the hub that counts events. The economics beside it are in `telemetry.prometheus`.

Labels are bounded: they hold names of this program and never a request, a session or a model. The registry is injected, so that a
process may hold several gateways. What cannot be known is not exported: tokens a close has saved would need the trace that was not
written, and the score of loops is the detector's own affair until it closes a trace, which is counted.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agentguard import __version__
from agentguard.economics.cells import CANCELLED
from agentguard.events import (
    CompactionAdvised,
    DraftUpdated,
    Event,
    RuleSwitched,
    SessionAlarm,
    StepFinished,
    StepStarted,
    TraceClosed,
    VerificationStep,
)

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
"""Bucket bounds of shares, and of the time to the last token: a step of a reasoning model takes up to minutes."""


class Metrics:
    """Counts events; `observe` is the sink, `render` the exposition text."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = mine = registry or CollectorRegistry()
        self._begun: dict[str, StepStarted] = {}
        self._build = Gauge("agentguard_build_info", "1, with the version that runs.", ["version"], registry=mine)
        self._build.labels(__version__).set(1)
        self._running = Gauge("agentguard_requests_running", "Steps that run now.", registry=mine)
        self._requests = Counter(
            "agentguard_requests", "Steps that ended: answered, closed (a trace, and an answer came), empty, failed, cancelled.",
            ["outcome"], registry=mine,
        )  # fmt: skip
        self._interventions = Counter(
            "agentguard_interventions",
            "Traces closed by force: why, and by the engine or how the stream went on.",
            ["reason", "how"],
            registry=mine,
        )
        self._errors = Counter(
            "agentguard_errors", "Steps that failed: in the engine, or in the gateway itself.", ["stage"], registry=mine
        )
        self._reasoning = Counter("agentguard_reasoning_tokens", "Tokens of think blocks.", registry=mine)
        self._answer = Counter("agentguard_answer_tokens", "Tokens of answers and tool calls.", registry=mine)
        self._prompt = Counter("agentguard_prompt_tokens", "Tokens of prompts.", registry=mine)
        self._remaining = Histogram(
            "agentguard_budget_remaining_ratio", "Share of a step's budget that was left at its end.", buckets=SHARES, registry=mine
        )
        self._duration = Histogram(
            "agentguard_request_duration_seconds", "Time to the last token of a step.", buckets=SECONDS, registry=mine
        )
        self._acceptance = Histogram(
            "agentguard_draft_acceptance_ratio", "Accepted over drafted tokens of a step, where the engine counts them.",
            buckets=SHARES, registry=mine,
        )  # fmt: skip
        self._updates = Counter("agentguard_drafter_updates", "New weights of the draft model (TTS).", registry=mine)
        self._switches = Counter("agentguard_rule_switches", "Arms switched to strict or back.", ["to"], registry=mine)
        self._alarms = Counter("agentguard_session_alarms", "Sessions near a limit or at it.", ["meter", "stopped"], registry=mine)
        self._compactions = Counter("agentguard_compactions_advised", "Steps whose client was told to compact.", registry=mine)
        self._lost = Counter("agentguard_telemetry_frames_lost", "Frames of the engine that never arrived.", registry=mine)

    def observe(self, event: Event) -> None:
        """A sink of the hub; returns at once."""
        if isinstance(event, VerificationStep):
            if event.lost:
                self._lost.inc(event.lost)
        elif isinstance(event, StepStarted):
            self._begun[event.request] = event
            self._running.set(len(self._begun))
        elif isinstance(event, StepFinished):
            self._finished(event)
        elif isinstance(event, TraceClosed):
            self._interventions.labels(str(event.reason), event.how).inc()
        elif isinstance(event, DraftUpdated):
            self._updates.inc()
        elif isinstance(event, RuleSwitched):
            self._switches.labels("relaxed" if event.on else "strict").inc()
        elif isinstance(event, SessionAlarm):
            self._alarms.labels(event.meter, str(event.stopped).lower()).inc()
        elif isinstance(event, CompactionAdvised):
            self._compactions.inc()

    def _finished(self, event: StepFinished) -> None:
        begun = self._begun.pop(event.request, None)
        self._running.set(len(self._begun))
        if event.undone:
            return
        self._requests.labels(outcome(event)).inc()
        self._reasoning.inc(event.think_tokens)
        self._answer.inc(event.answer_tokens)
        self._prompt.inc(event.prompt_tokens)
        if event.error:
            if event.error != CANCELLED:
                self._errors.labels("gateway" if event.error.startswith("internal:") else "engine").inc()
            return  # a step that broke off says nothing about lengths and times
        self._duration.observe(event.ttlt_s)
        if begun is not None and begun.budget > 0:
            self._remaining.observe(max(0.0, 1 - event.tokens / begun.budget))
        if event.drafted:
            self._acceptance.observe((event.accepted or 0) / event.drafted)

    def render(self) -> bytes:
        """The exposition text of this moment."""
        return generate_latest(self.registry)


def outcome(event: StepFinished) -> str:
    """answered, closed, empty, failed or cancelled."""
    if event.error:
        return "cancelled" if event.error == CANCELLED else "failed"
    if event.empty_answer:
        return "empty"
    return "closed" if event.closed else "answered"
