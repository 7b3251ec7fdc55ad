# SPDX-License-Identifier: MIT
"""The gated delta rule written down. It is Kimi Delta Attention with one decay for all key channels, and computed
so."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda


def naive_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token, the ground truth of ``chunk_gated_delta_rule``. Mind the order: ``beta`` before ``g``.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        beta: ``[B, T, HV]``.
        g: log decay (natural) ``[B, T, HV]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[B, HV, K, V]``.
        output_final_state: return the final state.

    Returns:
        ``o [B, T, HV, V]`` and the final state ``[B, HV, K, V]``, both float32 (float64 for float64 inputs).
    """
    g = g.unsqueeze(-1).expand(*g.shape, q.shape[-1])
    v = v.to(compute_dtype(v.dtype))
    return naive_recurrent_kda(q, k, v, g, beta, scale, initial_state, output_final_state)


def naive_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The chunk form, for any ``T``; arguments and results as ``naive_recurrent_gated_delta_rule``, ``g`` before
    ``beta``."""
    T = q.shape[1]
    dtype = compute_dtype(v.dtype)
    padding = -T % chunk_size
    pad = lambda x: torch.cat([x.to(dtype), x.new_zeros(x.shape[0], padding, *x.shape[2:], dtype=dtype)], 1)
    q, k, v, g, beta = map(pad, (q, k, v, g, beta))
    g = g.unsqueeze(-1).expand(*g.shape, q.shape[-1])
    o, state = naive_chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state, chunk_size)
    return o[:, :T], state
