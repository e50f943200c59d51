"""A guarded agent with a tool: python examples/sdk/agent_loop.py [URL] [--calls]

With ``--calls`` the model calls the tool itself, for servers with a tool parser (``engine: {tool_parser: hermes}`` in a
recipe). The reference pair writes no JSON, so without it the program calls the tool with the model's answer, as agents of plain
text do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import agentguard

QUESTIONS = ("a=47;b=a+8;c=a-3;?c", "a=ans;b=a+9;c=b-1;?c", "a=ans;b=a-5;c=b+2;?b")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "solve",
            "description": "The value of the variable behind '?' in a chain of assignments modulo 100.",
            "parameters": {"type": "object", "properties": {"chain": {"type": "string"}}, "required": ["chain"]},
        },
    }
]


def solve(chain: str, answer: int = 0) -> int:
    """The tool. ``answer`` is what ``ans`` stands for."""
    *lines, asked = chain.split(";")
    values = {"ans": answer}
    for line in lines:
        name, _, term = line.partition("=")
        sign = "+" if "+" in term else "-"
        left, _, right = term.partition(sign)
        values[name] = (values.get(left, 0) or int(left if left.isdigit() else 0)) + int(f"{sign}{right or 0}")
    return values[asked.removeprefix("?")] % 100


async def with_calls(s: agentguard.Session, question: str) -> str:
    """Steps until the model answers without calling the tool."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(5):
        reply = await s.complete(messages, tools=TOOLS)
        if not reply.tool_calls:
            return reply.content
        messages.append(reply.message)
        for call in reply.tool_calls:
            try:
                result = json.dumps(solve(**call.parsed()))
            except (agentguard.ToolArgumentsError, TypeError, ValueError, KeyError) as error:
                result = f"error: {error}"
            print(f"  {call.name}({call.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit("five calls without an answer")


async def as_text(s: agentguard.Session, history: list[dict[str, Any]], question: str, before: int) -> int:
    """Up to three tries; the tool says whether the answer is right."""
    asked = [*history, {"role": "user", "content": question}]
    for seed in range(3):
        reply = await s.complete(asked, temperature=1.0, seed=seed, max_tokens=600)
        right = reply.content.strip() == str(solve(question, before))
        verdict = "right" if right else "wrong"
        print(f"{question} -> {reply.content.strip()!r} is {verdict} ({reply.think_tokens} of {reply.tokens} tokens thought)")
        if right:
            break
    history += [asked[-1], {"role": "assistant", "content": str(solve(question, before))}]
    return solve(question, before)


async def main(url: str, *, calls: bool) -> None:
    async with agentguard.connect(url, middleware=[agentguard.RetryCuts()]) as guard, guard.session("agent-loop") as s:
        if calls:
            print(await with_calls(s, f"What is c? {QUESTIONS[0]}"))
        else:
            history: list[dict[str, Any]] = []
            answer = 0
            for question in QUESTIONS:
                answer = await as_text(s, history, question, answer)
        print(f"{s.budget.steps} steps, {s.budget.tokens} tokens, {s.budget.state.closes} traces closed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8484")
    parser.add_argument("--calls", action="store_true")
    given = parser.parse_args()
    asyncio.run(main(given.url, calls=given.calls))
