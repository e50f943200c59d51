"""Logs, metrics and traces of a gateway in front of a scripted server: names, ids, and no text of anybody's prompt."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentguard import logs
from agentguard.economics.cells import CANCELLED
from agentguard.economics.ledger import ledger_of
from agentguard.errors import ConfigError, EngineDiedError, EngineRequestError, loggable
from agentguard.events import DraftUpdated, RuleSwitched, SessionAlarm, StepFinished, StepStarted, TraceClosed, VerificationStep
from agentguard.gateway.server import bind, serve_upstream
from agentguard.policy import Policy
from agentguard.tasks import owned_task
from agentguard.telemetry import otel, prometheus
from agentguard.telemetry.metrics import Metrics, outcome
from tests.scripted import END, STOP, USAGE, A, B, Script, chunk, upstream

SECRET = "the-words-of-the-prompt"
ANSWERS = (chunk([A, A, END, B], reasoning="aa", content="b"), chunk([STOP], finish="stop"), USAGE)
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}]}
ROOT = Path(__file__).parents[1]


@asynccontextmanager
async def gateway(script: Script) -> AsyncIterator[httpx2.AsyncClient]:
    async with upstream(script) as server, serve_upstream(None, server) as (_, url), httpx2.AsyncClient(base_url=url) as client:
        yield client


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# logs


async def test_a_lines_ids_are_those_of_its_request_and_no_text_is_in_it() -> None:
    """A server breaks off in the middle and quotes the request: the log tells which request it was, and not its words."""
    quoting = "data: " + json.dumps({"error": {"message": f"cannot go on with {SECRET}", "code": 500}}) + "\n\n"
    stream = io.StringIO()
    with logs.to(stream, "json", "debug"):
        async with gateway(Script(chat=[chunk([A], reasoning="a"), quoting])) as client:
            for session in ("one", "two"):
                headers = {"x-session-id": session}
                reply = await client.post("/v1/chat/completions", json=ASK | {"stream": True}, headers=headers)
                assert SECRET in reply.text, "the client is told what the server said"
                request = reply.headers["x-agentguard-request"]
                (line,) = [line for line in lines_of(stream) if line.get("request") == request]
                assert line["event"] == "stream_failed"
                assert line["session"].endswith(session)
                assert (line["level"], line["logger"], line["error"]) == (
                    "warning",
                    "agentguard.gateway.app",
                    "the engine answered 500",
                )
                assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*Z", line["timestamp"])
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize(
    ("script", "body", "status"),
    [
        (Script(status=400, message=f"refused: {SECRET}"), ASK, 400),
        (Script(status=500, message=f"broken: {SECRET}"), ASK, 500),
        (Script(chat=list(ANSWERS)), {"messages": SECRET}, 400),
        (Script(chat=list(ANSWERS)), ASK | {"vllm_xargs": {"ag_rule": SECRET}}, 400),
        (Script(chat=list(ANSWERS)), ASK, 200),
    ],
)
async def test_no_line_holds_text_of_a_request_or_an_answer(script: Script, body: dict[str, Any], status: int) -> None:
    stream = io.StringIO()
    with logs.to(stream, "json", "debug"):
        async with gateway(script) as client:
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == status
    assert SECRET not in stream.getvalue()


def test_the_console_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("agentguard.x")
    for style in ("console", "json"):
        stream = io.StringIO()
        with logs.to(stream, style), logs.bound(session="s"):  # type: ignore[arg-type]
            logger.info("thing_happened", extra={"tokens": 3})
            logging.getLogger("other").info("chatter of another library")
            logger.debug("below the level")
        text = stream.getvalue()
        assert text.count("\n") == 1
        for part in ("thing_happened", "tokens", "3", "session", "info", "agentguard.x"):
            assert part in text
    logger.warning("nobody listens")
    assert capsys.readouterr() == ("", "")


def test_the_library_configures_nothing_and_prints_nothing() -> None:
    """In somebody else's program our lines go where that program sends them: nowhere, without a word, until it says so."""
    code = (
        "import logging, sys, agentguard.middleware, agentguard.step\n"
        "assert 'structlog' not in sys.modules\n"
        "assert logging.getLogger().handlers == []\n"
        "logging.getLogger('agentguard.middleware').warning('x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_log_is_put_back_as_it_was() -> None:
    root, ours = logging.getLogger(), logging.getLogger("agentguard")
    before = (list(root.handlers), root.level, ours.level)
    with logs.to(io.StringIO(), "json", "debug"):
        assert ours.level == logging.DEBUG
    assert (list(root.handlers), root.level, ours.level) == before


def test_errors_are_told_without_what_they_quote() -> None:
    assert loggable(EngineRequestError(422, SECRET)) == "the engine answered 422"
    assert loggable(ConfigError("messages", SECRET, "say it otherwise")) == "messages is refused"
    assert loggable(EngineDiedError("it is gone")) == "it is gone"
    with pytest.raises(KeyError) as caught:
        raise KeyError(SECRET)
    assert re.fullmatch(r"KeyError at .*test_observability\.py:\d+", loggable(caught.value))


# metrics


def begun(request: str = "r", budget: int = 100) -> StepStarted:
    return StepStarted(
        t=1.0, session="c/s", step=1, request=request, model="m", rule="strict", prompt_tokens=5, budget=budget, think_cap=80,
        bound_by="fraction", workload="m/chat/first", agent="helper",
    )  # fmt: skip


def ended(request: str = "r", **more: Any) -> StepFinished:
    base: dict[str, Any] = {
        "t": 3.0, "session": "c/s", "step": 1, "request": request, "model": "m", "rule": "strict", "prompt_tokens": 5, "tokens": 40,
        "think_tokens": 30, "answer_tokens": 8, "marker_tokens": 2, "rounds": 10, "drafted": 60, "accepted": 30, "ttlt_s": 2.0,
        "finish_reason": "stop",
    }  # fmt: skip
    return StepFinished(**base | more)


def closed() -> TraceClosed:
    return TraceClosed(
        t=2.0, session="c/s", step=1, request="r", reason="budget", think_tokens=30, cap=80, how="engine", detail="x"
    )


def samples(metrics: Metrics) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "le")
            if not sample.name.endswith(("_bucket", "_created")):
                found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_events_are_counted() -> None:
    metrics = Metrics()
    for event in (
        begun(), closed(), ended(closed="budget"), begun("x"), ended("x", error=CANCELLED), begun("y"),
        ended("y", error="internal: KeyError()"), begun("z"), ended("z", error="the engine answered 500"), begun("running"),
        ended("e", empty_answer=True, drafted=None, accepted=None),
        RuleSwitched(t=1.0, workload="w", arm="a", on=False, quantity="rounds", reason="", evidence="w", ratio=1.2, low=1.1,
                     high=1.3, sessions=9, control_sessions=9, baseline="live"),
        SessionAlarm(t=1.0, session="s", step=1, meter="tokens", value=9, limit=10, stopped=False),
        DraftUpdated(t=1.0, engine="e", version=1, epoch=1, rounds=5, rows=5, loss=1.0, train_ms=1.0, publish_ms=1.0, live=0.5,
                     frozen=0.4, gain=1.1, break_even=1.0),
        VerificationStep(t=1.0, engine="e", step=3, requests=[], lost=2),
    ):  # fmt: skip
        metrics.observe(event)
    found = samples(metrics)
    assert {k: v for k, v in found.items() if k.startswith("agentguard_requests_total")} == {
        "agentguard_requests_total{outcome=closed}": 1, "agentguard_requests_total{outcome=cancelled}": 1,
        "agentguard_requests_total{outcome=failed}": 2, "agentguard_requests_total{outcome=empty}": 1,
    }  # fmt: skip
    assert found["agentguard_interventions_total{how=engine,reason=budget}"] == 1
    assert found["agentguard_errors_total{stage=gateway}"] == found["agentguard_errors_total{stage=engine}"] == 1
    assert found["agentguard_reasoning_tokens_total"] == 5 * 30
    assert found["agentguard_requests_running"] == 1
    assert (found["agentguard_draft_acceptance_ratio_count"], found["agentguard_draft_acceptance_ratio_sum"]) == (1, 0.5)
    assert (found["agentguard_budget_remaining_ratio_count"], found["agentguard_budget_remaining_ratio_sum"]) == (1, 0.6)
    assert found["agentguard_request_duration_seconds_count"] == 2, "steps that broke off have no time to a last token"
    assert found["agentguard_rule_switches_total{to=strict}"] == 1
    assert found["agentguard_session_alarms_total{meter=tokens,stopped=false}"] == 1
    assert (found["agentguard_drafter_updates_total"], found["agentguard_telemetry_frames_lost_total"]) == (1, 2)
    assert not any("c/s" in name or "helper" in name for name in found), "no session, no request, no agent is a label"


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "answered"),
        ({"closed": "loop"}, "closed"),
        ({"closed": "loop", "empty_answer": True}, "empty"),
        ({"error": "x"}, "failed"),
    ],
)
def test_outcomes(more: dict[str, Any], name: str) -> None:
    assert outcome(ended(**more)) == name


