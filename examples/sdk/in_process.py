"""An engine in this process, no server: python examples/sdk/in_process.py

vLLM's AsyncLLM with the plugin; needs the engine environment. The same program with a path to another model, or with a recipe:
``connect("recipes/reference-pair.yaml", in_process=True)``.
"""

from __future__ import annotations

import asyncio

import agentguard
from agentguard.reference import reference_model


async def main() -> None:
    policy = agentguard.Policy(
        model=str(reference_model("target")), draft=str(reference_model("draft")), rule="cactus:delta=1,p_min=0.1,top_k=10"
    )
    async with agentguard.connect(policy, in_process=True) as guard:
        print(f"{guard.model} with a window of {guard.window} tokens")
        async with guard.session("in-process") as s:
            for rule in ("strict", None):  # None: the session's arm, here the relaxed rule but for 5 % of the sessions
                reply = await s.complete("a=47;b=a+8;c=a-3;?c", rule=rule, temperature=1.0, seed=1, max_tokens=600)
                done = reply.accounts
                print(
                    f"{done.rule}: {reply.content.strip()!r}, {done.tokens} tokens in {done.rounds} rounds, "
                    f"{done.accepted} of {done.drafted} draft tokens accepted"
                )
            closed = await s.complete("a=47;b=a+8;c=b-3;d=c+9;?d", think_tokens=6, max_tokens=600)
            print(f"closed at its budget of 6: {closed.think_tokens} think tokens, answer {closed.content.strip()!r}")


if __name__ == "__main__":  # vLLM's core begins as a fresh interpreter, which imports this file
    asyncio.run(main())
