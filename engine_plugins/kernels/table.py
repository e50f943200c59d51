"""Rules as numbers, so that one launch judges a batch in which every request has a rule of its own.

A request's rule is a row of eight float32: its code, two knobs, p_min, top_k, h_max, the phase it may relax in, and 1 if it reads
the draft's distribution. Rules that are not in `CODES` have no kernel: the code OTHER has them judged by the kernels and written by
their twin (`twin.py`).
"""

from __future__ import annotations

from agentguard.rulespec import RuleSpec

WIDTH = 8
NONE, FILTER, LENIENCE, CACTUS, INTERP, TYPICAL, FUZZY, R_FUZZY, CHOW, DIFF, OPT, TOK_V1, TOK_V2, TOK_V3 = range(14)
OTHER = 64
CODES = {
    "strict": FILTER, "lenience": LENIENCE, "mentored-dec": LENIENCE, "cactus": CACTUS, "interp": INTERP, "typical": TYPICAL,
    "fuzzy": FUZZY, "r-fuzzy": R_FUZZY, "casc-chow": CHOW, "casc-diff": DIFF, "casc-opt": OPT, "casc-tok-v1": TOK_V1,
    "casc-tok-v2": TOK_V2, "casc-tok-v3": TOK_V3,
}  # fmt: skip
READS_DRAFT = frozenset(CODES.values()) - {FILTER, CACTUS, TYPICAL} | {OTHER}
TWO_PASSES = READS_DRAFT - {CHOW, DIFF, OTHER} | {TYPICAL}
"""Rules whose decision needs a sum over both normalised rows. The others need a second pass for a filtered token alone."""
BOTH, THINK, ANSWER = range(3)
PHASES = {"both": BOTH, "think": THINK, "answer": ANSWER}
TOP_K_LIMIT = 1 << 24  # float32 is exact up to here, and no vocabulary is larger


def numbers(spec: RuleSpec, phase: str = "both") -> list[float]:
    """The row of a rule; all zeros for one that never acts."""
    if not (spec.relaxed or spec.filtered):
        return [0.0] * WIDTH
    code = CODES.get(spec.name, OTHER) if spec.relaxed else FILTER
    knobs = [*spec.knobs.values(), 0.0, 0.0][:2] if spec.relaxed else [0.0, 0.0]
    if spec.name == "mentored-dec":
        knobs[0] = 1 - knobs[0]
    if code == TYPICAL:
        knobs[0] = min(knobs[0], 2.0)  # p(x) is never above 1
    top_k = float(min(spec.top_k or 0, TOP_K_LIMIT))
    return [float(code), *knobs, spec.p_min or 0.0, top_k, spec.h_max, float(PHASES[phase]), float(code in READS_DRAFT)]


def passes(codes: set[int], *, filtered: bool) -> bool:
    """Does a batch with these rules need the second pass?"""
    return any(code in TWO_PASSES or (filtered and code in READS_DRAFT - {OTHER}) for code in codes)
