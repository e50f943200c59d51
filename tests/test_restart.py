"""An upstream that is restarted behind a running gateway is another one: what was learned of the first does not judge it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import httpx2
import pytest

from agentguard.engines.base import EngineInfo
from agentguard.engines.facts import Facts
from agentguard.engines.openai_http import OpenAIEngine
from agentguard.engines.pool import EnginePool
from agentguard.errors import ContextLengthError, EngineDiedError, EngineError, EngineRequestError, OtherModelError
from agentguard.events import EngineDied, EngineReady, Event, StepStarted, TraceClosed
from agentguard.gateway.server import bind, gateway
from agentguard.identity import Identity
from agentguard.middleware import Guard
from agentguard.policy import Policy
from agentguard.telemetry.hub import Hub
from tests.scripted import END, STOP, B, Script, chunk, thinking, upstream
from tests.test_guard import ASK, THINKS_AND_ANSWERS, Rig

LONG = ASK | {"max_tokens": 900}


class Place:
    """A port at which servers come and go."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._running = AsyncExitStack()
        self.url = ""

    async def put(self, script: Script) -> None:
        await self.take_away()
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self.url = await self._running.enter_async_context(upstream(script, port))
        self._stack.push_async_callback(self.take_away)

    async def take_away(self) -> None:
        await self._running.aclose()


class Restarts(Rig):
    places: list[Place]
    pool: EnginePool

    async def ready(self) -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=self.url) as client:
            return await client.get("/health/ready")

    async def look(self, number: int = 0) -> None:
        with contextlib.suppress(EngineError):  # told in `away`
            await self.pool.look(self.pool.engines[number])

    def told(self) -> list[tuple[str, Any]]:
        """What a monitor was told of engines."""
        about = [e for e in self.events if isinstance(e, EngineDied | EngineReady)]
        return [("ready", e.max_model_len) if isinstance(e, EngineReady) else ("died", e.engine) for e in about]


@asynccontextmanager
async def restarts(*scripts: Script, **policy: Any) -> AsyncIterator[Restarts]:
    events: list[Event] = []
    hub = Hub()
    async with AsyncExitStack() as stack:
        places = [Place(stack) for _ in scripts]
        for place, script in zip(places, scripts, strict=True):
            await place.put(script)
        pool = EnginePool([OpenAIEngine(place.url, name=f"engine-{i}", read_timeout_s=10) for i, place in enumerate(places)])
        stack.push_async_callback(pool.aclose)
        stack.enter_context(hub.sink(events.append))
        guard = await Guard.open(pool, Policy(model="scripted", **policy), hub)
        address = await stack.enter_async_context(gateway(guard, bind("127.0.0.1", 0)))
        rig = Restarts(guard, events, address)
        rig.places, rig.pool = places, pool
        yield rig


def script(**settings: Any) -> Script:
    return Script(chat=THINKS_AND_ANSWERS, **settings)


async def test_the_window_of_the_one_that_came_back_is_what_steps_go_by() -> None:
    second = script(window=200)
    async with restarts(script(window=1000)) as r, httpx2.AsyncClient(base_url=r.url) as client:
        await r.step(LONG)
        assert r.started().budget == 900
        await r.places[0].take_away()
        with pytest.raises(EngineDiedError):
            await r.step(LONG)
        assert (await r.ready()).json()["away"] == {"engine-0": "does not answer"}
        await r.places[0].put(second)
        await r.step(LONG)  # finds it by itself
        assert r.guard.info.max_model_len == 200
        assert r.started().budget == second.seen[-1][1]["max_tokens"] < 200
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 200
        reply = await client.post("/v1/chat/completions", json=LONG)
        assert reply.headers["x-agentguard-context-window"] == "200"
        assert r.told() == [("ready", 1000), ("died", "engine-0"), ("ready", 200)]
        ready = (await r.ready()).json()
        assert (ready["engines"], ready["away"]) == ({"engine-0": "ok"}, {})


async def test_what_did_not_fit_is_asked_again_of_a_larger_window() -> None:
    full = [*range(5, 996), 1]
    async with restarts(script(window=1000, prompt=full)) as r:
        for _ in range(2):  # the second time it is not sent
            with pytest.raises(ContextLengthError):
                await r.step()
        await r.places[0].put(script(window=4000, prompt=full))
        await r.look()
        await r.step()
        assert r.guard.info.max_model_len == 4000


