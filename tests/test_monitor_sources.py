"""Live sources on real sockets: the watch route of a real gateway, plain servers, outages, recordings, actions, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from agentguard.cli.tui import tui
from agentguard.errors import ActionRefusedError, ConfigError, EngineDiedError, EngineError
from agentguard.events import (
    DraftUpdated,
    EconomicsReport,
    EngineDied,
    EngineMetrics,
    EngineReady,
    FromSource,
    OperatorActed,
    RoundSums,
    SessionAlarm,
    SessionSeen,
    StepFinished,
    StepsRunning,
    TtsChanged,
    WatchFrame,
    decode_frame,
    encode_json,
)
from agentguard.gateway import watch as watching
from agentguard.monitor import sources as reading
from agentguard.monitor.feed import Feed
from agentguard.monitor.live import LiveMonitor, open_monitor
from agentguard.monitor.model import Model
from agentguard.monitor.options import Options, server_url
from agentguard.monitor.playback import Player, RecordingScript
from agentguard.monitor.simulator import Simulator
from agentguard.monitor.snapshot import DOWN_S, STALE_S, Snapshot
from agentguard.monitor.sources import Backoff, GatewaySource, MetricsSource, TailReader
from agentguard.session import Identity
from agentguard.telemetry.recorder import replay
from tests.monitor_rig import Clock, Engine, finished, ready, text
from tests.scripted import END, STOP, B, Script, chunk, text_chunk, thinking
from tests.test_economics import RULE
from tests.test_economics_gateway import ARMS, name_of
from tests.test_guard import ASK, THINKS_AND_ANSWERS, Rig, rig
from tests.test_guard import text as joined
from tests.test_monitor_state import ROUND, frame, verified


async def until(monitor: LiveMonitor, found: Callable[[Snapshot], bool]) -> Snapshot:
    while not found(shown := monitor.snapshot()):
        await asyncio.sleep(0.02)
    return shown


@asynccontextmanager
async def watched(url: str, **options: Any) -> AsyncIterator[LiveMonitor]:
    async with open_monitor(Options(gateways=(url,), interval_s=0.25, **options)) as monitor:
        assert isinstance(monitor, LiveMonitor)
        yield monitor


@asynccontextmanager
async def frames(r: Rig, query: str = "?interval=0.25") -> AsyncIterator[AsyncIterator[WatchFrame]]:
    async with httpx2.AsyncClient(base_url=r.url) as client, client.stream("GET", f"/guard/v1/watch{query}") as response:
        assert response.status_code == 200

        async def each() -> AsyncIterator[WatchFrame]:
            async for one in httpx2.EventSource(response, 1 << 24):
                yield decode_frame(one.data)

        yield each()


# -- the watch route ---------------------------------------------------------------------------------------------------------------


async def test_the_first_frame_tells_the_past_and_the_next_ones_what_is_new() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS)), cutoff={"f_min": 0.7}) as r:
        await r.step()
        async with frames(r) as stream:
            first = await anext(stream)
            kinds = [type(event) for event in first.events]
            assert kinds == [EngineReady, SessionSeen, EconomicsReport, StepsRunning]
            ready, seen = first.events[0], first.events[1]
            assert isinstance(ready, EngineReady)
            assert (ready.max_model_len, ready.f_min) == (1000, 0.7)
            assert isinstance(seen, SessionSeen)
            assert (seen.session, seen.steps, seen.tokens, [step.tokens for step in seen.latest]) == ("me", 1, 7, [7])
            await r.step()
            got: list[Any] = []
            while StepFinished not in [type(event) for event in got]:
                got += (await anext(stream)).events
            assert EngineReady not in [type(event) for event in got]
            (step,) = [event for event in got if isinstance(event, StepFinished)]
            assert step == r.finished()


async def test_an_engine_that_is_gone_is_told_as_gone_and_what_it_was() -> None:
    async with rig(Script()) as r:
        r.guard.died = EngineDied(t=50.0, engine="engine-0", reason="status -9")
        async with watched(r.url) as monitor:
            shown = await monitor.wait(2)
    assert [(row.state, row.why, row.model) for row in shown.engines] == [("down", "status -9", "scripted")]


async def test_a_running_step_is_told_with_its_tokens() -> None:
    hold = asyncio.Event()
    async with rig(Script(chat=thinking(20), hold=hold)) as r:
        step = asyncio.create_task(r.step())
        async with frames(r) as stream:
            async for one in stream:
                running = next(event for event in one.events if isinstance(event, StepsRunning))
                if running.steps and running.steps[0].think_tokens == 20:
                    break
        (told,) = running.steps
        begun = r.started()
        assert (told.session, told.inside, told.think_cap, told.request) == ("me", True, begun.think_cap, begun.request)
        hold.set()
        with pytest.raises(EngineError, match="without a finish reason"):
            await step


async def test_rounds_come_as_sums() -> None:
    async with rig(Script()) as r, frames(r) as stream:
        await anext(stream)
        for step in range(100):
            r.guard.hub.publish(frame(step, verified("r", 2, *ROUND)))
        events = (await anext(stream)).events + (await anext(stream)).events
        (sums,) = [event for event in events if isinstance(event, RoundSums)]
        assert (sums.rounds, sums.accepted, sums.frames, sums.requests[0].rounds) == (100, 200, 100, 100)


async def test_an_engine_whose_metrics_take_long_delays_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(Script()) as r:
        asked, answer = asyncio.Event(), asyncio.Event()

        async def late() -> str:
            asked.set()
            await answer.wait()
            return text({"0": Engine(running=7)})

        monkeypatch.setattr(r.guard.engine, "metrics", late)
        async with frames(r) as stream:
            got = [await anext(stream) for _ in range(3)]
            assert asked.is_set()
            assert not any(isinstance(event, EngineMetrics) for one in got for event in one.events)
            answer.set()
            measured: list[Any] = []
            while len(measured) < 2:
                measured += [event for event in (await anext(stream)).events if isinstance(event, EngineMetrics)]
            assert measured[0].gauges["running"] == 7
            assert measured[0].t < measured[1].t, "one scrape is told once"


async def test_two_samples_of_a_gateway_that_measures_late_still_give_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(running=7)
    async with rig(Script()) as r:

        async def late() -> str:
            await asyncio.sleep(0.3)
            engine.tokens_out += 50
            return text({"0": engine})

        monkeypatch.setattr(r.guard.engine, "metrics", late)
        async with watched(r.url) as monitor:
            (row,) = (await monitor.wait(2)).engines
            assert row.window_s is not None
            assert row.tokens_out_per_s == pytest.approx(50 / row.window_s)


async def test_an_engine_whose_metrics_fail_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(Script()) as r:

        async def gone() -> str:
            raise EngineDiedError("engine-0 is gone")

        monkeypatch.setattr(r.guard.engine, "metrics", gone)
        async with watched(r.url) as monitor:
            shown = await until(monitor, lambda s: bool(s.engines) and s.engines[0].state == "stale")
            assert shown.engines[0].why == "engine-0 is gone"
            assert shown.sources[0].state == "ok"


@pytest.mark.parametrize("interval", ["0.1", "11", "nan", "soon", ""])
async def test_an_interval_out_of_bounds_is_refused(interval: str) -> None:
    async with rig(Script()) as r, httpx2.AsyncClient(base_url=r.url) as client:
        reply = await client.get(f"/guard/v1/watch?interval={interval}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "interval")


async def test_the_watch_route_needs_the_key_and_actions_the_operators() -> None:
    async with rig(Script(), api_key="k", operator_key="o") as r, httpx2.AsyncClient(base_url=r.url) as client:
        assert (await client.get("/guard/v1/watch")).status_code == 401
        body = {"arm": RULE, "rule": "strict"}
        for key, status in (("k", 403), ("o", 400)):  # no relaxed arm here
            reply = await client.post("/agentguard/pin", json=body, headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == status


async def test_watchers_are_bounded_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "WATCHERS", 2)
    async with rig(Script()) as r:
        sinks = len(r.guard.hub._sinks)
        async with frames(r) as one, frames(r) as two:
            await anext(one)
            await anext(two)
            async with httpx2.AsyncClient(base_url=r.url) as client:
                assert (await client.get("/guard/v1/watch")).status_code == 503
            assert len(r.guard.hub._sinks) == sinks + 2
        while len(r.guard.hub._sinks) > sinks:
            await asyncio.sleep(0.01)
        async with frames(r) as again:
            await anext(again)


async def test_a_frame_holds_a_bounded_number_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "EVENTS", 5)
    async with rig(Script()) as r, frames(r) as stream:
        await anext(stream)
        for i in range(9):
            r.guard.hub.publish(OperatorActed(t=0, action="tts", target="e", detail=str(i)))
        got = [await anext(stream) for _ in range(2)]
        assert sum(one.dropped for one in got) == 4
        kept = [event.detail for one in got for event in one.events if isinstance(event, OperatorActed)]
        assert kept == ["0", "1", "2", "3", "4"]


# -- a monitor of a gateway --------------------------------------------------------------------------------------------------------


async def test_a_monitor_shows_what_the_gateway_knows() -> None:
    async with rig(Script(chat=list(THINKS_AND_ANSWERS)), economics=ARMS) as r:
        for arm in ("strict", RULE):
            for _ in range(3):
                await r.step(ASK, Identity("", name_of(arm, r)))
        async with watched(r.url) as monitor:
            shown = await monitor.wait(2)
            (row,) = shown.engines
            assert (row.state, row.model, row.running, row.kv_use) == ("ok", "scripted", None, None)
            assert {session.id: (session.steps, session.tokens) for session in shown.sessions} == {
                name_of("strict", r): (3, 21), name_of(RULE, r): (3, 21),
            }  # fmt: skip
            async with httpx2.AsyncClient(base_url=r.url) as client:
                rows = (await client.get("/guard/v1/economics")).json()["rows"]
            assert [(arm.workload, arm.arm, arm.steps, arm.verdict) for arm in shown.arms] == [
                (one["workload"], one["arm"], one["steps"], one["verdict"]) for one in rows
            ]
            await r.step(ASK, Identity("", "new"))
            shown = await until(monitor, lambda s: len(s.sessions) == 3)
            assert shown.sessions[-1].id == "new"
            shown = await until(monitor, lambda s: s.engines[0].steps == 1)
            assert shown.engines[0].think_share == pytest.approx(3 / 7)


async def test_another_interval_is_asked_for_without_an_outage() -> None:
    async with rig(Script()) as r, watched(r.url) as monitor:
        await monitor.wait(1)
        source = monitor._sources[r.url]
        monitor.set_interval(1.5)
        before = monitor.snapshot().sources[0].samples
        await until(monitor, lambda s: s.sources[0].samples >= before + 2)
        shown = monitor.snapshot()
        assert shown.sources[0].state == "ok"
        assert not any("stale" in line.text for line in shown.events)
        assert source.interval_s == 1.5


async def test_actions_reach_the_gateway_and_are_told() -> None:
    slow = [item for one in thinking(200) for item in (one, 0.05)]
    script = Script(chat=list(THINKS_AND_ANSWERS), again=slow, complete=[text_chunk([B, STOP], "b", "stop")])
    async with rig(script, economics=ARMS, limits={"steps": 1}, cutoff={"loops": False}) as r, watched(r.url) as monitor:
        name = name_of(RULE, r)
        await r.step(ASK, Identity("", name))
        key = f"{r.url}|{name}"
        await until(monitor, lambda s: any(row.key == key and row.state == "stopped" for row in s.sessions))
        assert "limit of steps" in await monitor.set_limit(key, "steps", 5)
        step = asyncio.create_task(r.step(ASK, Identity("", name)))
        await until(monitor, lambda s: any(row.phase == "thinking" for row in s.sessions))
        assert "closed 1 trace" in await monitor.close_trace(key)
        await step
        await monitor.pin(r.url, "", RULE, "strict")
        assert r.guard.ledger.assign(name, r.started().workload).rule == "strict"
        shown = await until(monitor, lambda s: any(arm.pinned == "strict" for arm in s.arms))
        assert {arm.pinned for arm in shown.arms if arm.arm == RULE} == {"strict"}
        await monitor.pin(r.url, "", RULE, None)
        assert r.guard.ledger.assign(name, r.started().workload).rule == RULE
        said = await until(monitor, lambda s: sum(line.kind == "operator_acted" for line in s.events) == 4)
        assert [line.text for line in said.events if line.kind == "operator_acted"] == [
            f"operator: limit of steps is 5 now ({name})", f"operator: closed 1 trace: operator ({name})",
            f"operator: pinned to strict in all classes ({RULE})", f"operator: left to the guard again in all classes ({RULE})",
        ]  # fmt: skip
        with pytest.raises(ActionRefusedError, match="nothing there to act on"):
            await monitor.close_trace(f"{r.url}|nobody")
        with pytest.raises(ActionRefusedError, match="did you mean"):
            await monitor.pin(r.url, "", RULE[:-1], "strict")
        with pytest.raises(ActionRefusedError, match="404"):
            await monitor.set_tts(r.url, False)  # this engine has none


async def test_a_readonly_monitor_and_one_of_a_plain_server_do_not_act() -> None:
    async with rig(Script()) as r:
        async with watched(r.url, readonly=True) as monitor:
            with pytest.raises(ActionRefusedError, match="--readonly"):
                await monitor.close_trace(f"{r.url}|s")
        async with open_monitor(Options(metrics=(r.url,), interval_s=0.25)) as plain:
            with pytest.raises(ActionRefusedError, match="is no gateway"):
                await plain.set_tts(r.url, True)


async def test_a_wrong_key_is_said_where_one_looks() -> None:
    async with rig(Script(), api_key="k") as r:
        async with watched(r.url, api_key="wrong") as monitor:
            shown = await until(monitor, lambda s: bool(s.sources[0].error))
            assert "AGENTGUARD_API_KEY" in shown.sources[0].error
        async with watched(r.url, api_key="k") as monitor:
            assert (await monitor.wait(1)).sources[0].state == "ok"


async def test_a_server_that_is_no_gateway_is_told_so() -> None:
    async with plain_server({"0": Engine()}) as url, watched(url) as monitor:
        shown = await until(monitor, lambda s: bool(s.sources[0].error))
        assert "--metrics" in shown.sources[0].error


async def test_a_gateway_without_the_watch_route_is_read_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(chat=list(THINKS_AND_ANSWERS))
    async with rig(script) as r:
        real = httpx2.AsyncClient.stream

        def stream(self: httpx2.AsyncClient, method: str, url: str, **more: Any) -> Any:
            return real(self, method, url.replace("/guard/v1/watch", "/guard/v1/nothing"), **more)

        monkeypatch.setattr(httpx2.AsyncClient, "stream", stream)
        async with watched(r.url) as monitor:
            await until(monitor, lambda s: len(r.guard.hub._sinks) > 1 and s.sources[0].samples > 0)
            await r.step()
            shown = await until(monitor, lambda s: any(row.tokens == 7 for row in s.sessions))
            assert shown.sources[0].state == "ok"


async def test_what_is_watched_can_be_recorded_and_played_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    async with rig(Script(chat=list(THINKS_AND_ANSWERS)), economics=ARMS) as r, watched(r.url, record=path) as monitor:
        await monitor.wait(1)
        for _ in range(3):
            await r.step()
        shown = await until(monitor, lambda s: s.engines[0].steps == 3)
        assert shown.recording == str(path)
        await monitor.stop_recording()
        assert monitor.snapshot().recording is None
        shown = monitor.snapshot()
    events = await asyncio.to_thread(lambda: list(replay(path)))
    assert isinstance(events[0], FromSource)
    assert (events[0].source, events[0].kind) == (r.url, "gateway")
    async with open_monitor(Options(replay=path)) as again:
        await again.seek_to(1e12)
        played = again.snapshot()
    same = ("key", "id", "steps", "tokens", "think_tokens_total", "arm", "closes", "bars")
    assert [[getattr(row, name) for name in same] for row in played.sessions] == [
        [getattr(row, name) for name in same] for row in shown.sessions
    ]
    assert [(row.key, row.steps, row.think_share) for row in played.engines] == [
        (row.key, row.steps, row.think_share) for row in shown.engines
    ]
    assert played.arms == shown.arms


async def test_a_recording_begins_with_the_first_word_although_its_file_opens_later(tmp_path: Path) -> None:
    model, path = Model(), tmp_path / "r.jsonl"
    model.add_source("http://s", "gateway")
    feed = Feed(model)
    feed.start_recording(path)
    acted = [OperatorActed(t=float(i), action="tts", target="e", detail=str(i)) for i in range(3)]
    feed.take("http://s", acted[:2])  # before the recording's task has run at all
    while feed._early is not None:
        await asyncio.sleep(0.001)
    feed.take("http://s", acted[2:])
    await feed.stop_recording()
    kept = await asyncio.to_thread(lambda: list(replay(path)))
    assert isinstance(kept[0], FromSource)
    assert [event for event in kept if not isinstance(event, FromSource)] == acted


async def test_a_recording_is_played_by_the_times_at_which_it_came(tmp_path: Path) -> None:
    """A first frame tells of the past, and the gateway's clock is an hour ahead: nothing waits for the times that events bear."""
    clock, path = Clock(10_000.0), tmp_path / "r.jsonl"
    model = Model(clock=clock)
    model.add_source("http://s", "gateway")
    feed = Feed(model, clock)
    feed.start_recording(path)
    changed = TtsChanged(t=400.0, engine="e", state="live", reason="first update", epoch=1, version=1)
    feed.take("http://s", [ready(), changed], sample=True)
    for _ in range(5):
        clock.t += 1
        feed.take("http://s", [OperatorActed(t=clock.t + 3600, action="tts", target="e", detail="d")], sample=True)
    shown = model.snapshot()
    await feed.stop_recording()
    play = await asyncio.to_thread(lambda: Player(RecordingScript(path), lambda now: Model(clock=now), Clock()))
    assert (play.state().start_t, play.state().end_t) == (10_000.0, 10_005.0)

    def lines(at: float) -> list[tuple[str, float, float, int]]:
        play.seek(at)
        return [(line.kind, line.t, line.last_t, line.n) for line in play.model.snapshot().events if line.kind != "source"]

    early, late = await asyncio.to_thread(lambda: (lines(10_002.0), lines(10_005.0)))
    assert early == [
        ("engine_ready", 10_000.0, 10_000.0, 1),
        ("tts_changed", 10_000.0, 10_000.0, 1),
        ("operator_acted", 10_001.0, 10_002.0, 2),
    ]
    assert late == [(line.kind, line.t, line.last_t, line.n) for line in shown.events if line.kind != "source"]


