"""Turns are neither lost nor given twice, whatever comes in the same moment: ends, timers, cancellations, hang-ups, a drain."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from agentguard.errors import BusyError
from agentguard.gateway.admission import Admission, Admit, Drain
from agentguard.gateway.ahead import Ahead, Room
from agentguard.policy import ServingLimits
from tests.scripted import Script
from tests.test_guard import ASK, THINKS_AND_ANSWERS
from tests.test_guard import rig as gateway_rig

CALLERS = ("a", "b", "c")
QUEUE_S = 10.0


class FakeTime(asyncio.SelectorEventLoop):
    """A loop whose clock only we move. Nothing here waits for a timer alone, so it never sleeps."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Crowd:
    """Clients of one `Admission`, and what must hold of it at every moment."""

    def __init__(self, loop: FakeTime, **limits: int) -> None:
        self.loop = loop
        self.limits = ServingLimits(queue_s=QUEUE_S, **limits)
        self.admission = Admission(self.limits)
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.left: dict[int, asyncio.Future[None]] = {}
        self.caller: dict[int, str] = {}
        self.held: list[int] = []
        self.ended: dict[int, BaseException] = {}

    def enter(self, caller: str) -> int:
        number = len(self.caller)
        self.caller[number], self.left[number] = caller, self.loop.create_future()

        async def client() -> None:
            try:
                await self.admission.enter(caller, lambda: self.left[number])
            except (BusyError, ClientDisconnect, asyncio.CancelledError) as error:
                self.ended[number] = error
                return
            self.held.append(number)

        self.tasks[number] = self.loop.create_task(client())
        return number

    def leave(self, number: int) -> None:
        if number in self.held:
            self.held.remove(number)
            self.admission.leave(self.caller[number])

    def hang_up(self, number: int) -> None:
        if not self.left[number].done():
            self.left[number].set_result(None)

    @property
    def waiting(self) -> list[int]:
        return [number for number, task in self.tasks.items() if not task.done()]

    def check(self) -> None:
        """What holds in the middle of everything, turns on their way to their task included."""
        a = self.admission
        queued = [turn for queue in a._queues.values() for turn in queue]
        assert a.waiting == len(queued) <= self.limits.queue
        assert all(a._queues.values())
        assert not any(turn.done() for turn in queued)
        assert len(self.held) <= a.running <= self.limits.running
        assert a.running + a.waiting == sum(a._of.values())
        assert all(0 < count <= self.limits.per_caller for count in a._of.values())
        assert a.running == self.limits.running or not a.waiting  # no turn is kept back from one that waits

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)
            self.check()

    def check_settled(self) -> None:
        a = self.admission
        assert (a.running, a.waiting) == (len(self.held), len(self.waiting))
        assert a._of == Counter(self.caller[number] for number in (*self.held, *self.waiting))

    async def go_home(self) -> None:
        """Everybody leaves, and nothing is left of them."""
        await self.settle()
        self.check_settled()
        while self.held or self.waiting:
            for number in list(self.held):
                self.leave(number)
            await self.settle()
        a = self.admission
        assert (a.running, a.waiting, dict(a._of), dict(a._queues)) == (0, 0, {}, {})
        await a.enter("late")
        a.leave("late")


def run(work: Callable[[FakeTime], Coroutine[Any, Any, None]]) -> None:
    loop = FakeTime()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        loop.run_until_complete(work(loop))
    finally:
        loop.close()
    assert not complaints


OPERATIONS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(CALLERS)),
    st.tuples(st.sampled_from(["leave", "leave_soon", "leave_at_deadline", "cancel", "hang_up"]), st.integers(0, 20)),
    st.tuples(st.just("clock"), st.sampled_from([QUEUE_S / 2, QUEUE_S])),
    st.tuples(st.just("pass"), st.integers(1, 4)),
    st.tuples(st.just("refuse"), st.none()),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(OPERATIONS, max_size=60), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6))
