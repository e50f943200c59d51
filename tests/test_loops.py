"""Loop detection: no alarm on a million tokens of legitimate repetition, and 500 constructed loops found in time.

Times are counted in copies and tokens, never in seconds. Every stream is fed as a server sends it, in pieces of a few tokens.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from agentguard.trace.loops import Loop, LoopDetector

Mode = Literal["ids", "text", "both"]
MODES: tuple[Mode, ...] = ("ids", "text", "both")
RULER = r"[ \t\n\r=#*/~_^.+|%;─━═│—–·•█░▁-]"
FORBIDDEN_RUN = re.compile(rf"(?!{RULER})(.)\1{{63}}", re.DOTALL)
"""What case 9 asks to close: 64 equal characters. Test vectors and embedded data that hold such a run are left out."""

THOUGHTS = """\
I need to find the smallest number that satisfies both of these conditions at once.
Let me check whether the function returns the right value for an empty list.
The error says that the module cannot be imported, which means the path is wrong.
If the cache is cleared before the request is finished, then the second reader sees stale data.
The user asked for a fix in the parser, not for a new design of the whole program.
So the answer should be the larger of the two roots, because the other one is negative.
That does not match the expected output in the test, so my assumption must be wrong somewhere.
I should look at the file again and see where the variable is set for the first time.
Maybe the problem is in the way the loop is closed when the last element is removed.
The lock is taken by the writer and is never released if the callback raises an exception.
First we compute the sum of the weights, then we divide every weight by that sum.
This would explain why the test passes alone but fails when the whole suite is run.
We know that the triangle is isosceles, so the two angles at the base must be equal.
The second condition is only needed when the list holds more than one element.
Let me think about the structure of the graph and which edges can be removed safely.
But then the counter would be increased twice for the same message, which cannot be right.
The documentation says that the default is false, although the code does the opposite.
I could rewrite the query with a join, which would also avoid the extra round trip to the server.
We can assume without loss of generality that the first player takes the middle square.
In that case the remainder is zero and the claim follows from the previous step.
The simplest explanation is that the configuration file is read before the variable is exported.
Since both sides are positive, we may square the inequality without changing its direction.
It seems that the request is retried by the proxy after the timeout of the client has already passed.
Let me try to write the function in a different way and compare the two results.
Every path from the root to a leaf must pass through one of the marked nodes.
The file is opened in text mode, so the line endings are translated on some systems.
We want the probability that at least one of the draws is red, so we count the opposite event.
The remaining question is whether the order of the arguments matters for the caller.
""".splitlines()
HESITATIONS = """\
Wait, that is not right.
Hmm, let me think about it again.
Alternatively, maybe the first idea was better.
Wait, maybe I should check the condition again.
Hmm, but that gives the same result as before.
Actually, no, that cannot be the case.
Wait, I already tried that.
Alternatively, maybe it is the other way around.
Hmm.
But wait, what about the second condition?
Maybe I should look at it from the other side.
Wait, no.
Actually, let me go back to the first idea.
Hmm, that does not work either.
Alternatively, I could just try both and see.
But wait, is that really what the question asks?
Perhaps I misread the question.
Wait, let me re-read the question.
Hmm, so the result is the same.
Actually, maybe it was right the first time.
Hold on, is the second condition even needed?
""".splitlines()


# -- legitimate text -------------------------------------------------------------------------------------------------------------


def files_on_disk(megabytes: float) -> Iterator[tuple[str, str]]:
    """Every k-th text file of the standard library (its tests included), by path. Not of the installed packages: each new one
    changed the draw, and their tables of numbers and expected outputs repeat word for word, which to find is right."""
    root = Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages"}
    paths = sorted(p for p in root.rglob("*") if p.suffix in {".py", ".pyi", ".md", ".rst", ".txt"} and not others & set(p.parts))
    stride = max(1, int(sum(min(path.stat().st_size, 100_000) for path in paths) / (megabytes * 1e6)))
    for path in paths[::stride]:
        try:
            yield str(path), path.read_text(encoding="utf-8")[:100_000]
        except UnicodeDecodeError:
            continue


def generated(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Repetition as it is wanted: tables, logs, enumerations, checks that progress."""
    words = [word for line in THOUGHTS for word in re.findall(r"[a-z]{4,}", line)]

    def name() -> str:
        return f"{rng.choice(words)}_{rng.choice(words)}"

    yield (
        "csv with constant columns",
        "id,state,region,rate\n" + "".join(f"{i},active,eu-west-1,{rng.choice(['0.0', '0.0', '1.5'])}\n" for i in range(1_500)),
    )
    for width in (2, 3, 6):
        rows = []
        for _ in range(300):
            row = "| " + " | ".join(rng.choice(["0", "0", "yes", "-", rng.choice(words)]) for _ in range(width)) + " |"
            rows += [row] * rng.choice([1, 1, 1, 2, 3, 5])
        yield f"markdown table of {width} columns with equal rows", "\n".join(["| a " * width + "|", "|---" * width + "|", *rows])
    yield "identical rows", "\n".join("| 0 | 0 |" for _ in range(18)) + "\n\n" + "ok,0,0\n" * 20
    yield "multiplication table", "\n".join(f"{a} x {b} = {a * b}" for a in range(1, 31) for b in range(1, 31))
    yield "multiplication grid", "\n".join(" ".join(f"{a * b:4d}" for b in range(1, 21)) for a in range(1, 41))
    yield "truth table", "\n".join("| " + " | ".join("TF"[n >> k & 1] for k in range(8)) + " |" for n in range(256))
    yield (
        "truth table in words",
        "\n".join(
            f"If p is {bool(n & 1)}, q is {bool(n & 2)} and r is {bool(n & 4)}, the formula is {bool(n & 1 and n & 6)}.".lower()
            for n in range(8)
        ),
    )
    log = ["INFO  request served from cache", "WARN  retrying after timeout", "INFO  heartbeat ok", "DEBUG pool: 8 idle, 0 busy"]
    for weights in ((5, 1, 20, 3), (0, 0, 1, 0)):
        yield (
            "server log",
            "\n".join(
                f"2026-11-30 {i // 3600:02d}:{i // 60 % 60:02d}:{i % 60:02d}.{rng.randrange(999)} {rng.choices(log, weights)[0]}"
                for i in range(0, 4_000, 3)
            ),
        )
    yield (
        "json records",
        json.dumps([{"id": i, "ok": True, "tags": [], "owner": None, "score": 0.0, "kind": "item"} for i in range(700)], indent=1),
    )
    yield "json of zeros", json.dumps({f"{name()}": [0] * rng.randrange(1, 40) for _ in range(150)})
    yield "enumeration", "\n".join(f"{i}. Check the {rng.choice(words)} of {name()} and write it down." for i in range(1, 500))
    yield "enumeration of equal steps", "\n".join(f"Step {i}: take one card from the pile and turn it over." for i in range(1, 400))
    yield "counting", "".join(f"I have {i} apples, I add one, now I have {i + 1} apples. " for i in range(400))
    yield "names in equal sentences", " ".join(f"The method {name()} returns the number of items in the list." for _ in range(300))
    yield (
        "checks that progress",
        "\n".join(
            f"Check {n}: {n} * 3 = {n * 3}, which is {'even' if n % 2 == 0 else 'odd'}. Wait, let me check that again. "
            f"{n} + {n} + {n} = {n * 3}. Yes, that is right. The sum so far is {3 * n * (n + 1) // 2}."
            for n in range(1, 300)
        ),
    )
    yield (
        "hesitation that progresses",
        " ".join(
            f"{rng.choice(['Wait', 'Hmm', 'Alternatively', 'Actually'])}, what about {a} and {b}? That gives {a * b - a}, "
            f"so the {rng.choice(words)} of {rng.choice(words)} would be {a % (b or 1)}."
            for a, b in ((rng.randrange(1000), rng.randrange(1, 1000)) for _ in range(300))
        ),
    )
    yield "case analysis", " ".join(
        f"If {a} is a knight and {b} is a knave, then {c} lies, so {d} cannot be a knight."
        for a in "ABCDE" for b in "ABCDE" for c in "ABC" for d in "DE" if a != b
    )  # fmt: skip
    moves: list[str] = []

    def hanoi(n: int, a: str, b: str, c: str) -> None:
        if n:
            hanoi(n - 1, a, c, b)
            moves.append(f"Move the top disk from peg {a} to peg {c}.")
            hanoi(n - 1, b, a, c)

    hanoi(10, "A", "B", "C")
    yield "towers of Hanoi", "\n".join(moves)
    rulers = [c * n for c in "=-#*~_/" for n in (20, 40, 72, 79, 80, 100, 120)]
    yield "rulers", "\n".join(f"{r}\n{name()} {i}\n{r}\n{rng.choice(THOUGHTS)}" for i, r in enumerate(rng.choices(rulers, k=300)))
    yield (
        "ascii art",
        "\n\n".join(
            "\n".join([f"+{'-' * w}+", *[f"|{rng.choice(' .#').center(w)}|"] * rng.randrange(1, 6), f"+{'-' * w}+"])
            for w in (rng.randrange(4, 70) for _ in range(120))
        ),
    )
    yield "bars", "\n".join(f"{name()[:12]:12} {'█' * (n := rng.randrange(60))}{'░' * (60 - n)} {n}" for _ in range(200))
    yield (
        "matrices",
        "\n\n".join("\n".join("[" + ", ".join(str(int(i == j)) for j in range(n)) + "]," for i in range(n)) for n in range(3, 17)),
    )
    yield "zeros", "\n\n".join("\n".join("[" + ", ".join("0" * n) + "]," for _ in range(n)) for n in range(2, 9))
    yield "grids", "\n\n".join("\n".join(" ".join(rng.choices("012", (12, 1, 1), k=12)) for _ in range(12)) for _ in range(40))
    yield (
        "hex dump",
        "\n".join(
            f"{16 * i:08x}  {' '.join(rng.choice(['00', '00', '00', 'ff', f'{rng.randrange(256):02x}']) for _ in range(16))}"
            for i in range(400)
        ),
    )
    yield (
        "short functions",
        "\n\n".join(f"def {name()}(self) -> int:\n    self._check_open()\n    return self._{name()}" for _ in range(250)),
    )
    yield "stubs", "\n\n".join(f"    def {name()}(self):\n        raise NotImplementedError()" for _ in range(250))
    yield (
        "unit tests",
        "\n\n".join(
            f"    def test_{name()}(self):\n        parser = make_parser()\n        parser.feed({rng.choice(words)!r})\n"
            f"        self.assertEqual(parser.close(), {rng.randrange(100)})\n        self.assertIsNone(parser.error)"
            for _ in range(250)
        ),
    )
    yield "test report", "\n".join(f"test_{name()} (tests.test_{name()}.Case) ... ok" for _ in range(400))
    yield (
        "html list",
        "<ul>\n" + "\n".join(f'  <li class="item"><a href="/p/{name()}">{name()}</a></li>' for _ in range(300)) + "\n</ul>",
    )


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    ids: list[int]
    ends: list[int]
    """Where each token's text ends."""


