"""Whether a rule wins or loses against strict, in a word and with its reason."""

from __future__ import annotations

from dataclasses import replace

from agentguard.study.inference import holm
from agentguard.study.summary import Arm

SIGNIFICANT = 0.05
FEW = 20
"""Sessions below which there is no verdict: of three pairs a bootstrap says too much."""


def judged(arms: list[Arm]) -> list[Arm]:
    """The arms with their verdicts; tests are adjusted over the arms of the same close."""
    found: dict[tuple[str, str], Arm] = {}
    for close in dict.fromkeys(arm.close for arm in arms):
        family = [arm for arm in arms if arm.close == close and arm.rule != "strict"]
        rounds = holm({a.rule: a.rounds_ratio.p for a in family if a.rounds_ratio is not None and a.rounds_ratio.p is not None})
        accuracy = holm({a.rule: a.against_strict.p for a in family if a.against_strict is not None})
        for arm in arms:
            if arm.close == close:
                found[arm.rule, close] = judge(replace(arm, p_rounds=rounds.get(arm.rule), p_accuracy=accuracy.get(arm.rule)))
    return [found[arm.rule, arm.close] for arm in arms]


def judge(arm: Arm) -> Arm:
    """The verdict in a word and its reason. A rule wins when it needs fewer rounds than strict, significantly, and is neither less
    often right nor slower to the last token; it loses when it needs more, or answers wrongly more often, or is slower."""
    if arm.rule == "strict":
        return replace(arm, verdict="baseline", reason="what the others are compared with")
    found = arm.rounds_ratio
    if found is None or arm.p_rounds is None or arm.gain is None or arm.inflation is None:
        return replace(arm, verdict="undecided", reason="no session of strict to compare with")
    if found.n < FEW:
        return replace(arm, reason=f"{found.n} sessions are too few for a verdict, take at least {FEW}; rounds ×{found}")
    sure = arm.p_rounds < SIGNIFICANT
    pairs, p_right = arm.against_strict, arm.p_accuracy
    wrong = pairs is not None and p_right is not None and p_right < SIGNIFICANT and pairs.lost > pairs.gained
    slower = arm.ttlt_ratio is not None and arm.ttlt_ratio.low > 1
    why = [f"rounds ×{found}"]
    if wrong:
        assert pairs is not None
        why.append(f"right answers {pairs.difference.value:+.0%}")
    if sure and found.value > 1:
        if arm.gain.low > 1:
            why.insert(0, f"longer although ℓ rises (gain {arm.gain.value:.2f}, λ {arm.inflation.value:.2f})")
        else:
            why.insert(0, f"longer (λ {arm.inflation.value:.2f}), and ℓ does not rise (gain {arm.gain.value:.2f})")
        return replace(arm, verdict="loss", reason="; ".join(why))
    if wrong:
        return replace(arm, verdict="loss", reason="; ".join(["wrong more often" + (" though shorter" if sure else ""), *why]))
    if sure and slower:
        return replace(arm, verdict="loss", reason="; ".join(["slower to the last token though fewer rounds", *why]))
    if sure:
        return replace(arm, verdict="win", reason="; ".join(["fewer rounds, answers as often right", *why]))
    return replace(arm, verdict="undecided", reason="; ".join(["no difference that this n can show", *why]))
