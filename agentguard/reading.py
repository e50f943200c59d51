"""What the stream of one step has said so far: its tokens by kind, its trace, its answer, its end.

`Step` decides by it; nothing here decides. Chunks come in as the engine sends them and go out as the client sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentguard.engines.base import Chunk
from agentguard.engines.chunks import ANSWERS, BLOCKS, REASONING, count
from agentguard.engines.facts import Facts
from agentguard.events import Note
from agentguard.requests import ChatRequest
from agentguard.trace.markers import Family
from agentguard.trace.opening import behind, ends_inside, opens
from agentguard.trace.splitter import Splitter
from agentguard.trace.tally import MarkerIds, Tally, TextTally

_TAIL = 2000
_CUT = ("length", "max_tokens", "model_length", "content_filter", "abort", "error")
"""Finish reasons behind which no end of turn stands."""
_LARGEST = 1 << 53
"""The largest whole number that JSON's readers agree on."""


class Reading:
    """``prompt``: its ids, None when the server cannot tell; ``facts``: what is known of the engine, which a stream adds to;
    ``most``: tokens the engine can have generated, and ``window`` that a prompt can have: a count beyond is not believed.

    notes: what the step's record will mention. ids: generated, end of turn included. given: think tokens the prompt brought.
    answered, tools: an answer's text or a tool call has come. inline: the trace comes in the content. entered, left: the latest
    chunk began or ended a block. rounds, drafted, accepted: the engine's counters, None where it told none. reported_think: the
    engine's own count of think tokens. estimated: tokens were counted from text, or the engine counts others.
    """

    def __init__(
        self, request: ChatRequest, facts: Facts, family: Family, markers: MarkerIds | None, *, prompt: list[int] | None,
        prompt_tokens: int, most: int, window: int,
    ) -> None:  # fmt: skip
        self.notes: list[Note] = []
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self.ids: list[int] = []
        self.given = 0
        self.answered = False
        self.tools = False
        self.inline = False
        self.entered = False
        self.left = False
        self.finish_reason = ""
        self.rounds: int | None = None
        self.drafted: int | None = None
        self.accepted: int | None = None
        self.reported_think: int | None = None
        self.estimated = False
        self.shape: Chunk = {}
        """What all chunks of the step have in common: id, model and so on."""
        self._request = request
        self._most = most
        self._window = window
        self._facts = facts
        self._family = family
        self._markers = markers
        self._chunks = 0
        self._trace: list[str] = []
        self._fresh_ids: list[int] = []
        self._fresh_text = ""
        self._stop_reason: int | str | None = None
        self._usage: Chunk | None = None
        self._splitter: Splitter | None = None
        self._separates = False
        self._misfiled: list[str] = []
        self._unknown = False
        self.doubtful = False
        """A start marker stands open in the prompt, and nothing says that the template wrote it."""
        self.tally: Tally | TextTally
        if prompt is not None and markers is not None:
            self.tally = self._open(prompt, markers)
        else:
            # a server that hides its reasoning looks like one that streams it as content, so content is believed to be a trace
            # only where that has been seen
            opened = bool(family.opened) and facts.inline and not request.thinking_off
            self.tally = TextTally(facts.chars_per_token, opened=opened)

    @property
    def empty(self) -> bool:
        return not self.answered and not self.tools

    @property
    def trace(self) -> str:
        """The text of the latest block."""
        return "".join(self._trace)

    def tail(self, characters: int) -> str:
        """The trace's latest words so far."""
        return "".join(self._trace[-characters:])[-characters:]

    @property
    def turn_ended(self) -> bool:
        """The model ended its turn: the last token is the end of turn. With a stop string of the client's it is a real token.

        Servers have names of their own for a natural end (`eos`, `end_turn`): every reason counts that is not known to be another.
        """
        return self.finish_reason not in ("", *_CUT) and not isinstance(self._stop_reason, str)

    @property
    def wanted_no_answer(self) -> bool:
        """The client named the end of the trace as its stop: it wants the trace alone. Any other stop is meant for the answer."""
        reason, markers = self._stop_reason, self._markers
        if isinstance(reason, str):
            return any(end in reason for _, end in self._family.pairs)
        return markers is not None and reason in markers.end and reason in self._request.stop_tokens

    @property
    def overrun(self) -> bool:
        """The engine sends more than it may, or too many chunks that hold none. A text is counted by an estimate, which may be some
        times too high."""
        if isinstance(self.tally, Tally):
            return self.tally.total > self._most or self._chunks > 4 * self._most
        return self.tally.total > 8 * self._most or self._chunks > 16 * self._most

    def fresh(self) -> tuple[list[int], str]:
        """Ids and trace text since it was last asked."""
        ids, text, self._fresh_ids, self._fresh_text = self._fresh_ids, self._fresh_text, [], ""
        return ids, text

    def note(self, note: Note) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # -- the stream ---------------------------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> Chunk | None:
        """Count a chunk; returns it as the client sees it, None for one without choices."""
        self._chunks += 1
        self.entered = self.left = False
        if chunk.get("prompt_token_ids") and not self.ids:
            # what was really served; a server may render a request differently from what /tokenize said
            self.prompt = list(chunk["prompt_token_ids"])
            self.prompt_tokens = len(self.prompt)
            if self._markers is not None:
                self.tally = self._open(self.prompt, self._markers)
        if chunk.get("usage") or chunk.get("metrics"):
            self._take_usage(chunk)
            chunk = {k: v for k, v in chunk.items() if k not in ("usage", "metrics")}  # it comes once, at the end
        if not chunk.get("choices"):
            return None
        if not self.shape:
            self.shape = {k: chunk[k] for k in ("id", "object", "created", "model", "system_fingerprint") if k in chunk}
        choice = chunk["choices"][0]
        self._read(choice)
        if choice.get("finish_reason"):
            self.finish_reason, self._stop_reason = choice["finish_reason"], choice.get("stop_reason")
        return self._public(chunk)

    def open_again(self, *, unknown: bool = False) -> None:
        """More is known of the template than when the prompt was read. ``unknown``: nobody can tell what it writes, so a marker
        that stands open is taken for its own: a trace must not run free because a tokenizer has no answer."""
        self._unknown = unknown
        if self.prompt is not None and self._markers is not None:
            self.tally = self._open(self.prompt, self._markers)

    def _open(self, prompt: list[int], markers: MarkerIds) -> Tally:
        rest = behind(prompt, markers)
        asked = {**(self._request.model_extra or {}), "messages": self._request.messages}
        opened = rest is not None and (self._opens(rest, markers) or ends_inside(asked, self._family))
        self.given = len(rest) if rest is not None and opened else 0
        self.doubtful = rest is not None and not opened
        return Tally(markers, opened=opened)

    def _opens(self, rest: tuple[int, ...], markers: MarkerIds) -> bool:
        return self._unknown or opens(rest, markers, self._facts.tails.values())

    def _read(self, choice: Mapping[str, Any]) -> None:
        ids = list(choice.get("token_ids") or ())
        delta = choice.get("delta") or {}
        reasoning = _thought(delta)
        content = delta.get("content") or ""
        self._separates = self._separates or bool(reasoning)
        self.tools = self.tools or _calls(delta)
        tally = self.tally
        was_inside = tally.inside
        if isinstance(tally, Tally):
            if not ids and not self.ids and (reasoning or content):
                # the server tells a prompt's ids and streams none
                tally = self.tally = TextTally(self._facts.chars_per_token, opened=tally.inside)
            else:
                tally.feed(ids)
        self.ids += ids
        thought, said = self._split(reasoning, content, still_inside=was_inside and (tally.inside or not ids))
        if isinstance(tally, TextTally):
            tally.feed_text(thought, said)
        self.answered = self.answered or bool(said.strip())
        self.entered, self.left = tally.inside and not was_inside, was_inside and not tally.inside
        if self.entered:
            self._trace.clear()
        if thought:
            self._trace.append(thought)
        self._fresh_ids += ids
        self._fresh_text += thought

    def _split(self, reasoning: str, content: str, *, still_inside: bool) -> tuple[str, str]:
        """Thought and answer text of a delta. Content is split too: a server without a reasoning parser streams the trace there,
        and some put a later block's markers into it."""
        if not content:
            return reasoning, ""
        if self._splitter is None:
            self._splitter = Splitter(
                self._family.pairs,
                opened=still_inside and not self._separates,
                special_tokens=self._family.special or self._separates,
            )
        was_open = self._splitter.inside
        segments = self._splitter.feed(content)
        thought = "".join(text for kind, text in segments if kind == "think")
        self.inline = self.inline or (bool(thought) and not self._separates)
        if self.inline and was_open and not self._splitter.inside:
            self._facts.inline = True
        return reasoning + thought, "".join(text for kind, text in segments if kind == "answer")

    def _take_usage(self, chunk: Chunk) -> None:
        """A server's own counts, as far as they can be true: a number it cannot have reached says nothing, nor does one below 0."""
        metrics = chunk.get("metrics")
        spec = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(spec, dict):
            rounds = count(spec.get("num_spec_steps"), self._most)
            drafted = count(spec.get("num_draft_tokens"), _LARGEST)
            accepted = count(spec.get("num_accepted_draft_tokens"), min(self._most, drafted or 0))
            if rounds is not None and drafted is not None and accepted is not None:
                self.rounds = (self.rounds or 0) + rounds
                self.drafted = (self.drafted or 0) + drafted
                self.accepted = (self.accepted or 0) + accepted
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            known = {k: v for k, v in usage.items() if v is None or isinstance(v, dict) or count(v, _LARGEST) is not None}
            known["prompt_tokens"] = count(usage.get("prompt_tokens"), self._window)
            known["completion_tokens"] = total = count(usage.get("completion_tokens"), self._most)
            details = usage.get("completion_tokens_details")
            reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
            known["completion_tokens_details"] = {"reasoning_tokens": count(reasoning, self._most if total is None else total)}
            self._usage = {**chunk, "usage": known}

    # -- its end ------------------------------------------------------------------------------------------------------

    def ended(self) -> None:
        """The stream is over: what looked like the beginning of a marker was none."""
        if self._splitter is None:
            return
        for kind, text in self._splitter.finish():
            self.answered = self.answered or (kind == "answer" and bool(text.strip()))

    def settle(self) -> None:
        """Compare with the engine's own counters at the end of a stream that was read to its end."""
        usage = (self._usage or {}).get("usage") or {}
        total = usage.get("completion_tokens")
        reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        if isinstance(self.tally, TextTally):
            if total:
                self._facts.learn_rate(self.tally.settle(total, reasoning or None))
            self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
            self.estimated = self.tally.estimated
            return
        self.estimated = total is not None and total != len(self.ids)
        # vLLM's older parsers say 0 where the prompt opened the block
        if reasoning or (reasoning == 0 and not self.given):
            self.reported_think = reasoning
            if reasoning != self.tally.think:
                self.note(Note.COUNT_DIFFERS)

    def look_back(self, *, closed: bool, usual_answer: int) -> None:
        """What is worth a note once the step is over. usual_answer: p90 of the session's answers in tokens, 0 for unknown."""
        if closed and usual_answer and self.tally.answer >= max(16, 3 * usual_answer):
            self.note(Note.ANSWER_GREW)
        if self.empty:
            self.note(Note.EMPTY_ANSWER)
        names = self._request.tool_names()
        if names and not self.tools and self.finish_reason == "stop":
            tail = self.trace[-_TAIL:]
            if any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", tail) for name in names):
                self.note(Note.PLANNED_NOT_CALLED)

    def final_usage(self) -> Chunk:
        """The usage chunk with the guard's counts, which cover a continuation too."""
        usage = dict((self._usage or {}).get("usage") or {})
        total = self.tally.total
        usage |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": total, "total_tokens": self.prompt_tokens + total}
        usage["completion_tokens_details"] = {"reasoning_tokens": self.tally.think}
        rest = {k: v for k, v in (self._usage or {}).items() if k not in ("id", "created", "model")}
        return {**rest, **self.shape, "choices": [], "usage": usage}

    # -- a continuation -----------------------------------------------------------------------------------------------

    def begin_answer(self) -> None:
        """Another stream begins: what ended the first one, and its counts, are settled."""
        self.finish_reason, self._stop_reason, self._usage = "", None, None

    def take_answer(self, chunk: Chunk, *, known: bool) -> Chunk | None:
        """A chunk of a continuation, spliced: the first part's id, no second role.

        Some servers file what follows a closed block as reasoning (antirez/ds4#897). Where the block is ``known`` to be closed,
        that is the answer; elsewhere it is held back until it is clear that nothing else comes.
        """
        if chunk.get("usage") or chunk.get("metrics"):
            self._take_usage(chunk)
        if chunk.get("prompt_token_ids") and not known and self._markers is not None and isinstance(self.tally, Tally):
            # the note is the last message, so nothing of the client's is continued
            rest = behind(chunk["prompt_token_ids"], self._markers)
            self.tally.inside = rest is not None and self._opens(rest, self._markers)
        self._chunks += 1
        if not chunk.get("choices"):
            return None
        choice = dict(chunk["choices"][0])
        ids = list(choice.get("token_ids") or ())
        delta = dict(choice.get("delta") or {})
        if "text" in choice:
            delta = {"content": choice["text"] or ""}
            if not self.answered:  # some models close the closed block once more; the completions route has no parser to hide it
                delta["content"] = re.sub(rf"\A\s*{re.escape(self._family.markers.end)}", "", delta["content"])
        delta.pop("role", None)
        inside = self.tally.inside
        if isinstance(self.tally, Tally):
            self.tally.feed(ids)
            inside = inside or self.tally.inside
        content = delta.get("content") or ""
        self.tools = self.tools or _calls(delta)
        reasoning = _thought(delta)
        if inside:
            self.note(Note.THINKS_AGAIN)
        if reasoning and not inside:
            for key in (*REASONING, *BLOCKS):
                delta.pop(key, None)
            if known:
                content = delta["content"] = reasoning + content
            else:
                self._misfiled.append(reasoning)
        self.answered = self.answered or bool(content.strip() and not (inside and self.tally.inside))
        if self._misfiled and (self.answered or self.tools):
            delta["reasoning"], self._misfiled = "".join(self._misfiled), []
            self.note(Note.THINKS_AGAIN)
        if isinstance(self.tally, TextTally):
            self.tally.feed_answer(content)
        if choice.get("finish_reason"):
            self.finish_reason, self._stop_reason = choice["finish_reason"], choice.get("stop_reason")
        if not ids and not any(delta.values()):
            return None
        shown = self.choice(delta, ids=ids or None)
        if "text" not in choice and choice.get("logprobs"):
            shown["choices"][0]["logprobs"] = choice["logprobs"]
        return self._public(shown)

    def misfiled(self) -> Chunk | None:
        """A continuation of which nothing but reasoning came: it is the answer, misfiled."""
        text, self._misfiled = "".join(self._misfiled), []
        if not text or not self.empty:
            return None
        self.answered = bool(text.strip())
        return self._public(self.choice({"content": text}))

    def settle_continuation(self, *, came: bool) -> None:
        """The continuation is over; ``came``: the engine sent one."""
        self.tally.finish(stopped=self.turn_ended)
        if isinstance(self.tally, TextTally):
            self.estimated = True
            if came and self._usage is not None:
                self.tally.answer = self._usage["usage"].get("completion_tokens") or self.tally.answer
                self.tally.markers = 0

    # -- as the client sees it ----------------------------------------------------------------------------------------

    def choice(self, delta: dict[str, Any], finish: str | None = None, ids: list[int] | None = None) -> Chunk:
        """A chunk of this step."""
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        if ids is not None:
            choice["token_ids"] = ids
        return {**self.shape, "choices": [choice]}

    def _public(self, chunk: Chunk) -> Chunk:
        """The chunk as the client asked for it: token ids only if it wanted them, reasoning unless it did not."""
        request, choices = self._request, []
        for choice in chunk["choices"]:
            choice = dict(choice)
            if not request.return_token_ids:
                choice.pop("token_ids", None)
            if request.include_reasoning is False:
                choice["delta"] = {k: v for k, v in (choice.get("delta") or {}).items() if k not in (*REASONING, *BLOCKS)}
            choices.append(choice)
        shown = chunk if request.return_token_ids else {k: v for k, v in chunk.items() if k != "prompt_token_ids"}
        return {**shown, "choices": choices}


def unfinished(chunk: Chunk) -> Chunk:
    """The last chunk of a step that goes on."""
    return {**chunk, "choices": [{**chunk["choices"][0], "finish_reason": None, "stop_reason": None}]}


def _thought(delta: Mapping[str, Any]) -> str:
    """A delta's trace; a server that writes both names says the same in both."""
    return next((delta[key] for key in REASONING if delta.get(key)), "")


def _calls(delta: Mapping[str, Any]) -> bool:
    """A delta that answers with something other than text: a call, a refusal, a picture, sound."""
    return any(delta.get(key) for key in ANSWERS)
