"""Which tokens a rule let through: a session's verification rounds as sums, while they happen.

The engine's telemetry says for each drafted token its probability and rank under the target, whether strict verification would
have accepted it on the same coin, and its fate. A full recording of that is about 2 kB a round; what the study's statistics need
is kept here (`records.RoundStats`), some 100 bytes a session under strict and 20 more for each token that was let through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from agentguard.engines.base import Engine
from agentguard.events import Event, Fate, StepFinished, StepStarted, VerificationStep, Verified
from agentguard.study.records import RelaxedToken, RoundStats

OUTPUT_BIN = 64
"""Output tokens a bin of the curve of acceptance over output positions."""
OUTPUT_BINS = 512
HESITATIONS = (
    "wait", "but", "hmm", "however", "alternatively", "actually", "maybe", "perhaps", "though", "hold", "recheck", "check",
    "verify", "again", "mistake", "wrong", "no",
)  # fmt: skip
"""Words with which reasoning models turn on what they just wrote, in the papers' traces and in s1's (Muennighoff 2025)."""
SETTLE_S = 2.0
"""How long a session waits for the last frames of its telemetry, which come on another socket than its text."""


@dataclass(slots=True)
class _Open:
    """A session that runs: its sums, and the place of each request in its output."""

    stats: RoundStats = field(default_factory=RoundStats)
    finished: list[StepFinished] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Anatomy:
    """A sink of the hub. Sessions are watched from `watch` to `take`; of all others nothing is kept."""

    def __init__(self, hesitations: Mapping[int, str] = MappingProxyType({})) -> None:
        self.hesitations = hesitations
        self._open: dict[str, _Open] = {}
        self._by_request: dict[str, _Open] = {}

    def watch(self, session: str) -> None:
        self._open[session] = _Open()

    def __call__(self, event: Event) -> None:
        match event:
            case StepStarted() if event.session in self._open:
                running = self._open[event.session]
                running.places[event.request] = 0
                self._by_request[event.request] = running
            case StepFinished(undone=False) if event.session in self._open:
                running = self._open[event.session]
                running.finished.append(event)
                running.changed.set()
            case VerificationStep():
                for verified in event.requests:
                    found = self._by_request.get(verified.request)
                    if found is not None:
                        found.places[verified.request] = add_round(
                            found.stats, verified, found.places[verified.request], self.hesitations
                        )
                        found.changed.set()

    async def take(self, session: str, steps: int) -> tuple[list[StepFinished], RoundStats]:
        """The session's accounts and sums, once its ``steps`` are over and all their rounds are here, or after `SETTLE_S`."""
        running = self._open[session]
        try:
            async with asyncio.timeout(SETTLE_S):
                while len(running.finished) < steps or running.stats.rounds < sum(s.rounds or 0 for s in running.finished):
                    running.changed.clear()
                    await running.changed.wait()
        except TimeoutError:
            pass  # frames may be dropped under load; `rounds` then says how many came
        finally:
            self.forget(session)
        return running.finished, running.stats

    def forget(self, session: str) -> None:
        running = self._open.pop(session, None)
        for request in running.places if running is not None else ():
            self._by_request.pop(request, None)


def add_round(stats: RoundStats, verified: Verified, place: int, hesitations: Mapping[int, str] = MappingProxyType({})) -> int:
    """Add one round that began behind ``place`` output tokens; returns where the next one begins.

    A request's first token comes from its prompt's own pass and counts to the first round's place: places are exact to one token.
    """
    rows = verified.rows
    stats.effective[verified.rule_effective] = stats.effective.get(verified.rule_effective, 0) + 1
    if not verified.drafted:
        return place + 1
    stats.rounds += 1
    stats.drafted += verified.drafted
    stats.accepted += verified.accepted
    _count(stats.by_position, verified.accepted)
    _count(stats.drafted_at, verified.drafted)
    where = min(place // OUTPUT_BIN, OUTPUT_BINS - 1)
    while len(stats.by_output) <= where:
        stats.by_output.append([0, 0])
    stats.by_output[where][0] += 1
    stats.by_output[where][1] += verified.accepted
    for i, fate in enumerate(rows.fate):
        stats.fates[fate] = stats.fates.get(fate, 0) + 1
        if rows.q[i] < 0 and fate not in (Fate.MASKED, Fate.FORCED):
            stats.unjudged += 1
        if fate is Fate.STRICT:
            rank = rows.rank[i] + 1
            stats.strict_n += 1
            stats.strict_p += rows.p[i]
            stats.strict_rank[rank] = stats.strict_rank.get(rank, 0) + 1
            _word(stats.strict_words, hesitations.get(rows.token[i]))
        elif fate is Fate.RELAXED:
            _word(stats.relaxed_words, hesitations.get(rows.token[i]))
            stats.relaxed.append(RelaxedToken(rows.token[i], round(rows.p[i], 6), rows.rank[i] + 1, place + i))
    return place + verified.accepted + 1


def _word(words: dict[str, int], word: str | None) -> None:
    if word is not None:
        words[word] = words.get(word, 0) + 1


def _count(by_position: list[int], upto: int) -> None:
    """One more for each of the first ``upto`` positions."""
    by_position.extend([0] * (upto - len(by_position)))
    for i in range(upto):
        by_position[i] += 1


async def hesitation_ids(engine: Engine, words: Iterable[str]) -> dict[int, str]:
    """Ids of the words that are one token, as a sentence's first word and inside it; empty where the engine does not tokenize."""
    found: dict[int, str] = {}
    for word in words:
        for text in dict.fromkeys((word, " " + word, word.capitalize(), " " + word.capitalize())):
            ids = await engine.tokenize_text(text)
            if ids is not None and len(ids) == 1:
                found[ids[0]] = word
    return found
