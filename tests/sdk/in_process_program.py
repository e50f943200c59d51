"""examples/sdk/in_process.py as it stands, and behind it, with the engine it has started, cancellations of a stream at every event.

python -m tests.sdk.in_process_program
"""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import agentguard
from agentguard.engines import vllm_inprocess as module
from agentguard.engines.vllm_inprocess import InProcessEngine
from agentguard.policy import Policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "sdk" / "in_process.py"
QUESTION = "a=47;b=a+8;c=b-3;d=c+9;e=d-2;?e"
start = module.vllm_inprocess


@asynccontextmanager
async def and_then_checked(policy: Policy) -> AsyncIterator[InProcessEngine]:
    async with start(policy) as engine:
        yield engine
        await check(engine, policy)


async def cancelled_at(s: agentguard.Session, n: int) -> None:
    """Read a step, and be cancelled at its ``n``-th event."""
    seen = 0
    async for _ in s.stream(QUESTION, max_tokens=300, temperature=1.0):
        seen += 1
        if seen == n:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(60)


async def check(engine: InProcessEngine, policy: Policy) -> None:
    async with agentguard.connect(engine, policy=policy) as guard:
        for n in range(1, 12):
            async with guard.session(f"cancel-{n}") as s:
                reader = asyncio.create_task(cancelled_at(s, n))
                await asyncio.wait([reader])
                assert reader.cancelled() or n > 5, reader
                # the loop was left by an exception, so Python closes its generator a moment later
                async with asyncio.timeout(10):
                    while s.budget.running:
                        await asyncio.sleep(0.01)
            async with asyncio.timeout(10):
                while engine.llm.output_processor.has_unfinished_requests() or engine._client._transport.running:
                    await asyncio.sleep(0.01)
            left = [task.get_name() for task in asyncio.all_tasks() if "agentguard" in task.get_name()]
            assert left == [], left
        async with guard.session("after") as s:
            assert (await s.complete(QUESTION, max_tokens=300, temperature=1.0)).content.strip()
    print("nothing is left behind")


if __name__ == "__main__":
    module.vllm_inprocess = and_then_checked
    asyncio.run(runpy.run_path(str(EXAMPLE))["main"]())