async def test_a_restart_that_nobody_saw_shows_by_the_window() -> None:
    async with restarts(script(window=1000, refuses=("thinking_token_budget",))) as r:
        await r.step()
        assert r.guard.engine.facts.budget == "rejected"
        await r.places[0].put(script(window=500))
        await r.look()
        assert (r.guard.info.max_model_len, r.guard.engine.facts.budget, r.pool.away) == (500, "unknown", {})
        assert r.told() == [("ready", 1000), ("ready", 500)]


@pytest.mark.parametrize("plugin", [True, False])
async def test_facts_are_learned_anew(plugin: bool) -> None:
    first = script(plugin=plugin, refuses=() if plugin else ("thinking_token_budget",))
    second = script(plugin=not plugin)
    async with restarts(first) as r:
        await r.step()
        facts = r.guard.engine.facts
        assert (facts.plugin, facts.budget) == (plugin, "unknown" if plugin else "rejected")
        await r.places[0].take_away()
        await r.look()
        await r.places[0].put(second)
        await r.step()
        assert r.guard.engine.facts.plugin is not plugin
        assert ("ag_think_tokens" in second.seen[-1][1]["vllm_xargs"]) is not plugin
        assert ("thinking_token_budget" in second.seen[-1][1]) is plugin


async def test_a_step_that_runs_keeps_the_facts_while_its_engine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def closes(body: dict[str, Any]) -> list[dict[str, Any]]:
        trace = thinking(body["vllm_xargs"]["ag_think_tokens"])
        return [*trace, chunk([END]), chunk([B], content="b"), chunk([STOP], finish="stop")]

    async with restarts(Script(chat=closes, plugin=True)) as r:
        engine, look = r.pool.engines[0], None
        info, go = engine.info, asyncio.Event()

        async def slow() -> EngineInfo:
            await go.wait()
            return await info()

        monkeypatch.setattr(engine, "info", slow)
        first = engine.facts
        first.dropped.add("stream_options")
        async for one in r.guard.stream(LONG, Identity("", "s")):
            if look is None and one["choices"] and one["choices"][0]["delta"].get("reasoning"):
                r.pool.failed(engine, EngineDiedError("the stream of another step broke"))
                look = asyncio.create_task(r.pool.look(engine))
                await asyncio.sleep(0)
                assert engine.facts is first
        assert look is not None
        assert r.pool.away
        assert [e.how for e in r.events if isinstance(e, TraceClosed)] == ["engine"]  # which it would not without its plugin
        assert (r.finished().think_tokens, r.finished().continued) == (r.started().think_cap, False)
        assert engine.facts.dropped == {"stream_options"}
        go.set()
        await look
        assert (engine.facts.plugin, engine.facts.dropped) == (True, set())


async def test_an_engine_with_another_window_is_asked_once() -> None:
    engine = Asked()
    engine.go.set()
    engine.says = EngineInfo("m", 100)
    pool = EnginePool([engine])  # type: ignore[list-item]
    pool.serve(EngineInfo("m", 200))
    engine.facts.dropped.add("stream_options")
    await pool.look(engine)  # type: ignore[arg-type]
    assert (engine.times, engine.facts.dropped, pool.serves.max_model_len) == (1, set(), 100)


@pytest.mark.parametrize(
    ("reply", "there"),
    [
        (httpx2.Response(200, json={"features": ["budget"]}), True),
        (httpx2.Response(404, json={"detail": "Not Found"}), False),
        (httpx2.Response(200, text="<html>"), False),
        (httpx2.Response(503), True),  # it does not tell, so what was known holds
        (httpx2.ReadTimeout("slow"), True),
    ],
)
async def test_the_plugin_is_believed_until_the_server_says_otherwise(reply: httpx2.Response | Exception, there: bool) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": "m", "max_model_len": 100}]})
        if isinstance(reply, Exception):
            raise reply
        return reply

    engine = OpenAIEngine("http://engine", transport=httpx2.MockTransport(answer))
    engine.facts.plugin = True
    await engine.info()
    assert engine.facts.plugin is there
    await engine.aclose()


