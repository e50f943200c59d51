"""What the monitor knows at one moment: frozen, complete, and the same for the screen, `--once --json` and the exports.

None is "unknown" and shown as "—"; 0 is a measured nought. Shares are 0 to 1, never percent. Times `..._t` are UNIX seconds, spans
`..._s` seconds. Every number that is taken over a span says which: ``window_s`` of its row, or the whole run where it says so.
Order is stable: engines, sessions and classes keep their place while their state changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agentguard.economics.ratios import Ratio

SourceKind: TypeAlias = Literal["gateway", "metrics", "recording", "simulator"]
State: TypeAlias = Literal["ok", "slow", "stale", "down"]
"""ok: fresh. slow: fresh, but tokens wait (see `monitor.alarms`). stale: nothing came for `STALE_S`. down: nobody answers, or the
engine has ended. A row that is stale or down keeps its last numbers; the screen dims them and shows `EngineRow.seen_t`'s age."""
Severity: TypeAlias = Literal["info", "good", "warning", "alarm"]
Phase: TypeAlias = Literal["queued", "thinking", "answering", "idle"]
"""queued: started, no token yet. idle: no step runs (the agent works with tools). None where the gateway does not tell."""
SessionState: TypeAlias = Literal["running", "idle", "filling", "growing", "looping", "stopped", "failed", "lost"]
"""running, idle: as they should be. filling: the context is at the cutoff's band. growing: traces get longer step by step, or a
meter is at its soft limit. looping: the latest steps were closed for a loop or brought nothing. stopped: refused at a limit.
failed: the latest step ended with an error. lost: its source is stale or down."""
ArmVerdict: TypeAlias = Literal["control", "win", "loss", "undecided"]
TtsState: TypeAlias = Literal["starting", "live", "paused", "restarting", "rolled_back", "stopped", "skipped", "off"]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One place the monitor reads from. ``since_t``: when the state began; ``seen_t``: the last word of it, None for never;
    ``error``: why it is not ok; ``retry_s``: seconds until the next try, None while connected; ``dropped``: events it dropped
    because this reader was too slow."""

    name: str
    kind: SourceKind
    state: State
    since_t: float
    seen_t: float | None = None
    error: str = ""
    retry_s: float | None = None
    dropped: int = 0
    can_act: bool = False
    """Does it take an operator's actions (a gateway)?"""
    samples: int = 0
    """Whole intervals it has told of."""


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm in one workload class: the gateway's economics, over the arm's whole life. Ratios are to ``baseline``."""

    workload: str
    arm: str
    on: bool
    since_t: float | None
    """When the guard moved it last; None: never."""
    verdict: ArmVerdict
    reason: str
    baseline: str
    sessions: int
    steps: int
    censored: int
    accepted_length: float | None = None
    strict_accepted_length: float | None = None
    """What strict would have accepted of this arm's drafts."""
    gain: float | None = None
    length_ratio: Ratio | None = None
    """λ; an open upper end is inf."""
    rounds_ratio: Ratio | None = None
    ttlt_ratio: Ratio | None = None
    pinned: str = ""
    """The rule an operator pinned the arm to, "" for none."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine of the fleet. ``key`` never changes and is unique; ``name`` is for people.

    The first block is the gateway's economics of one arm, over the arm's whole life: a losing one, else the relaxed one with most
    steps; ``workload`` names its class. All else, and ℓ, is over the last ``window_s``.
    """

    key: str
    name: str
    source: str
    model: str | None
    state: State
    since_t: float
    seen_t: float | None
    why: str = ""
    """Why it is not ok, one sentence."""

    arm: str | None = None
    rule: str | None = None
    """What new requests of that arm run under: the arm itself, or strict after a switch."""
    workload: str | None = None
    verdict: ArmVerdict | None = None
    accepted_length: float | None = None
    """ℓ over ``window_s`` of the rounds under ``rule``, of all classes; None if it had none. Where no arm is relaxed, of the rule
    with most rounds, and without telemetry of all rounds, from the engine's counters."""
    gain: float | None = None
    length_ratio: Ratio | None = None
    rounds_ratio: Ratio | None = None
    ttlt_ratio: Ratio | None = None

    window_s: float | None = None
    """The span that the numbers below were really taken over; None before the second sample."""
    ttlt_p50_s: float | None = None
    ttlt_p95_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    queue_p95_s: float | None = None
    think_share: float | None = None
    """Think tokens of generated ones, of the steps that ended."""
    steps: int | None = None
    """Steps that ended."""
    closes: int | None = None
    """Traces closed by force."""
    tokens_in_per_s: float | None = None
    tokens_in_computed_per_s: float | None = None
    """Without those from a cache."""
    tokens_out_per_s: float | None = None
    kv_use: float | None = None
    """Of the fullest KV cache."""
    running: int | None = None
    waiting: int | None = None
    preemptions_per_s: float | None = None
    rejections_per_s: float | None = None
    prefix_hit_share: float | None = None
    acceptance_share: float | None = None
    """Accepted of drafted tokens, of the same rounds as ℓ."""
    finish_reasons: tuple[tuple[str, int], ...] = ()
    """Requests that ended, by reason, most first."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the strip charts, of the time since the one before up to ``t``. length_ratio and gain are the economics' at that
    moment; accepted_length is of the span's rounds under the rule of `EngineRow.accepted_length`."""

    t: float
    length_ratio: float | None
    length_ratio_low: float | None
    length_ratio_high: float | None
    gain: float | None
    accepted_length: float | None
    tokens_out_per_s: float | None = None
    """Between two samples of the engine's counter, at the point after the second; None where no new one came."""


