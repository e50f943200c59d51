"""vLLM's V1 sampling functions outside an engine: a worker registers the CPU kernels first, so do the tests."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

current_platform.register_triton_kernel_overrides()
stock = rejection_sampler
# taken before any test installs the correction
stock_expand_batch_to_tokens = rejection_sampler.expand_batch_to_tokens
IS_CPU = current_platform.is_cpu()