def test_a_recording_without_times_of_arrival_is_played_by_its_events(tmp_path: Path) -> None:
    marked = FromSource(t=5.0, source="http://s", kind="gateway", state="ok")
    acted = [OperatorActed(t=float(t), action="tts", target="e", detail="d") for t in (6, 9)]
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(encode_json(event) + b"\n" for event in (marked, *acted)))
    script = RecordingScript(path)
    assert (script.start_t, script.end_t, [at for at, _, _ in script.advance(8.0)]) == (5.0, 9.0, [5.0, 6.0])


async def test_a_plain_server_is_recorded_and_played_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    engines = {"0": Engine(running=3, kv=0.12), "1": Engine(running=12, kv=0.72)}
    async with (
        plain_server(engines) as url,
        open_monitor(Options(metrics=(url,), interval_s=0.25, record=path)) as monitor,
    ):
        await monitor.wait(3)
        await monitor.stop_recording()
        shown = monitor.snapshot()
    async with open_monitor(Options(replay=path)) as again:
        await again.seek_to(1e12)
        played = again.snapshot()
    same = ("key", "name", "running", "kv_use", "window_s", "tokens_out_per_s", "state")
    assert [[getattr(row, name) for name in same] for row in played.engines] == [
        [getattr(row, name) for name in same] for row in shown.engines
    ]
    assert [row.running for row in played.engines] == [3, 12]