def pieces(document: Document, rng: random.Random | None) -> Iterator[tuple[list[int], str]]:
    """One token at a time, or 1 to 6 as a server streams them."""
    at = done = 0
    while at < len(document.ids):
        step = 1 if rng is None else rng.randint(1, 6)
        end = document.ends[min(at + step, len(document.ids)) - 1]
        yield document.ids[at : at + step], document.text[done:end]
        at, done = at + step, end


def alarm(document: Document, mode: Mode, rng: random.Random | None = None) -> tuple[Loop, int] | None:
    """The first alarm and the character at which it came."""
    detector, done = LoopDetector(), 0
    for ids, text in pieces(document, rng):
        done += len(text)
        loop = detector.feed(ids if mode != "text" else (), text if mode != "ids" else "")
        if loop:
            return loop, done
    return None


class Encoder:
    """A byte-pair tokenizer, trained here; digits are single tokens as in the Qwen and Llama families."""

    def __init__(self, sample: list[str]) -> None:
        self._tokenizer = Tokenizer(models.BPE())
        split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        trainer = trainers.BpeTrainer(vocab_size=6_000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        self._tokenizer.train_from_iterator(sample, trainer)

    def __call__(self, name: str, text: str) -> Document:
        encoding = self._tokenizer.encode(text)
        return Document(name, text, encoding.ids, [end for _, end in encoding.offsets])


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    found = [(name, text) for name, text in (*generated(random.Random(0)), *files_on_disk(megabytes=4)) if text]
    kept = [(name, text) for name, text in found if not FORBIDDEN_RUN.search(text)]
    assert len(kept) >= 0.99 * len(found)
    return kept


@pytest.fixture(scope="module")
def encode(texts: list[tuple[str, str]]) -> Encoder:
    return Encoder([text[:4_000] for _, text in texts] + THOUGHTS + HESITATIONS)


def test_no_alarm_on_a_million_tokens_of_legitimate_text(texts: list[tuple[str, str]], encode: Encoder) -> None:
    documents = [encode(name, text) for name, text in texts]
    assert sum(len(document.ids) for document in documents) >= 1_000_000
    assert sum(len(document.ids) >= 8_000 for document in documents) >= 20
    rng = random.Random(1)
    alarms = [(mode, d.name, found) for d in documents for mode in MODES if (found := alarm(d, mode, rng))]
    assert not alarms


# -- constructed loops -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    kind: str
    prefix: str
    unit: str
    copies: list[str]
    varied: bool


def prose(texts: list[tuple[str, str]]) -> list[str]:
    """Paragraphs of real prose: letters and plain punctuation only. Sentences with numbers are compared more strictly, as progress
    shows in them: of 150 varied paragraphs one with six decimals was missed each of the five times it was drawn."""
    plain = re.compile(r"[A-Za-z][A-Za-z ,.;:'\n-]{200,1500}[.]")
    return sorted({p for _, text in texts for p in re.split(r"\n\s*\n", text) if plain.fullmatch(p)})


def swap(unit: str, rng: random.Random) -> str:
    at = rng.choice([m.span() for m in re.finditer(r"(?<= )[a-z]{3,}", unit)])
    return unit[: at[0]] + rng.choice(["other", "second", "value", "again", "simply", "given", "whole"]) + unit[at[1] :]


def vary(unit: str, rng: random.Random) -> str:
    """One small change: punctuation, case, a word of hesitation or, one in 24 at most, another word."""
    words = re.findall(r"\w+", unit)
    can_swap = len(words) >= 24 and re.search(r" [a-z]{3,}", unit)
    change = rng.choice(["punctuation", "case", "hesitation", *["word"] * bool(can_swap)])
    if change == "word":
        return swap(unit, rng)
    if change == "case":
        word = rng.choice(words)
        return unit.replace(word, word.upper(), 1)
    if change == "punctuation":
        # not of "2.5": a number that changes is progress
        mark = rng.choice([m.start() for m in re.finditer(r"[,.](?!\d)", unit)])
        return unit[:mark] + ("!" if unit[mark] == "." else " -") + unit[mark + 1 :]
    start = len(unit) - len(unit.lstrip())
    return unit[:start] + rng.choice(["Wait, ", "Hmm, ", "Okay, so ", "But wait, "]) + unit[start:]


def cases(texts: list[tuple[str, str]], encode: Encoder, rng: random.Random) -> Iterator[Case]:
    paragraphs = prose(texts)
    codes = [text for name, text in texts if name.endswith(".py") and len(text) > 6_000]
    bodies = [text for _, text in texts if len(text) > 6_000]

    def unit(kind: str) -> str:
        lead, tail = rng.choice([(" ", ""), ("", "\n"), ("", "\n\n")])
        if kind == "token":
            # none that the tokenizer, trained on what is installed here, might join with its own copy, as "!"
            return rng.choice([" it", " wait", " the", " !", " so", "re", " Hmm", " x", " 1", " ok"])
        if kind == "phrase":
            words = rng.choice(THOUGHTS).split()
            at, n = rng.randrange(len(words) - 7), rng.randint(2, 7)
            return " " + " ".join(words[at : at + n]).strip(".,")
        if kind == "sentence":
            return lead + rng.choice(THOUGHTS) + tail
        if kind == "code":
            lines = rng.choice(codes).splitlines()
            at = rng.randrange(len(lines) - 45)
            text = "\n".join(lines[at : at + rng.randint(8, 40)])
            return text[: encode("", text).ends[:500][-1]] + "\n"
        if rng.random() < 0.5:
            return rng.choice(paragraphs) + "\n\n"
        sentences = rng.sample(THOUGHTS, rng.randint(3, 24))
        while len(encode("", " ".join(sentences)).ids) > 505:
            sentences.pop()
        return lead + " ".join(sentences) + tail

    plan = [("token", 40, False), ("phrase", 60, False), ("sentence", 50, False), ("paragraph", 60, False), ("code", 40, False)]
    for kind, number, varied in [*plan, ("sentence", 100, True), ("paragraph", 150, True)]:
        for _ in range(number):
            text, body = unit(kind), rng.choice(bodies)
            at = rng.randrange(len(body) - 5_000)
            prefix = body[at : at + rng.randint(300, 4_000)].rstrip() + ("." if text.startswith(" ") else "\n")
            many = 620 if kind in ("token", "phrase") else 40
            copies = [text] + [vary(text, rng) if varied else text for _ in range(many - 1)]
            yield Case(kind, prefix, text, copies, varied)


def promised(case: Case, mode: Mode, encode: Encoder) -> int:
    """The copy at whose end the docstring promises the alarm."""
    by_ids = mode == "ids" or (mode == "both" and case.kind in ("token", "phrase", "code"))
    if by_ids:
        lexed: list[object] = list(encode("", case.unit * 3).ids)
        lexed = lexed[: len(lexed) // 3]
    else:
        lexed = list(re.findall(r"-?\d\w*|\w+|[^\w\s]+|\n", case.unit.lower()) if case.unit != "re" else "re")
    size, distinct = len(lexed), len(set(lexed))
    exact = 64 if size == 1 else 128 if distinct >= 24 else 192 if 5 * distinct >= 3 * size else 512
    copies = max(3, math.ceil(exact / size))
    if by_ids or case.kind not in ("sentence", "paragraph"):
        return copies
    fillers = ("so", "but", "maybe", "actually", "no")
    words = [w for w in re.findall(r"\w+", case.unit.lower()) if w not in fillers]
    return max(3, math.ceil((72 if case.varied else 48) / len(words)))


def test_constructed_loops_are_found_in_time(texts: list[tuple[str, str]], encode: Encoder) -> None:
    """At the third copy, or where a short unit's copies reach the minimum; seen one token later (the docstring's last line)."""
    constructed = list(cases(texts, encode, random.Random(2)))
    assert len(constructed) == 500
    assert sum(case.varied for case in constructed) == 250
    hits: dict[tuple[str, str, Mode], list[bool]] = {}
    for case in constructed:
        for mode in MODES[case.varied :]:
            due = promised(case, mode, encode)
            document = encode("", case.prefix + "".join(case.copies[: due + 2 + 64 // len(case.unit)]))
            limit = len(case.prefix) + sum(map(len, case.copies[:due])) + (32 if mode == "text" else 0)
            limit = next(end for end in document.ends if end > limit)
            found = alarm(document, mode)
            assert found is None or found[1] > len(case.prefix) + len(case.copies[0]), found
            key = ("third copy" if due == 3 else "minimum run", f"{case.kind}{', varied' * case.varied}", mode)
            hits.setdefault(key, []).append(found is not None and found[1] <= limit)
    table = {key: (sum(flags), len(flags)) for key, flags in sorted(hits.items())}
    print(*table.items(), sep="\n")
    for when in ("third copy", "minimum run"):
        found_in_time, all_of_them = map(sum, zip(*(row for key, row in table.items() if key[0] == when), strict=True))
        assert found_in_time >= 0.99 * all_of_them, table


def copies_needed(copies: Sequence[str]) -> int | None:
    detector = LoopDetector()
    return next((n for n, copy in enumerate(copies, 1) if detector.feed(text=copy)), None)


def test_a_paragraph_with_other_sentences_put_in_is_still_a_loop() -> None:
    rng, found = random.Random(3), []
    for _ in range(100):
        sentences, copies = rng.sample(THOUGHTS, rng.randint(4, 12)), []
        for n in range(12):
            put_in = [rng.choice(HESITATIONS)] if n else []
            at = rng.randrange(len(sentences) + 1)
            copies.append(" ".join(sentences[:at] + put_in + sentences[at:]) + " ")
        found.append(copies_needed(copies))
    assert sum(n is not None and n <= 5 for n in found) >= 90
    assert sum(n is not None for n in found) >= 98


def test_a_short_sentence_with_changing_words_takes_longer() -> None:
    """Every third copy of 8 to 23 words has another word: too much for the third copy, as names in equal sentences are progress."""
    rng, found = random.Random(4), []
    for _ in range(100):
        sentence = rng.choice(THOUGHTS) + " "
        copies = [sentence] + [swap(sentence, rng) if rng.random() < 1 / 3 else sentence for _ in range(23)]
        found.append(copies_needed(copies))
    assert sum(n is not None and n <= 8 for n in found) >= 90
    assert sum(n is not None for n in found) >= 98


@pytest.mark.parametrize("seed", range(60))
def test_a_hesitation_storm_is_found(seed: int) -> None:
    rng = random.Random(seed)
    bank = rng.sample(HESITATIONS, rng.randint(5, len(HESITATIONS)))
    detector = LoopDetector()
    for thought in THOUGHTS:
        assert detector.feed(text=thought + " ") is None
    found = next((n for n in range(1, 73) if detector.feed(text=rng.choice(bank) + rng.choice([" ", "\n", "\n\n"]))), None)
    assert found is not None
    assert detector.feed() is not None
    assert detector.score == 1.0


# -- reported cases, budgets.md section 5 ----------------------------------------------------------------------------------------


def test_case_7_the_same_paragraph_is_closed_at_its_third_copy() -> None:
    paragraph = " ".join(THOUGHTS[:9]) + "\n\n"
    assert 700 < len(paragraph) < 900
    for name, varied in (("period", paragraph), ("paragraph", paragraph.replace("works", "does").replace(", ", " - "))):
        detector = LoopDetector()
        assert detector.feed(text=THOUGHTS[20] + "\n\n" + paragraph + varied) is None
        loop = detector.feed(text=paragraph)
        assert loop is not None
        assert (loop.kind, loop.repeats) == (name, 3)


@pytest.mark.parametrize("sentence", ["I should check the file again.", "Wait, the user said the parser is wrong.", THOUGHTS[3]])
def test_case_8_the_same_sentence_is_closed_within_five(sentence: str) -> None:
    n = copies_needed([sentence + " "] * 300)
    assert n is not None
    assert 3 <= n <= 5


def test_case_9_a_run_of_one_character_is_closed_at_64() -> None:
    detector = LoopDetector()
    found = next(n for n in range(1, 1_000) if detector.feed(text="!"))
    assert (found, detector.feed()) == (64, Loop("run", 1, 64))
    assert copies_needed(["="] * 1_000) == 512
    assert LoopDetector().feed(text=f"Title\n{'=' * 120}\n{'-' * 120}\n") is None


def test_case_10_one_token_over_and_over() -> None:
    detector = LoopDetector()
    assert detector.feed([5, 6, 7]) is None
    found = next(n for n in range(1, 1_000) if detector.feed([0]))
    assert (found, detector.feed()) == (64, Loop("run", 1, 64))
    assert copies_needed([" it"] * 1_000) in range(64, 76)
    assert copies_needed(["re"] * 1_000) in range(64, 120)


def test_case_11_a_loop_without_a_tool_call() -> None:
    """Nothing but the trace is looked at; a loop of several paragraphs with code between them."""
    code = "```python\nresult = [f(x) for x in items if x]\nprint(result)\n```\n"
    copies = [f"{THOUGHTS[2]}\n{THOUGHTS[5]}\n\n{code}\n{THOUGHTS[11]}\n\n"] * 10
    assert copies_needed(copies) == 3


# -- the interface ---------------------------------------------------------------------------------------------------------------


def fed_text(pieces: Iterable[str]) -> Loop | None:
    detector = LoopDetector()
    return [detector.feed(text=piece) for piece in pieces][-1]


def rechunk(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 40)))
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


PARTS = [
    "!",
    "=" * 30,
    " ",
    "\n",
    ". ",
    "a",
    "x = 1\n",
    "Wait. ",
    "Hmm, no. ",
    "等等，不对。",
    "ab" * 20,
    "and on and ",
    *THOUGHTS[:4],
]


@given(st.lists(st.tuples(st.sampled_from(PARTS), st.integers(1, 40)), max_size=8), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_the_chunking_never_matters(parts: list[tuple[str, int]], times: int, seed: int) -> None:
    text = "".join(part * n for part, n in parts) * times
    whole = fed_text([text])
    assert fed_text(rechunk(text, random.Random(seed))) == whole
    assert fed_text(text or [""]) == whole


def test_the_chunking_of_ids_never_matters() -> None:
    rng = random.Random(5)
    for _ in range(100):
        unit = rng.choices(range(rng.choice([3, 1_000])), k=rng.randint(1, 80))
        ids = rng.choices(range(1_000), k=200) + unit * 600
        found = set()
        for most in (1, 7, 50_000):
            detector, at = LoopDetector(), 0
            while at < len(ids):
                step = rng.randint(1, most) if most < 50_000 else most
                detector.feed(ids[at : at + step])
                at += step
            found.add(detector.feed())
        assert len(found) == 1
        assert None not in found


@pytest.mark.parametrize("period", [1, 2, 3, 17, 63, 200, 511, 512])
def test_every_period_up_to_512(period: int) -> None:
    ids = list(range(900)) + list(range(1_000, 1_000 + period)) * 200
    detector = LoopDetector()
    loop = detector.feed(ids)
    assert loop is not None
    assert loop.period == period
    assert loop.repeats == max(3, {1: 64}.get(period, (192 if period < 24 else 128) // period))


def test_a_longer_period_is_left_to_the_text() -> None:
    assert LoopDetector().feed(list(range(513)) * 10) is None


def test_chinese() -> None:
    sentences = "这个函数返回错误的结果，所以我需要再检查一下输入的数据。"
    assert copies_needed([sentences] * 10) in (3, 4)
    assert copies_needed([f"第{i}步：从左边的一堆里拿一张牌，然后放到右边的一堆里去。" for i in range(200)]) is None


def test_ids_take_over_from_words() -> None:
    detector = LoopDetector()
    detector.feed(text=THOUGHTS[0] * 2)
    assert detector.feed(list(range(40)) * 4) == Loop("period", 40, 3)


def test_a_found_loop_stays_until_the_next_block() -> None:
    detector = LoopDetector()
    loop = detector.feed(text="!" * 64)
    assert loop is not None
    assert detector.feed([1, 2, 3], "something else. ") is loop
    assert loop.detail == "run of 1 token or character, 64 copies"
    assert Loop("period", 37, 3).detail == "period of 37 tokens, 3 copies"
    detector.reset()
    assert detector.feed() is None
    assert detector.score == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_the_score_rises_to_one_at_the_alarm(mode: Mode, encode: Encoder) -> None:
    document = encode("", "\n".join(THOUGHTS[:12]) + "\n" + (" ".join(THOUGHTS[12:15]) + "\n") * 5)
    detector, scores = LoopDetector(), []
    for ids, text in pieces(document, None):
        found = detector.feed(ids if mode != "text" else (), text if mode != "ids" else "")
        scores.append(detector.score)
        if found:
            break
    fresh = len(encode("", "\n".join(THOUGHTS[:12])).ids)
    assert max(scores[:fresh]) == 0.0
    assert scores[-1] == 1.0
    rise = scores[next(i for i, score in enumerate(scores) if score > 0.0) :]
    assert rise == sorted(rise)
    assert max(b - a for a, b in pairwise([0.0, *rise])) < 0.5


def test_memory_is_bounded() -> None:
    rng, detector = random.Random(6), LoopDetector()
    sizes = []
    for _ in range(3):
        for _ in range(4_000):
            words = " ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(12))
            detector.feed([rng.randrange(150_000) for _ in range(16)], f"{words}. ")
        sizes.append(len(pickle.dumps(detector)))
    assert max(sizes) < 1_000_000
    assert max(sizes) < 1.3 * min(sizes)
