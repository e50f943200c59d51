"""Loops and stalls in a think trace, from the engine's token ids, from its text, or from both.

Bounded memory, amortised O(1) a token. Three ways to be stuck:

- exact periods of 1 to 512 tokens, and runs of one character. Without ids the words of the text are the tokens, and the
  characters where it has no spaces;
- sentences and lines that come again in the same order. Case, spacing, punctuation and words of hesitation never count; in prose
  a few words may change and a sentence may be put in. A number, a single letter or a symbol that changes is progress;
- hesitation: sentence after sentence that begins with "Wait", "Hmm", "Alternatively" and brings hardly a new word.

When it is a loop (lengths count all copies, the first included):

- exact: at the end of the third copy, but not before 128 tokens, 192 with fewer than 24 different ones, 512 if those also repeat
  within the unit; one token or character: 64 times, 512 times a character that rulers are drawn with;
- prose whose text is at hand: at the third copy, but not before 48 words, 72 if words changed, of which one in 24 may be new; a
  single sentence of five words or more at the latest at its fifth exact copy;
- hesitation: 14 of the last 24 sentences, at most 6 % of whose words are new.

A copy's end is seen with what follows it: the white space behind a sentence, and in text without ids up to 32 characters later.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["period", "sentence", "paragraph", "run", "hesitation"]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop as it was when found.

    period: its unit, in tokens for "period" and "run" (see above for what the tokens of a text are; a run may be of one
    character), in characters for the others; repeats: copies so far, the first included.
    """

    kind: Kind
    period: int
    repeats: int

    @property
    def detail(self) -> str:
        """One line for logs and events; never the trace's text."""
        unit = {"period": "tokens", "run": "token or character"}.get(self.kind, "characters")
        return f"{self.kind} of {self.period} {unit}, {self.repeats} copies"


MAX_PERIOD = 512
RUN, RULER_RUN = 64, 512
RULERS = frozenset(" \t\n\r-=#*/~_^.+|%;─━═│—–·•█░▁")
"""Rulers and blanks of 64 to 128 are everywhere in sources; the longest run in 341 MB of files has 321."""
DIVERSE = 24


def needed(distinct: int, period: int) -> int:
    """Tokens, all copies together, before exact repetition is a loop.

    By the longest legitimate repetitions in 27,743 files (341 MB, 111 M tokens): three copies of 24 and more different tokens make
    128 tokens in 8 files, of fewer make 192 in 2 files, and matrices, data and ASCII art, whose units repeat inside, make 512 in 3.
    """
    if period == 1:
        return RUN
    if distinct >= DIVERSE:
        return 128
    return 512 if 5 * distinct < 3 * period else 192


PROSE_WORDS, VARIED_WORDS, COPIES = 48, 72, 5
NEW, CHANGED, SKIPPED = 1 / 8, 1 / 5, 1 / 4
"""Of a varied loop's words: triples of words in neither of the two copies before (a changed word makes three), triples not in the
copy before (rows of a truth table in words differ by more), and words put in between."""
STORM, STORM_WINDOW, STORM_FRESH, STORM_MEMORY = 14, 24, 0.06, 512
"""Of 24 sentences at most 13 hesitate in 1,098 traces of one reasoning model (25 MB, 91 of them cut off) and at most 15 in 42 of
two others (0.5 MB); where 10 and more do, 7 % of the words and more are new, in half of all windows 14 %. New: not among the 512
words before."""

_HISTORY = 2048  # ids kept, a power of two; three longest periods are looked back
_GRAM_BITS = 15
_GRAM_MASK = (1 << 4 * _GRAM_BITS) - 1
_UNITS, _MAX_LAG = 256, 48  # sentences kept; four lags of at most 48 sentences are looked back
_MAX_UNIT, _SLICE = 512, 32  # characters: a sentence, what is read of a text's words at once
_PIECE = 48  # characters, fewer than RUN
_SLACK = 24  # words; a run may begin with a changed word
_NO_VALUES = hash(())

_END = re.compile(r"""[.!?]["'”’)\]*_`]{0,3}\s|[。！？\n]""")
_WORD = re.compile(r"-?\d\w*|\w+|[^\w\s]+|\n")
_CJK = re.compile(r"[぀-ヿ㐀-鿿가-힯]")
_LABEL_A = re.compile(r"\w A\b")
_LIGHT = ".,;:!?'\"…—–-*#“”‘’\n"
_DROPPED = _LIGHT + "()`_"
_FILLERS = frozenset("wait hmm hm alternatively actually okay ok so but well oh no yes alright maybe perhaps".split())  # noqa: SIM905
_HESITANT = re.compile(
    r"\W*(?:(?:no|but|oh|so|and|or)\b\W*)?(?:(?:wait|hm+|alternatively|actually|maybe|perhaps|hold on)\b|等|嗯|不对)", re.IGNORECASE
)