def test_whatever_comes_together_every_turn_comes_back(steps: list[tuple[str, Any]], running: int, queue: int, each: int) -> None:
    async def work(loop: FakeTime) -> None:
        crowd = Crowd(loop, running=running, queue=queue, per_caller=each)
        for what, value in steps:
            if what == "enter":
                crowd.enter(value)
            elif what == "clock":
                loop.now += value
            elif what == "pass":
                for _ in range(value):
                    await asyncio.sleep(0)
                    crowd.check()
            elif what == "refuse":
                crowd.admission.refuse(Drain.error)
            elif crowd.caller:
                number = value % len(crowd.caller)
                if what == "leave":
                    crowd.leave(number)
                elif what == "leave_soon":
                    loop.call_soon(crowd.leave, number)
                elif what == "leave_at_deadline":  # in the pass of a timer, before it or behind it
                    loop.call_at(loop.now + QUEUE_S, crowd.leave, number)
                elif what == "cancel":
                    crowd.tasks[number].cancel()
                else:
                    crowd.hang_up(number)
            crowd.check()
        loop.now += 3 * QUEUE_S  # what is due comes now
        await crowd.go_home()

    run(work)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.sampled_from(CALLERS)),
            st.tuples(st.sampled_from(["leave", "cancel", "hang_up"]), st.integers(0, 20)),
        ),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_callers_take_turns_and_within_one_the_first_comes_first(steps: list[tuple[str, Any]], running: int) -> None:
    async def work(loop: FakeTime) -> None:
        crowd = Crowd(loop, running=running, queue=100, per_caller=100)
        line: OrderedDict[str, list[int]] = OrderedDict()
        held: list[int] = []

        def hand_on() -> None:
            while len(held) < running and line:
                caller, numbers = line.popitem(last=False)
                held.append(numbers.pop(0))
                if numbers:
                    line[caller] = numbers

        for what, value in steps:
            if what == "enter":
                line.setdefault(value, []).append(crowd.enter(value))
                hand_on()
            elif crowd.caller:
                number = value % len(crowd.caller)
                waits = number in crowd.waiting
                if what == "leave":
                    crowd.leave(number)
                    held[:] = [n for n in held if n != number]
                elif waits:
                    crowd.tasks[number].cancel() if what == "cancel" else crowd.hang_up(number)
                    line[crowd.caller[number]].remove(number)
                    if not line[crowd.caller[number]]:
                        del line[crowd.caller[number]]
                hand_on()
            await crowd.settle()
            crowd.check_settled()
            assert sorted(crowd.held) == sorted(held)
        await crowd.go_home()

    run(work)


@pytest.mark.parametrize("end", ["cancel", "hang_up", "timer", "refuse"])
def test_an_end_at_every_pass_beside_a_turn_at_every_pass(end: str) -> None:
    """``end`` comes after 0 to 8 passes of the loop, the turn after 0 to 8, in either order within one pass."""

    async def work(loop: FakeTime) -> None:
        for ends, comes, first in itertools.product(range(9), range(9), ("end", "turn")):
            crowd = Crowd(loop, running=1, queue=5, per_caller=5)
            one = crowd.enter("a")
            await crowd.settle()
            two, three = crowd.enter("b"), crowd.enter("c")

            def finish(crowd: Crowd = crowd, two: int = two) -> None:
                if end == "cancel":
                    crowd.tasks[two].cancel()
                elif end == "hang_up":
                    crowd.hang_up(two)
                elif end == "timer":
                    loop.now += QUEUE_S
                else:
                    crowd.admission.refuse(Drain.error)

            both = [(ends, finish), (comes, lambda crowd=crowd, one=one: crowd.leave(one))]
            for number in range(10):
                for at, move in both if first == "end" else reversed(both):
                    if at == number:
                        move()
                crowd.check()
                await asyncio.sleep(0)
            await crowd.settle()
            crowd.check_settled()
            assert crowd.held or {two, three} <= crowd.ended.keys()
            await crowd.go_home()

    run(work)


async def test_a_turn_that_comes_with_the_timer_is_taken() -> None:
    """A busy loop finds both due in one pass; the client waited long enough to be served."""
    admission = Admission(ServingLimits(running=1, queue=5, queue_s=0.01))
    await admission.enter("a")
    waiting = asyncio.create_task(admission.enter("b"))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.005, admission.leave, "a")
    deadline = asyncio.get_running_loop().time() + 0.05
    while asyncio.get_running_loop().time() < deadline:
        pass  # a loop that is held up
    await waiting
    admission.leave("b")
    assert (admission.running, admission.waiting) == (0, 0)


# -- the request behind a turn -----------------------------------------------------------------------------------------------------


