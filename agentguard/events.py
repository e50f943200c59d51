"""The event types: the only wire format between engine, gateway, monitor and recorder.

msgspec structs with a `type` tag: msgpack on the ZMQ socket (one frame a step, as `PackedStep`), JSON on SSE and in recordings (one
event a line).
Adding a field with a default keeps old recordings readable; a reader skips what it does not know. Prompts and outputs are in none
of them. Times are UNIX seconds; every count is in tokens unless its name says otherwise.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec

from agentguard.row_flags import RowFlag as RowFlag


class Fate(StrEnum):
    """What became of one drafted token, and why."""

    STRICT = "strict"  # accepted, and strict verification would have accepted it on the same coin
    RELAXED = "relaxed"  # accepted only because the rule relaxes
    COIN = "coin"  # rejected by the rule's own test
    LOW_SUPPORT = "low_support"  # rejected by the support filter
    MASKED = "masked"  # rejected because the target forbids it, or because no token was drafted (-1)
    FORCED = "forced"  # the row was forced: accepted if it is the forced token, else rejected
    UNREAD = "unread"  # behind the first rejected token, so nothing was decided


class Note(StrEnum):
    """What the guard noticed about a step, besides its counts."""

    NO_CLOSE_TAG = "no_close_tag"  # the model ended its turn inside the trace; no overrun
    BUDGET_IGNORED = "backend_ignored_budget"  # the server did not close the trace at the budget it was sent
    BUDGET_MOVED = "budget_alias"  # the think budget came in a place where no server reads it
    IDENTICAL_RETRY = "identical_retry"  # the same request as one that was cut; its trace gets less room
    PLANNED_NOT_CALLED = "planned_not_called"  # the trace speaks of a tool, the step ends without a call
    ANSWER_GREW = "answer_grew"  # after the close the model went on reasoning in its answer
    THINKS_AGAIN = "thinks_again"  # after the close the model opened another block
    EMPTY_ANSWER = "empty_answer"  # neither text nor a tool call; the client got a line that says so
    COUNT_DIFFERS = "count_differs"  # the engine's own count of think tokens is another one
    FAULT_BEHIND = "fault_behind"  # the stream broke behind its finish reason; the answer was whole


class DraftRows(msgspec.Struct, frozen=True, kw_only=True):
    """The drafted tokens of one request in one round, position by position; all lists have the same length.

    p, q: target and draft probability of the token (q is -1 where the drafter kept none); rank: how many tokens the target
    finds more probable; strict: the probability min(1, p/q) with which strict verification would have accepted it; would:
    whether it would have, on the very coin that was thrown.
    """

    token: list[int]
    p: list[float]
    q: list[float]
    rank: list[int]
    strict: list[float]
    flags: list[int]
    would: list[bool] = msgspec.field(default_factory=list)
    fate: list[Fate] = msgspec.field(default_factory=list)


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One request in one verification round. ``accepted`` counts draft tokens, never the bonus token.

    ``end``: the highest probability the target gave the end-of-think marker among the round's decided rows, and ``entropy`` in nats
    there; -1 where the marker is unknown.
    """

    request: str
    rule_asked: str
    rule_effective: str
    drafted: int
    accepted: int
    rows: DraftRows
    end: float = -1.0
    entropy: float = -1.0


class VerificationStep(msgspec.Struct, frozen=True, kw_only=True, tag="verification_step"):
    """One engine step with drafts: the telemetry frame.

    ``step`` numbers the frames of an engine; ``lost`` is how many before this one never reached the gateway.
    """

    t: float
    engine: str
    step: int
    requests: list[Verified]
    lost: int = 0


