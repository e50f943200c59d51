from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentguard.errors import ConfigError
from agentguard.rulespec import KNOBS, RuleSpec
from engine_plugins import rules


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("strict", "strict"),
        ("cactus:0.25", "cactus:delta=0.25"),
        (" cactus:delta=0.25 ", "cactus:delta=0.25"),
        ("cactus:delta=0.25,p_min=0.1,top_k=10", "cactus:delta=0.25,p_min=0.1,top_k=10"),
        ("cactus:0.25,top_k=10,p_min=0.1", "cactus:delta=0.25,p_min=0.1,top_k=10"),
        ("cactus:delta=0.25,p_min=0,top_k=0", "cactus:delta=0.25,p_min=0,top_k=0"),
        ("typical:delta=0.3,eps=0.09", "typical:eps=0.09,delta=0.3"),
        ("casc-opt:-inf", "casc-opt:alpha=-inf"),
        ("fuzzy:T=inf,h_max=2", "fuzzy:T=inf,h_max=2"),
        ("top-k:3", "top-k:k=3"),
        ("strict:p_min=0.1", "strict:p_min=0.1"),
        ("cactus:inf", "cactus:delta=inf"),
        ("interp:w=1", "interp:w=1"),
    ],
)
def test_one_spelling_for_each_rule(text: str, written: str) -> None:
    assert str(RuleSpec.parse(text)) == written


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("cactuz:0.2", "did you mean 'cactus'"),
        ("", "unknown rule"),
        ("cactus", "cactus needs delta"),
        ("cactus:delta=-1", "from 0 to inf, not -1"),
        ("cactus:delta=nan", "not nan"),
        ("cactus:delta=much", "not 'much'"),
        ("cactus:alpha=1", "unknown knob 'alpha'"),
        ("cactus:delta=1,delta=2", "given twice"),
        ("cactus:delta=1,p_min=1.5", "p_min is a number from 0 to 1"),
        ("cactus:delta=1,top_k=2.5", "whole number"),
        ("strict:0.5", "unknown knob"),
        ("interp:w=1.1", "from 0 to 1"),
    ],
)
def test_a_bad_rule_names_field_value_and_remedy(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuleSpec.parse(text, what="ag_rule")
    assert named in str(caught.value)
    assert str(caught.value).startswith(f"ag_rule={text!r}: ")


@given(delta=st.floats(0, 1e6), p_min=st.sampled_from([0, 0.1, 0.15, 1]), top_k=st.integers(0, 1000))
def test_writing_and_reading_is_stable(delta: float, p_min: float, top_k: int) -> None:
    spec = RuleSpec("cactus", {"delta": delta}, p_min, top_k)
    assert RuleSpec.parse(str(spec)) == spec


def test_relaxed_is_false_at_the_strict_limit() -> None:
    assert not RuleSpec.parse("strict").relaxed
    assert not RuleSpec.parse("cactus:0").relaxed
    assert not RuleSpec.parse("interp:0").relaxed
    assert RuleSpec.parse("cactus:0.1").relaxed


def test_the_grammar_and_the_rules_have_the_same_names_and_knobs() -> None:
    assert set(rules.names()) == set(KNOBS)
    for name, knobs in KNOBS.items():
        spec = RuleSpec(name, {k.name: k.low if math.isfinite(k.low) else 0.0 for k in knobs})
        assert rules.get(spec).rule.name == name


@pytest.mark.parametrize(
    ("text", "requested", "studied"),
    [
        ("cactus:0.2", "cactus:delta=0.2,p_min=0.1,top_k=10", "cactus:delta=0.2,p_min=0,top_k=0"),
        ("cactus:0.2,p_min=0.3", "cactus:delta=0.2,p_min=0.3,top_k=10", "cactus:delta=0.2,p_min=0.3,top_k=0"),
        ("cactus:0.2,p_min=0,top_k=0", "cactus:delta=0.2,p_min=0,top_k=0", "cactus:delta=0.2,p_min=0,top_k=0"),
        ("cactus:0", "cactus:delta=0", "cactus:delta=0"),
        ("strict", "strict", "strict"),
        ("strict:p_min=0.2", "strict:p_min=0.2", "strict:p_min=0.2"),
        ("r-fuzzy:-1", "r-fuzzy:T=-1", "r-fuzzy:T=-1"),
    ],
)
def test_a_relaxed_request_is_filtered_unless_it_says_no_and_a_study_arm_is_what_it_says(
    text: str, requested: str, studied: str
) -> None:
    spec = RuleSpec.parse(text)
    assert str(spec.for_request()) == requested
    assert str(spec.as_it_stands()) == studied
    assert spec.as_it_stands().for_request() == spec.as_it_stands()


@pytest.mark.parametrize("name", list(KNOBS))
def test_the_usual_values_of_every_rule_are_in_range_and_relax(name: str) -> None:
    knobs = KNOBS[name]
    text = name + (":" if knobs else "") + ",".join(f"{k.name}={k.usual}" for k in knobs)
    assert RuleSpec.parse(text).relaxed == (name != "strict")
    for knob in knobs:
        assert knob.strict is None or not knob.strict(knob.usual)


@pytest.mark.parametrize(("p_min", "top_k"), [(1.5, None), (None, -1), (None, 2.5), (math.nan, 1)])
def test_a_filter_out_of_range_is_refused(p_min: float | None, top_k: int | None) -> None:
    with pytest.raises(ConfigError, match=r"p_min|top_k"):
        RuleSpec("strict").filtered_by(p_min, top_k)
