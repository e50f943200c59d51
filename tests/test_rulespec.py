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
        ("cactus:delta=0.25,p_min=0,top_k=0", "cactus:delta=0.25"),
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
