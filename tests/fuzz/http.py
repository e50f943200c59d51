"""The gateway's routes, fuzzed over a socket: requests that schemathesis makes from the OpenAPI document, valid and invalid ones,
and bent ones of our own that no schema describes.

What must hold: an answer in time, never a 5xx (the upstream behind it is well), and of every 4xx the field, in a JSON error.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import h11
import httpx2
import psutil
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from agentguard.gateway.auth import ROUTES
from agentguard.gateway.openapi import document
from tests.fuzz import make
from tests.fuzz.run import BATCHES, BUGS, Outcome
from tests.fuzz.targets import _BODY_WORDS, BODY

ANSWER_S = 20.0
OURS = 0.5
"""Share of requests of our own making."""
PLANTED = ("agentguard.gateway.app", "        except ValidationError as error:\n", "        except KeyError as error:\n")


class EnoughError(Exception):
    """Enough bugs were found."""


@contextmanager
def gateway(bug: tuple[str, str, str] | None = None) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "tests.fuzz.gateway", *(bug or ())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError("the gateway did not start; run python -m tests.fuzz.gateway")
        yield url, psutil.Process(process.pid)
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class Judge:
    """Sends requests, and looks at what comes back."""

    def __init__(self, url: str, process: psutil.Process, outcome: Outcome, wanted: int) -> None:
        self._client = httpx2.Client(base_url=url, timeout=ANSWER_S, trust_env=False)
        self._process, self.outcome, self._wanted = process, outcome, wanted
        self.memory: list[float] = []
        self.statuses: Counter[int] = Counter()

    def close(self) -> None:
        self._client.close()

    def send(self, method: str, url: str, **options: Any) -> None:
        outcome = self.outcome
        try:
            request = self._client.build_request(method, url, **options)
        except (httpx2.InvalidURL, UnicodeError, ValueError, TypeError):
            return  # cannot be sent by this client
        began = time.perf_counter()
        try:
            response = self._client.send(request, stream=True)
            try:
                wrong = self._wrong(request, response)
            finally:
                response.close()
        except (httpx2.LocalProtocolError, httpx2.UnsupportedProtocol, h11.LocalProtocolError):
            return  # not by this client's parser
        except httpx2.TransportError as error:
            wrong = f"{type(error).__name__}: no answer"
        outcome.inputs += 1
        outcome.slowest_ms = max(outcome.slowest_ms, 1000 * (time.perf_counter() - began))
        if wrong:
            asked = f"{method} {url} {dict(request.headers)} {request.content[:300] if hasattr(request, '_content') else ''!r}"
            outcome.bugs.append({"number": outcome.inputs, "error": wrong, "input": asked[:600]})
            if len(outcome.bugs) >= BUGS:
                raise EnoughError
        if outcome.inputs % max(1, self._wanted // BATCHES) == 0:
            self.memory.append(self._process.memory_info().rss / 2**20)

    def _wrong(self, request: httpx2.Request, response: httpx2.Response) -> str:
        status = response.status_code
        self.statuses[status] += 1
        if status >= 500 and not (status == 503 and request.url.path == "/guard/v1/watch"):
            return f"{status}: {response.read()[:200]!r}"
        if any(name.startswith("access-control-allow") for name in response.headers):
            return "another origin is allowed"
        if 300 <= status < 400:
            return f"{status} to {response.headers.get('location')!r}"
        if status < 400:
            self.outcome.seen["accepted"] += 1
            if "event-stream" not in response.headers.get("content-type", ""):
                response.read()
            return ""
        self.outcome.seen["refused"] += 1
        raw = response.read()
        if request.method == "HEAD":
            return ""
        try:
            error = json.loads(raw)["error"]
        except (ValueError, KeyError, TypeError):
            return f"{status} without an error of ours: {raw[:200]!r}"
        return "" if error.get("param") and error.get("message") else f"{status} names no field: {raw[:200]!r}"


def run(requests: int, *, seed: int = 1, bug: tuple[str, str, str] | None = None, made_by: float = OURS) -> Outcome:
    """``made_by``: the share of our own making, the rest is schemathesis'."""
    outcome = Outcome("http-routes", seed)
    started = time.perf_counter()
    with gateway(bug) as (url, process):
        judge = Judge(url, process, outcome, requests)
        try:
            _ours(judge, round(requests * made_by), seed)
            if made_by < 1:
                _schemathesis(judge, requests, seed)
            if httpx2.get(f"{url}/health", timeout=ANSWER_S, trust_env=False).status_code != 200:
                outcome.bugs.append({"number": outcome.inputs, "error": "not healthy at the end", "input": ""})
        except EnoughError:
            pass
        finally:
            judge.close()
    outcome.seconds = time.perf_counter() - started
    if len(judge.memory) >= 4:
        outcome.grown_mb = min(judge.memory[-2:]) - judge.memory[1]
    return outcome