class PackedStep(msgspec.Struct, frozen=True, kw_only=True, tag="packed_step"):
    """A `VerificationStep` as an engine sends it; `decode_msgpack` gives the step. What became of each row is worked out
    where it is read: in the engine's process it held up the next step.

    requests, rules (what was asked for), drafted, accepted: of each request. values: float32, little-endian, all rows of the column
    ``columns[0]`` first; the rows are those of the requests in turn, ``drafted`` of each. A reader finds columns by name.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ("token", "p", "q", "rank", "strict", "coin", "flags", "end", "entropy")

    t: float
    engine: str
    step: int
    requests: list[str]
    rules: list[str]
    drafted: list[Annotated[int, msgspec.Meta(ge=0)]]
    accepted: list[int]
    values: bytes
    columns: tuple[str, ...] = COLUMNS

    def unpacked(self) -> VerificationStep:
        """Requests without drafts are left out. Raises `msgspec.DecodeError` for a frame whose parts do not fit together."""
        rows, missing = sum(self.drafted), set(self.COLUMNS) - set(self.columns)
        if missing:
            raise msgspec.DecodeError(f"columns missing in `$.columns`: {sorted(missing)}; run the same agentguard on both sides")
        if not len(self.requests) == len(self.rules) == len(self.drafted) == len(self.accepted):
            raise msgspec.DecodeError("`$.requests`, `$.rules`, `$.drafted` and `$.accepted` differ in length")
        if len(self.values) != 4 * rows * len(self.columns):
            raise msgspec.DecodeError(f"`$.values` has {len(self.values)} bytes, not {rows} rows of {len(self.columns)} columns")
        numbers = array("f", self.values)
        if sys.byteorder == "big":
            numbers.byteswap()
        found = {name: numbers[i * rows : (i + 1) * rows].tolist() for i, name in enumerate(self.columns)}
        try:
            token, rank, flags = ([int(value) for value in found[name]] for name in ("token", "rank", "flags"))
        except (ValueError, OverflowError) as error:
            raise msgspec.DecodeError(f"`$.values` has no whole number where one belongs: {error}") from None
        columns = _Rows(token, found["p"], found["q"], rank, found["strict"], found["coin"], flags, found["end"], found["entropy"])
        requests, at = [], 0
        for request, rule, drafted, accepted in zip(self.requests, self.rules, self.drafted, self.accepted, strict=True):
            if drafted:
                requests.append(columns.verified(request, rule, at, drafted, accepted))
            at += drafted
        return VerificationStep(t=self.t, engine=self.engine, step=self.step, requests=requests)


_ACCEPTED, _RELAXED, _LOW_SUPPORT = int(RowFlag.ACCEPTED), int(RowFlag.RELAXED), int(RowFlag.LOW_SUPPORT)
_FORCED, _MASKED = int(RowFlag.FORCED), int(RowFlag.MASKED)  # an enum's own operators cost 1 us each


class _Rows:
    """Columns of a frame's rows, and the requests in them."""

    def __init__(
        self, token: list[int], p: list[float], q: list[float], rank: list[int], strict: list[float], coin: list[float],
        flags: list[int], end: list[float], entropy: list[float],
    ) -> None:  # fmt: skip
        self.token, self.p, self.q, self.rank, self.strict, self.flags = token, p, q, rank, strict, flags
        self.end, self.entropy = end, entropy
        self.would = [s >= c if s < 1 else True for s, c in zip(strict, coin, strict=True)]

    def verified(self, request: str, asked: str, start: int, drafted: int, accepted: int) -> Verified:
        """One request's round: the rows from ``start`` on, of whose drafts the first ``accepted`` passed."""
        mine = slice(start, start + drafted)
        flags, would = self.flags[mine], self.would[mine]
        fate = [_fate(j - accepted, flags[j], would[j]) for j in range(drafted)]
        relaxed = any([f & _RELAXED for f in flags])  # noqa: C419 - a list is half the cost for a handful of rows
        for j in range(min(accepted, drafted)):
            flags[j] |= _ACCEPTED
        # told is where, among the rows decided, the end marker stood highest
        decided = self.end[start : start + max(0, min(accepted + 1, drafted))]
        highest = max(decided, default=-1.0)
        at = start + decided.index(highest) if highest >= 0 else -1
        return Verified(
            request=request, rule_asked=asked, rule_effective=asked if relaxed else "strict", drafted=drafted, accepted=accepted,
            rows=DraftRows(
                token=self.token[mine], p=self.p[mine], q=self.q[mine], rank=self.rank[mine], strict=self.strict[mine], flags=flags,
                would=would, fate=fate,
            ),
            end=highest if at >= 0 else -1.0, entropy=self.entropy[at] if at >= 0 else -1.0,
        )  # fmt: skip


def _fate(behind: int, flags: int, would: bool) -> Fate:
    """``behind``: the row's distance to the first rejected one; negative for an accepted row."""
    if behind > 0:
        return Fate.UNREAD
    if flags & _FORCED:
        return Fate.FORCED
    if behind < 0:
        return Fate.RELAXED if flags & _RELAXED and not would else Fate.STRICT
    if flags & _MASKED:
        return Fate.MASKED
    return Fate.LOW_SUPPORT if flags & _LOW_SUPPORT else Fate.COIN


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="engine_ready"):
    """``f_min`` and ``f_max``: the cutoff's band, as shares of the window and of a budget."""

    t: float
    engine: str
    model: str
    max_model_len: int
    f_min: float = 0.80
    f_max: float = 0.85


