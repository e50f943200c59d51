"""A scripted model for coding agents: it thinks until it is cut, calls the client's own tool, and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.scripted import STOP, USAGE, B, chunk, thinking

SHELLS = ("Bash", "bash", "exec_command", "shell", "shell_command", "run_shell_command")
WRITTEN = "made by the agent"
DONE = "The file is written."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent's model says that it is done; its prompt asks for it."""


def agent(path: str) -> Any:
    """A script's ``chat``: the first turn with tools runs away inside its trace; continued behind the close it writes ``path`` with
    the client's shell; with a tool's result it answers; without tools (a title, a summary) it says a word."""

    def chat(body: dict[str, Any]) -> Iterator[Any]:
        return iter(list(_turn(body, path)))

    return chat


def _turn(body: Mapping[str, Any], path: str) -> Iterator[Any]:
    yield chunk([], role="assistant")
    tools = [t["function"] for t in body.get("tools") or () if t.get("type") == "function"]
    results = [m for m in body["messages"] if m.get("role") == "tool"]
    if tools and not results and not body.get("continue_final_message"):
        yield from thinking(4000)
        yield chunk([], finish="length")
        return
    submits = SUBMIT.split()[1] in json.dumps(body["messages"])
    if tools and (not results or submits):
        shell = next(t for name in SHELLS for t in tools if t["name"] == name)
        arguments = json.dumps(_arguments(shell, SUBMIT if results else f"printf '{WRITTEN}' > {path}"))
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": shell["name"], "arguments": arguments[:9]}}
        yield chunk([B], tool_calls=[call])
        yield chunk([B], tool_calls=[{"index": 0, "function": {"arguments": arguments[9:]}}])
        yield chunk([STOP], finish="tool_calls")
    else:
        if tools and not body.get("continue_final_message"):
            yield from thinking(6)
            yield chunk([2], content="")
        for word in DONE.split(" "):
            yield chunk([B], content=f"{word} ")
        yield chunk([STOP], finish="stop")
    yield USAGE


def _arguments(tool: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The command in whatever the client calls it, and a word for everything else it requires."""
    schema = tool["parameters"]
    found: dict[str, Any] = {}
    for name in {*schema.get("required", ()), *({"command", "cmd"} & set(schema["properties"]))}:
        kind = schema["properties"][name].get("type", "string")
        if name in ("command", "cmd"):
            found[name] = ["bash", "-c", command] if kind == "array" else command
        else:
            found[name] = {"string": "write a file", "boolean": False, "number": 1000, "integer": 1000}.get(kind, [])
    return found
