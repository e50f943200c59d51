"""The autograd twin of the served draft: the same weights as a Hugging Face model or as an EAGLE-3 head (eagle.py), in float32,
with a scope of trained parameters.

vLLM's own copy cannot be trained: it runs under inference mode, its matrices are fused, and on CPU they are packed and gone
(model_executor/layers/utils.py). The twin is built from the same directory and its weights are published by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from agentguard.errors import ConfigError
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts.eagle import EagleHead, Unrolled, directory, unroll
from engine_plugins.tts.layout import Lesson, Packed, pack
from engine_plugins.tts.loss import position_weights, tts_loss
from engine_plugins.tts.rounds import Round, Sequence

MOMENTS = 2  # Adam's
BYTES = 4  # float32


class LowRank(nn.Module):
    """weight + up @ down, with ``up`` 0 at the start: a rank-r delta on a frozen matrix."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns, generator=generator) / math.sqrt(columns))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class NonFinite(ArithmeticError):
    """A loss or a gradient was not finite; nothing was changed."""


class Twin:
    """A draft under training. ``model``: any Hugging Face causal language model that takes position_ids, or an `EagleHead`.

    ``fixed``: names of tensors that are the target's own in serving, so they neither learn nor are published.
    """

    def __init__(
        self, model: nn.Module, settings: TtsSettings, *, mask_token: int | None = None, fixed: Collection[str] = ()
    ) -> None:  # fmt: skip
        self.model: Any = model.eval()  # dropout would make q' another law than the served one
        self.settings = settings
        self.mask_token = mask_token
        self._published = apply_scope(model, settings.scope)
        for name in fixed:
            self._published.pop(name, None)
            model.get_parameter(name).requires_grad_(False)
        if not self._published:
            raise ConfigError(
                "tts.scope", settings.scope, f"{', '.join(fixed)} belong to the target, which must not change; give full or last:1"
            )
        self._possible = model.possible() if isinstance(model, EagleHead) else None
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.base = {name: p.detach().clone() for name, p in self.trained.items()}
        self._optimizer = self._fresh_optimizer()

    @classmethod
    def load(
        cls, path: str, settings: TtsSettings, *, method: str = "draft_model", target: str = "", fixed: Collection[str] = ()
    ) -> Twin:  # fmt: skip
        """From the draft's directory or name. method: vLLM's, ``eagle3`` for a head; target: whose hidden states that gets. Raises
        ConfigError for a head of a kind that is not known, and whatever transformers raises for a model."""
        if method == "eagle3":
            return cls(EagleHead.load(directory(path), directory(target)), settings, fixed=fixed)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(  # nosec B615  # the operator names the model, and where it comes from
            path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=Path(path).exists()
        )
        return cls(model, settings, mask_token=getattr(model.config, "pard_token", None), fixed=fixed)

    def pack(self, sequence: Sequence, rounds: Items[Round]) -> Lesson | None:
        """The rounds' rows as this draft's forward pass takes them; None without a row to learn from."""
        window, rejected = self.settings.window, self.settings.rejected
        if isinstance(self.model, EagleHead):
            return unroll(sequence, rounds, window, rejected=rejected)
        return pack(sequence, rounds, window, rejected=rejected, mask_token=self.mask_token)

    def logits(self, packed: Lesson) -> Tensor:
        """[n, V] at the packed rows, at the request's temperature."""
        return self._run(self.model, packed)

    @torch.no_grad()
    def log_laws(self, packed: Lesson, *, frozen: bool) -> Tensor:
        """[n, width] log-probabilities over the target rows' tokens, of the live weights or of the trained ones at the start."""
        if frozen:

            def model(*args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(self.model, self.base, args, kwargs)
        else:
            model = self.model
        return packed.target.of(self._run(model, packed).log_softmax(-1))

    def step(self, batch: Items[Lesson], alive: Callable[[], None] = lambda: None) -> float:
        """One Adam step on the packed requests; the loss before it. Raises NonFinite and changes nothing then. ``alive`` is called
        after each request, as a step on a large draft takes long."""
        self._optimizer.zero_grad(set_to_none=True)
        rows = sum(len(p.k) for p in batch)
        total = 0.0
        for packed in batch:
            weights, target, part = position_weights(packed.k, self.settings.decay), packed.target, len(packed.k) / rows
            if self._possible is not None:
                target, inside = target.within(self._possible)
                part *= float((weights * inside).sum() / weights.sum())
                weights = weights * inside
            loss = part * tts_loss(self.logits(packed), target, packed.source, weights, self.settings.proximal)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            alive()
        norm = nn.utils.clip_grad_norm_(self.trained.values(), self.settings.clip)
        if not (math.isfinite(total) and math.isfinite(norm.item())):
            raise NonFinite(f"loss {total}, gradient norm {norm.item()}")
        self._optimizer.step()
        return total

    def reset(self) -> None:
        """Back to the weights at the start, with fresh moments; bit for bit."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(self.base[name])
        self._optimizer = self._fresh_optimizer()

    def payload(self) -> dict[str, Tensor]:
        """What has to be published, under the checkpoint's names. Whole layers: vLLM fuses their matrices and re-packs a fused one
        only from all its parts."""
        return {name: read() for name, read in self._published.items()}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the twin and of what its scope adds: parameter, gradient and Adam's moments in float32, and the copy to go back
        to."""
        everything = sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for p in self.trained.values())
        return {"model": everything * BYTES, "state": trained * BYTES * (1 + MOMENTS + 1), "trained_parameters": trained}

    def _run(self, model: Callable[..., Any], packed: Lesson) -> Tensor:
        if isinstance(packed, Unrolled):
            unrolled: Tensor = model(packed)
            return unrolled / (packed.temperature or 1.0)
        assert isinstance(packed, Packed)
        mask = None
        if packed.attend is not None:
            mask = torch.zeros(packed.attend.shape).masked_fill_(~packed.attend, torch.finfo(torch.float32).min)[None, None]
        out = model(
            input_ids=packed.ids[None], position_ids=packed.positions[None], attention_mask=mask, logits_to_keep=packed.at,
            use_cache=False,
        )  # fmt: skip
        logits: Tensor = out.logits[0]
        return logits / (packed.temperature or 1.0)

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.trained.values(), lr=self.settings.rate)