async def test_a_recording_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    async with rig(Script()) as r, watched(r.url, record=tmp_path / "nowhere" / "r.jsonl") as monitor:
        shown = await until(monitor, lambda s: any(line.kind == "recording" for line in s.events))
        assert "cannot be written" in next(line.text for line in shown.events if line.kind == "recording")


async def test_the_words_of_a_trace_are_shown_only_if_both_sides_want_it() -> None:
    slow = [item for one in thinking(60) for item in (one, 0.02)]
    end = [chunk([END, B, STOP], content="b", finish="stop")]
    for gives, wants in ((True, True), (True, False), (False, True)):
        async with rig(Script(chat=[*slow, *end]), content=gives, operator_key="o") as r:
            async with watched(r.url, content=wants, operator_key="o") as monitor:
                await monitor.wait(1)
                step = asyncio.create_task(r.step())
                if gives and wants:
                    shown = await until(monitor, lambda s: any(len(tail) > 10 for tail in s.content.values()))
                    ((request, tail),) = shown.content.items()
                    assert request == shown.sessions[0].running_request
                    assert joined(await step, "reasoning").startswith(tail)
                else:
                    await step
                    shown = monitor.snapshot()
                    assert shown.content == {}
                    refused = [line.text for line in shown.events if "gives no content (403)" in line.text]
                    assert len(refused) == (not gives)
            async with httpx2.AsyncClient(base_url=r.url) as client:
                assert (await client.get("/agentguard/tails")).status_code == 401