async def test_the_gateway_exports_both_and_counts_what_it_served() -> None:
    async with gateway(Script(chat=list(ANSWERS))) as client:
        await client.post("/v1/chat/completions", json=ASK)
        text = (await client.get("/metrics")).text
    named = [family.name for family in text_string_to_metric_families(text)]
    families = set(named)
    assert len(families) == len(named), "the two halves have no name in common"
    assert {"agentguard_steps", "agentguard_requests", "agentguard_reasoning_tokens", "agentguard_build_info"} <= families
    assert 'agentguard_requests_total{outcome="answered"} 1.0' in text


def exported() -> set[str]:
    """Every sample name the gateway can export, labels aside."""
    names = {f"{name}" for family in Metrics().registry.collect() for name in _names(family.name, family.type)}
    empty = prometheus.render(ledger_of(Policy(model="m"), on_event=lambda _: None)).decode()
    for family in text_string_to_metric_families(empty):
        names |= set(_names(family.name, family.type))
    return names


def _names(name: str, kind: str) -> list[str]:
    if kind == "counter":
        return [f"{name}_total"]
    return [f"{name}_{end}" for end in ("bucket", "sum", "count")] if kind == "histogram" else [name]


def test_the_dashboard_asks_for_what_is_exported_and_for_all_of_it() -> None:
    board = json.loads((ROOT / "recipes" / "grafana" / "agentguard.json").read_text())
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    texts += [one["query"]["query"] for one in board["templating"]["list"] if isinstance(one["query"], dict)]
    asked = set(re.findall(r"agentguard_\w+", " ".join(texts)))
    assert asked <= exported(), asked - exported()
    # counts and ends of intervals that a panel of their own would not make clearer
    left_out = {name for name in exported() - asked if not name.endswith(("_sum", "_count", "_low", "_high", "_ratio"))}
    assert left_out == {
        "agentguard_steps_total",
        "agentguard_sessions_total",
        "agentguard_censored_steps_total",
        "agentguard_think_lambda",
    }
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_metrics_page_names_every_metric() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for name in exported():
        base = re.sub(r"_(bucket|sum|count|low|high)$", "", name)
        assert f"`{base}" in page, base


