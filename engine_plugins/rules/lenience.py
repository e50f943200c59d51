"""Lenience: compare with a smaller draft probability."""

from __future__ import annotations

import torch

from engine_plugins.rules.base import CERTAIN, Edit, Pair, Rows, Rule


class Lenience(Rule):
    """a(x) = min(1, p(x)/(l q(x))), residual norm(max(p - q, 0)) as in strict: q' = q with its entry at x multiplied by l.

    Source: arXiv 2211.17192, appendix A.5. No token is emitted with a probability above p/l, so KL(law || p) <= ln(1/l). ``l``
    in [0, 1]: 1 is strict bit for bit, 0 accepts every token the target allows. A one-hot p leaves it strict.
    """

    name = "lenience"
    keeps_target = True

    def __init__(self, l: float) -> None:  # noqa: E741 - the paper's name, and the knob's
        self.scale = l

    def definition(self, rows: Rows) -> Pair:
        qx = (rows.qx * self.scale).clamp_min(CERTAIN).unsqueeze(-1)
        return rows.p, rows.q.scatter(-1, rows.x.unsqueeze(-1), qx)

    def edit(self, rows: Rows) -> Edit | None:
        if self.scale == 1:
            return None
        least = rows.qx * self.scale
        # where p(x) >= q(x) strict accepts as well
        return rows.accept(torch.where(rows.px >= least, 1.0, rows.px / least), rows.px < rows.qx)


class MentoredDec(Lenience):
    """Lenience with l = 1 - alpha, under the name of the five-rule studies (arXiv 2610.23818, 2607.08690).

    It is mentored decoding with beta held at 1, not its KL-optimal form (see `mentored`). ``alpha`` in [0, 1]: 0 is strict.
    """

    name = "mentored-dec"

    def __init__(self, alpha: float) -> None:
        super().__init__(1 - alpha)
