"""Expected acceptance of a draft on the target's own text, at temperature 1 under the strict rule.

    python measure.py TARGET DRAFT HELD.jsonl [LONG.jsonl ...]

`acceptance` is the mean of Σₓ min(p(x), q(x)) over the answers' positions; `accepted` the expected number of accepted draft
tokens a round of K = 4: the mean of a₁ + a₁a₂ + a₁a₂a₃ + a₁a₂a₃a₄ over the starts, along the target's text. `bands` splits the
acceptance by position in the sequence. Both models run in float32 from their saved weights; `measured.json` goes beside the draft.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

DRAFT_TOKENS = 4
BANDS = (0, 96, 192, 384, 768, 1024)
CHUNK = 256  # positions whose rows over the whole vocabulary are held at once


@dataclass(slots=True)
class Row:
    """A prompt and the target's answer; ``start`` is the answer's first position."""

    ids: list[int]
    start: int


def read_rows(path: Path) -> list[Row]:
    with path.open() as file:
        return [Row(line["ids"], line["prompt"]) for line in map(json.loads, file)]


@torch.no_grad()
def answer_states(model: LlamaForCausalLM, row: Row) -> torch.Tensor:
    """Final hidden states [answer tokens, width] behind the answer's logits: one position ahead of each token."""
    return model.model(input_ids=torch.tensor([row.ids[:-1]]), use_cache=False).last_hidden_state[0, row.start - 1 :]


@torch.no_grad()
def overlap(goal: torch.Tensor, states: torch.Tensor, head: torch.Tensor, draft_head: torch.Tensor) -> torch.Tensor:
    """Σₓ min(p(x), q(x)) of each position [n], from the hidden states [n, width] of target and draft."""
    return torch.cat(
        [
            torch.minimum((g @ head.T).softmax(-1), (s @ draft_head.T).softmax(-1)).sum(-1)
            for g, s in zip(goal.split(CHUNK), states.split(CHUNK), strict=True)
        ]
    )


def accepted_length(a: torch.Tensor) -> torch.Tensor:
    """Expected accepted tokens of a round at each start [n - K + 1], from the acceptances [n] of one sequence."""
    return a.unfold(0, DRAFT_TOKENS, 1).cumprod(1).sum(1)


def measure(target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: list[Row], goals: list[torch.Tensor] | None = None) -> dict:
    """Acceptance, accepted length and bands on ``rows``; ``goals`` are the target's states where the caller has them."""
    head, draft_head = target.lm_head.weight, draft.lm_head.weight
    goals = goals or [answer_states(target, r) for r in rows]
    a = [overlap(g, answer_states(draft, r), head, draft_head) for g, r in zip(goals, rows, strict=True)]
    flat = torch.cat(a)
    at = torch.cat([torch.arange(r.start, len(r.ids)) for r in rows])
    bands = {}
    for low, high in pairwise(BANDS):
        if (inside := (at >= low) & (at < high)).any():
            bands[f"{low}-{high}"] = round(flat[inside].mean().item(), 4)
    return {
        "sequences": len(rows),
        "positions": len(flat),
        "acceptance": round(flat.mean().item(), 4),
        "accepted": round(torch.cat([accepted_length(x) for x in a if len(x) >= DRAFT_TOKENS]).mean().item(), 3),
        "bands": bands,
    }


def load(path: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("text", type=Path, nargs="+", help="what generate.py wrote")
    args = parser.parse_args()
    models = load(args.target), load(args.draft)
    found = {path.stem: measure(*models, read_rows(path)) for path in args.text}
    (args.draft / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
