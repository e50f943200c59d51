"""From the chunks of a chat completion to the SDK's events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentguard.events import StepFinished
from agentguard.sdk.events import AnswerDelta, StepEvent, StepSummary, ThinkDelta, ToolCall


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a step stood when a chunk was given: think and answer tokens so far, and the think cap."""

    think: int
    answer: int
    cap: int


class ChunkReader:
    """Reads one step: ``feed`` gives the events of a chunk, ``summary`` those of all of them."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._told: list[ToolCall] = []
        self._finish = ""

    def feed(self, chunk: Mapping[str, Any], at: Standing) -> Iterator[StepEvent]:
        """The events of one chunk; a trace comes before the answer behind it."""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
            if thought:
                self._reasoning.append(thought)
                yield ThinkDelta(text=thought, think_tokens=at.think, think_cap=at.cap)
            said = delta.get("content") or ""
            if said:
                self._content.append(said)
                yield AnswerDelta(text=said, answer_tokens=at.answer)
            for part in delta.get("tool_calls") or ():
                yield from self._call(part)
            if choice.get("finish_reason"):
                self._finish = choice["finish_reason"]
                yield from self._whole()

    def _call(self, part: Mapping[str, Any]) -> Iterator[ToolCall]:
        """A piece of a tool call; a call is whole once another one begins, or with the finish reason."""
        index = part.get("index", 0)
        if index not in self._calls:
            yield from self._whole()
            self._calls[index] = {"id": "", "name": "", "arguments": ""}
        call, function = self._calls[index], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""

    def _whole(self) -> Iterator[ToolCall]:
        for call in list(self._calls.values())[len(self._told) :]:
            self._told.append(ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"]))
            yield self._told[-1]

    def summary(self, accounts: StepFinished) -> StepSummary:
        """The whole step."""
        return StepSummary(
            content="".join(self._content), reasoning="".join(self._reasoning), tool_calls=list(self._told),
            finish_reason=self._finish or accounts.finish_reason, accounts=accounts,
        )  # fmt: skip
