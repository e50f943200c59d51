"""Policies of one's own around every step: python examples/sdk/own_middleware.py [URL]

One is a function, one an object; their order is that of the list, the outermost first.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time

import agentguard
from agentguard import CallNext, Events, Middleware, StepRequest

SECRET = re.compile(r"sk-\w+")


async def redact(request: StepRequest, call_next: CallNext) -> Events:
    """Keys never reach the model."""
    clean = [{**m, "content": SECRET.sub("0", m["content"])} if isinstance(m.get("content"), str) else m for m in request.messages]
    async for event in call_next(request.copy(messages=clean)):
        yield event


class RateLimit(Middleware):
    """At most one step every ``every_s`` seconds, in all sessions together: later ones wait."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.waited_s = 0.0
        self._next = 0.0

    async def handle(self, request: StepRequest, call_next: CallNext) -> Events:
        now = time.monotonic()
        wait = max(0.0, self._next - now)
        self._next = max(now, self._next) + self.every_s
        self.waited_s += wait
        await asyncio.sleep(wait)
        async for event in call_next(request):
            yield event


async def main(url: str) -> None:
    limit = RateLimit(0.2)
    async with agentguard.connect(url, middleware=[redact, limit]) as guard, guard.session("own-middleware") as s:
        questions = ("a=sk-47x;b=a+8;?b", "a=12;b=a+3;?b", "a=30;b=a-4;?b")
        for reply in await asyncio.gather(*(s.complete(q, max_tokens=400, temperature=1.0, seed=1) for q in questions)):
            print(f"{reply.reasoning.strip().splitlines()[:1]} -> {reply.content.strip()}")
    print(f"waited {limit.waited_s:.1f} s for the rate limit")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8484"))