# OpenTelemetry


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def recording(exporter: InMemorySpanExporter) -> tuple[TracerProvider, MeterProvider, InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    return tracing, MeterProvider(metric_readers=[reader]), reader


def test_a_step_is_a_span_with_the_conventions_names(spans: InMemorySpanExporter) -> None:
    tracing, metering, reader = recording(spans)
    with otel.spans("vllm", tracing, metering) as sink:
        for event in (begun(), closed(), ended(closed="budget")):
            sink.observe(event)
    (span,) = spans.get_finished_spans()
    assert (span.name, span.kind, span.start_time, span.end_time) == ("chat m", SpanKind.CLIENT, 1_000_000_000, 3_000_000_000)
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "m", "gen_ai.response.model": "m",
        "gen_ai.response.id": "r", "gen_ai.response.finish_reasons": ("stop",), "gen_ai.conversation.id": "c/s",
        "gen_ai.agent.id": "helper", "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 40,
        "gen_ai.usage.reasoning.output_tokens": 30, "agentguard.step": 1, "agentguard.rule": "strict",
        "agentguard.workload": "m/chat/first", "agentguard.budget_tokens": 100, "agentguard.think_cap_tokens": 80,
        "agentguard.bound_by": "fraction", "agentguard.closed": "budget", "agentguard.continued": False,
        "agentguard.empty_answer": False, "agentguard.estimated": False, "agentguard.rounds": 10, "agentguard.drafted_tokens": 60,
        "agentguard.accepted_tokens": 30,
    }  # fmt: skip
    (note,) = span.events
    assert (note.name, note.timestamp) == ("agentguard.trace_closed", 2_000_000_000)
    assert dict(note.attributes or {})["agentguard.reason"] == "budget"
    data = reader.get_metrics_data()
    assert data is not None
    points = {
        (metric.name, metric.unit, point.attributes.get("gen_ai.token.type")): point.sum
        for resource in data.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics
        for point in metric.data.data_points
    }  # fmt: skip
    assert points == {
        ("gen_ai.client.token.usage", "{token}", "input"): 5, ("gen_ai.client.token.usage", "{token}", "output"): 40,
        ("gen_ai.client.operation.duration", "s", None): 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (f"engine said {SECRET}", "engine", StatusCode.ERROR),
        (f"internal: {SECRET}", "internal", StatusCode.ERROR),
        (CANCELLED, "cancelled", StatusCode.UNSET),
    ],
)
def test_a_failed_step_says_its_kind_and_no_words(spans: InMemorySpanExporter, error: str, kind: str, status: StatusCode) -> None:
    tracing, metering, _ = recording(spans)
    with otel.spans("openai", tracing, metering) as sink:
        sink.observe(begun())
        sink.observe(ended(error=error))
    (span,) = spans.get_finished_spans()
    assert (dict(span.attributes or {})["error.type"], span.status.status_code) == (kind, status)
    assert SECRET not in span.to_json()