class LoopDetector:
    """One think block's detector. The same text, or the same ids, in other pieces give the same `Loop`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A new think block begins."""
        self._loop: Loop | None = None
        self._periods = _Periods()
        self._sentences = _Sentences()
        self._hesitation = _Hesitation()
        self._by_ids = False
        self._tail, self._lexed = "", 0
        self._char, self._run = "", 0

    def feed(self, tokens: Sequence[int] = (), text: str = "") -> Loop | None:
        """What came in: ids, text, or both. Once a loop was found, that loop."""
        if self._loop is None and tokens:
            if not self._by_ids:
                self._by_ids, self._periods = True, _Periods()
            self._loop = self._periods.feed(tokens)
        if self._loop is None and text:
            for at in range(0, len(text), _PIECE):
                self._loop = self._piece(text[at : at + _PIECE])
                if self._loop:
                    break
        return self._loop

    @property
    def score(self) -> float:
        """How loop-like the latest tokens are, in [0, 1]: 0 up to a quarter of what makes an alarm, 1 at the alarm."""
        if self._loop:
            return 1.0
        share = max(self._periods.share, self._sentences.share, self._hesitation.share)
        if self._run > RUN // 4:
            share = max(share, self._run / _limit(self._char))
        return (min(share, 1.0) - 0.25) / 0.75 if share > 0.25 else 0.0

    def _piece(self, piece: str) -> Loop | None:
        """At most `_PIECE` characters: only a run that has come in from before can get long enough within them."""
        lead = len(piece) - len(piece.lstrip(self._char)) if piece[0] == self._char else 0
        total, limit = self._run + lead, _limit(self._char)
        if lead and total >= limit:
            return self._read(piece[: lead - (total - limit)]) or Loop("run", 1, limit)
        self._char = piece[-1]
        self._run = total if lead == len(piece) else len(piece) - len(piece.rstrip(self._char))
        return self._read(piece)

    def _read(self, piece: str) -> Loop | None:
        """Sentences and lines, as soon as the character behind their end is known; longer ones are cut at a space."""
        start = max(0, len(self._tail) - 4)
        self._tail += piece
        while True:
            match = _END.search(self._tail, start, _MAX_UNIT)
            end = match.end() if match else _cut(self._tail, 0, _MAX_UNIT)
            if not self._by_ids and (end or len(self._tail) >= self._lexed + _SLICE):
                found = self._read_words(end or len(self._tail), final=bool(end))
                if found:
                    return found
            if not end:
                return None
            text, self._tail, self._lexed, start = self._tail[:end], self._tail[end:], 0, 0
            found = None if text.isspace() else self._sentence(text)
            if found:
                return found

    def _read_words(self, end: int, *, final: bool) -> Loop | None:
        """Without ids, words are the tokens; they need not wait for the end of a sentence that may never come."""
        while True:
            cut = _cut(self._tail[:end], self._lexed, _SLICE)
            if not cut and not final:
                return None
            text, self._lexed = self._tail[self._lexed : cut or end], cut or end
            words = [] if text.isspace() else _lex(text)
            if len(words) == 1 and len(text) == _SLICE and " " not in text and len(set(text)) > 1:
                words = list(text)
            found = self._periods.feed(map(hash, words))
            if found or not cut:
                return found

    def _sentence(self, text: str) -> Loop | None:
        lexed = _lex(text)
        words = [w for word in lexed if (w := word.strip(_DROPPED)) and w not in _FILLERS]
        hesitant = _HESITANT.match(text) is not None
        storm = self._hesitation.add(hesitant, words, len(text))
        if storm or not words or (hesitant and len(words) < 3):
            return storm
        symbols = len([word for word in lexed if not word.isalnum() and word.strip(_LIGHT)])
        english = "i" if _LABEL_A.search(text) else "ai"
        values = [w for w in words if not w.isalpha() or (len(w) == 1 and w.isascii() and w not in english)]
        if 5 * symbols > len(words) - symbols or 3 * len(values) > len(words):
            unit = _Unit(hash(tuple(lexed)), len(lexed), frozenset(map(hash, lexed)), None, len(text))
        else:
            triples = frozenset(map(hash, zip(["", "", *words], ["", *words], words, strict=False)))
            unit = _Unit(hash(tuple(words)), len(words), triples, hash(tuple(values)), len(text))
        return self._sentences.add(unit)


