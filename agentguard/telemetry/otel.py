"""OpenTelemetry, off unless it is configured: a span and two metrics a step, with the names of the GenAI conventions.

Configured as every program is: OTEL_EXPORTER_OTLP_ENDPOINT (or the one of traces or metrics alone), OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_SDK_DISABLED. The names are those of the conventions, which are still in development, kept as strings
of our own, as the packages mark their constants deprecated. Spans hold counts, ids and reasons, and no text of prompts, answers or
errors. A trace that the client began (`traceparent`) goes on in our span.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from agentguard import __version__
from agentguard.economics.cells import CANCELLED
from agentguard.events import CompactionAdvised, Event, StepFinished, StepStarted, TraceClosed

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

logger = logging.getLogger(__name__)
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")

EXPORT_TIMEOUT_S: Final = 2.0
"""Unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise. With the packages' ten seconds Ctrl-C took 13 s where no collector was."""

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
CONVERSATION: Final = "gen_ai.conversation.id"
AGENT: Final = "gen_ai.agent.id"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105
ERROR_TYPE: Final = "error.type"
TOKEN_USAGE: Final = "gen_ai.client.token.usage"  # noqa: S105
DURATION: Final = "gen_ai.client.operation.duration"
TOKEN_BUCKETS: Final = tuple(4.0**power for power in range(14))
DURATION_BUCKETS: Final = tuple(0.01 * 2**power for power in range(14))
"""Bucket bounds as the conventions advise them."""


def configured(environ: Mapping[str, str] = os.environ) -> bool:
    """Does the environment name a collector?"""
    return environ.get("OTEL_SDK_DISABLED", "").lower() != "true" and any(environ.get(name) for name in ENDPOINTS)


class Spans:
    """A sink of the hub. ``provider``: whose models these are, for `gen_ai.provider.name`."""

    def __init__(self, tracer: Tracer, meter: Meter, provider: str) -> None:
        self._tracer = tracer
        self._provider = provider
        self._spans: dict[str, Span] = {}
        self._usage = meter.create_histogram(
            TOKEN_USAGE, "{token}", "Tokens of a step.", explicit_bucket_boundaries_advisory=TOKEN_BUCKETS
        )
        self._duration = meter.create_histogram(
            DURATION, "s", "Time to the last token of a step.", explicit_bucket_boundaries_advisory=DURATION_BUCKETS
        )

    def observe(self, event: Event) -> None:
        """A sink of the hub; returns at once."""
        if isinstance(event, StepStarted):
            self._started(event)
        elif isinstance(event, StepFinished):
            self._finished(event)
        elif isinstance(event, TraceClosed) and (span := self._spans.get(event.request)) is not None:
            told = {"reason": str(event.reason), "how": event.how, "think_tokens": event.think_tokens, "cap_tokens": event.cap}
            span.add_event("agentguard.trace_closed", _ours(told), _nanoseconds(event.t))
        elif isinstance(event, CompactionAdvised) and (span := self._spans.get(event.request)) is not None:
            told = {"context_tokens": event.context_tokens, "window_tokens": event.window}
            span.add_event("agentguard.compaction_advised", _ours(told), _nanoseconds(event.t))

    def _started(self, event: StepStarted) -> None:
        from opentelemetry.trace import SpanKind

        attributes: dict[str, Any] = {
            OPERATION: "chat", PROVIDER: self._provider, REQUEST_MODEL: event.model, CONVERSATION: event.session,
            **({AGENT: event.agent} if event.agent else {}),
            **_ours({
                "step": event.step, "rule": event.rule, "arm": event.arm, "workload": event.workload, "budget_tokens": event.budget,
                "think_cap_tokens": event.think_cap, "bound_by": event.bound_by,
            }),
        }  # fmt: skip
        self._spans[event.request] = self._tracer.start_span(
            f"chat {event.model}", kind=SpanKind.CLIENT, attributes=attributes, start_time=_nanoseconds(event.t)
        )

    def _finished(self, event: StepFinished) -> None:
        from opentelemetry.trace import Status, StatusCode

        if event.undone:  # a span that is never ended is never sent
            self._spans.pop(event.request, None)
            return
        common = {OPERATION: "chat", PROVIDER: self._provider, REQUEST_MODEL: event.model, RESPONSE_MODEL: event.model}
        failed = {ERROR_TYPE: _error_type(event.error)} if event.error else {}
        self._duration.record(event.ttlt_s, common | failed)
        self._usage.record(event.prompt_tokens, common | {TOKEN_TYPE: "input"})
        self._usage.record(event.tokens, common | {TOKEN_TYPE: "output"})  # reasoning is a part of it, and not counted twice
        if (span := self._spans.pop(event.request, None)) is None:
            return
        span.set_attributes(
            {
                RESPONSE_MODEL: event.model, RESPONSE_ID: event.request, INPUT_TOKENS: event.prompt_tokens,
                OUTPUT_TOKENS: event.tokens, REASONING_TOKENS: event.think_tokens, **failed,
                **({FINISH_REASONS: [event.finish_reason]} if event.finish_reason else {}),
                **_ours({
                    "closed": event.closed, "continued": event.continued, "empty_answer": event.empty_answer,
                    "estimated": event.estimated, "rounds": event.rounds, "drafted_tokens": event.drafted,
                    "accepted_tokens": event.accepted,
                }),
            }
        )  # fmt: skip
        if event.error and event.error != CANCELLED:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(event.t))


def _ours(values: Mapping[str, Any]) -> dict[str, Any]:
    """Under our own prefix, without what is not known or not there."""
    return {f"agentguard.{name}": value for name, value in values.items() if value is not None and value != ""}


def _error_type(error: str) -> str:
    """A few words for it; the text of an error may quote a request."""
    return "cancelled" if error == CANCELLED else "internal" if error.startswith("internal:") else "engine"


def _nanoseconds(t: float) -> int:
    return int(t * 1e9)


@contextlib.contextmanager
def spans(provider: str, tracing: TracerProvider, metering: MeterProvider) -> Iterator[Spans]:
    """A sink on these providers; what still runs at the end is ended there."""
    sink = Spans(tracing.get_tracer("agentguard", __version__), metering.get_meter("agentguard", __version__), provider)
    try:
        yield sink
    finally:
        for span in sink._spans.values():
            span.end()


@contextlib.contextmanager
def exporting(provider: str) -> Iterator[Spans | None]:
    """The sink that sends to the configured collector, over HTTP; None where nothing is configured, or the packages are missing,
    which is said once. The end sends what is left, and blocks for some seconds where the collector does not answer."""
    if not configured():
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider as SdkMeters
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkTracers
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("opentelemetry_missing", extra={"missing": error.name, "remedy": "pip install 'agentguard-vllm[otel]'"})
        yield None
        return
    named = {"service.version": __version__} | ({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "agentguard"})
    resource = Resource.create(named)
    tracing = SdkTracers(resource=resource)
    timeout = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else EXPORT_TIMEOUT_S
    tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout)))
    metering = SdkMeters(resource=resource, metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter(timeout=timeout))])
    try:
        with spans(provider, tracing, metering) as sink:
            yield sink
    finally:
        tracing.shutdown()
        metering.shutdown(timeout_millis=5000)


class TraceContext:
    """Pure-ASGI middleware: the client's `traceparent` is the parent of what happens in its request."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from opentelemetry import context
        from opentelemetry.propagate import extract

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = context.attach(extract(carrier))
        try:
            await self.app(scope, receive, send)
        finally:
            context.detach(token)
