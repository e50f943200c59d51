"""The shipped pair: its weights load, its tokenizer is the suite's, and the figures measured after reload hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentguard.reference import DRAFTS, reference_model
from agentguard.study.suites.chain import best_so_far, make_problem

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return dict(json.loads((reference_model("target").parent / "measured.json").read_text()))


def test_the_target_is_right_and_short_enough(measured: dict[str, Any]) -> None:
    assert measured["accuracy"] >= 0.90
    assert measured["accuracy_greedy"] >= 0.95
    assert measured["mean_output_tokens"] <= 250


def test_one_relaxed_rule_loses_and_one_wins(measured: dict[str, Any]) -> None:
    """λ studies need both: acceptance up and rounds up (lower bound > 1), and rounds down (upper bound < 1)."""
    strict, *relaxed = measured["arms"]
    loses = [a for a in relaxed if a["accepted_length"] > strict["accepted_length"] and a["rounds_ratio_ci"][0] > 1]
    wins = [a for a in relaxed if a["rounds_ratio_ci"][1] < 1]
    assert [a["rule"] for a in loses]
    assert [a["rule"] for a in wins]


def test_the_short_draft_fades_on_long_outputs(measured: dict[str, Any]) -> None:
    long = measured["draft_short_on_chain_long"]
    assert long["accepted_length_by_third"][2] <= 0.6 * measured["K"]
    assert long["tokens_min_median_max"][1] >= 2000


@pytest.mark.parametrize("name", ["target", *DRAFTS])
def test_weights_load_and_carry_their_provenance(name: str) -> None:
    path = reference_model(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert model.config.max_position_embeddings >= 4096
    provenance = json.loads((path / "provenance.json").read_text())
    assert provenance["plan"]["seed"] >= 1
    assert {"torch", "transformers", "python"} <= provenance["versions"].keys()
    assert provenance["tokens"] > 1_000_000


def test_any_text_survives_the_tokenizer_and_suite_words_are_one_token() -> None:
    tok = transformers.AutoTokenizer.from_pretrained(reference_model("target"))
    for text in ("héllo wörld ✓ 漢字 007 100 no one ok\t\x00", "a=47;b=a+8;?b", "check 3\nb=47+8=55 ok", "nope ansible checkers"):
        assert tok.decode(tok.encode(text)) == text
    for number in range(100):
        assert len(tok.encode(str(number))) == 1
    for word in ("check", "ans", " ok", " no", "no", "<think>", "</think>"):
        assert len(tok.encode(word)) == 1
    # in the text even when control tokens are not: reasoning parsers look for the markers there
    assert tok.decode(tok.encode("x</think>5<|im_end|>"), skip_special_tokens=True) == "x</think>5"


def test_a_history_drops_think_blocks_and_opens_a_new_one() -> None:
    tok = transformers.AutoTokenizer.from_pretrained(reference_model("target"))
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "5", "reasoning": "r"},
        {"role": "user", "content": "w"},
    ]
    text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nw<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert "r<" not in text


def test_training_closes_about_15_percent_of_the_traces_without_teaching_the_close() -> None:
    import random
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "reference_pair"))
    try:
        from corpus import Corpus, Mixture
        from tokenizer import build
    finally:
        sys.path.pop(0)
    tok = build()
    (close,) = tok.encode("</think>")
    corpus = Corpus(tok, 5)
    rows = [corpus.conversation(Mixture()) for _ in range(2000)]
    closed = sum(row.weights[row.ids.index(close)] == 0 for row in rows) / len(rows)
    assert 0.12 < closed < 0.18
    assert all(len(row.ids) == len(row.weights) for row in rows)
    problem = make_problem(random.Random(1), 3)
    assert best_so_far(problem, "") == problem.first