async def test_a_server_that_lists_its_models_in_another_order_is_the_same() -> None:
    listed = ["a", "b"]

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path != "/v1/models":
            return httpx2.Response(404)
        return httpx2.Response(200, json={"data": [{"id": name, "max_model_len": 100 + ord(name)} for name in listed]})

    engine = OpenAIEngine("http://engine", transport=httpx2.MockTransport(answer))
    pool = EnginePool([engine])
    assert await pool.info() == EngineInfo("a", 197)
    listed.reverse()
    await pool.look(engine)
    assert (pool.serves, pool.away) == (EngineInfo("a", 197), {})
    listed.remove("a")
    with pytest.raises(OtherModelError):
        await pool.look(engine)
    listed.append("a")
    await pool.look(engine)
    assert (pool.serves, pool.away) == (EngineInfo("a", 197), {})
    await engine.aclose()


async def test_an_engine_that_refuses_the_step_it_came_back_for_is_back() -> None:
    async with restarts(script()) as r:
        await r.places[0].take_away()
        await r.look()
        await r.places[0].put(script(status=400))
        with pytest.raises(EngineRequestError):
            await r.step()
        assert r.guard.died is None
        await r.look()
        assert r.told() == [("ready", 1000), ("died", "engine-0"), ("ready", 1000)]


async def test_an_engine_whose_step_showed_nothing_is_back_with_the_next_look() -> None:
    async with restarts(script()) as r:
        await r.places[0].take_away()
        await r.look()
        for end in (script(status=500), script(hold=asyncio.Event())):
            await r.places[0].put(end)
            async with aclosing(r.guard.stream(ASK, Identity("", "s"))) as chunks:
                with contextlib.suppress(EngineRequestError):
                    await anext(chunks)  # its client hangs up
            assert r.guard.died is not None
            assert r.told()[-1] == ("died", "engine-0")
            for _ in range(2):
                await r.look()
                assert r.guard.died is None
            assert r.told()[-2:] == [("died", "engine-0"), ("ready", 1000)]
            await r.places[0].take_away()
            await r.look()


async def test_a_step_shows_that_its_engine_is_back() -> None:
    async with restarts(script()) as r:
        await r.step()
        await r.places[0].take_away()
        await r.look()
        await r.places[0].put(script())
        await r.step()
        await r.look()
        assert r.told() == [("ready", 1000), ("died", "engine-0"), ("ready", 1000)]


async def test_another_model_is_kept_away_and_said_why_until_the_right_one_is_back() -> None:
    stranger = script(model="other", window=50)
    async with restarts(script()) as r, httpx2.AsyncClient(base_url=r.url) as client:
        await r.step()
        await r.places[0].put(stranger)
        await r.look()
        ready = await r.ready()
        assert (ready.status_code, ready.json()["engines"]) == (503, {"engine-0": "away"})
        assert "serves 'other' now, and this gateway 'scripted'" in ready.json()["away"]["engine-0"]
        reply = await client.post("/v1/chat/completions", json=ASK)
        assert (reply.status_code, "serves 'other' now" in reply.json()["error"]["message"]) == (503, True)
        assert reply.headers["retry-after"]
        assert not stranger.seen
        assert "serves 'other'" in next(e.reason for e in r.events if isinstance(e, EngineDied))
        await r.places[0].take_away()
        await r.look()
        assert (await r.ready()).json()["away"] == {"engine-0": "does not answer"}
        await r.places[0].put(script())
        await r.look()
        await r.step()
        assert r.told() == [("ready", 1000), ("died", "engine-0"), ("died", "engine-0"), ("ready", 1000)]


async def test_of_several_the_others_go_on_and_the_smallest_window_holds() -> None:
    one, two = script(window=1000), script(window=800)
    async with restarts(one, two) as r:
        assert r.guard.info.max_model_len == 800
        name = next(f"s{i}" for i in range(100) if r.pool.choose(f"s{i}") is r.pool.engines[0])
        await r.places[0].put(script(model="other"))
        await r.look(0)
        await r.step(identity=Identity("", name))
        assert len(two.seen) == 1
        assert [kind for kind, _ in r.told()] == ["ready", "died", "ready"]  # the monitor's engine is up: another one serves
        ready = await r.ready()
        assert (ready.status_code, ready.json()["engines"]) == (200, {"engine-0": "away", "engine-1": "ok"})
        await r.places[0].put(script(window=600))
        await r.look(0)
        assert (r.guard.info.max_model_len, r.pool.away) == (600, {})


