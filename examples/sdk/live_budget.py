"""A stream with the session's budget beside it: python examples/sdk/live_budget.py [URL]"""

from __future__ import annotations

import asyncio
import sys

import agentguard
from agentguard import AnswerDelta, StepStarted, StepSummary, ThinkDelta, TraceClosed

QUESTION = "a=47;b=a+8;c=b-3;d=c+9;e=d-2;f=e+1;g=f+7;h=g-6;i=h+5;j=i-4;k=j+3;l=k-7;m=l+6;n=m-2;?n"
ENOUGH = 40
"""Think tokens after which this program closes the trace, long before the guard would."""


async def main(url: str) -> None:
    async with agentguard.connect(url) as guard, guard.session("live-budget") as s, s.stream(QUESTION, max_tokens=600) as stream:
        asked = False
        async for event in stream:
            match event:
                case StepStarted():
                    print(f"step {event.step} under {event.rule}: {event.budget} tokens, {event.think_cap} of them to think")
                case ThinkDelta():
                    for step in s.budget.running:
                        print(f"  thought {step.think_tokens:4d}, {step.think_left:4d} left   {event.text!r}")
                    if event.think_tokens >= ENOUGH and not asked:
                        asked = True
                        await stream.close_now("this is enough")
                case TraceClosed():
                    print(f"closed at {event.think_tokens} tokens by the {event.how}: {event.detail}")
                case AnswerDelta():
                    print(f"answer: {event.text!r}")
                case StepSummary():
                    print(f"{event.think_tokens} think + {event.answer_tokens} answer tokens in {event.accounts.ttlt_s:.2f} s")
        print(f"the session has used {s.budget.tokens} tokens in {s.budget.steps} step(s)")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8484"))
