"""Distil a four-layer draft from the target, on CPU.

    python train.py TARGET TRAIN.jsonl HELD.jsonl OUT

The draft is the target's layers 0, 27, 28 and 29 with its embedding and final norm; the embedding, tied with the head, stays
frozen. After 13 steps the acceptance on 8 sequences was 0.158 from these layers, 0.151 from 0, 10, 20, 29 and 0.129 from the
last four.
Loss: forward KL from the target's rows at temperature 1, on the answers' positions. The target runs once over a sequence and leaves
its final hidden states; its rows are made from them again at later visits (57 MFLOP a token, against 270 for the whole target).
AdamW: at few hundred steps of some 600 tokens Muon's orthogonalisation would cost as much as the step.
float32, as bfloat16 is slower without AMX. Writes `provenance.json` beside the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copyfile

import torch
import transformers
from measure import CHUNK, Row, answer_states, load, measure, read_rows
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Plan:
    layers: tuple[int, ...] = (0, 27, 28, 29)
    """Layers of the target the draft starts from."""
    seconds: int = 780
    """Time for the training, the target's pass included; the rate follows it, so that a busy machine only sees fewer tokens."""
    batch: int = 4
    """Sequences a step."""
    rate: float = 1e-3
    seed: int = 1


def make_draft(target: LlamaForCausalLM, layers: tuple[int, ...]) -> LlamaForCausalLM:
    config = deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    draft = LlamaForCausalLM(config)
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for mine, theirs in zip(draft.model.layers, layers, strict=True):
        mine.load_state_dict(target.model.layers[theirs].state_dict())
    draft.model.embed_tokens.requires_grad_(False)
    return draft


def rate_factor(done: float) -> float:
    """Warm up over 4 % of the run, hold, then fall linearly to zero over the last 50 %."""
    return min(1.0, done / 0.04 + 0.01) * min(1.0, (1.0 - done) / 0.5)


@torch.no_grad()
def kl_and_gradient(goal: torch.Tensor, states: torch.Tensor, head: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Mean KL(p ‖ q) over the positions, and its gradient by the draft's hidden states [n, width]: (q - p) · head / n.

    Written out, as autograd would keep several [n, vocabulary] tensors a step.
    """
    total, gradient = 0.0, torch.empty_like(states)
    for g, s, out in zip(goal.split(CHUNK), states.split(CHUNK), gradient.split(CHUNK), strict=True):
        p, q = (g @ head.T).log_softmax(-1), (s @ head.T).log_softmax(-1)
        difference = p - q
        p.exp_()
        total += (p * difference).sum().item()
        torch.matmul(q.exp_().sub_(p), head, out=out)
    return total / len(states), gradient.div_(len(states))


def batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        order = rng.sample(range(count), count)
        yield from (order[i : i + size] for i in range(0, count - size + 1, size))


def train(plan: Plan, target: LlamaForCausalLM, rows: list[Row], draft: LlamaForCausalLM) -> tuple[list[dict], int]:
    """Train ``draft`` in place; returns the log and the answer tokens it saw."""
    goals: dict[int, torch.Tensor] = {}
    head = draft.lm_head.weight
    trained = [p for p in draft.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trained, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0)
    log, seen, recent, started = [], 0, [], time.time()
    for step, picked in enumerate(batches(len(rows), plan.batch, plan.seed)):
        done = (time.time() - started) / plan.seconds
        if done >= 1:
            break
        opt.param_groups[0]["lr"] = plan.rate * rate_factor(done)
        goals |= {i: answer_states(target, rows[i]) for i in picked if i not in goals}
        # padded on the right: under causal attention the padding is never looked at
        ids = pad_sequence([torch.tensor(rows[i].ids[:-1]) for i in picked], batch_first=True)
        hidden = draft.model(input_ids=ids, use_cache=False).last_hidden_state
        states = torch.cat([h[rows[i].start - 1 : len(rows[i].ids) - 1] for h, i in zip(hidden, picked, strict=True)])
        loss, gradient = kl_and_gradient(torch.cat([goals[i] for i in picked]), states, head)
        states.backward(gradient)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        opt.step()
        opt.zero_grad()
        seen += len(states)
        recent.append(loss)
        if step % 10 == 0:
            log.append({"step": step, "tokens": seen, "kl": round(sum(recent) / len(recent), 4), "s": round(time.time() - started)})
            recent = []
            print(json.dumps(log[-1]), flush=True)
    return log, seen


def save(draft: LlamaForCausalLM, target: Path, out: Path, provenance: dict[str, object]) -> None:
    """Weights in bfloat16, the target's tokenizer and templates, provenance."""
    deepcopy(draft).to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    AutoTokenizer.from_pretrained(target).save_pretrained(out)
    copyfile(target / "chat_template_think.jinja", out / "chat_template_think.jinja")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    (out / "provenance.json").write_text(json.dumps({**provenance, "versions": versions}, indent=1) + "\n")


def main(target_path: Path, text: Path, held: Path, out: Path, plan: Plan) -> None:
    torch.manual_seed(plan.seed)
    target, rows, held_rows = load(target_path), read_rows(text), read_rows(held)
    draft = make_draft(target, plan.layers)
    held_goals = [answer_states(target, r) for r in held_rows]
    before = measure(target, draft, held_rows, held_goals)
    print(json.dumps({"before": before}), flush=True)
    log, seen = train(plan, target, rows, draft)
    after = measure(target, draft, held_rows, held_goals)
    print(json.dumps({"after": after}), flush=True)
    provenance = {
        "plan": asdict(plan),
        "target": target_path.name,
        "sequences": len(rows),
        "text_tokens": sum(len(r.ids) - r.start for r in rows),
        "longest": max(len(r.ids) for r in rows),
        "tokens": seen,
        "threads": torch.get_num_threads(),
        "held_out": {"before": before, "after": after},
        "log": log,
    }
    save(draft, target_path, out, provenance)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("text", type=Path, help="generate.py's training text")
    parser.add_argument("held", type=Path, help="generate.py's text on held-out topics")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=int, default=Plan().seconds, help="time for the training")
    args = parser.parse_args()
    main(args.target, args.text, args.held, args.out, Plan(seconds=args.seconds))