async def test_an_engine_that_was_away_at_the_start_is_compared_too() -> None:
    async with AsyncExitStack() as stack:
        there, late = Place(stack), Place(stack)
        await there.put(script())
        await late.put(script())
        await late.take_away()
        pool = EnginePool([OpenAIEngine(place.url, name=f"engine-{i}") for i, place in enumerate((there, late))])
        stack.push_async_callback(pool.aclose)
        guard = await Guard.open(pool, Policy(model="scripted"), Hub())
        await late.put(script(model="other"))
        with pytest.raises(OtherModelError):
            await pool.look(pool.engines[1])
        await late.put(script(window=300))
        await pool.look(pool.engines[1])
        assert (guard.info.max_model_len, pool.away) == (300, {})


async def test_a_route_that_is_missing_for_a_moment_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("engines.facts", "middleware"):
        monkeypatch.setattr(f"agentguard.{module}.MISSING_S", 0.2)
    server = script(tokenizes=False)
    async with restarts(server) as r:
        await r.step()
        assert (r.finished().tokens, r.guard.exact) == (5, False)  # as the server's usage says
        server.tokenizes = True
        await asyncio.sleep(0.3)
        await r.step()
        assert (r.finished().tokens, r.guard.exact) == (7, True)  # counted by id
        assert r.started().prompt_tokens == 3


def test_a_route_an_engine_never_has_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentguard.engines.facts.MISSING_S", -1.0)
    facts = Facts(tokenize=False)
    facts.metrics = False
    assert (facts.tokenize, facts.metrics) == (False, True)  # of the one that was only missing the time is over
    facts.chars_per_token = 3.0
    assert (facts.anew().tokenize, facts.anew().chars_per_token) == (False, 3.0)


class Asked:
    """An engine of which we only ask what it serves."""

    name = "asked"

    def __init__(self) -> None:
        self.facts = Facts()
        self.times = 0
        self.go = asyncio.Event()
        self.says: Any = EngineDiedError("gone")

    async def info(self) -> Any:
        self.times += 1
        await self.go.wait()
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


