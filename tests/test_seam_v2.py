"""Model Runner V2 on a CPU: its own verification draws from the exact laws on our rows, its own budget closes a trace on time.

One child process runs it all (`v2_scenarios.py`); AG_DRAWS sets how many draws a rule gets. With 5,000 a run takes eight minutes
on an idle core, docs/log.md has its result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentguard.events import Fate, RowFlag
from engine_plugins import rules
from tests import rule_definitions as defined
from tests.chi_square import p_value
from tests.test_rules import distributions
from tests.v2_laws import FILTERED, RULES

pytestmark = pytest.mark.kernels
DRAWS = int(os.environ.get("AG_DRAWS", "100"))


@pytest.fixture(scope="module")
def happened() -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.v2_scenarios", str(DRAWS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rule", [*RULES, *FILTERED])
def test_v2_draws_from_the_exact_law(rule: str, happened: dict[str, Any]) -> None:
    """Chi-square, p > 1e-3 after Bonferroni; the law by the rules' own definitions, not by the package's rules."""
    counts = torch.tensor(happened["laws"]["counts"][rule], dtype=torch.float64)
    parsed = rules.get(rule)
    p, q = distributions(11)
    law, acceptance, _ = defined.law(
        parsed.spec.name, parsed.spec.knobs, p.tolist(), q.tolist(), parsed.spec.p_min or 0, parsed.spec.top_k or 0
    )
    n = float(counts.sum())
    assert n >= DRAWS
    assert p_value(counts, torch.tensor(law, dtype=torch.float64) * n) > 1e-3 / len((*RULES, *FILTERED))
    if parsed.spec.name == "fuzzy":
        # in the one-hot form a rejected row may draw x again, and it counts as accepted then (rules.md, 2.3)
        acceptance = float((p * q).sum())
    assert happened["laws"]["accepted"][rule] == pytest.approx(acceptance, abs=4.5 * (0.25 / n) ** 0.5)


@pytest.mark.parametrize("rule", [*RULES, *FILTERED])
def test_the_rows_of_this_code_have_the_exact_law(rule: str, happened: dict[str, Any]) -> None:
    """Without a draw: the drawn laws above and below only have to show that V2 does to the rows what it says."""
    parsed = rules.get(rule)
    p, q = distributions(11)
    law, _, _ = defined.law(
        parsed.spec.name, parsed.spec.knobs, p.tolist(), q.tolist(), parsed.spec.p_min or 0, parsed.spec.top_k or 0
    )
    assert happened["exact"][rule] == pytest.approx(law, abs=2e-6)


def test_the_kept_run_of_5000_draws_a_rule_is_the_exact_laws() -> None:
    kept = json.loads((Path(__file__).parents[1] / "docs" / "v2-laws.json").read_text())
    assert set(kept["counts"]) == set(RULES)
    p, q = distributions(11)
    for rule, counts in kept["counts"].items():
        spec = rules.get(rule).spec
        law, _, _ = defined.law(spec.name, spec.knobs, p.tolist(), q.tolist())
        assert sum(counts) >= 5000
        assert p_value(torch.tensor(counts).double(), torch.tensor(law, dtype=torch.float64) * sum(counts)) > 1e-3 / len(RULES)


def test_strict_requests_draw_the_same_beside_relaxed_ones(happened: dict[str, Any]) -> None:
    found = happened["strict_beside_relaxed"]
    assert found["mixed"] == found["alone"]
    assert found["relaxed"] == [3] * 12, "accept all accepts all"


def test_the_tap_tells_each_row_s_fate(happened: dict[str, Any]) -> None:
    found = happened["telemetry"]
    p, q = found["p"], found["q"]
    free, forced, masked, low, greedy, closing = found["rows"]
    assert found["sampled"][1] == 2, "the forced token is emitted"
    assert found["sampled"][2] != 1, "a forbidden one is not"
    assert found["sampled"][3] != found["low"], "a filtered one is neither accepted nor resampled"
    assert found["sampled"][4] == p.index(max(p))
    assert free["accepted"] == 2
    assert free["fate"][1] == Fate.RELAXED
    assert [RowFlag(row["flags"][0]) for row in (forced, masked, greedy)] == [RowFlag.FORCED, RowFlag.MASKED, RowFlag.GREEDY]
    assert [row["fate"][0] for row in (forced, masked, low)] == [Fate.FORCED, Fate.MASKED, Fate.LOW_SUPPORT]
    assert greedy["effective"] == "strict"
    assert not RowFlag(closing["flags"][1]) & RowFlag.RELAXED, (
        "behind a drafted end marker the answer begins, and ag_phase=think ends"
    )
    for row in (free, low):
        assert row["p"] == pytest.approx([p[t] for t in row["tokens"]], abs=1e-6)
        assert row["q"] == pytest.approx([q[t] for t in row["tokens"]], abs=1e-6)
        assert row["rank"] == [sum(other > p[t] for other in p) for t in row["tokens"]]
    assert [row["accepted"] for row in found["rows"]] == [number - 1 for number in found["number"]]


def test_vllm_s_own_sampler_runs_behind_the_proxy_whole_and_in_chunks(happened: dict[str, Any]) -> None:
    found = happened["own_sampler"]
    assert found["whole"] == found["chunks"], "V2's coins hang on seed and position alone"
    for request in (0, 2):
        assert found["whole"][request][:-1] == found["drafts"][request], "accept all accepts all"
    assert any(len(found["whole"][request]) < 3 for request in (1, 3)), "strict does not"
    assert found["whole kept"]
    assert found["chunks kept"], "the model's own logits are not written to"
    assert found["steps"] == 2, "the proxy hands attributes through"
    assert found["switched"], "also those that are set, as vLLM's warm-up switches adaptive verification off for its fixed drafts"
    assert found["deleted"]
    assert found["frames"] == [["r2", "r1", "r0", "r3"], ["r2"], ["r1"], ["r0"], ["r3"]]


def test_the_worker_installs_itself_over_v2_s_own_classes_and_they_generate(happened: dict[str, Any]) -> None:
    """Request states, sampler, rejection sampler and update kernels are vLLM's. The drafter is sure of 7, the model of 8."""
    found = happened["installed"]
    assert found["off"] == {}, "every feature is on"
    assert all(found["copied"])
    # no draft is verified in the step that ends the prefill; then accept all takes 7 7, the bonus is the model's, and the limit of
    # 5 think tokens falls among the drafts of the next round
    assert found["bound"] == [8, 7, 7, 8, 7, 5, 8, 8]
    assert found["free"] == [8] * 5, "the strict neighbour rejects each 7"
    assert found["standing"] == {"found": True, "think": 5, "inside": False, "total": 5}


