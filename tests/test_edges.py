"""What comes in from outside: recipes, identities, phases of the token stream, and what imports what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentguard import policy
from agentguard.errors import ConfigError
from agentguard.events import StepFinished
from agentguard.identity import Identity, identify
from agentguard.lengths import Lengths
from agentguard.session import Session, Sessions
from agentguard.trace.tally import MarkerIds, Tally
from engine_plugins.vllm.compat import version_block_reason
from engine_plugins.vllm.params import RequestParams
from engine_plugins.vllm.phase import PhaseTracker, ThinkMarkers


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("draft: x", "model"),
        ("model: x\nrul: strict", "rul='strict': unknown key; did you mean 'rule'"),
        ("model: x\nrule: cactus:delta=-2", "delta is a number from 0 to inf"),
        ("model: x\ncutoff: {f_mni: 0.7}", "did you mean 'f_min'"),
        ("model: x\ncutoff: {f_max: 1.5}", "cutoff.f_max=1.5"),
        ("model: x\ncutoff: {f_min: 0.9, f_max: 0.8}", "swap them"),
        ("model: x\nengine: {draft_tokens: 0}", "engine.draft_tokens=0"),
        ("model: [", "is not YAML"),
        ("- x", "is not a mapping"),
    ],
)
def test_a_bad_recipe_names_field_value_and_remedy(tmp_path: Path, recipe: str, named: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    with pytest.raises(ConfigError) as caught:
        policy.load(path)
    assert named in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        policy.load(tmp_path / "none.yaml")


def test_paths_in_a_recipe_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "recipe.yaml").write_text("model: big\ndraft: org/small\nrule: cactus:0.25")
    loaded = policy.load(tmp_path / "recipe.yaml")
    assert (loaded.model, loaded.draft, loaded.rule) == (str(tmp_path / "big"), "org/small", "cactus:delta=0.25")


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({"X-Session-Id": "a"}, {}, "a"),
        ({"x-litellm-trace-id": "t", "x-session-id": "a"}, {}, "t"),
        ({"X-Claude-Code-Session-Id": "c0ffee00"}, {}, "c0ffee00"),
        ({"x-session-id": "a", "x-claude-code-session-id": "c"}, {}, "c"),
        ({"x-agentguard-session": "mine", "x-litellm-trace-id": "t"}, {}, "mine"),
        ({}, {"metadata": {"session_id": "m"}}, "m"),
    ],
)
def test_the_first_id_in_litellms_order_names_the_session(headers: dict[str, str], body: dict[str, Any], session: str) -> None:
    assert identify(headers, body) == Identity("", session)


def test_callers_do_not_share_sessions() -> None:
    one, other = (identify({"authorization": f"Bearer {k}", "x-session-id": "a"}, {}) for k in "12")
    assert one.session == other.session
    assert one != other
    assert "Bearer" not in str(one)


def test_without_an_id_every_request_is_its_own_session() -> None:
    assert identify({}, {}) != identify({}, {})


@pytest.mark.parametrize("value", ["", "a b", "x" * 257, "naïve", "a\tb", "a\n"])
def test_a_strange_id_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match="x-session-id"):
        identify({"x-session-id": value}, {})


def step(number: int, think: int, answer: int = 2, error: str = "") -> StepFinished:
    return StepFinished(
        t=0.0, session="s", step=number, request="r", model="m", rule="strict", prompt_tokens=1, tokens=think + answer,
        think_tokens=think, answer_tokens=answer, marker_tokens=0, error=error,
    )  # fmt: skip


def test_a_sessions_sums_outlive_the_steps_it_keeps() -> None:
    session = Session(Identity("", "s"), lengths=Lengths(3))
    for number in range(10):
        session.add(step(number, think=number))
    session.add(step(10, think=99, error="lost"))
    assert session.lengths.traces == [8, 9]
    assert (session.tokens, session.think_tokens) == (sum(range(10)) + 20 + 101, sum(range(10)) + 99)


def test_the_least_recently_used_session_is_forgotten() -> None:
    sessions = Sessions(2)
    a = sessions.get(Identity("", "a"))
    sessions.get(Identity("", "b"))
    assert sessions.get(Identity("", "a")) is a
    sessions.get(Identity("", "c"))
    assert {s.identity.session for s in sessions} == {"a", "c"}


@pytest.mark.parametrize("markers", [((0,), (1,), (1,)), ((0, 2), (1, 2, 3), (1, 2, 3))])
@given(tokens=st.lists(st.integers(0, 4), max_size=60), data=st.data())
def test_a_tally_does_not_depend_on_how_tokens_arrive(markers: Any, tokens: list[int], data: st.DataObject) -> None:
    whole, pieces = (Tally(MarkerIds(*markers), opened=True) for _ in range(2))
    whole.feed(tokens)
    rest = tokens
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.feed(rest[:size])
        rest = rest[size:]
    assert (whole.think, whole.answer, whole.markers) == (pieces.think, pieces.answer, pieces.markers)
    assert whole.total == len(tokens)
    assert whole.total == len(tokens)


@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.lists(st.integers(0, 4), max_size=8),
    st.sampled_from([((0,), (1,)), ((0, 2), (1, 3))]),
)
def test_a_phase_read_ahead_equals_the_phase_when_committed(
    committed: list[int], drafts: list[int], markers: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    think = ThinkMarkers(*markers)
    tracker = PhaseTracker(think, [0, 2])
    tracker.update(committed)
    ahead = tracker.ahead(drafts)
    for i in range(len(drafts)):
        fresh = PhaseTracker(think, [0, 2])
        assert fresh.update([*committed, *drafts[:i]]) == ahead[i]
    assert tracker.update([*committed, *drafts]) == PhaseTracker(think, [0, 2, *committed, *drafts]).inside


@pytest.mark.parametrize("markers", [((4,), (5,)), ((4, 7), (5, 7, 6))])
@pytest.mark.parametrize(
    ("behind", "given"),
    [([], 0), ([9], 1), ([9] * 50, 50), ([21], -1), ([9, 21, 8], -1), ([21, 8, 4], None), ([21, 8, 4, 9], None), ([5, 21], -1)],
)
def test_a_start_marker_with_a_turn_behind_it_is_a_quotation(markers: Any, behind: list[int], given: int | None) -> None:
    """``given`` None: behind the turn the template opens a block of its own."""
    start, end = markers
    whole = {4: start, 5: end}
    prompt = [1, *start, *(token for one in behind for token in whole.get(one, (one,)))]
    found = ThinkMarkers(start, end, frozenset({21, 22})).given(prompt)
    assert found == (len(behind) - behind.index(4) - 1 if given is None else given)
    tracker = PhaseTracker(ThinkMarkers(start, end, frozenset({21})), prompt)
    assert (tracker.inside, tracker.think) == (found >= 0, 0)
    if 5 not in behind:  # without a tokenizer nobody can tell
        assert ThinkMarkers(start, end).given(prompt) >= 0


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"ag_rul": "strict"}, "did you mean 'ag_rule'"),
        ({"ag_rule": 0.5}, "as a string"),
        ({"ag_phase": "thinking"}, "one of think, answer, both"),
        ({"ag_rule": "cactus:delta=-1"}, "from 0 to inf"),
    ],
)
def test_bad_request_keys_are_named(args: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RequestParams.read(args, policy.RuleSpec("strict"))


def test_keys_of_others_are_left_alone() -> None:
    read = RequestParams.read({"session_id": "x", "other": 1}, policy.RuleSpec.parse("cactus:0.2,p_min=0"))
    assert (str(read.rule), read.phase) == ("cactus:delta=0.2,p_min=0,top_k=10", "think")
    assert RequestParams.read(None, policy.RuleSpec("strict")).rule == policy.RuleSpec("strict")


@pytest.mark.parametrize(
    ("version", "ok"), [("0.32.0", True), ("0.33.1", True), ("0.31.0", False), ("0.34.0", False), ("1.0", False), (None, False)]
)
def test_the_version_window(version: str | None, ok: bool) -> None:
    reason = version_block_reason(version)
    assert (reason == "") == ok
    if not ok:
        assert "install" in reason


HEAVY = ("torch", "vllm", "litellm", "textual", "transformers")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("agentguard.gateway.server", HEAVY),
        ("agentguard.study.command", HEAVY),
        ("agentguard.doctor", HEAVY),
        ("agentguard.cli", (*HEAVY, "pydantic", "msgspec", "rich", "httpx2", "structlog")),
        ("engine_plugins.vllm", HEAVY),
    ],
)
def test_imports_stay_light(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*[m for m in {forbidden!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
