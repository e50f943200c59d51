"""How the kernels are compiled: `kernel` in place of `triton.jit`."""

from __future__ import annotations

import triton

# Arguments that a step may hand over as slices: where a chunk of requests begins is known in serving alone, and Triton compiles
# anew for a pointer that is no multiple of 16 bytes. They are read one element at a time, so alignment is worth nothing there.
SLICES = (
    "x_ptr", "want_ptr", "flags_ptr", "slot_ptr", "step_ptr", "temperature_ptr", "verdict_ptr", "ends_ptr", "slots_ptr",
    "drafted_ptr", "inside_ptr", "position_ptr", "seed_ptr",
)  # fmt: skip
kernel = triton.jit(do_not_specialize_on_alignment=SLICES)