@dataclass(frozen=True, slots=True)
class Series:
    """The strip charts of one engine, oldest point first; a gap has points of None. ``every_s``: seconds between two points, on
    average; a second, or an interval where that is longer."""

    engine: str
    every_s: float
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class StepBar:
    """One step of a session. ``closed``: reason of a forced close ("budget", "reserve", "session", "loop", "deadline", "operator",
    "ready"), "" for a natural end. ``cap``: the cutoff then, None where none bound. ``done`` False: it runs now."""

    step: int
    request: str
    rule: str
    prompt_tokens: int
    think_tokens: int
    answer_tokens: int
    cap: int | None
    budget: int | None
    bound_by: str
    closed: str
    done: bool
    error: str = ""
    ttlt_s: float | None = None
    accepted_length: float | None = None
    notes: tuple[str, ...] = ()
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One agent session; ``key`` is unique over all sources. ``why`` is one sentence about a state that is not fine.

    ``context_used`` is the latest step's prompt and what it has generated; the band is where the cutoff closes (80-85 % of
    ``context_limit`` by default). ``bars``: the latest steps, oldest first, at most `BARS`.
    """

    key: str
    id: str
    caller: str | None
    source: str
    engine: str
    model: str | None
    arm: str
    workload: str
    state: SessionState
    why: str
    since_t: float
    last_t: float
    steps: int
    phase: Phase | None
    running_request: str | None
    context_used: int | None
    context_limit: int | None
    band_low: int | None
    band_high: int | None
    think_tokens: int | None
    """Of the running step so far; None when none runs."""
    think_cap: int | None
    """Its cutoff."""
    tokens: int
    """Generated in all, over the session's whole life."""
    think_tokens_total: int
    closes: int
    bars: tuple[StepBar, ...] = ()


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin [low, high) of drafted tokens that were decided: ``strict`` accepted and strict would have too, ``relaxed`` accepted
    only because the rule relaxes, ``cut`` rejected by the support filter, ``rejected`` by the rule's own test."""

    low: float
    high: float
    strict: int
    relaxed: int
    cut: int
    rejected: int


@dataclass(frozen=True, slots=True)
class PositionPoint:
    """Output tokens [low, high) of a request: ℓ with the learning draft (``live``) and with the one without TTS (``frozen``), each
    with the rounds it is the mean of, under `Speculation.rule`. Since the monitor began, not over the window."""

    low: int
    high: int
    live: float | None
    live_rounds: int
    frozen: float | None
    frozen_rounds: int


