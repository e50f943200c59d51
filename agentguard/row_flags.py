"""The flags of a verified draft row. A file of their own, as kernels are tried on machines that have torch and little else."""

from __future__ import annotations

from enum import IntFlag


class RowFlag(IntFlag):
    """What happened to one drafted token. Several may hold."""

    ACCEPTED = 1
    RELAXED = 2  # a relaxed rule judged this row (otherwise strict did)
    LOW_SUPPORT = 4  # the support filter rejected it
    FORCED = 8  # a budget or a grammar forced this row, so it stayed strict
    MASKED = 16  # the target forbids the token (-inf)
    END_OF_THINK = 32  # the target's argmax closes the trace, so the row stayed strict
    GREEDY = 64  # temperature 0: the engine's greedy kernel decides
    UNSURE = 128  # the target's entropy is above the rule's h_max, so the row stayed strict
