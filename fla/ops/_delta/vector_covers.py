# SPDX-License-Identifier: MIT
"""Which calls of `chunk_kda` its Triton kernels take. Needs no Triton itself."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._delta.covers import covers_chunk


def bounded_gate(use_gate_in_kernel: bool, safe_gate: bool, lower_bound: float | None) -> bool:
    """Whether all log decays are known to lie in [-5, 0]: by the gate's form, or by the caller's promise."""
    if use_gate_in_kernel:
        return lower_bound is not None and -5.0 <= lower_bound < 0.0
    return safe_gate


def covers_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    use_gate_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[bool, str | None]:
    """Verifier of ``chunk_kda``."""
    if 0 in q.shape or 0 in v.shape:
        return False, "there is nothing to launch for axes of no length"
    if (
        q.device.type != "cpu"
        and q.dtype in (torch.float16, torch.bfloat16)
        and not bounded_gate(use_gate_in_kernel, safe_gate, lower_bound)
        and needs_backward((q, k, v, g, beta, initial_state, A_log, dt_bias))
    ):
        return False, (
            "the 16-bit backward for gates without a bound has not been checked on a device since its first form met a "
            "fault of ptxas 12.8; a gate with lower_bound >= -5, or safe_gate=True, has no such limit"
        )
    return covers_chunk(q, v)
