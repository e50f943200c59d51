"""A window of a request as one forward pass of the draft: committed tokens, and branches for what was drafted beside them.

An autoregressive draft predicts row k of a round from the committed tokens before it, as long as the drafts before it were
accepted; rows behind the first rejected one hang on a branch of rejected drafts. A parallel draft (PARD) predicts row k > 0 from k
mask tokens behind the last committed one, so every round has a branch of masks. Row i of q and row i of p predict the same token:
the one at position start + i."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine_plugins.tts.loss import Rows, joined
from engine_plugins.tts.rounds import Round, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Rows to learn from. k: [n] place in its round. number: [n] verification step of the row. target, source: the laws p and q_t
    of the rows. temperature: of the request."""

    k: Tensor
    number: Tensor
    target: Rows
    source: Rows | None
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(Lesson):
    """ids, positions: [L]. attend: [L, L] bool, row may look at column; None is plain causal. at: [n] place in L whose logits
    predict the row."""

    ids: Tensor
    positions: Tensor
    attend: Tensor | None
    at: Tensor


def lesson(picked: Items[tuple[Round, list[int]]], temperature: float) -> dict[str, Any]:
    """The fields of a `Lesson` on these rounds' rows."""
    index = [torch.tensor(wanted, dtype=torch.long) for _, wanted in picked]
    sources = [r.source[i] for (r, _), i in zip(picked, index, strict=True) if r.source is not None]
    return {
        "k": torch.cat(index),
        "number": torch.tensor([r.number for r, wanted in picked for _ in wanted]),
        "target": joined([r.target[i] for (r, _), i in zip(picked, index, strict=True)]),
        "source": joined(sources) if len(sources) == len(picked) else None,
        "temperature": temperature,
    }


def chosen(sequence: Sequence, window: int, newest: int) -> list[Round]:
    """The rounds of the window's newer half (older ones would be judged with less context than they had), the ``newest`` of them;
    0 for all."""
    end = sequence.base + len(sequence.tokens)
    half = max(end - window // 2, sequence.base + 1)
    rounds = [r for r in sequence.rounds if r.start >= half]
    if not rounds and sequence.rounds:
        rounds = [sequence.rounds[-1]]
    return rounds[-newest:] if newest else rounds


def pack(
    sequence: Sequence, rounds: Items[Round], window: int, *, rejected: bool = False, mask_token: int | None = None
) -> Packed | None:
    """The forward pass that gives the draft's laws at the rounds' rows; None without a row to learn from.

    rejected: rows behind the first rejected one too. mask_token: the draft is a parallel one, with this mask.
    """
    if not rounds:
        return None
    end = sequence.base + len(sequence.tokens)
    low = max(sequence.base, min(end - window, rounds[0].start - 1))
    ids = sequence.tokens[low - sequence.base :]
    positions = list(range(low, end))
    branches: list[tuple[int, int, int]] = []  # first and last + 1 place, trunk places it looks at
    at: list[int] = []
    picked: list[tuple[Round, list[int]]] = []
    for r in rounds:
        decided, wanted = r.decided, r.rows(rejected=rejected)
        if not wanted:
            continue
        picked.append((r, wanted))
        places = {k: r.start - 1 + k - low for k in range(decided + 1)}
        tokens, root = _branch(r, decided, mask_token, wanted[-1])
        first = len(ids)
        for j, token in enumerate(tokens):
            places[root + 1 + j] = first + j
            ids.append(token)
            positions.append(r.start + root + j)
        if tokens:
            branches.append((first, len(ids), r.start + root - low))
        at += [places[k] for k in wanted]
    if not at:
        return None
    attend = None
    if branches:
        attend = torch.ones(len(ids), len(ids), dtype=torch.bool).tril_()
        for first, stop, seen in branches:
            attend[first:stop, seen:first] = False
    return Packed(
        **lesson(picked, sequence.temperature),
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        attend=attend,
        at=torch.tensor(at),
    )


def _branch(r: Round, decided: int, mask_token: int | None, last_row: int) -> tuple[list[int], int]:
    """The tokens behind committed ones up to row ``last_row``, and the row its first token stands at."""
    if mask_token is not None:
        return [mask_token] * last_row, 0
    return r.drafted[decided:last_row], decided