def _schemathesis(judge: Judge, requests: int, seed: int) -> None:
    """Valid and invalid requests of every operation, in turns, until there are enough."""
    operations = [result.ok() for result in schemathesis.openapi.from_dict(document()).get_all_operations()]

    def send(case: Any) -> None:
        options = case.as_transport_kwargs(base_url="http://gateway")
        path = options["url"].removeprefix("http://gateway")
        headers = {str(k): str(v) for k, v in options.get("headers", {}).items() if v is not None}
        body: dict[str, Any] = {}
        if "json" in options:
            body = {"content": json.dumps(options["json"]).encode(), "headers": {"content-type": "application/json"} | headers}
        elif options.get("data") is not None:
            data = options["data"]
            body = {
                "content": data.encode("utf-8", "replace")
                if isinstance(data, str)
                else data
                if isinstance(data, bytes)
                else repr(data).encode()
            }
        params = {
            str(k): v if isinstance(v, str | int | float | bool) else json.dumps(v)
            for k, v in (options.get("params") or {}).items()
        }
        judge.send(case.method, path, params=params, **{"headers": headers} | body)

    for turn in itertools.count():
        for number, operation in enumerate(operations):
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                left = requests - judge.outcome.inputs
                if left <= 0:
                    return
                # bodies have most to say; a GET without parameters is soon told
                share = 6 if operation.method == "post" else 1
                examples = min(left, max(2, share * requests // 400))
                _cases(operation.as_strategy(generation_mode=mode), examples, seed + 1000 * turn + number, send)


def _cases(strategy: Any, examples: int, seed: int, send: Callable[[Any], None]) -> None:
    quiet = settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    with contextlib.suppress(Unsatisfiable):  # a GET without parameters has no invalid form
        seeded(seed)(quiet(given(case=strategy)(send)))()


_HEADERS: dict[str, tuple[str, ...]] = {
    "content-type": ("application/json", "text/plain", "application/json; charset=utf-16", "multipart/form-data", ""),
    "host": ("127.0.0.1", "evil.example", "localhost", "[::1", ""),
    "origin": ("null", "http://evil.example", "http://[", "http://127.0.0.1"),
    "sec-fetch-site": ("cross-site", "none", "same-origin"),
    "x-session-id": ("s1", "../x", "a b", "x" * 300, "\x7f"),
    "x-agentguard-caller": ("c", "é"),
    "baggage": ("session.id=1", "session.id="),
    "content-length": ("0", "-1", "99999999999999999999", "5"),
    "transfer-encoding": ("chunked",),
    "expect": ("100-continue",),
    "authorization": ("Bearer x", "Basic x", ""),
    "upgrade": ("websocket", "h2c"),
    "accept-encoding": ("gzip", "identity;q=0"),
    "x-agentguard-side": ("1", "0"),
}
_POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": BODY | {"model": "scripted"},
    "/agentguard/close": {"request": "r", "session": "", "why": "w"},
    "/agentguard/sessions/limit": {"session": "s", "meter": "tokens", "limit": 5},
    "/agentguard/pin": {"arm": "a", "workload": "", "rule": "strict"},
    "/agentguard/tts": {"enabled": True, "settings": {"stride": 5}},
}


def _ours(judge: Judge, requests: int, seed: int) -> None:
    number = 0
    while judge.outcome.inputs < requests:
        rng = random.Random(f"http/{seed}/{number}")
        number += 1
        path = (
            rng.choice([*_POSTS, *_POSTS, *ROUTES])
            if rng.random() < 0.9
            else "/" + quote(make.text(rng, [*ROUTES, "..", "/", "%2e"], 4), errors="surrogatepass")
        )
        method = rng.choice(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH")) if rng.random() < 0.2 else ""
        method = method or ("POST" if path in _POSTS else "GET")
        options: dict[str, Any] = {"headers": {"content-type": "application/json"}}
        if rng.random() < 0.3:
            for name in rng.sample([*_HEADERS], rng.randrange(1, 3)):
                options["headers"][name] = rng.choice(_HEADERS[name])
            options["headers"] = {k: v.encode("latin-1") for k, v in options["headers"].items()}
        if path in _POSTS:
            sample = {k: v for k, v in _POSTS[path].items() if k in ("messages", "model") or rng.random() < 0.6}
            raw = make.dumped(rng, make.bent(rng, sample, _BODY_WORDS) if rng.random() < 0.8 else sample)
            options["content"] = make.bent_bytes(rng, raw, [b"NaN", b"\\ud800", b"[" * 2000]) if rng.random() < 0.15 else raw
        if rng.random() < 0.1:
            options["params"] = {make.text(rng, ["interval"], 2): make.text(rng, ["0.5", "nan", "-1"], 2)}
        judge.send(method, path, **options)
