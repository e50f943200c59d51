"""Lenience: compare with a smaller draft probability."""

from __future__ import annotations

from torch import Tensor

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
        return rows.p, rows.q.scatter(-1, rows.x.unsqueeze(-1), self._qx(rows))

    def edit(self, rows: Rows) -> Edit | None:
        return None if self.scale == 1 else Edit(qx=self._qx(rows).squeeze(-1))

    def _qx(self, rows: Rows) -> Tensor:
        return (rows.qx * self.scale).clamp_min(CERTAIN).unsqueeze(-1)


class MentoredDec(Lenience):
    """Lenience with l = 1 - alpha, under the name of the five-rule studies (arXiv 2610.23818, 2607.08690).

    It is mentored decoding with beta held at 1, not its KL-optimal form (see `mentored`). ``alpha`` in [0, 1]: 0 is strict.
    """

    name = "mentored-dec"

    def __init__(self, alpha: float) -> None:
        super().__init__(1 - alpha)
