"""What a verification rule is.

Speculative sampling verifies a drafted token x ~ q against the target's row p: accept with probability min(1, p(x)/q(x)), otherwise
resample from norm(max(p - q, 0)) (arXiv 2211.17192). A rule here is a map from (p, q, x) to a substituted pair (p', q') on which
*stock* speculative sampling does what the rule says, so the engine's kernels stay untouched. A row is only ever compared with
its own drafted token, so the pair may depend on x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class Rule(ABC):
    """A verification rule. One class a rule, one file a family; instances are immutable and hold the knobs.

    ``name`` and the knobs' names and ranges are those of `agentguard.rulespec.KNOBS`.
    """

    name: ClassVar[str]

    @abstractmethod
    def pair(self, p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> Pair:
        """The substituted pair (p', q').

        p, q: [rows, V] processed target and draft distributions, any float dtype; x: [rows] int64, the drafted tokens.
        Returns two [rows, V] tensors; p' sums to one in every row. Must not write into p or q.
        """
