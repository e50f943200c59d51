"""A share of every fuzzer in each run of the tests, a bug in a copy of each target that has to be found, and what was found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
from pathlib import Path

import msgspec
import pytest

from agentguard.engines.openai_http import OpenAIEngine, _chunk
from agentguard.errors import ConfigError, EngineError, EngineRequestError
from agentguard.events import decode_frame, decode_json, decode_msgpack
from agentguard.gateway.app import parse_body
from agentguard.gateway.fetches import check_fetches
from agentguard.gateway.openapi import document
from agentguard.identity import digest
from agentguard.policy import load
from agentguard.policy import read as read_recipe
from agentguard.requests import ChatRequest
from agentguard.telemetry import exposition
from agentguard.trace import markers
from agentguard.trace.splitter import Splitter
from benchmarks.fuzz import faults
from tests.fuzz import http
from tests.fuzz.planted import planted
from tests.fuzz.run import HANG_S, run
from tests.fuzz.targets import DEEP, TARGETS, Target

DOCS = Path(__file__).parents[2] / "docs"
SHARE, SEED = 1200, 20261130
FIND = 6000
"""Inputs within which a planted bug must be found; most are within 300."""


@pytest.mark.parametrize("target", TARGETS.values(), ids=[*TARGETS])
def test_nothing_is_found(target: Target) -> None:
    assert faults(run(target, SHARE, seed=SEED).as_row()) == []


@pytest.mark.parametrize("target", TARGETS.values(), ids=[*TARGETS])
def test_a_planted_bug_is_found(target: Target) -> None:
    modules, first = target.modules(with_bug=True), 0
    while first < FIND:
        outcome = run(target, 300, seed=SEED, first=first, modules=modules)
        if outcome.bugs:
            # the same input is fine without the bug, so it is the planted one that was found
            number = outcome.bugs[0]["number"]
            assert run(target, 1, seed=SEED, first=number).bugs == []
            return
        first += 300
    pytest.fail(f"{FIND} inputs did not show that {target.bug[1]!r} had become {target.bug[2]!r}")


def test_a_planted_bug_must_have_its_place() -> None:
    with pytest.raises(LookupError, match="plant the bug anew"):
        planted("agentguard.rulespec", "this stands nowhere", "")


def test_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.run.HANG_S", 0.2)

    def hang(_: object, __: object) -> str:
        while True:
            pass

    stuck = Target("stuck", (), lambda rng: rng.random(), hang, ("", "", ""))
    (bug,) = run(stuck, 1).bugs
    assert bug["error"].startswith("HangError")
    assert HANG_S > 1


def test_memory_that_grows_is_found() -> None:
    kept: list[mmap.mmap] = []

    def leak(_: object, __: object) -> str:
        kept.append(mmap.mmap(-1, 40_000))  # new pages: what tests before it have freed would be used again, and nothing would grow
        kept[-1].write(b"x" * 40_000)
        return "accepted"

    row = run(Target("leak", (), lambda rng: rng.random(), leak, ("", "", ""), refuses=False), 2000).as_row()
    assert [fault for fault in faults(row) if "memory grew" in fault]


def test_the_routes_hold() -> None:
    outcome = http.run(250, seed=SEED, made_by=0.7)
    assert outcome.inputs >= 250
    assert faults(outcome.as_row()) == []
    assert min(outcome.seen["accepted"], outcome.seen["refused"]) > 20


def test_a_bug_in_a_copy_of_the_gateway_is_found() -> None:
    outcome = http.run(250, seed=SEED, made_by=1, bug=http.PLANTED)
    assert outcome.bugs
    assert outcome.bugs[0]["error"].startswith("500")


def test_the_openapi_document_is_the_one_in_docs() -> None:
    kept = json.loads((DOCS / "openapi.json").read_text())
    assert kept == json.loads(json.dumps(document())), "write it anew: python -m agentguard.gateway.openapi > docs/openapi.json"


# -- what fuzzing found, as kinds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", [decode_json, decode_frame, decode_msgpack])
def test_frames_nested_without_end_are_unreadable_and_no_more(decode: object) -> None:
    """A RecursionError went through every reader of frames and ended it."""
    raw = DEEP if decode is decode_msgpack else b'{"type":' + b"[" * 100_000
    with pytest.raises(msgspec.DecodeError, match="nested too deep"):
        decode(raw)  # type: ignore[operator]


def test_chunks_nested_without_end_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="are not JSON"):
        _chunk("[" * 100_000)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b'{"a": NaN}', "is not JSON"),
        (b'{"a": 1e999}', "too large a number"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\xed\xa0\x80"}', "is not JSON"),
        ('{"a": 1}'.encode("utf-16"), "is not JSON"),
        (b"[" * 100_000, "deeper than"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "deeper than"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_bodies_that_could_not_be_sent_on_are_refused(raw: bytes, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_body(raw)


def test_a_key_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for key in ("?", "7", "2026-01-01", "[a]"):
        for recipe in (f"model: m\ntts: {{{key}: 1}}\ndraft: d\n", f"model: m\n{key}: 1\n", f"model: m\neconomics: {{{key}: 1}}\n"):
            path.write_text(recipe)
            with pytest.raises(ConfigError):
                load(path)


def test_a_number_that_is_none_is_refused_as_text_too() -> None:
    """Pydantic reads "NaN" as a float, which no JSON can carry on to the engine."""
    with pytest.raises(ConfigError, match="temperature"):
        ChatRequest.read({"messages": [{"role": "user"}], "temperature": "NaN"})


def test_a_recipe_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: " + "[" * 2000)
    with pytest.raises(ConfigError, match="nested too deep"):
        read_recipe(path)
    path.write_text('model: "\\ud800"\nrule: "\\udfff"')
    with pytest.raises(ConfigError):
        load(path)
    path.write_text("model: 2026-99-99")  # a date for YAML, which Python has not
    with pytest.raises(ConfigError, match="is not YAML"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"added_tokens": [1, "x", null]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": {}, "template": "x"}]}'),
    ],
)
def test_odd_files_of_a_model_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    markers.derive("some-model", *markers.read(tmp_path))


@pytest.mark.parametrize(("name", "raw"), [("chat_template.jinja", b"\xff"), ("tokenizer_config.json", b"[" * 100_000)])
def test_broken_files_of_a_model_are_named(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ConfigError, match="download the model again"):
        markers.read(tmp_path)


def test_a_backslash_in_a_marker_is_its_own() -> None:
    """`re.sub` read it as a group of its pattern."""
    template = r"<think\1> </think\1> {% set t = '<think\1>' %}{% if add_generation_prompt %}{{ t }}{% endif %}"
    tokens = {"added_tokens_decoder": {"1": {"content": "<think\\1>"}, "2": {"content": "</think\\1>"}}}
    assert markers.derive("m", tokens, template).family.opened is True


def test_backticks_as_markers_do_not_depend_on_the_cuts() -> None:
    for special in (True, False):
        found = []
        for pieces in (["x```<p"], ["x", "`", "`", "`<p"]):
            splitter = Splitter([("`", "``")], opened=True, special_tokens=special)
            segments = [s for piece in pieces for s in splitter.feed(piece)] + splitter.finish()
            found.append("".join(f"[{kind}]{text}" for kind, text in segments).replace("[think][think]", "[think]"))
        assert found[0].replace("[think]", "") == found[1].replace("[think]", "")


@pytest.mark.parametrize(
    "text",
    [
        'vllm:time_to_first_token_seconds_bucket{engine="0",x="1"} 1',
        '# TYPE vllm:time_to_first_token_seconds histogram\nvllm:time_to_first_token_seconds_bucket{x="1"} 1\n',
    ],
)
def test_a_bucket_without_a_bound_is_a_value_error_at_most(text: str) -> None:
    """A KeyError ended the watch of every monitor."""
    with contextlib.suppress(ValueError):
        exposition.read(text, 0.0)


def test_sums_of_metrics_stay_numbers() -> None:
    text = "# TYPE vllm:num_requests_running gauge\n" + 'vllm:num_requests_running{engine="0"} 1e308\n' * 2
    assert all(not row.gauges for row in exposition.read(text, 0.0))


def test_half_a_surrogate_in_a_callers_name_is_hashed() -> None:
    assert digest("\ud800") != digest("\udfff")


def test_a_url_deep_in_a_part_is_found() -> None:
    body = {"messages": [{"role": "user", "content": [[{"type": "text", "deep": {"image_url": {"url": "http://10.0.0.1/"}}}]]}]}
    with pytest.raises(ConfigError, match=r"messages\.0\.content\.0\.0\.deep\.image_url\.url"):
        check_fetches(body, ())


def test_an_engines_refusal_names_its_field() -> None:
    async def refused() -> EngineRequestError:
        from tests.security.rig import gate, script

        async with gate(script(status=400, message="max_tokens is too large")) as g:
            reply = await g.ask()
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "engine"
            engine = OpenAIEngine(g.url)
            try:
                await engine.tts()
            except EngineRequestError as error:
                return error
            finally:
                await engine.aclose()
        raise AssertionError

    assert asyncio.run(refused()).field == "path"  # what a gateway behind a gateway said


def test_a_refusal_keeps_nothing_of_the_body() -> None:
    """One exception raised again and again kept the frames of all of them: 70 MB in 100,000 inputs."""
    seen = []
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            parse_body(b"[" * 100_000)
        seen.append(caught.value)
    assert seen[0] is not seen[1]
    assert len(caught.traceback) < 6


def test_the_kept_run_is_whole_and_found_nothing() -> None:
    kept = json.loads((DOCS / "fuzzing.json").read_text())
    rows = {row["target"]: row for row in kept["rows"]}
    assert set(rows) == {*TARGETS, "http-routes"}
    assert all(faults(row) == [] for row in kept["rows"])
    assert all(row["inputs"] >= (20_000 if name == "http-routes" else 100_000) for name, row in rows.items())
    assert kept["inputs"] == sum(row["inputs"] for row in kept["rows"]) >= 1_000_000
    page = (DOCS / "fuzzing.md").read_text()
    for name, row in rows.items():
        assert f"| `{name}` | {row['inputs']:,} | {row['accepted']:,} | {row['refused']:,} |" in page
        assert f"| `{name}` | " in page.partition("## The run")[0]