# -- outages -----------------------------------------------------------------------------------------------------------------------


class Server:
    """A /metrics that can go away; time is what its readers sleep."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.up = True
        self.engine = Engine(running=2)
        self.asked: list[float] = []

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(self.clock.t)
        if not self.up:
            raise httpx2.ConnectError("refused", request=request)
        self.engine.tokens_out += 100
        return httpx2.Response(200, text=text({"0": self.engine}))


async def test_thirty_seconds_without_the_server_and_back() -> None:
    """stale, down, ok again; the tries come later and later, and nothing is raised."""
    server = Server()
    model = Model(clock=server.clock)
    model.add_source("http://s", "metrics")
    states: list[tuple[float, str, str]] = []
    done = asyncio.Event()

    async def sleep(seconds: float) -> None:
        end = server.clock.t + seconds
        while server.clock.t < end:
            server.clock.t = min(end, server.clock.t + 0.5)
            server.up = not 1010 <= server.clock.t < 1040
            shown = model.snapshot()
            engine = shown.engines[0].state if shown.engines else ""
            states.append((server.clock.t, shown.sources[0].state, engine))
        if server.clock.t > 1070:
            done.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    client = httpx2.AsyncClient(base_url="http://s", transport=httpx2.MockTransport(server.answer))
    source = MetricsSource("http://s", Feed(model, server.clock), interval_s=1.0, sleep=sleep, client=client)
    task = asyncio.create_task(source.run())
    await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    seen = [state for _, state, _ in states]
    order = [state for i, state in enumerate(seen) if i == 0 or seen[i - 1] != state]
    assert order == ["ok", "stale", "down", "ok"]
    assert {state for t, state, _ in states if t < 1010} == {"ok"}
    assert {state for t, state, _ in states if 1016 <= t < 1040} == {"down"}
    back = next(t for t, state, _ in states if t > 1040 and state == "ok")
    assert back <= 1051  # the longest wait is 10 s
    assert [engine for t, _, engine in states if t == back] == ["ok"]
    tries = [t for t in server.asked if 1010 <= t < 1040]
    assert 4 <= len(tries) <= 12
    row = model.snapshot().engines[0]
    assert row.tokens_out_per_s is not None
    assert 0 < row.tokens_out_per_s <= 101


class Gateway:
    """A gateway on a clock set by hand: a frame a second, the past first, as `gateway.watch` sends them. Away from 1010 to 1040:
    refusing connections, or open and silent."""

    def __init__(self, *, silent: bool) -> None:
        self.clock, self.silent = Clock(), silent
        self.model = Model(clock=self.clock)
        self.model.add_source("http://s", "gateway")
        self.shown: list[tuple[float, Snapshot]] = []
        self.connected: list[float] = []
        self.done = asyncio.Event()

    @property
    def away(self) -> bool:
        return 1010 <= self.clock.t < 1040

    async def sleep(self, seconds: float) -> None:
        end = self.clock.t + seconds
        while self.clock.t < end:
            self.clock.t = min(end, self.clock.t + 0.5)
            self.shown.append((self.clock.t, self.model.snapshot()))
        if self.clock.t > 1070:
            self.done.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        if self.away and not self.silent:
            raise httpx2.ConnectError("refused", request=request)
        self.connected.append(self.clock.t)
        frames = _Frames(self)
        return httpx2.Response(200, stream=frames, headers={"content-type": "text/event-stream"})

    def frame(self, *, first: bool) -> WatchFrame:
        t = self.clock.t
        update = DraftUpdated(
            t=900, engine="e", version=7, epoch=1, rounds=96, rows=256, loss=0.5, train_ms=10, publish_ms=2, live=0.6, frozen=0.4,
            gain=1.3, break_even=1.05,
        )  # fmt: skip
        past: list[Any] = [
            ready(), TtsChanged(t=800, engine="e", state="live", reason="first update", epoch=1, version=1), update,
            SessionSeen(t=t, session="s", steps=9, tokens=900, think_tokens=600, closes=1, latest=[finished("s", 9, t=500)]),
            SessionAlarm(t=t, session="s", step=9, meter="steps", value=9, limit=10, stopped=False),
        ]  # fmt: skip
        sums = RoundSums(
            t=t, engine="e", span_s=1.0, frames=10, lost=0, rounds=10, drafted=40, accepted=20, strict=8.0, rule="strict"
        )
        measured = EngineMetrics(t=t, engine="0", gauges={"running": 1.0}, counters={"tokens_out": 100 * t})
        return WatchFrame(t=t, interval_s=1.0, events=[*(past if first else ()), sums, measured, StepsRunning(t=t, steps=[])])


class _Frames(httpx2.AsyncByteStream):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __aiter__(self) -> AsyncIterator[bytes]:
        gateway, first = self._gateway, True
        while True:
            if gateway.away:
                if gateway.silent:
                    await gateway.sleep(15.0)
                    raise httpx2.ReadTimeout("")
                raise httpx2.ReadError("reset")
            yield b"data: " + encode_json(gateway.frame(first=first)) + b"\n\n"
            first = False
            await gateway.sleep(1.0)


@pytest.mark.parametrize("silent", [False, True])
async def test_thirty_seconds_without_the_gateway_and_back(silent: bool) -> None:
    """stale, down, ok again, after the real times; what it tells again of the past is counted once."""
    gateway = Gateway(silent=silent)
    client = httpx2.AsyncClient(base_url="http://s", transport=httpx2.MockTransport(gateway.answer))
    source = GatewaySource("http://s", Feed(gateway.model), interval_s=1.0, sleep=gateway.sleep, client=client)
    source.backoff = Backoff(rng=random.Random(0))
    task = asyncio.create_task(source.run())
    await gateway.done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    states = [(t, s.sources[0].state, s.engines[0].state, s.verdict.severity) for t, s in gateway.shown if s.engines]
    changes = [one for i, one in enumerate(states) if i == 0 or states[i - 1][1:] != one[1:]]
    assert [one[1:] for one in changes] == [
        ("ok", "ok", "good"), ("stale", "stale", "warning"), ("down", "down", "alarm"), ("ok", "ok", "good"),
    ]  # fmt: skip
    last = 1009.0  # the last word
    stale_t, down_t, back_t = (t for t, *_ in changes[1:])
    # silence is stale after 5 s, and down once the reader gives up its open line; a refusal is stale at once and down after 5 s
    expected = (last + STALE_S, 1025.0) if silent else (1010.0, last + STALE_S)
    assert all(0 <= t - at <= 0.5 for t, at in zip((stale_t, down_t), expected, strict=True))
    assert down_t <= last + DOWN_S
    assert 1040 <= back_t <= 1056  # the longest wait is 10 s, an open line is given up after 15
    assert len([t for t in gateway.connected if t < 1010 or t >= 1040]) == 2

    shown = gateway.shown[-1][1]
    (session,), tts = shown.sessions, shown.speculation[0].tts
    assert (session.steps, session.tokens, session.state, len(session.bars), session.last_t) == (9, 900, "growing", 1, 500.0)
    assert {s.sessions[0].state for t, s in gateway.shown if down_t <= t < back_t} == {"lost"}
    assert tts is not None
    assert (tts.publishes, tts.losses) == (1, (0.5,))
    told = [(line.kind, line.n) for line in shown.events if line.kind in ("engine_ready", "tts_changed", "session_alarm")]
    assert told == [("engine_ready", 1), ("tts_changed", 1), ("session_alarm", 1)]
    rates = [(p.t, p.tokens_out_per_s) for p in shown.series[0].points]
    assert {rate for t, rate in rates if last + 2 <= t < back_t} == {None}
    known = [rate for _, rate in rates if rate is not None]
    assert len(known) >= 35
    assert known == pytest.approx([100.0] * len(known))
    assert shown.engines[0].tokens_out_per_s == pytest.approx(100.0)


class Line:
    """A line to a server that can be cut: what was open breaks, and what is new is refused."""

    def __init__(self, url: str) -> None:
        self._to = int(url.rpartition(":")[2])
        self._port = 0
        self._server: asyncio.Server | None = None
        self._open: list[asyncio.StreamWriter] = []

    async def mend(self) -> str:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self._port}"

    def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        self._open = []

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open += [writer, back]

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))


async def test_a_gateway_that_is_gone_and_comes_back() -> None:
    """On real sockets: the stream breaks, the state says so, and the next try goes on where the sessions were."""
    async with rig(Script(chat=list(THINKS_AND_ANSWERS))) as r:
        line = Line(r.url)
        url = await line.mend()
        await r.step()
        async with watched(url) as monitor:
            await monitor.wait(1)
            monitor._sources[url].backoff = Backoff(0.05, 0.1)
            before = monitor.snapshot().sessions
            line.cut()
            shown = await until(monitor, lambda s: bool(s.sources[0].error))
            assert shown.sources[0].state == "stale"
            await until(monitor, lambda s: "ConnectError" in s.sources[0].error)
            assert [row.steps for row in monitor.snapshot().sessions] == [1]
            await line.mend()
            shown = await until(monitor, lambda s: s.sources[0].state == "ok")
            assert shown.sessions == before
            await r.step()
            await until(monitor, lambda s: s.sessions[0].steps == 2)
        line.cut()


def test_waits_grow_and_differ() -> None:
    backoff = Backoff()
    waits = [backoff.again() for _ in range(8)]
    for wait, whole in zip(waits, (0.5, 1, 2, 4, 8, 10, 10, 10), strict=True):
        assert whole / 2 <= wait <= whole
    assert len(set(waits)) == 8
    backoff.worked()
    assert backoff.again() <= 0.5


async def test_a_stream_of_another_kind_is_trouble_and_no_traceback() -> None:
    model = Model()
    model.add_source("http://s", "gateway")
    tries = asyncio.Semaphore(0)

    async def sleep(_: float) -> None:
        tries.release()
        await asyncio.sleep(0)

    replies = iter(
        [
            httpx2.Response(200, text="<html>", headers={"content-type": "text/html"}),
            httpx2.Response(200, text="data: nonsense\n\n", headers={"content-type": "text/event-stream"}),
            httpx2.Response(500, text="broken"),
            httpx2.Response(200, text="", headers={"content-type": "text/event-stream"}),
        ]
    )
    client = httpx2.AsyncClient(base_url="http://s", transport=httpx2.MockTransport(lambda _: next(replies)))
    source = GatewaySource("http://s", Feed(model), interval_s=1.0, sleep=sleep, client=client)
    task = asyncio.create_task(source.run())
    said = []
    for _ in range(4):
        await tries.acquire()
        said.append(model.sources["http://s"].error)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "text/event-stream" in said[0]
    assert "cannot be read" in said[1]
    assert said[2] == "/guard/v1/watch answered 500: broken"
    assert said[3] == "the server ended the stream"


ODD: list[tuple[str, bytes, dict[str, str], str]] = [
    ("a list", b"[]", {}, "Expected `object`, got `array`"),
    ("no rows", b"{}", {}, "missing required field `rows`"),
    ("rows of another kind", b'{"rows":[1]}', {}, "Expected `object`, got `int`"),
    ("a page", b"<html>", {}, "malformed"),
    ("nothing", b"", {}, "truncated"),
    ("deep", b'{"x":' * 5000, {}, "RecursionError"),
    ("not what it says", b"{}", {"content-encoding": "gzip"}, "DecodingError"),
]


@pytest.mark.parametrize(("body", "headers", "said"), [one[1:] for one in ODD], ids=[one[0] for one in ODD])
async def test_odd_answers_are_said_and_asked_for_again(body: bytes, headers: dict[str, str], said: str) -> None:
    """Of a gateway without the watch route; a sound answer afterwards is taken."""
    model = Model()
    model.add_source("http://s", "gateway")
    tries, odd = asyncio.Semaphore(0), True

    async def sleep(_: float) -> None:
        tries.release()
        await asyncio.sleep(0)

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/guard/v1/economics" and not odd:
            return httpx2.Response(200, json={"rows": []})
        if request.url.path != "/guard/v1/economics":
            if request.url.path == "/agentguard/events":
                await asyncio.Event().wait()
            return httpx2.Response(404)
        return httpx2.Response(200, stream=httpx2.ByteStream(body), headers=headers)

    client = httpx2.AsyncClient(base_url="http://s", transport=httpx2.MockTransport(answer))
    source = GatewaySource("http://s", Feed(model), interval_s=1.0, sleep=sleep, client=client)
    task = asyncio.create_task(source.run())
    for _ in range(2):
        await tries.acquire()
        error = model.sources["http://s"].error
        assert "cannot be read" in error
        assert said in error
    odd = False
    while not model.sources["http://s"].samples:
        await tries.acquire()
    assert not task.done()
    assert model.sources["http://s"].error == ""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_odd_event_of_a_frame_is_said_and_the_reading_goes_on() -> None:
    model = Model()
    model.add_source("http://s", "gateway")
    tries = asyncio.Semaphore(0)

    async def sleep(_: float) -> None:
        tries.release()
        await asyncio.sleep(0)

    odd = RoundSums(
        t=0, engine="e", span_s=1.0, frames=1, lost=0, rounds=1, drafted=1, accepted=1, strict=0.5, live={"1": [1, 2, 3]}
    )
    told = WatchFrame(t=0, interval_s=1.0, events=[odd])
    reply = b"data: " + encode_json(told) + b"\n\n"
    replies = httpx2.MockTransport(lambda _: httpx2.Response(200, content=reply, headers={"content-type": "text/event-stream"}))
    client = httpx2.AsyncClient(base_url="http://s", transport=replies)
    task = asyncio.create_task(GatewaySource("http://s", Feed(model), interval_s=1.0, sleep=sleep, client=client).run())
    for _ in range(2):
        await tries.acquire()
        assert "cannot be read (ValueError: too many values" in model.sources["http://s"].error
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_content_that_cannot_be_read_is_asked_for_again_and_only_a_refusal_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.add_source("http://s", "gateway")
    good = httpx2.Response(200, json={"tails": {"r": "so the sum"}})
    replies = [
        good, httpx2.Response(200, text="<html>"), httpx2.Response(200, text="<html>"), good, httpx2.Response(200, json={"no": 1}),
        httpx2.Response(200, json={"tails": {"r": 1}}), httpx2.Response(401), good, httpx2.Response(500, text="broken"),
        httpx2.Response(403, json={"error": {"message": "no content here"}}), good,
    ]  # fmt: skip
    left = iter(replies)
    shown: list[dict[str, str]] = []

    async def sleep(_: float) -> None:
        shown.append(model.content.get("http://s", {}))

    def client(url: str, **more: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=url, transport=httpx2.MockTransport(lambda _: next(left)))

    monkeypatch.setattr(reading, "http_client", client)
    await TailReader(GatewaySource("http://s", Feed(model), interval_s=1.0), None, sleep=sleep).run()
    words = {"r": "so the sum"}
    assert shown == [words, {}, {}, words, {}, {}, {}, words, {}]
    assert model.content == {}
    assert list(left) == [good]
    said = [line.text for line in model.log.lines()]
    assert [line.n for line in model.log.lines()] == [1] * len(said)
    reasons = ("malformed", "missing", "Expected `str`", "(401)", "(500): broken", "(403): no content here")
    assert [reason for reason, line in zip(reasons, said, strict=True) if reason not in line] == []


# -- addresses ---------------------------------------------------------------------------------------------------------------------


SECRETS = [
    "http://op:s3cret@host:8484", "https://s3cret@host", "http://op:s3/cret@host", "op:s3cret@host", "http://h/?key=s3cret",
    "http://h/#s3cret", "http://op:s3cret@[::1", "http://op:s3cret@host:99999",
]  # fmt: skip
NO_ADDRESSES = [
    "http://[::1", "http://h:99999", "http://h:0", "http://h:x", "http://", "http://:8484", "nowhere", "ftp://h", "http://a b",
    "http://h\x1b[2J", "http://a..b", "http://" + "a" * 64, "",
]  # fmt: skip


@pytest.mark.parametrize("given", SECRETS)
def test_an_address_with_a_secret_is_refused_without_repeating_it(given: str) -> None:
    for field in ("gateway", "metrics"):
        with pytest.raises(ConfigError, match=r"AGENTGUARD_API_KEY|give a URL such as") as refused:
            server_url(field, given)
        assert "s3" not in str(refused.value)
        assert "cret" not in str(refused.value)
    with pytest.raises(ConfigError):
        Options(gateways=(given,))


def test_the_refusal_of_a_password_names_where_the_key_goes() -> None:
    with pytest.raises(ConfigError, match="no user or password; put the key into AGENTGUARD_API_KEY"):
        server_url("gateway", "http://op:s3cret@host:8484")


@pytest.mark.parametrize("given", NO_ADDRESSES)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"give a URL such as http://127\.0\.0\.1:8484"):
        server_url("gateway", given)


@pytest.mark.parametrize(
    ("given", "kept"), [("http://[::1]:8484/", "http://[::1]:8484"), ("https://gpu.example/a/v1", "https://gpu.example/a")]
)
def test_an_address_is_kept_without_the_path_of_the_api(given: str, kept: str) -> None:
    assert server_url("metrics", given) == kept


# -- the command -------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def plain_server(engines: dict[str, Engine]) -> AsyncIterator[str]:
    async def metrics(_: Request) -> Response:
        for engine in engines.values():
            engine.tokens_out += 50
        return PlainTextResponse(text(engines))

    config = uvicorn.Config(Starlette(routes=[Route("/metrics", metrics)]), port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def command(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentguard", "tui", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_once_waits_for_two_samples_and_prints_json() -> None:
    async with plain_server({"0": Engine(running=3, kv=0.12), "1": Engine(running=12, kv=0.72)}) as url:
        status, out, err = await command("--once", "--json", "--metrics", url, "--interval", "0.25")
    shown = json.loads(out)
    assert (status, err) == (0, "")
    assert [(row["running"], row["kv_use"], row["gain"]) for row in shown["engines"]] == [(3, 0.12, None), (12, 0.72, None)]
    for row in shown["engines"]:
        assert row["window_s"] > 0
        assert row["tokens_out_per_s"] == pytest.approx(50 / row["window_s"])


async def test_once_has_rates_of_a_demo_too() -> None:
    status, out, _ = await command("--once", "--json", "--demo", "healthy", "--speed", "5")
    assert status == 0
    for row in json.loads(out)["engines"]:
        assert row["window_s"] >= 1
        assert row["tokens_out_per_s"] is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--once --web", "--once --web"), ("--once --mini", "--once --mini"), ("--web --mini", "--web --mini"),
        ("--web --record r.jsonl", "press R"), ("--once --theme x", "no colours"), ("--once --ascii", "prints text"),
        ("--port 9000", "is for --web"), ("--seed 3", "is for --demo"), ("--speed 2", "is for --demo and --replay"),
        ("--json", "is for --once"), ("--content --replay r.jsonl", "holds no words"), ("--record r --demo", "not recorded again"),
        ("--window 5 --interval 10", "two samples"),
    ],
)  # fmt: skip
def test_options_that_would_be_ignored_are_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        tui.main(words.split(), standalone_mode=False)


async def test_exit_statuses(tmp_path: Path) -> None:
    status, out, _ = await command("--once", "--metrics", "http://127.0.0.1:1", "--interval", "0.25")
    assert (status, "is down" in out) == (3, True)
    events = Simulator("loop").advance(60.0)
    path = tmp_path / "r.jsonl"
    await asyncio.to_thread(path.write_bytes, b"".join(encode_json(event) + b"\n" for _, event in events))
    status, out, _ = await command("--once", "--replay", str(path))
    assert (status, out.startswith("alarm: ")) == (1, True)
    for wrong in (
        "--json", "--once --gateway nowhere", "--once --gateway http://[::1", "--once --gateway http://op:s3cret@h",
        "--once --demo helthy", "--once --demo loop --replay x", "--once --window 5 --interval 10",
    ):  # fmt: skip
        status, out, err = await command(*wrong.split())
        assert (status, out) == (2, "")
        assert err.startswith("agentguard: ")
        assert "s3cret" not in err