class Client:
    """A server's side of a request: messages as they come, as `receive` gives them, and the answer."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []

    def body(self, data: bytes, *, more: bool = False) -> None:
        self.messages.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def hang_up(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


SCOPE = {"type": "http", "path": "/step", "headers": [], "method": "POST"}


class Rig:
    """Steps behind `Admit`; each reads its body, then runs until ``go``."""

    def __init__(self, **limits: Any) -> None:
        self.drain, self.admission = Drain(), Admission(ServingLimits(**limits))
        self.go = asyncio.Event()
        self.bodies: list[bytes] = []
        self.admit = Admit(self.app, self.admission, self.drain, ("/step",))

    async def app(self, _: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def start(self, client: Client) -> asyncio.Task[None]:
        return asyncio.create_task(self.admit(SCOPE, client.messages.get, client.send))


async def passes(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_who_hangs_up_in_the_queue_gives_its_place_to_the_living() -> None:
    rig = Rig(running=1, queue=5, queue_s=30, per_caller=4)
    clients = [Client() for _ in range(4)]
    tasks = [rig.start(client) for client in clients]
    for client in clients:
        client.body(b"x")
    await passes()
    assert (rig.admission.running, rig.admission.waiting) == (1, 3)
    for client in clients[1:]:
        client.hang_up()
    await passes()
    assert (rig.admission.running, rig.admission.waiting) == (1, 0)
    assert [client.status for client in clients[1:]] == [499] * 3
    live = Client()
    task = rig.start(live)
    live.body(b"live")
    rig.go.set()
    await asyncio.gather(*tasks, task)
    assert rig.bodies == [b"x", b"live"]
    assert (clients[0].status, live.status, rig.admission.running, rig.admit._room.taken) == (200, 200, 0, 0)


@pytest.mark.parametrize("comes", range(8))
@pytest.mark.parametrize("cut", [(), (1,), (2, 5), (1, 2, 3, 4, 5, 6)])
async def test_a_body_that_comes_before_with_and_after_the_turn_is_whole(cut: tuple[int, ...], comes: int) -> None:
    """One message a pass; the turn comes after ``comes``."""
    body = b"0123456"
    pieces = [body[a:b] for a, b in itertools.pairwise((0, *cut, len(body)))]
    rig = Rig(running=1, queue=5, queue_s=30)
    await rig.admission.enter("other")
    client = Client()
    task = rig.start(client)
    await asyncio.sleep(0)
    for number in range(max(len(pieces), comes + 1)):
        if number == comes:
            rig.admission.leave("other")
        if number < len(pieces):
            client.body(pieces[number], more=number < len(pieces) - 1)
        await asyncio.sleep(0)
    rig.go.set()
    await task
    assert (rig.bodies, client.status, rig.admission.running, rig.admit._room.taken) == ([body], 200, 0, 0)


async def test_a_hang_up_right_behind_the_turn_reaches_the_app() -> None:
    for late in range(8):
        rig = Rig(running=1, queue=5, queue_s=30)
        await rig.admission.enter("other")
        client = Client()
        client.body(b"half", more=True)
        task = rig.start(client)
        await passes()
        asyncio.get_running_loop().call_soon(rig.admission.leave, "other")
        await passes(late)
        client.hang_up()
        async with asyncio.timeout(5):
            await task
        assert (rig.bodies, rig.admission.running, rig.admit._room.taken) == ([], 0, 0)


@pytest.mark.parametrize("at", range(10))
async def test_cancelled_at_every_await_nothing_is_left(at: int) -> None:
    for turn in range(10):
        rig = Rig(running=1, queue=5, queue_s=30)
        await rig.admission.enter("other")
        client = Client()
        task = rig.start(client)
        client.body(b"x")
        for number in range(12):
            if number == turn:
                rig.admission.leave("other")
            if number == at:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
        await passes()
        assert (rig.admission.running, rig.admission.waiting, rig.admit._room.taken) == (0, 0, 0)
        assert not [one for one in asyncio.all_tasks() if one.get_name() == "queued client"]


async def test_what_is_read_ahead_is_bounded_and_the_rest_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentguard.gateway.ahead.AHEAD", 10)
    monkeypatch.setattr("agentguard.gateway.ahead.ROOM_S", 0.01)
    room = Room()
    first, second = Client(), Client()
    one, two = Ahead(first.messages.get, room), Ahead(second.messages.get, room)
    for client in (first, second):
        client.body(b"x" * 6, more=True)
        client.body(b"x" * 6, more=True)
        client.body(b"x" * 6)
    gone = [one.gone(), two.gone()]
    await asyncio.sleep(0.05)
    assert room.taken <= 10 + 6
    for ahead in (one, two):
        read, more = b"", True
        while more:
            message = await ahead()
            read, more = read + message["body"], message["more_body"]
        assert read == b"x" * 18
        ahead.end()
    assert room.taken == 0
    await asyncio.gather(*gone, return_exceptions=True)


async def test_those_that_wait_when_the_gateway_ends_are_told_at_once_and_running_steps_go_on() -> None:
    rig = Rig(running=1, queue=5, queue_s=30)
    clients = [Client() for _ in range(3)]
    tasks = [rig.start(client) for client in clients]
    for client in clients:
        client.body(b"x")
    await passes()
    rig.drain.begin()
    await asyncio.gather(*tasks[1:])
    assert [client.status for client in clients[1:]] == [503, 503]
    assert all(b"gateway_ends" in client.sent[1]["body"] for client in clients[1:])
    rig.go.set()
    await tasks[0]
    assert (clients[0].status, rig.admission.running, rig.admission.waiting) == (200, 0, 0)


# -- over sockets ------------------------------------------------------------------------------------------------------------------


def request_bytes(url: str, session: str, size: int = 0) -> bytes:
    payload = json.dumps(ASK | {"messages": [{"role": "user", "content": "x" * size}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url[7:]}\r\nx-session-id: {session}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*url[7:].split(":"))


async def until(running: int, waiting: int, client: httpx2.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while True:
            told = (await client.get("/health/ready")).json()
            if (told["running"], told["waiting"]) == (running, waiting):
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [0, 1 << 20], ids=["small", "larger than the server's buffer"])
async def test_over_http_the_dead_make_room_and_the_living_send_whole_bodies(size: int) -> None:
    script = Script(chat=THINKS_AND_ANSWERS, hold=asyncio.Event(), window=10_000_000)
    async with (
        gateway_rig(script, serving={"running": 1, "queue": 8, "queue_s": 60, "per_caller": 4}) as r,
        httpx2.AsyncClient(base_url=r.url, timeout=30) as client,
    ):
        writers = []
        for number in range(4):
            _, writer = await connected(r.url)
            writer.write(request_bytes(r.url, f"s{number}", size))
            await writer.drain()
            writers.append(writer)
            await until(1, number, client)
        for writer in writers[1:]:
            writer.close()
        await until(1, 0, client)
        body = ASK | {"messages": [{"role": "user", "content": "y" * size}]}
        live = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(1, 1, client)
        script.hold.set()  # type: ignore[union-attr]
        assert (await live).status_code == 200
        assert [len(asked["messages"][0]["content"]) for _, asked, _ in script.seen] == [size, size]
        assert script.seen[-1][1]["messages"][0]["content"] == "y" * size
        writers[0].close()
        await until(0, 0, client)


async def test_over_http_requests_in_one_packet_and_a_body_in_pieces_pass_the_queue_unharmed() -> None:
    script = Script(chat=THINKS_AND_ANSWERS, hold=asyncio.Event())
    async with gateway_rig(script, serving={"running": 1, "queue": 8}) as r:
        _, first = await connected(r.url)
        first.write(request_bytes(r.url, "first"))
        while not script.seen:
            await asyncio.sleep(0.01)
        reader, piped = await connected(r.url)
        piped.write(request_bytes(r.url, "one") + request_bytes(r.url, "two"))
        in_pieces = request_bytes(r.url, "pieces", 40)
        other_reader, other = await connected(r.url)
        for at in range(0, len(in_pieces), 60):
            other.write(in_pieces[at : at + 60])
            await other.drain()
            await asyncio.sleep(0.01)
            if at == len(in_pieces) // 120 * 60:
                script.hold.set()  # type: ignore[union-attr]
        for stream, answers in ((reader, 2), (other_reader, 1)):
            for _ in range(answers):
                async with asyncio.timeout(20):
                    head = await stream.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200"), head
                    length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
                    assert json.loads(await stream.readexactly(length))["choices"][0]["message"]["content"] == "bb"
        assert Counter(headers["x-session-id"] for _, _, headers in script.seen) == Counter(["first", "one", "two", "pieces"])
        for writer in (first, piped, other):
            writer.close()