class EngineDied(msgspec.Struct, frozen=True, kw_only=True, tag="engine_died"):
    """The engine is gone. ``reason``: how its process or its connection ended."""

    t: float
    engine: str
    reason: str


class StepStarted(msgspec.Struct, frozen=True, kw_only=True, tag="step_started"):
    """A model call begins. ``think_cap`` is the cutoff in tokens and ``bound_by`` the term that set it.

    ``arm`` is what the session was assigned ("" for a request that is not counted) in the class ``workload``, ``rule`` what it
    really runs under, and ``assigned`` why. ``agent`` is which of the session's agents asks, "" for its main one.
    """

    t: float
    session: str
    step: int
    request: str
    model: str
    rule: str
    prompt_tokens: int
    budget: int
    think_cap: int
    bound_by: str
    arm: str = ""
    workload: str = ""
    assigned: str = ""
    agent: str = ""


class StepFinished(msgspec.Struct, frozen=True, kw_only=True, tag="step_finished"):
    """A model call's accounts.

    ``tokens`` = ``think_tokens`` + ``answer_tokens`` + ``marker_tokens``, all of them generated; ``marker_tokens`` are the think
    markers and the end-of-turn token. ``rounds``, ``drafted`` and ``accepted`` are the engine's own counters (None from an engine
    that does not report them). ``closed`` is the reason of a forced close, "" for a natural end. ``ttlt_s`` is the time to the
    last token. ``error`` is "" unless the step failed. ``notes`` are findings (see `Note`). ``reported_think`` is the engine's own
    count of think tokens where it gave one. ``undone``: the engine refused the request's limit as too large, before any token, and
    the guard asked again with a lower one; this was no step and counts nowhere, and ``error`` says what was refused.
    """

    t: float
    session: str
    step: int
    request: str
    model: str
    rule: str
    prompt_tokens: int
    tokens: int
    think_tokens: int
    answer_tokens: int
    marker_tokens: int
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    closed: str = ""
    continued: bool = False
    empty_answer: bool = False
    finish_reason: str = ""
    estimated: bool = False
    ttlt_s: float = 0.0
    error: str = ""
    arm: str = ""
    workload: str = ""
    notes: list[Note] = msgspec.field(default_factory=list)
    reported_think: int | None = None
    agent: str = ""
    undone: bool = False


class TraceClosed(msgspec.Struct, frozen=True, kw_only=True, tag="trace_closed"):
    """A trace was closed by force. ``reason`` is a `trace.cutoff.CloseReason`, ``think_tokens`` where it stood, ``cap`` the cutoff
    then, ``how`` who did it: the engine, at its limit or on our word, or a cut of the stream, continued at token level, through the
    chat template, from a note to the model, or not at all. ``detail`` never holds the trace's text."""

    t: float
    session: str
    step: int
    request: str
    reason: str
    think_tokens: int
    cap: int
    how: Literal["engine", "tokens", "chat", "note", "none"]
    detail: str = ""


class CompactionAdvised(msgspec.Struct, frozen=True, kw_only=True, tag="compaction_advised"):
    """The session's context is about to reach the cutoff of its window: ``context_tokens`` now, ``next_tokens`` expected of the
    next prompt."""

    t: float
    session: str
    step: int
    request: str
    context_tokens: int
    next_tokens: int
    window: int


Meter: TypeAlias = Literal["steps", "tokens", "no_progress"]


class SessionAlarm(msgspec.Struct, frozen=True, kw_only=True, tag="session_alarm"):
    """A session's meter reached its soft limit, or its limit (``stopped``: further steps are refused)."""

    t: float
    session: str
    step: int
    meter: Meter
    value: int
    limit: int
    stopped: bool


class RuleSwitched(msgspec.Struct, frozen=True, kw_only=True, tag="rule_switched"):
    """The guard switched an arm of a workload class to strict (``on`` false) or back, with the numbers it acted on.

    ``ratio`` is relaxed over strict of ``quantity`` (rounds or ttlt), with the interval that decided; ``evidence`` names the
    class whose sums were judged.
    """

    t: float
    workload: str
    arm: str
    on: bool
    quantity: str
    reason: str
    evidence: str
    ratio: float
    low: float
    high: float
    sessions: int
    control_sessions: int
    baseline: str