def _cut(text: str, start: int, length: int) -> int:
    """Where the first ``length`` characters from ``start`` on end: behind their last space; 0 while there are fewer."""
    return (text.rfind(" ", start, start + length) + 1 or start + length) if len(text) >= start + length else 0


def _lex(text: str) -> list[str]:
    return _WORD.findall((text if text.isascii() else _CJK.sub(r" \g<0> ", text)).lower())


def _limit(char: str) -> int:
    return RULER_RUN if char in RULERS else RUN


class _Periods:
    """Exact periods of a stream of integers. A 4-gram seen before proposes a period; a count of x[i] == x[i - period] proves it."""

    __slots__ = ("_goal", "_gram", "_i", "_last", "_period", "_ring", "_run", "_sized")

    def __init__(self) -> None:
        self._ring = [0] * _HISTORY
        self._last: dict[int, int] = {}
        self._i = self._gram = self._period = self._run = 0
        self._goal, self._sized = 1, False

    def feed(self, items: Iterable[int]) -> Loop | None:
        ring, last, mask = self._ring, self._last, _HISTORY - 1
        gram, i, period, run, goal = self._gram, self._i, self._period, self._run, self._goal
        get, never, found = last.get, -MAX_PERIOD, None
        for item in items:
            i += 1
            gram = (gram << _GRAM_BITS ^ item) & _GRAM_MASK
            before = get(gram, never)
            last[gram] = i
            ring[i & mask] = item
            if run:
                if ring[(i - period) & mask] == item:
                    run += 1
                    if run >= goal:
                        goal = self._needed(i, period)
                        if run >= goal:
                            found = Loop("run" if period == 1 else "period", period, run // period + 1)
                            break
                    continue
                run = 0
            if i - before <= MAX_PERIOD:
                period = i - before
                run = self._backwards(i, period)
                goal, self._sized = max(period // 2, 16), False
        if len(last) > 2 * MAX_PERIOD:
            self._last = {key: at for key, at in last.items() if i - at < MAX_PERIOD}
        self._gram, self._i, self._period, self._run, self._goal = gram, i, period, run, goal
        return found

    def _backwards(self, i: int, period: int) -> int:
        """How long the newest tokens have had this period. The 4-gram may be found late: a unit repeats shorter ones inside."""
        ring, mask, run = self._ring, _HISTORY - 1, 0
        most = min(i - period, 2 * MAX_PERIOD)
        while run < most and ring[(i - run) & mask] == ring[(i - run - period) & mask]:
            run += 1
        return run

    def _needed(self, i: int, period: int) -> int:
        """Tokens that all copies but the first must have. Not known before half a copy matches: most proposals die earlier."""
        self._sized = True
        distinct = len({self._ring[k & (_HISTORY - 1)] for k in range(i - period + 1, i + 1)})
        return max(2 * period, needed(distinct, period) - period)

    @property
    def share(self) -> float:
        return self._run / self._goal if self._sized else 0.0


@dataclass(frozen=True, slots=True)
class _Unit:
    """A sentence or line: a hash of its words, their number, hashes of its triples of words, of its values, and its characters.

    Code and tables (values None) are compared literally: there a changed word is the point of the line.
    """

    key: int
    size: int
    marks: frozenset[int]
    values: int | None
    length: int


class _Sentences:
    """Units that come again in the same order: the unit a lag earlier is the same, or the same but for a few words."""

    def __init__(self) -> None:
        self._ring = [_Unit(0, 0, frozenset(), None, 0)] * _UNITS
        self._keys: dict[int, int] = {}
        self._triples: dict[int, int] = {}
        self._held: _Unit | None = None
        self._i = 0
        self.share = 0.0
        self._begin(0)

    def _begin(self, lag: int) -> None:
        self._lag = lag
        self._run = self._words = self._new = self._changed = self._skipped = 0

    def add(self, unit: _Unit) -> Loop | None:
        held, self._held = self._held, None
        i = self._i + 1
        self._ring[i % _UNITS] = unit
        if self._run and self._extends(i):
            self._skipped += held.size if held else 0
        elif self._run and not held and unit.values == _NO_VALUES:
            # "Hmm, let me check that again." between two sentences of a copy must not shift the rest out of line
            self._held = unit
            return None
        elif held:
            self._begin(0)
            return self.add(held) or self.add(unit)
        else:
            self._begin(self._candidate(unit, i))
            k = i
            while k > self._lag > 0 and self._run < 2 * self._lag and self._extends(k):
                k -= 1
        self._i = i
        self._keys[unit.key] = i
        if unit.values is not None:
            self._triples.update(dict.fromkeys(unit.marks, i))
        if len(self._keys) > _UNITS:
            self._keys = {key: at for key, at in self._keys.items() if i - at < _MAX_LAG}
        if len(self._triples) > 8 * _UNITS:
            self._triples = {triple: at for triple, at in self._triples.items() if i - at < _MAX_LAG}
        self.share = 0.0
        if 2 * self._run < max(1, self._lag):
            return None
        goal = self._goal()
        self.share = min(self._run / (2 * self._lag), self._words / max(1.0, goal))
        if self._run < 2 * self._lag or self._words < goal:
            return None
        length = sum(unit.length for unit in self._period())
        return Loop("sentence" if self._lag == 1 else "paragraph", length, self._run // self._lag + 1)

    def _candidate(self, unit: _Unit, i: int) -> int:
        """The lag to the latest unit with the same words, or with half of the same triples; 0 for none."""
        if unit.size < 3:
            return 0
        at = self._keys.get(unit.key, 0)
        if not at and unit.values is not None:
            votes = Counter([k for triple in unit.marks if (k := self._triples.get(triple))]).most_common(1)
            at = votes[0][0] if votes and 2 * votes[0][1] >= len(unit.marks) else 0
        return i - at if at and i - at <= _MAX_LAG else 0

    def _extends(self, i: int) -> bool:
        """Whether unit i continues the run; if so, it is counted. What is new may use up its allowance early."""
        unit, before, earlier = (self._ring[k % _UNITS] for k in (i, i - self._lag, i - 2 * self._lag))
        if unit.key != before.key:
            if unit.values is None or unit.values != before.values:
                return False
            changed = unit.marks - before.marks
            new = len(changed - earlier.marks)
            if (unit.size > 5 and 5 * new > 3 * unit.size) or self._new + new > NEW * (self._words + unit.size + _SLACK):
                return False
            self._new += new
            self._changed += len(changed)
        self._words += unit.size
        self._run += 1
        return True

    def _period(self) -> list[_Unit]:
        return [self._ring[k % _UNITS] for k in range(self._i - self._lag + 1, self._i + 1)]

    def _goal(self) -> float:
        """Words that the run, all copies but the first, must have."""
        units = self._period()
        size, prose = sum(unit.size for unit in units), sum(unit.size for unit in units if unit.values is not None)
        need = needed(len(frozenset().union(*[unit.marks for unit in units])), size)
        if self._changed or self._skipped:
            is_prose = 10 * prose >= 9 * size and need < 512
            shares = (self._new / NEW, self._changed / CHANGED, self._skipped / SKIPPED)
            return max(VARIED_WORDS - size, *shares) if is_prose else float("inf")
        if 2 * prose < size or need >= 512:
            return need - size
        return min(PROSE_WORDS - size, (COPIES - 1) * size if self._lag == 1 and size >= 5 else PROSE_WORDS)


class _Hesitation:
    """Of the last `STORM_WINDOW` sentences, those that begin with a word of hesitation, and the share of new words in all."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._window = deque([(False, 0, 0, 0)] * STORM_WINDOW)
        self._n = self._hesitant = self._words = self._fresh = self._length = 0
        self.share = 0.0
        """1 at the alarm; 0 where three times as many words are new."""

    def add(self, hesitant: bool, words: Sequence[str], length: int) -> Loop | None:
        fresh, n, seen = 0, self._n, self._seen
        for word in words:
            n += 1
            if n - seen.get(word, -STORM_MEMORY) > STORM_MEMORY:
                fresh += 1
            seen[word] = n
        self._n = n
        if len(seen) > 2 * STORM_MEMORY:
            self._seen = {word: at for word, at in seen.items() if n - at < STORM_MEMORY}
        gone = self._window.popleft()
        self._window.append((hesitant, len(words), fresh, length))
        self._hesitant += hesitant - gone[0]
        self._words += len(words) - gone[1]
        self._fresh += fresh - gone[2]
        self._length += length - gone[3]
        newness = self._fresh / max(1, self._words) / STORM_FRESH
        self.share = min(1.0, self._hesitant / STORM) * max(0.0, min(1.0, 1.5 - newness / 2))
        return Loop("hesitation", self._length // STORM_WINDOW, self._hesitant) if self.share == 1.0 else None