def test_without_draft_logits_a_rule_falls_back_to_strict(happened: dict[str, Any]) -> None:
    assert happened["without_draft_logits"] == [1] * 4


def test_what_a_step_launches_was_compiled_before_a_request_waits(happened: dict[str, Any]) -> None:
    """Logits of the target in float32, bfloat16 and float16, with and without the draft's, with a listener and without."""
    found = happened["warmed_up"]
    assert len(found) == 6
    for kind, steps in found.items():
        assert steps["launched"] >= (7 if "with draft" in kind else 3), kind
        assert steps["bare"] == [], kind


@pytest.mark.parametrize("whose", ["stock", "ours"])
@pytest.mark.parametrize("drafts", ["alone", "drafts"])
def test_a_block_budget_is_kept_with_and_without_drafts(whose: str, drafts: str, happened: dict[str, Any]) -> None:
    """vLLM's own state keeps it too, in 0.32: reports that drafts switch it off do not hold for this class."""
    found = happened["budgets"]
    assert found[f"{whose} marker {drafts}"][:9] == [8] * 7 + [5, 8]
    assert found[f"{whose} phrase {drafts}"][:10] == [8] * 7 + [9, 5, 8]


def test_a_total_counts_all_blocks_of_a_step(happened: dict[str, Any]) -> None:
    assert happened["budgets"]["total"][:16] == [*([8] * 6), 5, 8, 8, 4, 8, 8, 8, 8, 5, 8]


