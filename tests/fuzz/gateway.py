"""A gateway for the fuzzer of its routes, in a process of its own: `python -m tests.fuzz.gateway [module right wrong]` prints its
URL and serves until its standard input ends. The three words plant a bug in a copy of a module (tests/fuzz/planted.py)."""

from __future__ import annotations

import asyncio
import sys

from tests.fuzz.planted import planted
from tests.scripted import Script
from tests.security.rig import ANSWERS, gate

SESSIONS = 300
"""Remembered at once, so that what they hold does not look like a leak."""


async def main() -> None:
    script = Script(chat=list(ANSWERS), plugin=True)
    async with gate(script, content=True, max_sessions=SESSIONS) as g:
        print(g.url, flush=True)
        ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        while not ended.done():
            await asyncio.wait((ended,), timeout=0.5)
            g.events.clear()  # the rig's own memories
            script.seen.clear()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        copy = planted(*sys.argv[1:4])
        original = sys.modules[sys.argv[1]]
        for name in vars(original):
            if not name.startswith("__"):
                setattr(original, name, vars(copy)[name])
        from agentguard.gateway import app, server

        server.create_app = app.create_app
    asyncio.run(main())