@dataclass(frozen=True, slots=True)
class Tts:
    """The draft that learns. ``gain`` and the overlaps are of all rules, the overlaps means of a round's first row (see
    events.DraftUpdated)."""

    state: TtsState
    since_t: float
    reason: str
    version: int
    epoch: int
    publishes: int
    """Seen by this monitor."""
    loss: float | None = None
    losses: tuple[float, ...] = ()
    """The latest ones, oldest first."""
    train_ms: float | None = None
    publish_ms: float | None = None
    live_overlap: float | None = None
    frozen_overlap: float | None = None
    gain: float | None = None
    break_even: float | None = None
    by_output_position: tuple[PositionPoint, ...] = ()
    updated_t: float | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """One engine's speculation under one rule over the last ``window_s``; ``rounds`` says how many verifications that are, 0 when
    none was seen (then all else is None or empty).

    ``rule`` is that of the engine's row (`EngineRow.rule`), or the one with most rounds where no arm is relaxed; ℓ, the positions,
    the bins, the fates and the curve over the output are of its rounds alone, whichever class they are of. None: no rule is known,
    so all rounds, from /metrics.

    ``by_position``: share of rounds that accepted draft position i; ``strict_by_position``: what strict would have accepted of the
    same drafts. From /metrics alone there are no bins and no strict.
    """

    engine: str
    window_s: float | None
    rounds: int
    drafted: int
    accepted: int
    accepted_length: float | None
    strict_accepted_length: float | None
    by_position: tuple[float, ...] = ()
    strict_by_position: tuple[float, ...] = ()
    probability: tuple[Bin, ...] = ()
    """By the target's probability of the token, edges 0 to 1."""
    rank: tuple[Bin, ...] = ()
    """By how many tokens the target finds more probable; the last bin is open."""
    p_min: float | None = None
    """The support filter of the rule in use, None without one."""
    top_k: int | None = None
    rule: str | None = None
    fates: tuple[tuple[str, int], ...] = ()
    """Drafted tokens by what became of them (events.Fate), most first."""
    lost_frames: int = 0
    """Telemetry frames that never reached the gateway."""
    tts: Tts | None = None
    arms: tuple[ArmRow, ...] = ()


@dataclass(frozen=True, slots=True)
class EventLine:
    """One line of the event log. ``n``: how often it happened within 60 s from ``t``, shown once, the last time at ``last_t``;
    ``number`` grows by one a line and is its identity."""

    number: int
    t: float
    severity: Severity
    kind: str
    """The event's type, or "alarm" and "source" for the monitor's own."""
    text: str
    engine: str = ""
    session: str = ""
    request: str = ""
    n: int = 1
    last_t: float = 0.0


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """The one sentence on top. ``engine`` and ``session`` name the culprit, "" for none; ``since_t``: when it began."""

    severity: Severity
    text: str
    engine: str = ""
    session: str = ""
    since_t: float | None = None


@dataclass(frozen=True, slots=True)
class Playback:
    """Where a replay stands. ``start_t`` and ``end_t`` are the recording's own times."""

    start_t: float
    end_t: float
    at_t: float
    speed: float
    paused: bool
    ended: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything, at time ``t``. ``number`` grows with every snapshot."""

    number: int
    t: float
    verdict: VerdictLine
    sources: tuple[SourceRow, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    series: tuple[Series, ...] = ()
    sessions: tuple[SessionRow, ...] = ()
    sessions_hidden: int = 0
    """Sessions forgotten because there were too many."""
    speculation: tuple[Speculation, ...] = ()
    arms: tuple[ArmRow, ...] = ()
    events: tuple[EventLine, ...] = ()
    """Oldest first, at most `monitor.log.KEPT`."""
    playback: Playback | None = None
    recording: str | None = None
    """The file that is written, None for none."""
    window_s: float = 60.0
    """What was asked for; a row says what it got."""
    samples: int = 0
    """Intervals taken so far: rates need two."""
    content: dict[str, str] = field(default_factory=dict)
    """Live tail of running traces by request id; only when the operator turned content on, else empty."""


BARS = 64
"""Steps of a session that are kept for its bars."""
STALE_S = 5.0
"""Seconds (or 3 intervals, whichever is longer) without a word after which a source is stale."""
DOWN_S = 20.0
"""Seconds without a word after which it is down; a refused connection is down at once after `STALE_S`."""