class DraftUpdated(msgspec.Struct, frozen=True, kw_only=True, tag="draft_updated"):
    """The serving draft got new weights from the trainer (TTS).

    rounds: verifications the trainer has seen since it started. version counts the trainer's publishes, epoch the requests that
    began with the draft's own weights. loss: nats a row before the step, over ``rows`` rows; train_ms: of the step, beside the
    engine; publish_ms: what the engine stood still. live, frozen: mean overlap with the target of a round's first row, of the
    served draft and of the one without TTS; gain: (ℓ + 1) of the first over that of the second, from these; break_even: what the
    gain has to be above."""

    t: float
    engine: str
    version: int
    epoch: int
    rounds: int
    rows: int
    loss: float
    train_ms: float
    publish_ms: float
    live: float
    frozen: float
    gain: float
    break_even: float


TtsState: TypeAlias = Literal["starting", "live", "paused", "restarting", "rolled_back", "stopped", "skipped", "off"]


class TtsChanged(msgspec.Struct, frozen=True, kw_only=True, tag="tts_changed"):
    """What became of TTS, and why. rolled_back: the draft is back at its own weights and goes on learning; stopped: it does not
    learn from this request any more; skipped: an update or a frame was dropped; restarting, off: the trainer ended."""

    t: float
    engine: str
    state: TtsState
    reason: str
    epoch: int
    version: int


class StudyStarted(msgspec.Struct, frozen=True, kw_only=True, tag="study_started"):
    """The first event of a study's recording: what is run, and the arms in the order of the table. ``budget``: tokens a run may use
    in a study of closing, 0 in others."""

    t: float
    suite: str
    seed: int
    sessions: int
    temperature: float
    arms: list[str]
    budget: int = 0


class Graded(msgspec.Struct, frozen=True, kw_only=True, tag="graded"):
    """A study's verdict on a step's answer. ``arm`` is the rule the session was run under. ``right``: None where nothing is
    graded."""

    t: float
    session: str
    step: int
    arm: str
    right: bool | None


class RequestRounds(msgspec.Struct, frozen=True, kw_only=True):
    """One request's part of `RoundSums`."""

    request: str
    rounds: int
    drafted: int
    accepted: int


class RoundSums(msgspec.Struct, frozen=True, kw_only=True, tag="round_sums"):
    """An engine's verification under one rule over the ``span_s`` seconds before ``t``: `VerificationStep`s without their rows.

    rule: what was asked for (`Verified.rule_asked`); "" for rules beyond those that are told apart, together. An interval has one
    of these for each rule; the first has the engine's frames and lost, which are of no rule. by_position: rounds that accepted
    draft position i; strict_by_position: how many strict would be expected to have accepted, of the same drafts. probability, rank:
    a list for each bin of `telemetry.rounds`, of decided tokens: accepted by strict too, accepted only because the rule relaxes,
    cut by the support filter, rejected. live, frozen: [rounds, accepted] for each bin of output positions, of requests that ran
    while the draft learned, and of the others."""

    t: float
    engine: str
    span_s: float
    frames: int
    lost: int
    rounds: int
    drafted: int
    accepted: int
    strict: float
    rule: str = ""
    by_position: list[int] = msgspec.field(default_factory=list)
    strict_by_position: list[float] = msgspec.field(default_factory=list)
    probability: list[list[int]] = msgspec.field(default_factory=list)
    rank: list[list[int]] = msgspec.field(default_factory=list)
    fates: dict[str, int] = msgspec.field(default_factory=dict)
    live: dict[str, list[int]] = msgspec.field(default_factory=dict)
    frozen: dict[str, list[int]] = msgspec.field(default_factory=dict)
    requests: list[RequestRounds] = msgspec.field(default_factory=list)


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True, tag="engine_metrics"):
    """What a vLLM server's /metrics said of one engine (its label; "" for what the server counts for all of them).

    Counters are as they stand there, since the server's start; buckets are cumulative, (upper bound, count), None for no bound. The
    names are those of `telemetry.exposition`. What the server does not export is missing. ``error``: it could not be read.
    """

    t: float
    engine: str
    model: str = ""
    gauges: dict[str, float] = msgspec.field(default_factory=dict)
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    buckets: dict[str, list[tuple[float | None, float]]] = msgspec.field(default_factory=dict)
    error: str = ""


