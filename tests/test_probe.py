"""What the probe of ready answers counts, by hand; the probe itself runs real models."""

from __future__ import annotations

from agentguard.study.probe import Probed, summarise_probe


def test_a_probe_says_from_where_on_every_branch_is_right() -> None:
    late = Probed(50, (False,) * 5 + (True,) * 5, (0.1,) * 5 + (0.9,) * 5, (2.0,) * 5 + (0.5,) * 5)
    never = Probed(50, (True,) * 9 + (False,), (0.5,) * 10, (1.0,) * 10)
    assert (late.ready, never.ready) == (0.6, None)
    result = summarise_probe([late, never])
    assert (result.traces, result.ready_median) == (2, 0.6)
    assert (result.right_at["0.1"].value, result.right_at["1"].value) == (0.5, 0.5)
    assert summarise_probe([late]).auc_end == summarise_probe([late]).auc_entropy == 1.0
    assert summarise_probe([never]).auc_end is None
