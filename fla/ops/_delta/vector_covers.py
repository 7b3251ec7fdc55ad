# SPDX-License-Identifier: MIT
"""Which calls of the chunk forms their Triton kernels take, and which gates are bounded. Needs no Triton itself."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.covers import Answer, covers_chunk


def bounded_gate(use_gate_in_kernel: bool, safe_gate: bool, lower_bound: float | None) -> bool:
    """Whether all log decays are known to lie in [-5, 0]: by the gate's form, or by the caller's promise."""
    if use_gate_in_kernel:
        return lower_bound is not None and -5.0 <= lower_bound < 0.0
    return safe_gate


def covers_chunk_delta(q: Tensor, v: Tensor) -> Answer:
    """Verifier of the chunk forms, and of the others where a gradient is due."""
    if 0 in q.shape or 0 in v.shape:
        return False, "there is nothing to launch for axes of no length"
    return covers_chunk(q, v)
