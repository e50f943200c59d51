"""What a step tells while it runs: the events of a stream, in the order they come.

    StepStarted            first, and once: the step's rule, budget and think cap
    CompactionAdvised      the context is about to reach its cutoff
    ThinkDelta             any number
    TraceClosed            the guard closed the trace (at most a few)
    AnswerDelta, ToolCall  any number
    StepSummary            the step's accounts and whole message
    SessionAlarm           one of the session's meters is near its limit, or at it
    Economics              last: whether the step's rule pays

An attempt that gave nothing and that the guard makes again by itself, with a lower limit or on another engine, brings nothing.
A step that is tried again (`agentguard.RetryCuts`) brings `Retried` and then all of it anew. All are frozen msgspec structs;
counts are in tokens, times are UNIX seconds. `StepStarted`, `CompactionAdvised`, `TraceClosed` and `SessionAlarm` are the
guard's own events (agentguard.events).
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import msgspec

from agentguard.errors import AgentGuardError
from agentguard.events import ArmReport, CompactionAdvised, RatioReport, SessionAlarm, StepFinished, StepStarted, TraceClosed


class ThinkDelta(msgspec.Struct, frozen=True, kw_only=True, tag="think_delta"):
    """A piece of a trace. ``think_tokens``: of the step so far, this piece included; ``think_cap``: where the trace will be closed,
    which may move while it grows (agentguard.trace.cutoff)."""

    text: str
    think_tokens: int
    think_cap: int


class AnswerDelta(msgspec.Struct, frozen=True, kw_only=True, tag="answer_delta"):
    """A piece of the answer. ``answer_tokens``: of the step so far, this piece included."""

    text: str
    answer_tokens: int


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, tag="tool_call"):
    """A whole tool call; the pieces it streams in are put together first. ``arguments`` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """The arguments as a mapping. Raises ToolArgumentsError where the model wrote something else."""
        try:
            value = json.loads(self.arguments or "{}")
        except ValueError as error:
            raise ToolArgumentsError(self.name, self.arguments, f"are not JSON ({error})") from None
        if not isinstance(value, dict):
            raise ToolArgumentsError(self.name, self.arguments, "are no JSON object")
        return value


class ToolArgumentsError(AgentGuardError, ValueError):
    """A model's tool call cannot be read. ``tool`` is its name, ``arguments`` the text it wrote."""

    def __init__(self, tool: str, arguments: str, why: str) -> None:
        super().__init__(f"the arguments of tool {tool!r} {why}: {arguments[:80]!r}; tell the model so in the tool's result")
        self.tool = tool
        self.arguments = arguments


class StepSummary(msgspec.Struct, frozen=True, kw_only=True, tag="step_summary"):
    """A finished step: what was said, and what it cost.

    ``content`` and ``reasoning`` are the whole texts, ``tool_calls`` in the model's order, ``finish_reason`` as OpenAI's, and
    ``accounts`` every count of the guard (`agentguard.events.StepFinished`).
    """

    content: str
    reasoning: str
    tool_calls: list[ToolCall]
    finish_reason: str
    accounts: StepFinished

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message for the next step's ``messages``; the trace stays out, as chat templates drop it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.tool_calls:
            calls = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.tool_calls
            ]
            message["tool_calls"] = calls
        return message

    @property
    def closed(self) -> str:
        """Why the guard closed the trace (`agentguard.trace.cutoff.CloseReason`), "" where the model closed it itself."""
        return self.accounts.closed

    @property
    def tokens(self) -> int:
        """Generated tokens: think, answer and markers together."""
        return self.accounts.tokens

    @property
    def think_tokens(self) -> int:
        """Tokens of the trace."""
        return self.accounts.think_tokens

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer and of tool calls."""
        return self.accounts.answer_tokens


class Economics(msgspec.Struct, frozen=True, kw_only=True, tag="economics"):
    """Whether the rule pays in the class of work this step belongs to, from all sessions of the guard (docs/economics.md).

    ``workload`` is the class, ``arm`` what the session was assigned ("" for a step that is not counted) and ``rows`` one
    `agentguard.events.ArmReport` an arm, the strict control first.
    """

    workload: str
    arm: str
    rows: list[ArmReport]

    @property
    def own(self) -> ArmReport | None:
        """The row of the step's own arm; None before anything was counted."""
        return next((row for row in self.rows if row.arm == self.arm), None)

    @property
    def inflation(self) -> RatioReport | None:
        """λ of the step's arm: tokens a step over those under strict, with its 95 % interval. None: not known yet, or the arm is
        strict itself."""
        return self.own.ratios.get("tokens") if self.own is not None else None

    @property
    def gain(self) -> float | None:
        """(ℓ + 1) of the step's arm over that of strict; None: not known yet, or the arm is strict itself."""
        return self.own.gain if self.own is not None else None


class Retried(msgspec.Struct, frozen=True, kw_only=True, tag="retried"):
    """The step is run again: what its stream told so far is void. ``attempt`` counts from 1, ``reason`` is why the former one was
    not kept, ``changed`` the names of the request's fields that differ now."""

    attempt: int
    reason: str
    changed: list[str]


StepEvent: TypeAlias = (
    StepStarted
    | CompactionAdvised
    | ThinkDelta
    | TraceClosed
    | AnswerDelta
    | ToolCall
    | SessionAlarm
    | StepSummary
    | Economics
    | Retried
)
"""Everything a step's stream may bring."""
