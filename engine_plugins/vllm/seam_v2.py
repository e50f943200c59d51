"""The verification seam of Model Runner V2: relaxed rules on the stock kernels, without waiting for the device.

`rejection_sample`, as `vllm.v1.worker.gpu.spec_decode.rejection_sampler` calls it, is wrapped, and the runner's rejection sampler
is put behind a proxy that knows the step's batch. Rows of requests with a relaxed rule are rewritten on the device: the target's
logits are vLLM's copy for this step (a request that relaxes has asked for one, `RequestSlots.admit`), the draft's are made anew
before the next verification. Rows of strict requests keep every bit, and V2's random numbers hang on seed and position alone, so
strict is stock bit for bit also beside relaxed requests.

V2 normalises both rows, so the pairs are others than on V1: `engine_plugins.kernels.rows`. Rows that stay strict whatever was asked
are the same as on V1 (`seam_v1`).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agentguard.events import PackedStep
from engine_plugins.kernels import Choice, batch, table, twin
from engine_plugins.vllm import coins
from engine_plugins.vllm.lessons import Lessons, without_broken_rows
from engine_plugins.vllm.observe import Rounds
from engine_plugins.vllm.outbox import Outbox
from engine_plugins.vllm.request_slots import RequestSlots

if TYPE_CHECKING:
    from engine_plugins.vllm.tap import Tap


class SeamV2:
    """Installed once a worker by `install`; called in place of vLLM's `rejection_sample`, once for each chunk of a step's requests.

    reported: processed logits leave the sampler after verification (as logprobs or a sampling mask), so copies are rewritten.
    lessons: where TTS trains the draft, on every rank, as weights may have been broken on all of them.
    """

    def __init__(
        self, stock: Callable[..., tuple[Tensor, Tensor]], slots: RequestSlots, *, tap: Tap | None, choice: Choice,
        reported: bool, lessons: Lessons | None = None,
    ) -> None:  # fmt: skip
        self._stock, self._slots, self._tap, self._reported, self._lessons = stock, slots, tap, reported, lessons
        self._signature = inspect.signature(stock)
        self._kernels: ModuleType | None = None
        if choice.kernels:
            from engine_plugins.kernels import launch

            self._kernels = launch
        self.outbox = Outbox()
        self._input_batch: Any = None
        self._first = 0  # of the step's requests, the first one that has not come yet
        self._listened = False
        self._steps = 0
        self._kept: dict[str, Tensor] = {}

    def warm_up(self, vocab: int, draft: Tensor | None, steps: int, dtypes: Iterable[torch.dtype]) -> None:
        """Compile the kernels before a request waits for them. draft: the speculator's logits, None where it keeps none; steps: K;
        dtypes: of the target's logits, where no request has vLLM copy them to float32."""
        slots = self._slots
        if self._kernels is not None:
            end = slots.markers.end[0] if slots.markers is not None else -1
            self._kernels.warm_up(vocab, draft, steps, slots.device, dtypes, end=end, learns=self._lessons is not None)
        if self._tap is not None:
            at = torch.zeros(steps + 1, dtype=torch.int64, device=slots.device)
            coins.note(torch.zeros(len(at), batch.STATS, device=at.device), at, at, at, torch.ones(1, device=at.device))
        if slots.markers is not None:
            slots.warm_up(steps)

    def begin(self, input_batch: Any) -> None:
        """The runner is about to verify this batch."""
        self._input_batch, self._first = input_batch, 0
        self._kept.clear()
        self._listened = self._tap is not None and self._tap.wanted
        if self._lessons is not None:
            self._lessons.begin(input_batch)

    def end(self) -> None:
        self._input_batch = None
        if self._lessons is not None:
            self._lessons.end()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._input_batch is None:  # not the runner's own call
            return self._stock(*args, **kwargs)
        given = self._signature.bind_partial(*args, **kwargs).arguments
        ends: Tensor = given["cu_num_logits"]
        first, self._first = self._first, self._first + len(ends) - 1
        slots: np.ndarray[Any, Any] = self._input_batch.idx_mapping_np[first : self._first]
        draft: Tensor | None = given["draft_logits"]
        # without the draft's logits a rule falls back to strict
        acting = slots[self._slots.acting[slots]] if draft is not None else slots[:0]
        lessons = self._lessons
        if not len(acting) and not self._listened and lessons is None:
            return self._stock(*args, **kwargs)
        target: Tensor = given["target_logits"]
        if lessons is not None:
            lessons.take(given, target, first, self._first)
            if draft is not None and lessons.may_be_broken:
                given["draft_sampled"] = without_broken_rows(given, self._kernels or twin)
        if len(acting):
            target = target.to(torch.float32, copy=self._reported)
        stats = self._rewrite(given, target, acting) if len(acting) or self._listened else None
        given["target_logits"] = target
        out = self._stock(**given)
        if lessons is not None:
            lessons.verified(*out, first, self._first)
        if stats is not None and self._listened:
            self._publish(stats, ends, out[1], self._input_batch.req_ids[first : self._first], slots)
        return out

    def _rewrite(self, given: dict[str, Any], target: Tensor, acting: np.ndarray[Any, Any]) -> Tensor:
        """Write the pairs of the rows that may relax; returns the statistics of the rows, which are those of the true ones."""
        slots, known, backend = self._slots, given["idx_mapping"], self._kernels or twin
        stats: Tensor
        drafted, ends = given["draft_sampled"], given["cu_num_logits"]
        inside = torch.full((len(drafted),), -1, dtype=torch.int32, device=target.device)
        if slots.phased[acting].any():
            slots.advance(known)
            inside = slots.ahead(known, ends, drafted)
        rows = backend.layout(
            ends, known, given["expanded_idx_mapping"], given["expanded_local_pos"], drafted, self._at_hand(given, "temperature"),
            slots.table, inside, target, given["draft_logits"], listened=self._listened,
        )  # fmt: skip
        end = slots.markers.end[0] if slots.markers is not None else -1
        stats, verdict = backend.statistics(rows, slots.table, end=end)
        if len(acting):
            asked = [rule for rule in (slots.rules[slot] for slot in acting) if rule is not None]
            if self._kernels is not None:
                codes = {table.CODES.get(rule.spec.name, table.OTHER) for rule in asked}
                sums = table.passes(codes, filtered=any(rule.spec.filtered for rule in asked))
                self._kernels.rewrite(rows, slots.table, stats, verdict, sums=sums)
                without = frozenset(rule.spec.name for rule in asked if rule.spec.name not in table.CODES)
                if without:
                    twin.rewrite(rows, verdict, slots.rules, only=without)
            else:
                twin.rewrite(rows, verdict, slots.rules)
        if self._listened:
            coins.note(stats, rows.slot, given["pos"], self._at_hand(given, "seed"), rows.temperature)
        return stats

    def _at_hand(self, given: dict[str, Any], name: str) -> Tensor:
        """An array of the runner's that lies in the host's memory, copied to the device once a step: every block of every row reads
        it."""
        if name not in self._kept:
            self._kept[name] = given[name].clone()
        return self._kept[name]

    def _publish(self, stats: Tensor, ends: Tensor, number: Tensor, requests: list[str], slots: np.ndarray[Any, Any]) -> None:
        """number: [requests], how many tokens each emits."""
        tap, now = self._tap, time.time()
        assert tap is not None
        self._steps += 1
        step, admitted = self._steps, self._slots.admitted
        asked = [known.asked if (known := admitted[slot]) else "strict" for slot in slots.tolist()]

        def deliver(copies: list[Tensor]) -> None:
            """On the outbox's thread, and so for the worker's next step a matter of the GIL: numpy, and nothing a row in Python."""
            table, bounds, emitted = (copy.numpy() for copy in copies)
            drafts = np.ones(len(table), dtype=bool)
            drafts[bounds[1:] - 1] = False  # the bonus rows
            drafts[bounds[-1] :] = False
            columns = table[np.flatnonzero(drafts)[:, None], _COLUMNS].T
            tap.publish(now, step, Rounds(requests, asked, (np.diff(bounds) - 1).tolist(), (emitted - 1).tolist(), columns))

        self.outbox.send([stats, ends, number], deliver)


