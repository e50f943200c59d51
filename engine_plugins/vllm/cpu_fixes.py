"""Corrections to the CPU build of vLLM, without which its numbers are void."""

from __future__ import annotations

from typing import Any

import torch


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[batch] -> [num_tokens]: each request's value once for each of its draft rows. Same contract as vLLM's function.

    Symptom of the stock one on CPU: every non-greedy batch with drafts divides its logits by uninitialised memory, because the
    C++ kernel writes into an int64 copy that is never copied back (vllm#55005; `_expand_kernel_impl` in
    vllm/utils/cpu_triton_utils.py). A rule that accepts everything then shows 1 to 3 accepted tokens of 6 instead of 6.
    Remove when a wheel's kernel copies its output back: `tests/test_cpu_fixes.py` fails on the day the stock function is right.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype, device=x.device), x)
    return replaced.repeat_interleave(counts.long(), output_size=num_tokens)


def install(sampler_module: Any) -> None:
    """Replace the broken function in `vllm.v1.sample.rejection_sampler`."""
    sampler_module.expand_batch_to_tokens = expand_batch_to_tokens


def rewind_discarded_draws(runner: Any) -> None:
    """Let seeded requests survive a prefill in several chunks on CPU.

    The token sampled behind an unfinished chunk is thrown away, and V1's runner then rewinds the request's generator with
    `set_offset`, which only CUDA generators have: "CPU Generator does not use offset" ends the whole engine
    (`GPUModelRunner._bookkeeping_sync`, vLLM 0.32). Here the state of such generators is saved before sampling and restored
    after, and the runner finds none to rewind. Remove when the runner asks for the generator's device first.
    """
    sample, bookkeep = runner._sample, runner._bookkeeping_sync

    def sample_and_rewind(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        discarded = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        held = [batch.generators[int(i)] for i in discarded if int(i) in batch.generators]
        states = [generator.get_state() for generator in held]
        out = sample(*args, **kwargs)
        for generator, state in zip(held, states, strict=True):
            generator.set_state(state)
        return out

    def bookkeep_without_generators(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        held, batch.generators = batch.generators, {}
        try:
            return bookkeep(*args, **kwargs)
        finally:
            batch.generators = held

    runner._sample, runner._bookkeeping_sync = sample_and_rewind, bookkeep_without_generators
