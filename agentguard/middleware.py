"""The guard: asyncio middleware around an Engine.

For each step it measures the prompt, computes the adaptive cutoff, sends the budget and the rule with the request, counts the
tokens that come back by kind, makes sure that an answer comes (a step that ends without one is continued once behind a closed
trace), and publishes the step's accounts.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic
import structlog
from pydantic import BaseModel, ConfigDict, Field

from agentguard.economics.cells import CANCELLED
from agentguard.economics.classes import Classes, is_side_call, kind_of
from agentguard.economics.ledger import Ledger, ledger_of
from agentguard.engines.base import Chunk, Engine, EngineInfo, Stream
from agentguard.errors import AgentGuardError, ConfigError, EngineDiedError, EngineError
from agentguard.events import EngineDied, EngineReady, Event, StepFinished, StepStarted, VerificationStep
from agentguard.policy import Policy
from agentguard.rulespec import RuleSpec
from agentguard.session import Identity, Session, Sessions
from agentguard.telemetry.hub import Hub
from agentguard.trace.cutoff import Cap, growth_pressure, think_cap
from agentguard.trace.markers import Markers
from agentguard.trace.tally import MarkerIds, Tally

logger = structlog.get_logger(__name__)


class ChatRequest(BaseModel):
    """The parts of a chat request the guard reads; everything else is passed on as it came."""

    model_config = ConfigDict(extra="allow", frozen=True)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    include_reasoning: bool | None = None
    tools: list[Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ChatRequest:
        try:
            return cls.model_validate(body)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(".".join(map(str, first["loc"])), first.get("input"), first["msg"]) from None

    @property
    def limit(self) -> int | None:
        """The client's limit M; of two given, the smaller."""
        given = [m for m in (self.max_tokens, self.max_completion_tokens) if m is not None]
        return min(given) if given else None


@dataclass(slots=True)
class _Account:
    """What a running step has produced so far."""

    prompt: list[int]
    tally: Tally
    opened_tokens: int
    """Tokens of the prompt that already count against the think cap."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tools: bool = False
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    finish_reason: str = ""
    stop_reason: int | str | None = None
    closed: str = ""
    continued: bool = False
    estimated: bool = False

    def take_usage(self, chunk: Chunk) -> None:
        """Add the engine's own counters from the final chunk; a total that is not ours marks the counts as estimated."""
        spec = (chunk.get("metrics") or {}).get("speculative_decoding")
        if spec:
            self.rounds = (self.rounds or 0) + spec["num_spec_steps"]
            self.drafted = (self.drafted or 0) + spec["num_draft_tokens"]
            self.accepted = (self.accepted or 0) + spec["num_accepted_draft_tokens"]
        total = (chunk.get("usage") or {}).get("completion_tokens")
        if not self.continued and total is not None and total != len(self.ids):
            self.estimated = True

    def take_finish(self, choice: Mapping[str, Any]) -> None:
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
            self.stop_reason = choice.get("stop_reason")

    @property
    def turn_ended(self) -> bool:
        """The model ended its turn: the last token is the end of turn. With a stop string of the client's it is a real token."""
        return self.finish_reason in ("stop", "tool_calls") and not isinstance(self.stop_reason, str)

    @property
    def empty(self) -> bool:
        return not self.text.strip() and not self.tools


# what a continuation takes over from its request: how tokens are drawn and what the answer must look like
_CONTINUED = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "bad_words", "response_format", "structured_outputs", "vllm_xargs", "priority",
)  # fmt: skip