async def test_those_who_look_at_once_share_one_answer() -> None:
    engine = Asked()
    pool = EnginePool([engine])  # type: ignore[list-item]
    pool.failed(engine, EngineDiedError("gone"))  # type: ignore[arg-type]
    looking = [asyncio.create_task(pool.look(engine)) for _ in range(20)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    engine.go.set()
    results = await asyncio.gather(*looking, return_exceptions=True)
    assert all(isinstance(result, EngineDiedError) for result in results)
    assert len({id(result) for result in results}) == 20  # one that is raised twice keeps the frames of both
    assert engine.times == 1


async def test_who_is_cancelled_while_it_looks_leaves_the_others_their_answer() -> None:
    engine = Asked()
    engine.says = EngineInfo("m", 100)
    pool = EnginePool([engine])  # type: ignore[list-item]
    pool.failed(engine, EngineDiedError("gone"))  # type: ignore[arg-type]
    first, second = (asyncio.create_task(pool.look(engine)) for _ in range(2))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    first.cancel()
    engine.go.set()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert pool.away == {}


async def test_odd_answers_do_not_end_the_watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    engine = Asked()
    engine.go.set()
    pool = EnginePool([engine])  # type: ignore[list-item]
    pool.failed(engine, EngineDiedError("gone"))  # type: ignore[arg-type]
    async with asyncio.timeout(10), pool.watched(0.05):
        for odd in (KeyError("id"), TypeError("x"), EngineError("a page"), RecursionError()):
            engine.says, before = odd, engine.times
            while engine.times < before + 3:
                await asyncio.sleep(0.01)
            assert pool.away
        engine.says = EngineInfo("m", 100)
        while pool.away:
            await asyncio.sleep(0.01)
    unwell = [record for record in caplog.records if record.message == "engine_unwell"]
    assert len(unwell) == 4  # each once, not at every look


async def test_the_watch_of_a_gateway_finds_what_came_back() -> None:
    async with restarts(script(window=1000)) as r, asyncio.timeout(20), r.pool.watched(0.05):
        await r.places[0].put(script(window=700))
        while r.guard.info.max_model_len != 700:
            await asyncio.sleep(0.02)
        await r.places[0].take_away()
        while not r.pool.away:
            await asyncio.sleep(0.02)
        assert (await r.ready()).status_code == 503  # though no step has failed
        await r.places[0].put(script(window=600))
        while r.guard.info.max_model_len != 600:
            await asyncio.sleep(0.02)
        assert not any(isinstance(e, StepStarted) for e in r.events)


async def test_an_engine_that_hangs_hides_no_other_and_holds_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, well = Asked(), Asked()
    hangs.name, well.name = "hangs", "well"
    well.go.set()
    pool = EnginePool([hangs, well])  # type: ignore[list-item]
    pool.failed(well, EngineDiedError("gone"))  # type: ignore[arg-type]
    async with asyncio.timeout(10), pool.watched(0.05):
        while well.times < 3:
            await asyncio.sleep(0.01)
        well.says = EngineInfo("m", 100)
        while pool.away:
            await asyncio.sleep(0.01)
        assert hangs.times == 1
    monkeypatch.setattr("agentguard.engines.pool.LOOK_S", 0.05)
    with pytest.raises(EngineError, match="did not say within") as unwell:
        await pool.look(hangs)  # type: ignore[arg-type]
    assert not isinstance(unwell.value, EngineDiedError)  # a busy engine is not gone
    assert pool.away == {}
    pool.failed(hangs, EngineDiedError("gone"))  # type: ignore[arg-type]
    with pytest.raises(EngineDiedError, match="did not say within"):  # the step goes elsewhere
        await pool.look(hangs)  # type: ignore[arg-type]


async def test_an_engine_that_is_there_and_says_nothing_gets_no_step_while_others_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentguard.engines.pool.LOOK_S", 0.2)
    async with restarts(script(), script()) as r, asyncio.timeout(20):
        first = r.pool.engines[0]
        name = next(f"s{i}" for i in range(100) if r.pool.choose(f"s{i}") is first)
        answers = asyncio.Event()

        async def info() -> EngineInfo:
            await answers.wait()
            return EngineInfo("scripted", 1000)

        async def at_once() -> EngineInfo:
            return EngineInfo("scripted", 1000)

        monkeypatch.setattr(first, "info", info)
        monkeypatch.setattr(r.pool.engines[1], "info", at_once)  # a busy machine makes nobody unwell here
        async with r.pool.watched(0.05):
            while "engine-0" not in r.pool.unwell:
                await asyncio.sleep(0.02)
            assert r.pool.choose(name) is r.pool.engines[1]
            assert r.pool.choose(name, ("engine-1",)) is first  # when nothing else is left
            ready = await r.ready()
            assert (ready.status_code, ready.json()["engines"]) == (200, {"engine-0": "unwell", "engine-1": "ok"})
            await r.step(identity=Identity("", name))
            monkeypatch.setattr(r.pool.engines[1], "info", info)
            while "engine-1" not in r.pool.unwell:
                await asyncio.sleep(0.02)
            ready = await r.ready()  # both are busy, or so, and serve
            assert (ready.status_code, ready.json()["reasons"]) == (200, [])
            assert ready.json()["engines"] == {"engine-0": "unwell", "engine-1": "unwell"}
            await r.step(identity=Identity("", name))
            assert not any(isinstance(e, EngineDied) for e in r.events)
            for engine in r.pool.engines:
                assert (await r.ready()).status_code == 200  # one of them is left
                r.pool.failed(engine, EngineDiedError("gone"))
            ready = await r.ready()
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["no engine answers"])
            answers.set()
            while r.pool.unwell or r.pool.away:
                await asyncio.sleep(0.02)
            assert r.pool.choose(name) is first
            assert (await r.ready()).status_code == 200


async def test_the_only_engine_is_looked_at_seldom_while_well_and_soon_once_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentguard.engines.pool.ALONE", 1_000_000)
    engine = Asked()
    engine.go.set()
    engine.says = EngineInfo("m", 100)
    pool = EnginePool([engine])  # type: ignore[list-item]
    pool.serve(engine.says)
    async with asyncio.timeout(10), pool.watched(0.05):
        await asyncio.sleep(0.3)
        assert engine.times == 1
        pool.failed(engine, EngineDiedError("gone"))  # type: ignore[arg-type]
        while pool.away:
            await asyncio.sleep(0.01)
        assert engine.times == 2