def apply_scope(model: nn.Module, scope: str) -> dict[str, Callable[[], Tensor]]:
    """Let only the scope's parameters learn; returns how to read each tensor to publish, by its name in the checkpoint.

    full: everything. head: the output matrix (tied to the embedding, that moves too). last:N: the last N layers and the final norm.
    lora:R: a rank-R delta on every matrix of the layers.
    """
    names = {id(p): name for name, p in model.named_parameters()}  # tied parameters once, under the name of the first
    layers = _layers(model)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    for parameter in model.parameters():
        parameter.requires_grad_(scope == "full")
    kind, _, number = scope.partition(":")
    if kind == "lora":
        read: dict[str, Callable[[], Tensor]] = {}
        generator = torch.Generator().manual_seed(0)
        for layer in layers:
            read |= {names[id(p)]: p.detach for p in layer.parameters()}
            for linear in [m for m in layer.modules() if isinstance(m, nn.Linear)]:
                name = names[id(linear.weight)]
                parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, int(number), generator))
                read[name] = _merged(linear)
        return read
    touched: list[nn.Module]
    if kind == "head":
        head.requires_grad_(True)
        touched = [head]
    elif kind == "last":
        if int(number) > len(layers):
            raise ConfigError("tts.scope", scope, f"the draft has {len(layers)} layers; give last:{len(layers)} or less")
        inside = {id(p) for layer in layers for p in layer.parameters()}
        outer = {id(p) for m in (head, model.get_input_embeddings()) for p in m.parameters()}  # type: ignore[operator]
        norms = [p for p in model.parameters() if id(p) not in inside | outer]
        chosen = [p for layer in layers[-int(number) :] for p in layer.parameters()] + norms
        for parameter in chosen:
            parameter.requires_grad_(True)
        return {names[id(p)]: p.detach for p in chosen}
    else:
        touched = [model]
    return {names[id(p)]: p.detach for module in touched for p in module.parameters()}


def _merged(linear: nn.Module) -> Callable[[], Tensor]:
    return lambda: linear.weight.detach()  # type: ignore[operator]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: the longest list of modules in the model."""
    stacks = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not stacks:
        raise ConfigError("draft", type(model).__name__, "has no list of decoder layers; use tts.scope: full")
    return max(stacks, key=len)