class Guard:
    """One engine, many sessions. Create with `Guard.open`; it owns no task of its own."""

    def __init__(
        self, engine: Engine, policy: Policy, hub: Hub, info: EngineInfo, markers: MarkerIds, ledger: Ledger | None = None
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.hub = hub
        self.info = info
        self.sessions = Sessions(policy.max_sessions)
        self.ledger = ledger or ledger_of(policy, on_event=hub.publish)
        self._classes = Classes()
        self._markers = markers
        self._engine_gone = False

    @classmethod
    async def open(
        cls, engine: Engine, policy: Policy, hub: Hub, markers: Markers | None = None, ledger: Ledger | None = None
    ) -> Guard:
        """Ask the engine for its model, window and the ids of its think markers."""
        markers = markers or Markers()
        info = await engine.info()
        start, end = await engine.tokenize_text(markers.start), await engine.tokenize_text(markers.end)
        if len(end) != 1 or len(start) != 1:
            raise EngineError(
                f"{info.model} writes {markers.start!r} as {len(start)} and {markers.end!r} as {len(end)} tokens; "
                "this version needs single-token think markers"
            )
        hub.publish(EngineReady(t=time.time(), engine=engine.name, model=info.model, max_model_len=info.max_model_len))
        return cls(engine, policy, hub, info, MarkerIds(start[0], end[0]), ledger)

    def observe(self, event: Event) -> None:
        """Take the engine's telemetry into the economics; a sink of the hub."""
        if isinstance(event, VerificationStep):
            self.ledger.verified(event)

    async def stream(self, body: Mapping[str, Any], identity: Identity, *, route: str = "chat", side: bool = False) -> Stream:
        """One guarded step as OpenAI chunks. The last chunk carries usage and the finish reason came before it.

        ``route`` names the protocol the client speaks and ``side`` that it calls this a side call, both for the economics.
        Raises ConfigError for a bad request (nothing was sent), EngineRequestError and EngineDiedError from the engine. Closing the
        iterator cancels the step in the engine; its accounts are published either way.
        """
        request = ChatRequest.read(body)
        if request.model not in (None, self.info.model):
            raise ConfigError("model", request.model, f"this gateway serves {self.info.model!r}; ask for that, or leave it out")
        asked = self._asked_rule(request)
        session = self.sessions.get(identity)
        prompt = await self.engine.tokenize_chat({"model": self.info.model, **body})
        kind = kind_of(request.messages, session.steps_started + 1)
        workload = self._classes.name(self.info.model, route, kind)
        side = is_side_call(
            body, request.limit, session_used_tools=session.used_tools, first=session.steps_started == 0, marked=side
        )
        assigned = self.ledger.assign(str(identity), workload, pinned=asked, side=side)
        xargs = {"ag_phase": self.policy.phase} | dict(request.vllm_xargs or {}) | {"ag_rule": assigned.rule}
        cap = self._cap(request, session, len(prompt), workload)
        session.used_tools |= bool(request.tools)
        number, request_id = session.next_step(), uuid.uuid4().hex
        self.ledger.started(request_id, assigned)
        account = _Account(prompt, *self._open_tally(prompt))
        started, error = time.perf_counter(), CANCELLED
        self.hub.publish(
            StepStarted(
                t=time.time(), session=str(identity), step=number, request=request_id, model=self.info.model, rule=xargs["ag_rule"],
                prompt_tokens=len(prompt), budget=cap.budget, think_cap=cap.think_cap, bound_by=cap.bound_by, arm=assigned.arm,
                workload=assigned.workload, assigned=assigned.reason,
            )
        )  # fmt: skip
        upstream = {**body, "model": self.info.model, "max_tokens": cap.budget, "return_token_ids": True, "vllm_xargs": xargs}
        for key in ("stream", "stream_options", "max_completion_tokens"):
            upstream.pop(key, None)
        upstream |= {"thinking_token_budget": cap.think_cap, "include_reasoning": True}
        try:
            async with aclosing(self._run(request, upstream, cap, account, request_id, identity.session)) as chunks:
                async for chunk in chunks:
                    yield chunk
            error, self._engine_gone = "", False
        except AgentGuardError as failure:
            error = str(failure)
            if isinstance(failure, EngineDiedError) and not self._engine_gone:
                self._engine_gone = True
                self.hub.publish(EngineDied(t=time.time(), engine=self.engine.name, reason=error))
            raise
        except Exception as failure:
            error = f"internal: {failure!r}"
            raise
        finally:
            tally = account.tally
            step = StepFinished(
                t=time.time(), session=str(identity), step=number, request=request_id, model=self.info.model, rule=xargs["ag_rule"],
                prompt_tokens=len(account.prompt), tokens=tally.total, think_tokens=tally.think, answer_tokens=tally.answer,
                marker_tokens=tally.markers, rounds=account.rounds, drafted=account.drafted, accepted=account.accepted,
                closed=account.closed, continued=account.continued, empty_answer=account.empty and not error,
                finish_reason=account.finish_reason, estimated=account.estimated, ttlt_s=time.perf_counter() - started, error=error,
                arm=assigned.arm, workload=assigned.workload,
            )  # fmt: skip
            session.add(step)
            self.hub.publish(step)
            try:
                self.ledger.finished(step, assigned, session.sums)
            except Exception as failure:  # counting must never break a client's stream
                logger.error("economics_failed", request=request_id, error=repr(failure))

    async def _run(
        self, request: ChatRequest, upstream: dict[str, Any], cap: Cap, account: _Account, request_id: str, session: str
    ) -> Stream:
        last: Chunk | None = None
        usage: Chunk | None = None
        async with aclosing(self.engine.chat(upstream, request_id, session)) as chunks:
            async for chunk in chunks:
                if chunk.get("prompt_token_ids"):
                    # what was really served; a server may render a request differently from what /tokenize said
                    account.prompt = chunk["prompt_token_ids"]
                    account.tally, account.opened_tokens = self._open_tally(account.prompt)
                if not chunk.get("choices"):
                    account.take_usage(chunk)
                    usage = chunk
                    continue
                choice = chunk["choices"][0]
                self._count(account, choice.get("token_ids") or [], cap)
                delta = choice.get("delta") or {}
                account.text += delta.get("content") or ""
                account.tools = account.tools or bool(delta.get("tool_calls"))
                account.take_finish(choice)
                if choice.get("finish_reason"):
                    last = _public(chunk, request)
                    continue
                yield _public(chunk, request)
        account.tally.finish(stopped=account.turn_ended)
        if last is None:
            raise EngineError(f"engine {self.engine.name} ended request {request_id} without a finish reason")
        if self._continuable(request, account, cap):
            yield _unfinished(last)
            async with aclosing(self._continue(cap, upstream, request, account, request_id, last)) as chunks:
                async for chunk in chunks:
                    yield chunk
            last = _choice(last, {}, account.finish_reason)
        yield last
        if usage is not None:
            yield _usage(usage, account)

    def _continuable(self, request: ChatRequest, account: _Account, cap: Cap) -> bool:
        """A step without an answer is continued, unless the client's own stop ended it, nothing of its budget is left, or it has
        tools: what follows could be a tool call, and the completions route would hand it out as text."""
        stopped_by_client = account.finish_reason == "stop" and account.stop_reason is not None
        return account.empty and not stopped_by_client and not request.tools and account.tally.total < cap.budget

    async def _continue(
        self, cap: Cap, upstream: Mapping[str, Any], request: ChatRequest, account: _Account, request_id: str, shape: Chunk
    ) -> Stream:
        """A step that ended without an answer goes on behind its trace, at token level (vllm.md, section 14).

        The end-of-turn token is dropped, the end marker added where it is missing, and what follows is the answer.
        """
        ids = list(account.ids)
        if account.turn_ended and ids:
            ids.pop()
        if account.tally.inside:
            ids.append(self._markers.end)
            account.tally.markers += 1
            account.closed = account.closed or "no_answer"
        account.continued = True
        account.tally.inside = False
        limit = max(1, min(cap.reserve, cap.budget - account.tally.total))
        body = {k: upstream[k] for k in _CONTINUED if k in upstream}
        # the turn may not end at once again: a marker is followed by a newline and at least one token of the answer
        body |= {"max_tokens": limit, "min_tokens": min(2, limit), "return_token_ids": True}
        async with aclosing(self.engine.complete([*account.prompt, *ids], body, f"{request_id}-answer")) as chunks:
            async for chunk in chunks:
                if not chunk.get("choices"):
                    account.take_usage(chunk)
                    continue
                choice = chunk["choices"][0]
                new = choice.get("token_ids") or []
                account.tally.feed(new)
                account.text += choice.get("text") or ""
                account.take_finish(choice)
                if choice.get("text") or new:
                    yield _public(_choice(shape, {"content": choice.get("text") or ""}, None, new), request)
        account.tally.finish(stopped=account.turn_ended)

    def _count(self, account: _Account, ids: list[int], cap: Cap) -> None:
        was_inside = account.tally.inside
        account.tally.feed(ids)
        account.ids += ids
        left = was_inside and not account.tally.inside
        if left and account.tally.block + account.opened_tokens >= cap.think_cap:
            account.closed = cap.bound_by
        if left:
            account.opened_tokens = 0

    def _open_tally(self, prompt: list[int]) -> tuple[Tally, int]:
        """A tally that knows whether the prompt opened a block, and how many of its tokens already count against the cap."""
        start = _last(prompt, self._markers.start)
        opened = start > _last(prompt, self._markers.end)
        return Tally(self._markers, opened=opened), len(prompt) - start - 1 if opened else 0

    def _cap(self, request: ChatRequest, session: Session, prompt: int, workload: str) -> Cap:
        cutoff = self.policy.cutoff
        cap = think_cap(
            window=self.info.max_model_len, prompt=prompt, limit=request.limit, answers=session.answers,
            growth=max(growth_pressure(session.traces), self.ledger.pressure(workload)), f_min=cutoff.f_min, f_max=cutoff.f_max,
            answer_floor=cutoff.answer_floor, margin=cutoff.margin,
        )  # fmt: skip
        if cap.budget == 0:
            raise ConfigError(
                "messages",
                f"{prompt} tokens",
                f"the prompt fills the context window of {self.info.max_model_len} tokens; compact it",
            )
        asked = request.thinking_token_budget
        if asked is not None and 0 <= asked < cap.think_cap:
            cap = Cap(cap.budget, asked, cap.reserve, cap.growth, "client")
        return cap

    def _asked_rule(self, request: ChatRequest) -> str:
        """The rule a request names itself, with its filter written out; "" for none."""
        rule = (request.vllm_xargs or {}).get("ag_rule")
        if rule is None:
            return ""
        if not isinstance(rule, str):
            raise ConfigError("vllm_xargs.ag_rule", rule, "write the rule as a string, for example 'cactus:delta=0.25'")
        return str(RuleSpec.parse(rule, what="vllm_xargs.ag_rule").for_request())


def _last(ids: list[int], token: int | None) -> int:
    for i in range(len(ids) - 1, -1, -1):
        if ids[i] == token:
            return i
    return -1


def _public(chunk: Chunk, request: ChatRequest) -> Chunk:
    """The chunk as the client asked for it: token ids only if it wanted them, reasoning unless it did not."""
    choices = []
    for choice in chunk["choices"]:
        choice = dict(choice)
        if not request.return_token_ids:
            choice.pop("token_ids", None)
        if request.include_reasoning is False:
            hidden = ("reasoning", "reasoning_content")
            choice["delta"] = {k: v for k, v in (choice.get("delta") or {}).items() if k not in hidden}
        choices.append(choice)
    shown = chunk if request.return_token_ids else {k: v for k, v in chunk.items() if k != "prompt_token_ids"}
    return {**shown, "choices": choices}


def _choice(shape: Chunk, delta: dict[str, Any], finish: str | None, ids: list[int] | None = None) -> Chunk:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    if ids is not None:
        choice["token_ids"] = ids
    return {**shape, "choices": [choice]}


def _unfinished(chunk: Chunk) -> Chunk:
    """The last chunk of a step that goes on."""
    return {**chunk, "choices": [{**chunk["choices"][0], "finish_reason": None, "stop_reason": None}]}


def _usage(chunk: Chunk, account: _Account) -> Chunk:
    """The usage chunk with the guard's counts, which cover a continuation too."""
    prompt, total = len(account.prompt), account.tally.total
    usage = dict(chunk.get("usage") or {})
    usage |= {"prompt_tokens": prompt, "completion_tokens": total, "total_tokens": prompt + total}
    usage["completion_tokens_details"] = {"reasoning_tokens": account.tally.think}
    return {**chunk, "usage": usage}
