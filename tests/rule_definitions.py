"""The rules once more, from their definitions, for one row and one token in plain Python floats; nothing of the package is used.

`verify` gives what a rule does with a drafted token: the probability of accepting it and the law after a rejection. `target`
gives the distribution a rule holds in place of the target's, from which the support filter takes the token away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Row = list[float]


@dataclass
class Gaps:
    """How far every comparison was from going the other way; a case too close to call says nothing about two summation orders."""

    values: list[float] = field(default_factory=list)

    def at_least(self, left: float, right: float) -> bool:
        if left != right and math.isfinite(left - right):
            self.values.append(abs(left - right))
        return left >= right

    @property
    def smallest(self) -> float:
        return min(self.values, default=math.inf)


def norm(row: Row) -> Row:
    total = math.fsum(row)
    return [v / total for v in row]


def residual(p: Row, q: Row) -> Row:
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return norm(left) if sum(left) > 0 else list(p)


def ratio(p: float, q: float) -> float:
    return min(1.0, p / q) if q > 0 else 0.0


def kl(p: Row, q: Row) -> float:
    if any(a > 0 and b == 0 for a, b in zip(p, q, strict=True)):
        return math.inf
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jsd(p: Row, q: Row) -> float:
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (kl(p, m) + kl(q, m)) / 2


def tv(p: Row, q: Row) -> float:
    return math.fsum(max(a - b, 0) for a, b in zip(p, q, strict=True))


def lenient(p: Row, q: Row, x: int, scale: float) -> float:
    return 1.0 if p[x] > 0 and scale * q[x] <= p[x] else p[x] / (scale * q[x]) if p[x] > 0 else 0.0


def raised(p: Row, x: int, g: float) -> Row:
    rest = (1 - g) / (1 - p[x]) if p[x] < 1 else 0.0
    return [g if y == x else v * rest for y, v in enumerate(p)]


def cactus(px: float, delta: float) -> float:
    return min(1.0, px + math.sqrt(2 * delta * px * (1 - px))) if 0 < px < 1 else px


def cactus_exact(px: float, delta: float) -> float:
    def divergence(g: float) -> float:
        return (g * math.log(g / px) if g > 0 else 0) + ((1 - g) * math.log((1 - g) / (1 - px)) if g < 1 else 0)

    if not 0 < px < 1 or delta == 0:
        return px
    if divergence(1.0) <= delta:
        return 1.0
    low, high = px, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(middle) <= delta else (low, middle)
    return low


def mentored(p: Row, q: Row, budget: float, gaps: Gaps) -> Row:
    """By two nested bisections, to the last bit."""
    if budget == 0:
        return p
    if gaps.at_least(budget, kl(p, q)):
        return q

    def clip(alpha: float) -> Row:
        surplus = math.fsum(max(b - a / alpha, 0) for a, b in zip(p, q, strict=True))
        low, high = 0.0, 1.0  # s = 1/beta
        while low < (s := (low + high) / 2) < high:
            enough = math.fsum(max(s * a - b, 0) for a, b in zip(p, q, strict=True)) >= surplus
            low, high = (low, s) if enough else (s, high)
        return [min(max(b, high * a), a / alpha) for a, b in zip(p, q, strict=True)]

    low, high = math.log(1e-300), 0.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if kl(p, clip(math.exp(middle))) > budget else (low, middle)
    return clip(math.exp(high))


def trusted_set(name: str, p: Row, q: Row, alpha: float, gaps: Gaps) -> list[bool]:
    top = max(p)
    if name == "casc-tok-v1":
        inside = [gaps.at_least(b, top - alpha) for b in q]
    elif name == "casc-tok-v2":
        inside = [gaps.at_least(a, top - alpha) for a in p]
    else:
        inside = [gaps.at_least(a, (1 - alpha) * top) for a in p]
    return [i and a > 0 for i, a in zip(inside, p, strict=True)]  # none that the target forbids


def trusted(name: str, p: Row, q: Row, knob: float, gaps: Gaps) -> bool:
    if name == "casc-chow":
        return gaps.at_least(max(q), 1 - knob)
    if name == "casc-diff":
        return gaps.at_least(max(q), max(p) - knob)
    if name == "casc-opt":
        distance = tv(p, q)
        return gaps.at_least(max(q), max(p) - (knob * distance if distance > 0 and knob != 0 else 0))
    far = jsd(p, q)
    return not gaps.at_least(far, knob) if name == "r-fuzzy" else gaps.at_least(knob, far)


def target(name: str, knobs: dict[str, float], p: Row, q: Row, x: int, gaps: Gaps) -> tuple[Row, Row]:
    """The pair of rules.md, section 2.1, one row."""
    (knob, *_) = (*knobs.values(), 0.0)
    if name in ("lenience", "mentored-dec", "strict"):
        return p, q
    if name in ("cactus", "cactus-exact"):
        return raised(p, x, (cactus if name == "cactus" else cactus_exact)(p[x], knob)), q
    if name == "mentored":
        return mentored(p, q, knob, gaps), q
    if name == "interp":
        return [knob * b + (1 - knob) * a for a, b in zip(p, q, strict=True)], q
    if name.startswith("casc-tok"):
        inside = trusted_set(name, p, q, knob, gaps)
        rest = 1 - math.fsum(b for b, i in zip(q, inside, strict=True) if i)
        return [(b if i else 0) + rest * a for a, b, i in zip(p, q, inside, strict=True)], q
    if name in ("r-fuzzy", "casc-chow", "casc-diff", "casc-opt"):
        return (q if trusted(name, p, q, knob, gaps) else p), q
    if name == "fuzzy":
        return (q, q) if trusted(name, p, q, knob, gaps) else (p, [0.0] * len(q))
    accepted, recovered = verify(name, knobs, p, q, x, gaps)
    return (p, q) if accepted else (recovered, [0.0] * len(q))


def verify(name: str, knobs: dict[str, float], p: Row, q: Row, x: int, gaps: Gaps) -> tuple[float, Row]:
    """a(x) and R_x by the rule's definition, for p(x) > 0."""
    (knob, *_) = (*knobs.values(), 0.0)
    if name in ("lenience", "mentored-dec"):
        return lenient(p, q, x, knob if name == "lenience" else 1 - knob), residual(p, q)
    if name == "fuzzy":
        return (1.0 if trusted(name, p, q, knob, gaps) else 0.0), list(p)
    if name == "typical":
        entropy = -math.fsum(a * math.log(a + 1e-5) for a in p)
        threshold = min(knobs["eps"], knobs["delta"] * math.exp(-entropy))
        best = p.index(max(p))
        gaps.at_least(p[x], threshold)
        return float(p[x] > threshold), [float(y == best) for y in range(len(p))]
    if name == "top-k":
        least = sorted(p, reverse=True)[int(min(knob, len(p))) - 1]
        inside = [a >= least and a > 0 for a in p]
        weights = [max(i - b, 0.0) for i, b in zip(inside, q, strict=True)]
        return float(inside[x]), norm(weights) if sum(weights) > 0 else list(p)
    if name in ("r-fuzzy", "casc-chow", "casc-diff", "casc-opt"):
        # trusted: any x passes, and nothing is left to recover
        return (1.0, list(p)) if trusted(name, p, q, knob, gaps) else (ratio(p[x], q[x]), residual(p, q))
    held, draft = target(name, knobs, p, q, x, gaps)
    return ratio(held[x], draft[x]), residual(held, draft)


