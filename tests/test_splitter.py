"""The splitter: reported failures under any chunking, code that talks about markers, and what is held back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentguard.trace import Markers, Splitter

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/splitter.jsonl").read_text().splitlines()]
PAIR = [("<think>", "</think>")]
# fifty streams of the reference target from a stock vLLM without a reasoning parser, delta by delta
STREAMS = [json.loads(line) for line in (Path(__file__).parent / "cases/streams.jsonl").read_text().splitlines()]


def split(chunks: list[str], **options: Any) -> tuple[str, str]:
    splitter = Splitter(options.pop("markers", PAIR), **options)
    segments = [segment for chunk in chunks for segment in splitter.feed(chunk)] + splitter.finish()
    return "".join(t for kind, t in segments if kind == "think"), "".join(t for kind, t in segments if kind == "answer")


def rechunk(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, min(len(text), 12))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_reported_cases_hold_under_any_chunking(case: dict[str, Any]) -> None:
    options = {key: case[key] for key in ("opened", "special_tokens", "markers") if key in case}
    expected = (case["reasoning"], case["content"])
    assert split(case["chunks"], **options) == expected
    rng = random.Random(case["id"])
    text = "".join(case["chunks"])
    for _ in range(1_000):
        chunks = rechunk(text, rng)
        assert split(chunks, **options) == expected, chunks
    assert split(list(text), **options) == expected


@pytest.mark.slow
def test_a_hundred_thousand_chunkings_of_recorded_streams_give_the_same_segments() -> None:
    assert len(STREAMS) == 50
    for number, stream in enumerate(STREAMS):
        text = "".join(stream["chunks"])
        think, _, answer = text.partition("</think>")
        expected = (think, answer)
        assert split(stream["chunks"], opened=True) == expected
        rng = random.Random(number)
        for _ in range(2_000):
            assert split(rechunk(text, rng), opened=True) == expected
    assert sum("</think>" in "".join(s["chunks"]) for s in STREAMS) >= 45


def test_a_marker_that_begins_another_one_waits_for_it() -> None:
    """`<|channel>` and `<|channel>thought`: told apart by what follows, whatever the chunks."""
    pairs = [("<|channel>", "<channel|>"), ("<|channel>thought\n", "<channel|>")]
    for text, think in (("<|channel>thought\nplan<channel|>x", "plan"), ("<|channel>those<channel|>x", "those")):
        assert split([text], markers=pairs) == split(list(text), markers=pairs) == (think, "x")


@given(
    parts=st.lists(st.sampled_from([*"<`\naé ", "<think>", "</think>", "</", "think>", "``", "<thinking>", "</thinking>"])),
    opened=st.booleans(), special=st.booleans(), seed=st.integers(0, 9), several=st.booleans(),
)  # fmt: skip
def test_the_chunking_never_matters(parts: list[str], opened: bool, special: bool, seed: int, several: bool) -> None:
    markers = [*PAIR, ("<thinking>", "</thinking>")] if several else PAIR
    options: dict[str, Any] = {"opened": opened, "special_tokens": special, "markers": markers}
    text = "".join(parts)
    whole = split([text], **options)
    assert split(rechunk(text, random.Random(seed)), **options) == whole
    assert split(list(text), **options) == whole


@pytest.mark.parametrize(
    ("text", "think", "answer"),
    [
        ("<think>is `</think>` the end? no`</think>yes", "is `</think>` the end? no`", "yes"),
        ("<think>a stray ` tick</think>b", "a stray ` tick", "b"),
        ("x ``<think>`` y <think>z</think>w", "z", "x ``<think>`` y w"),
        ("an open ` tick\n<think>z</think>w", "z", "an open ` tick\nw"),
        ("```\ncode <think> in it\n```\n<think>z</think>w", "z", "```\ncode <think> in it\n```\nw"),
        ("end on `</think>`", "", "end on `</think>`"),
    ],
)
def test_quoted_markers_are_text_where_markers_are_special_tokens(text: str, think: str, answer: str) -> None:
    assert split([text], special_tokens=True) == (think, answer)
    assert split(list(text), special_tokens=True) == (think, answer)


def test_segments_come_as_soon_as_they_are_certain() -> None:
    splitter = Splitter(Markers(), opened=True)
    assert splitter.feed("abc<") == [("think", "abc")]
    assert splitter.feed("/thin") == []
    assert splitter.feed("g>d</think>e") == [("think", "</thing>d"), ("answer", "e")]
    assert splitter.inside is False
    assert splitter.finish() == []


def test_little_is_held_back() -> None:
    rng = random.Random(0)
    text = "".join(rng.choice(["<think>", "</think>", "word ", "<", "</th", "`", "\n"]) for _ in range(4_000))
    splitter = Splitter(PAIR, special_tokens=True)
    for character in text:
        splitter.feed(character)
        assert len(splitter._held) <= len("</think>") + 12
    assert sum(len(text) for _, text in splitter.feed("`" * 10_000)) > 9_900


@pytest.mark.parametrize("markers", [[], [("", "x")], [("a", "")]])
def test_empty_markers_are_refused(markers: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        Splitter(markers)
