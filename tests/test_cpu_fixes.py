from __future__ import annotations

import pytest
import torch

from engine_plugins.vllm.cpu_fixes import expand_batch_to_tokens
from tests import stock_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_stands_once_for_each_row(dtype: torch.dtype) -> None:
    x = torch.tensor([3, 0, 7], dtype=dtype)
    cu = torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = expand_batch_to_tokens(x, cu, 5, replace_from=0, replace_to=1)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [3, 3, 7, 7, 7]
    assert expand_batch_to_tokens(x, torch.tensor([1, 2, 3]), 3, 0, 1).tolist() == [3, 1, 7]


@pytest.mark.skipif(not stock_kernels.IS_CPU, reason="the fault is in the CPU build")
def test_the_stock_function_is_still_broken() -> None:
    """When this fails, vllm#55005 is fixed in the installed wheel: remove `engine_plugins.vllm.cpu_fixes` and this test."""
    torch.full((64,), 7.0)  # freed at once, so that uninitialised memory holds something else than zeros
    expanded = stock_kernels.stock_expand_batch_to_tokens(torch.full((8,), 0.5), torch.arange(8, 65, 8, dtype=torch.int32), 64)
    assert expanded.tolist() != [0.5] * 64