def outside(p: Row, x: int, p_min: float, top_k: int) -> bool:
    return p[x] < p_min or (top_k > 0 and sum(a > p[x] for a in p) >= top_k)


def law(name: str, knobs: dict[str, float], p: Row, q: Row, p_min: float = 0, top_k: int = 0) -> tuple[Row, float, float]:
    """The law of the emitted token, the acceptance, and the smallest gap of a comparison."""
    out, acceptance, gaps = [0.0] * len(p), 0.0, Gaps()
    alone = sum(a > 0 for a in p) == 1  # then p(x) = 1 and nothing could take its place
    for x, weight in enumerate(q):
        if weight == 0:
            continue
        if p[x] == 0:  # forbidden: strict
            a, recovered = 0.0, residual(p, q)
        elif outside(p, x, p_min, top_k) and not alone:
            held, draft = target(name, knobs, p, q, x, gaps)
            left = [h if a > 0 and y != x else 0.0 for y, (h, a) in enumerate(zip(held, p, strict=True))]
            if sum(left) == 0:
                left = [0.0 if y == x else a for y, a in enumerate(p)]
            a, recovered = 0.0, residual(norm(left), [0.0 if y == x else b for y, b in enumerate(draft)])
        else:
            a, recovered = verify(name, knobs, p, q, x, gaps)
        acceptance += weight * a
        out[x] += weight * a
        for y, r in enumerate(recovered):
            out[y] += weight * (1 - a) * r
    return out, acceptance, gaps.smallest