class RatioReport(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio with its interval; None: no upper end."""

    value: float
    low: float
    high: float | None
    n: int


class ArmReport(msgspec.Struct, frozen=True, kw_only=True):
    """One arm in one class, as `GET /guard/v1/economics` shows it (economics.ledger.Row)."""

    workload: str
    arm: str
    on: bool
    since: float
    verdict: str
    reason: str
    baseline: str
    sessions: int
    steps: int
    censored: int
    ratios: dict[str, RatioReport | None]
    accepted_length: float | None = None
    strict_accepted_length: float | None = None
    gain: float | None = None
    pinned: str = ""


class EconomicsReport(msgspec.Struct, frozen=True, kw_only=True, tag="economics_report"):
    """The whole economics of a gateway at one moment."""

    t: float
    rows: list[ArmReport]


class RunningStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that runs. ``inside``: within a trace; ``started``: UNIX seconds."""

    session: str
    step: int
    request: str
    think_tokens: int
    answer_tokens: int
    inside: bool
    rule: str = ""
    prompt_tokens: int = 0
    budget: int = 0
    think_cap: int = 0
    bound_by: str = ""
    arm: str = ""
    workload: str = ""
    started: float = 0.0


class StepsRunning(msgspec.Struct, frozen=True, kw_only=True, tag="steps_running"):
    """All steps that run at this moment; one that is not named has ended."""

    t: float
    steps: list[RunningStep]


class SessionSeen(msgspec.Struct, frozen=True, kw_only=True, tag="session_seen"):
    """A session as it stands, for a reader that came late: sums of its whole life and its latest steps."""

    t: float
    session: str
    steps: int
    tokens: int
    think_tokens: int
    closes: int
    latest: list[StepFinished]


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """A session's account and the limits that hold now (`GET /agentguard/sessions?session=ID`).

    ``steps`` counts model calls, ``tokens`` and ``think_tokens`` what was generated in them, ``closes`` forced closes, ``lost``
    tokens that steps of a worker that died may have used besides, which limits count, and ``idle`` the steps in a row that brought
    nothing. ``step_limit``, ``token_limit``: None for no limit; ``soft`` is the share of them at
    which the guard warns.
    """

    session: str
    steps: int = 0
    tokens: int = 0
    think_tokens: int = 0
    closes: int = 0
    lost: int = 0
    step_limit: int | None = None
    token_limit: int | None = None
    soft: float = 0.8
    idle: int = 0


OperatorAction: TypeAlias = Literal["close", "limit", "pin", "tts"]


class OperatorActed(msgspec.Struct, frozen=True, kw_only=True, tag="operator_acted"):
    """An operator did something over HTTP. ``target``: the request, session, arm or engine; ``detail``: what, in a few words."""

    t: float
    action: OperatorAction
    target: str
    detail: str


class FromSource(msgspec.Struct, frozen=True, kw_only=True, tag="from_source"):
    """In a recording of a monitor: what follows came from this source, which is in this state now (monitor.snapshot.SourceRow).

    ``arrived``: it came at ``t``, whatever times it bears: a source tells of its past, and its clock may be another. Without it, as
    in recordings of before, each event counts at its own time.
    """

    t: float
    source: str
    kind: str
    state: str
    error: str = ""
    arrived: bool = False


Event: TypeAlias = (
    VerificationStep
    | EngineReady
    | EngineDied
    | StepStarted
    | StepFinished
    | TraceClosed
    | CompactionAdvised
    | SessionAlarm
    | RuleSwitched
    | DraftUpdated
    | TtsChanged
    | StudyStarted
    | Graded
    | RoundSums
    | EngineMetrics
    | EconomicsReport
    | StepsRunning
    | SessionSeen
    | OperatorActed
    | FromSource
)


class WatchFrame(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway tells a monitor of one interval (gateway.watch). ``dropped``: events that did not fit."""

    t: float
    interval_s: float
    events: list[Event]
    dropped: int = 0


encode_json = msgspec.json.Encoder().encode
encode_msgpack = msgspec.msgpack.Encoder().encode


T = TypeVar("T")


def _bounded(decode: Callable[[Any], T]) -> Callable[[Any], T]:
    """With what is nested without end a DecodeError too, which readers expect: one bad frame must not end them."""

    def read(raw: Any) -> T:
        try:
            return decode(raw)
        except RecursionError:
            raise msgspec.DecodeError("nested too deep") from None

    return read


_json_event: Callable[[Any], Event] = msgspec.json.Decoder(Event).decode
_msgpack_frame: Callable[[Any], Event | PackedStep] = msgspec.msgpack.Decoder(Event | PackedStep).decode


def _msgpack_event(raw: Any) -> Event:
    frame = _msgpack_frame(raw)
    return frame.unpacked() if isinstance(frame, PackedStep) else frame


_json_frame: Callable[[Any], WatchFrame] = msgspec.json.Decoder(WatchFrame).decode
decode_json = _bounded(_json_event)
decode_msgpack = _bounded(_msgpack_event)
decode_frame = _bounded(_json_frame)


def arm_reports(rows: list[dict[str, Any]]) -> list[ArmReport]:
    """The rows of an economics report (economics.report.report) as structs."""
    return msgspec.convert(rows, list[ArmReport])
