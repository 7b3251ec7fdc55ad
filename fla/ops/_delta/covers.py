# SPDX-License-Identifier: MIT
"""Which calls the Triton kernels of the delta family cover. Needs no triton; the rest of a call runs in PyTorch."""

from __future__ import annotations

from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.covers import Answer, covers_chunk
from fla.ops._delta.vector_covers import covers_chunk_delta


def covers_recurrent_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Answer:
    """Verifier of ``fused_recurrent_gated_delta_rule``: its backward is that of the chunk kernels."""
    if needs_backward((q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias)):
        if gk is not None or gv is not None or beta is None or beta.dim() == 4:
            return False, "the Triton backward takes a scalar decay and one beta per head"
        return covers_chunk_delta(q, v)
    return covers_chunk(q, v)


def covers_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, initial_state: Tensor | None
) -> Answer:
    """Verifier of ``fused_recurrent_delta_rule``."""
    return covers_recurrent_gdn(q, k, v, None, None, None, beta, initial_state, None, None)


def covers_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
) -> Answer:
    """Verifier of ``fused_recurrent_comba``: its backward is that of the chunk kernels."""
    if needs_backward((q, k, p, v, g, beta, initial_state)):
        if beta is not None and beta.dim() == 4:
            return False, "the Triton backward takes one beta per head"
        return covers_chunk_delta(q, v)
    return covers_chunk(q, v)


def covers_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
) -> Answer:
    """Verifier of ``fused_recurrent_kda``: its backward is that of the chunk kernels."""
    if needs_backward((q, k, v, g, beta, A_log, dt_bias, initial_state)):
        if beta.dim() == 4:
            return False, "the Triton backward takes one beta per head"
        return covers_chunk_delta(q, v)
    return covers_chunk(q, v)


def covers_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
) -> Answer:
    """Verifier of ``fused_recurrent_gdn2``: its backward is that of the chunk kernels."""
    if needs_backward((q, k, v, g, b, w, A_log, dt_bias, initial_state)):
        return covers_chunk_delta(q, v)
    return covers_chunk(q, v)
