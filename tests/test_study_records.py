"""A recording grows by whole sessions, survives kill -9, and is gone on with only under the plan it was begun with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentguard.errors import ConfigError
from agentguard.study.records import Header, Recording, RoundStats, SessionRecord, load
from tests.study_sessions import session

PLAN: dict[str, Any] = {"suite": "chain", "seed": 1, "cells": [["strict", "off", 3]]}


def header(**changes: Any) -> Header:
    return Header(plan=PLAN | changes, provenance={"agentguard": "x"})


def write(path: Path, records: list[SessionRecord]) -> None:
    recording = Recording.new(path, header())

    async def all_at_once() -> None:
        await asyncio.gather(*(recording.append(record) for record in records))

    asyncio.run(all_at_once())


def test_what_is_appended_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    records = [session("strict", number, tokens=10 + number) for number in range(20)]
    write(path, records)
    found, loaded = load(path)
    assert found == header()
    assert sorted(loaded, key=lambda r: r.number) == records


@pytest.mark.parametrize("torn", [b"{", b'{"rule":"strict","close":"off","num', b"\x00\x00"])
def test_a_torn_last_line_is_cut_off_and_its_session_is_run_again(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "sessions.jsonl"
    write(path, [session("strict", 0), session("strict", 1)])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [r.number for r in load(path)[1]] == [0, 1]
    recording = Recording.resume(path, PLAN)
    assert path.read_bytes() == whole
    asyncio.run(recording.append(session("strict", 2)))
    assert [r.number for r in load(path)[1]] == [0, 1, 2]


def test_every_place_where_a_write_may_be_cut_leaves_a_recording_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    write(path, [session("strict", 0), session("strict", 1)])
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(first, len(content), 37):
        path.write_bytes(content[:cut])
        found = Recording.resume(path, PLAN).records
        assert len(found) == content[first:cut].count(b"\n")


@pytest.mark.parametrize(("change", "says"), [({"seed": 2}, "seed is 1 there and 2 now"), ({"tasks": "a"}, "tasks is None there")])
def test_a_recording_of_another_plan_is_refused_and_left_alone(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "sessions.jsonl"
    write(path, [session("strict", 0)])
    path.write_bytes(path.read_bytes() + b"{torn")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=says):
        Recording.resume(path, PLAN | change)
    assert path.read_bytes() == before


def test_an_older_recording_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    write(path, [session("strict", 0)])
    with pytest.raises(ConfigError, match="--resume"):
        Recording.new(path, header())
    assert len(load(path)[1]) == 1


def test_what_is_no_recording_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no study"):
        load(path)
    path.write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match=r"sessions\.jsonl:1"):
        load(path)
    path.unlink()
    write(path, [session("strict", 0)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[1])
    with pytest.raises(ConfigError, match=r"sessions\.jsonl:2"):
        load(path)


def test_a_format_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    write(path, [])
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":9'))
    with pytest.raises(ConfigError, match="format 9"):
        load(path)


def test_stats_are_not_shared_between_sessions() -> None:
    one = RoundStats()
    one.by_position.append(1)
    assert RoundStats().by_position == []
