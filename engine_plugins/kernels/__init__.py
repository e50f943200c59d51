"""Row statistics and rule rewriting as Triton kernels, each with a twin in plain torch; here it is decided which of them runs.

The twin is the definition (`engine_plugins.rules`), the kernel the fast form for a GPU. They agree to 1e-6 on probabilities and
exactly on ranks (`tests/test_kernels.py`, under Triton's interpreter).
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

KERNELS_ENV = "AG_KERNELS"


@dataclass(frozen=True, slots=True)
class Choice:
    """kernels: the Triton kernels run, else their twins; reason: why."""

    kernels: bool
    reason: str


def choose(device: str, *, interpreted: bool | None = None) -> Choice:
    """Kernels or twins on this kind of device ("cuda", "cpu", …)? The same answer on every rank of an engine: it depends on the
    installation and the environment, never on a measurement.

    interpreted: whether Triton runs in its interpreter; None: as the environment says.
    """
    if interpreted is None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    asked = os.environ.get(KERNELS_ENV, "1")
    if asked == "0":
        return Choice(False, f"torch twins, asked for by {KERNELS_ENV}=0")
    if importlib.util.find_spec("triton") is None:
        return Choice(False, "torch twins: Triton is not installed; install the build that belongs to this torch")
    if device == "cuda":
        if interpreted:
            return Choice(False, "torch twins: TRITON_INTERPRET=1 is set, and its interpreter is for tests; unset it")
        return Choice(True, "Triton kernels")
    if device == "cpu" and interpreted and asked == "interpret":
        return Choice(True, f"Triton kernels under the interpreter, asked for by {KERNELS_ENV}=interpret; slow, for tests")
    return Choice(False, f"torch twins: the kernels need a CUDA device, this is {device!r}")
