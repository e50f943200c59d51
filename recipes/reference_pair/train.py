"""Train one model of the reference pair from nothing, on CPU.

    python train.py target OUT            # 192 wide, 4 layers, 36 M tokens in five stages, about an hour on 2 cores
    python train.py draft OUT --teacher TARGET
    python train.py draft-short OUT

Muon for the matrices and AdamW for embedding and norms (torch.optim), constant rate and a linear decay over the last 40 %. After
0.41 M tokens Muon's loss was 1.32 where AdamW alone had 2.05 (same rows, same seed).
float32: bfloat16 autocast is slower on this width (measured 6.4k against 10.0k tokens/s eager on 2 cores without AMX).
The run saves a checkpoint a stage and writes `provenance.json` beside the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from corpus import Corpus, Mixture
from tokenizer import EMBEDDING_ROWS, build
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class Stage:
    """A span of training at one row length: ``tokens`` in all, ``batch`` rows of ``length`` a step."""

    tokens: int
    length: int
    batch: int
    mix: Mixture


@dataclass(frozen=True, slots=True)
class Plan:
    hidden: int
    layers: int
    rate: float
    stages: tuple[Stage, ...]
    seed: int

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.stages)


SHORT = Mixture(low=2, high=4, turns=1)
PLANS = {
    "target": Plan(
        hidden=192,
        layers=4,
        rate=4e-3,
        seed=1,
        stages=(
            Stage(3_000_000, 384, 24, Mixture(low=2, high=5, error=0.2, turns=2)),
            Stage(9_000_000, 384, 24, Mixture(error=0.2, turns=3)),
            Stage(12_000_000, 512, 18, Mixture(error=0.1, long=0.04)),
            Stage(9_000_000, 768, 12, Mixture(error=0.06, long=0.06)),
            Stage(3_000_000, 4096, 3, Mixture(error=0.06, long=0.08)),
        ),
    ),
    # a second run from the first one's state (--init): long chains were still right in 17 % only, and stopped too early
    "target-long": Plan(
        hidden=192,
        layers=4,
        rate=1.5e-3,
        seed=11,
        stages=(Stage(1_000_000, 4096, 2, Mixture(error=0.06, long=0.25)),),
    ),
    "draft": Plan(
        hidden=64,
        layers=2,
        rate=6e-3,
        seed=2,
        stages=(Stage(7_000_000, 512, 18, Mixture()), Stage(1_000_000, 2048, 5, Mixture(long=0.05))),
    ),
    "draft-short": Plan(hidden=64, layers=2, rate=6e-3, seed=3, stages=(Stage(5_000_000, 256, 36, SHORT),)),
}


def make_model(plan: Plan, tok: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(plan.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=EMBEDDING_ROWS,
            hidden_size=plan.hidden,
            intermediate_size=3 * plan.hidden,
            num_hidden_layers=plan.layers,
            num_attention_heads=max(2, plan.hidden // 32),
            num_key_value_heads=max(2, plan.hidden // 64),
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tok.eos_token_id,
            pad_token_id=tok.pad_token_id,
        )
    )


def rate_factor(done: float) -> float:
    """Warm up over 1 % of the run, hold, then fall linearly to zero over the last 40 %."""
    return min(1.0, done / 0.01 + 0.01) * min(1.0, (1.0 - done) / 0.4)


def train(name: str, out: Path, *, teacher: Path | None = None, init: Path | None = None, scale: float = 1.0) -> None:
    plan, tok = PLANS[name], build()
    model = make_model(plan, tok)
    if init is not None:
        model.load_state_dict(torch.load(init, weights_only=True))
    guide = Qwen3ForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval() if teacher else None
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=plan.rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base = [o.param_groups[0]["lr"] for o in optimizers]
    forward = torch.compile(model)
    guide_forward = torch.compile(guide) if guide is not None else None
    corpus, seen, started, log = Corpus(tok, plan.seed), 0, time.time(), []
    total = plan.tokens * scale
    for number, stage in enumerate(plan.stages):
        rows, until = corpus.rows(stage.mix, stage.length), seen + stage.tokens * scale
        step = 0
        while seen < until:
            for opt, lr in zip(optimizers, base, strict=True):
                for group in opt.param_groups:
                    group["lr"] = lr * rate_factor(seen / total)
            batch = [next(rows) for _ in range(stage.batch)]
            ids = torch.tensor([r.ids for r in batch])
            weights = torch.tensor([r.weights for r in batch])[:, 1:].flatten()
            logits = forward(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
            if guide_forward is None:
                per_token = cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
            else:
                with torch.no_grad():
                    goal = log_softmax(guide_forward(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1), -1)
                per_token = kl_div(log_softmax(logits, -1), goal, reduction="none", log_target=True).sum(-1)
            loss = (per_token * weights).sum() / weights.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in optimizers:
                opt.step()
                opt.zero_grad()
            seen += stage.batch * stage.length
            if step % 50 == 0:
                log.append({"stage": number, "tokens": seen, "loss": round(loss.item(), 4), "s": round(time.time() - started)})
                print(json.dumps(log[-1]), flush=True)
            step += 1
        save(
            model,
            tok,
            out,
            {
                "plan": asdict(plan),
                "name": name,
                "scale": scale,
                "init": init is not None,
                "teacher": teacher.name if teacher else None,
                "tokens": seen,
                "seconds": round(time.time() - started),
                "log": log[::10] + log[-1:],
            },
        )


def save(model: Qwen3ForCausalLM, tok: PreTrainedTokenizerFast, out: Path, provenance: dict[str, object]) -> None:
    """Weights in bfloat16 (half the size; measured again after reload), tokenizer, provenance."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out.with_suffix(".pt"))  # float32, for --init
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tok.save_pretrained(out)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    (out / "provenance.json").write_text(json.dumps({**provenance, "versions": versions}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(PLANS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--teacher", type=Path, help="distil from this model's rows instead of the corpus's next tokens")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the planned tokens, for trials")
    parser.add_argument("--init", type=Path, help="continue from the float32 state another run left beside its output")
    args = parser.parse_args()
    train(args.name, args.out, teacher=args.teacher, init=args.init, scale=args.scale)