def test_an_attempt_that_was_undone_is_no_span_and_no_metric(spans: InMemorySpanExporter) -> None:
    tracing, metering, reader = recording(spans)
    with otel.spans("vllm", tracing, metering) as sink:
        sink.observe(begun())
        sink.observe(ended(error="max_tokens is too large", undone=True))
    assert not spans.get_finished_spans()
    assert reader.get_metrics_data() is None


def test_a_step_that_still_runs_at_the_end_is_ended_too(spans: InMemorySpanExporter) -> None:
    tracing, metering, _ = recording(spans)
    with otel.spans("vllm", tracing, metering) as sink:
        sink.observe(begun())
    assert len(spans.get_finished_spans()) == 1


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_it_is_off_unless_configured(environ: dict[str, str], on: bool) -> None:
    assert otel.configured(environ) is on


def test_nothing_of_it_is_imported_while_it_is_off() -> None:
    code = (
        "import sys, agentguard.gateway.server, agentguard.telemetry.otel; print(*[m for m in sys.modules if 'opentelemetry' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("there", [True, False], ids=["collector", "no collector"])
async def test_a_configured_collector_gets_them_and_one_that_is_not_there_stops_nobody(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[tuple[str, bytes]] = []

    async def take(request: Request) -> Response:
        got.append((request.url.path, await request.body()))
        return Response(b"")

    routes = [Route(f"/v1/{signal}", take, methods=["POST"]) for signal in ("traces", "metrics")]
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off"))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        async with contextlib.AsyncExitStack() as stack:
            if there:
                await stack.enter_async_context(owned_task(server.serve(sockets=[listener]), "collector"))
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port if there else 9}")
            async with gateway(Script(chat=list(ANSWERS))) as client:
                assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
            server.should_exit = True
    paths = {path for path, _ in got}
    assert paths == ({"/v1/traces", "/v1/metrics"} if there else set())
    bodies = b"".join(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body for _, body in got)
    assert (b"gen_ai.usage.reasoning.output_tokens" in bodies) is there
    assert (b"gen_ai.client.token.usage" in bodies) is there
    assert SECRET.encode() not in bodies


async def test_the_clients_trace_goes_on_in_the_gateways_span(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: configured by environment, served over HTTP, streamed, with the client's traceparent."""
    tracing, metering, _ = recording(spans)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(otel, "exporting", lambda provider: otel.spans(provider, tracing, metering))
    parent = "0af7651916cd43dd8448eb211c80319c"
    async with gateway(Script(chat=list(ANSWERS))) as client:
        for streamed in (True, False):
            headers = {"traceparent": f"00-{parent}-b7ad6b7169203331-01", "x-session-id": "s"}
            reply = await client.post("/v1/chat/completions", json=ASK | {"stream": streamed}, headers=headers)
            assert reply.status_code == 200
        await client.post("/v1/chat/completions", json=ASK)
    made: tuple[ReadableSpan, ...] = spans.get_finished_spans()
    ids = [format(span.context.trace_id, "032x") for span in made]
    assert ids[:2] == [parent, parent]
    assert ids[2] != parent
    assert all(span.attributes is not None and span.attributes["gen_ai.usage.reasoning.output_tokens"] == 2 for span in made)
    assert all(span.attributes is not None and span.attributes["gen_ai.provider.name"] == "openai" for span in made)
    assert all(SECRET not in span.to_json() for span in made)