def test_a_request_without_a_budget_is_closed_and_stays_so_after_preemption(happened: dict[str, Any]) -> None:
    found = happened["budgets"]
    assert found["unlimited"] == 8
    assert found["set"] == {"found": True, "think": 8, "inside": True, "total": 11}
    assert found["needs"], "vLLM hands such a request's logits to the budget only when told so"
    assert found["resumed"][:13] == [8] * 11 + [5, 8]
    assert found["unknown"] == {"found": False}
    assert found["forgotten"] == {}


def test_the_trace_is_counted_on_the_device_as_on_the_host(happened: dict[str, Any]) -> None:
    assert happened["phases"]
    assert all(happened["phases"])


def test_the_draft_s_tokens_are_drawn_from_the_law_a_trainer_is_sent(happened: dict[str, Any]) -> None:
    """vLLM's own speculator, with logits kept for verification: 600 tokens of one row, chi-square."""
    found = happened["lessons"]
    drawn, law = torch.tensor(found["drawn"]).double(), torch.tensor(found["law"]).double()
    assert p_value(drawn, law / law.sum() * 600) > 1e-3


@pytest.mark.parametrize("how", ["whole", "chunks"])
def test_what_a_trainer_is_sent_is_what_decided(how: str, happened: dict[str, Any]) -> None:
    """Whole or in chunks the batch makes one frame; q is the one that was drafted with, though the weights have changed since."""
    found = happened["lessons"][how]
    assert found["failed"] == ""
    assert (found["frames"], found["requests"]) == (1, [f"r{i}" for i in range(6)])
    assert found["worst"] < 1e-6 < 0.5 < found["changed"], "q of the weights that came since is another one"
    assert found["worst_p"] < 1e-6, "also of the row that a rule rewrote"
    assert found["drafted"]
    assert found["out"]
    assert found["tokens"] == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]], "a window of 4"
    assert found["starts"] == [[2, 0, 0], [3, 0, 0], [4, 0, 0], [5, 1, 0], [6, 2, 0], [7, 3, 0]]
    assert found["ratios"] < 1e-6
    assert all(would == accepted for would, accepted in found["decided"])
    assert {accepted for _, accepted in found["decided"]} == {True, False}


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_rows_of_q_that_are_no_law_are_rejected_and_the_targets_law_is_drawn(bad: str, happened: dict[str, Any]) -> None:
    """As on V1 (test_tts_worker.py). V2 itself would give the same token each time; sound rows keep every bit."""
    found = happened["broken_rows"]
    p, _ = distributions(11)
    trained, plain = (torch.tensor(found[f"{name} {bad}"]["counts"]).double() for name in ("trained", "plain"))
    assert found[f"trained {bad}"]["accepted"] == 0
    assert p_value(trained, p * trained.sum()) > 1e-3
    assert p_value(plain, p * plain.sum()) < 1e-9
    assert found[f"not yet {bad}"] == found[f"plain {bad}"], "nothing is looked for before weights were published"
    assert found[f"trained {bad}"]["sound"] == found[f"plain {bad}"]["sound"]


def test_no_step_waits_for_the_device(happened: dict[str, Any]) -> None:
    """Rules, filter, phase, budget, telemetry and TTS on ragged, mixed batches, on a device where waiting is an error."""
    found = happened["no_waiting"]
    assert found["failed"] == ""
    # r3 has no draft in the last step
    assert found["frames"] == [[f"r{i}" for i in range(7)], ["r2"], ["r6", "r0"]], "the steps did their work"
    assert found["lessons"] == found["frames"]


@pytest.mark.parametrize(
    "fault",
    ["reads", "looks_for_rows", "sends_at_once", "from_pageable_memory", "asks_how_long", "a rule in torch", "the twins"],
)
def test_a_step_that_waits_is_noticed(fault: str, happened: dict[str, Any]) -> None:
    """docs/cuda.md names the last two: rules without a kernel, and AG_KERNELS=0."""
    assert "device" in happened["no_waiting"]["caught"][fault] or "mask" in happened["no_waiting"]["caught"][fault]
