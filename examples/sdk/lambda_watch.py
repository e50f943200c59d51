"""λ against gain while traffic flows: python examples/sdk/lambda_watch.py [URL] [SECONDS]

One line a second for each relaxed arm and class of work. A rule pays while gain > λ; "—" is not known yet (docs/economics.md). With
``--traffic N`` it sends N short sessions itself.
"""

from __future__ import annotations

import argparse
import asyncio
import random

import agentguard


def shown(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


async def watch(guard: agentguard.Connection) -> None:
    for row in await guard.economics():
        ratio = row.ratios.get("tokens")
        if row.arm != "strict":
            interval = "" if ratio is None else f" [{ratio.low:.2f}, {shown(ratio.high)}]"
            print(
                f"{row.arm}  λ {shown(ratio.value if ratio else None)}{interval}  gain {shown(row.gain)}  {row.verdict}"
                f"  ({row.sessions} sessions, {'on' if row.on else 'switched to strict'})",
                flush=True,
            )


async def traffic(guard: agentguard.Connection, sessions: int) -> None:
    async def one(number: int) -> None:
        a, b = random.Random(number).sample(range(10, 90), 2)
        async with guard.session(f"watch-{number}", temperature=1.0) as s:
            await s.complete(f"a={a};b=a+{b % 9 + 1};c=b-{a % 9 + 1};?c", max_tokens=600)

    await asyncio.gather(*(one(number) for number in range(sessions)))


async def main(url: str, seconds: float, sessions: int) -> None:
    async with agentguard.connect(url) as guard:
        sending = asyncio.create_task(traffic(guard, sessions))
        try:
            async with asyncio.timeout(seconds):
                while not sending.done() or not sessions:
                    await watch(guard)
                    await asyncio.sleep(1)
        except TimeoutError:
            print(f"watched for {seconds:g} s")
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        await watch(guard)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8484")
    parser.add_argument("seconds", nargs="?", type=float, default=60.0)
    parser.add_argument("--traffic", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(main(given.url, given.seconds, given.traffic))