# where the statistics have the columns of a frame
_COLUMNS = [
    {
        "token": batch.TOKEN, "p": batch.PX, "q": batch.QX, "rank": batch.RANK, "strict": batch.STRICT, "coin": batch.COIN,
        "flags": batch.FLAGS, "end": batch.END, "entropy": batch.ENTROPY,
    }[name]
    for name in PackedStep.COLUMNS
]  # fmt: skip


class SamplerProxy:
    """In place of the runner's rejection sampler: tells the seam which batch is verified, and is otherwise the sampler: what is
    set on it is set there, as vLLM's warm-up does with `enable_adaptive_verification`."""

    _OWN = frozenset({"stock", "_seam", "_signature"})

    def __init__(self, stock: Any, seam: SeamV2) -> None:
        self.stock, self._seam = stock, seam
        self._signature = inspect.signature(stock.__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._seam.begin(self._signature.bind(*args, **kwargs).arguments["input_batch"])
        try:
            return self.stock(*args, **kwargs)
        finally:
            self._seam.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.stock, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.stock, name)


def install(
    runner: Any, module: Any, slots: RequestSlots, *, tap: Tap | None, choice: Choice, processed_modes: Any,
    lessons: Lessons | None = None,
) -> SeamV2:  # fmt: skip
    """Wrap `module.rejection_sample` and the runner's rejection sampler. module:
    `vllm.v1.worker.gpu.spec_decode.rejection_sampler`; a second worker in the process replaces the first one's seam."""
    stock = module.rejection_sample
    if isinstance(stock, SeamV2):
        stock = stock._stock
    sampler = runner.sampler
    reported = sampler.return_sampling_mask or sampler.logprobs_mode in processed_modes
    seam = SeamV2(stock, slots, tap=tap, choice=choice, reported=reported, lessons=lessons)
    module.rejection_sample = seam
    inner = runner.rejection_sampler
    runner.rejection_sampler = SamplerProxy(inner.stock if isinstance(inner, SamplerProxy) else inner, seam)
    return seam
