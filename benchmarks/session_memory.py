"""What a worker holds of one session, in bytes: `python benchmarks/session_memory.py`.

Each session runs ``--steps`` steps of an agent as the guard books them: added, recorded, settled in a store in memory. ``usual`` is
one agent with natural ends; ``most`` is everything at its bound: as many agents as are kept apart, with names as long as they may
be, every other step cut and the rest failed with the longest message, every request too long, and a store that never says what it
has recorded. Counted by tracemalloc, which sees Python's own allocations; a process needs somewhat more for its heap.
"""

from __future__ import annotations

import argparse
import gc
import json
import tracemalloc
import uuid
from collections.abc import Callable
from functools import partial

from agentguard.economics.cells import QUANTITIES, SessionSums
from agentguard.engines.openai_http import MESSAGE
from agentguard.events import StepFinished
from agentguard.identity import Identity
from agentguard.policy import Policy
from agentguard.session import AGENTS, Session, Sessions
from agentguard.store.accounts import Key, Settlement
from agentguard.store.sessions import MemorySessions

NAME = 256
"""Characters of an id at most."""
KINDS = ("first", "follow_up", "tool_result")


def step_of(session: Session, number: int, *, most: bool) -> StepFinished:
    """A step whose strings are its own, as those of a running guard are."""
    return StepFinished(
        t=1e9 + number / 3, session=str(session.identity), step=number, request=uuid.uuid4().hex, model="model", rule="strict",
        prompt_tokens=1000 + 37 * number, tokens=900 + number, think_tokens=600 + number, answer_tokens=298, marker_tokens=2,
        rounds=300 + number, drafted=1800 + number, accepted=600 + number, closed="loop" if most and number % 2 else "",
        finish_reason="stop", ttlt_s=number * 1.1, error=uuid.uuid4().hex * (MESSAGE // 32) if most and not number % 2 else "",
        arm="strict", workload=f"model/chat/{KINDS[number % 3]}", notes=[], reported_think=600 + number,
        agent=f"{number % AGENTS:0{NAME}}" if most else "",
    )  # fmt: skip


def run(session: Session, store: MemorySessions, steps: int, *, most: bool) -> None:
    key = Key(session.identity.caller, session.identity.session)
    for number in range(1, steps + 1):
        step = step_of(session, number, most=most)
        session.add(step, uuid.uuid4().hex[:16] if most else "", agent=step.agent)
        session.sums.setdefault((step.workload, step.arm), SessionSums(1, dict.fromkeys(QUANTITIES, number / 7)))
        session.record(step, "", side=False)
        told: Callable[[int], None] = partial(session.recorded, step.request)
        seq = store.settle_now(key, Settlement(step.request, step.tokens, step.think_tokens, record="r"))
        if most:
            session.remember_overflow(uuid.uuid4().hex[:16], 32_768)
        else:
            told(seq)


def bytes_a_session(sessions: int, steps: int, *, most: bool) -> float:
    """Mean over the sessions, after their ``steps`` steps."""
    kept, store = Sessions(sessions), MemorySessions(sessions)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(sessions):
            name = f"{uuid.uuid4().hex}-{number}"
            run(kept.get(Identity("c" * 12, name.zfill(NAME) if most else name)), store, steps, most=most)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / sessions
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6000)
    args = parser.parse_args()
    limit = Policy(model="m").max_sessions
    rows = {}
    for name, most in (("usual", False), ("most", True)):
        size = bytes_a_session(args.sessions, args.steps, most=most)
        rows[name] = {"KiB a session": round(size / 1024, 1), f"MiB at {limit} sessions": round(size * limit / 2**20)}
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
