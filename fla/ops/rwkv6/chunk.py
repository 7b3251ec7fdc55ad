# SPDX-License-Identifier: MIT
"""RWKV-6, chunked."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.checks import check_floating, check_shapes
from fla.ops._common.gate_ops import check_chunk_cumsum
from fla.ops._common.gates import compute_dtype, to_output
from fla.ops._common.varlen import plan_chunks
from fla.ops._linear.exclusive import bonus_attention
from fla.ops._linear.op import HEAD_FIRST, linear_op
from fla.ops._linear.rows import RWKV6
from fla.ops._linear.vector_covers import covers_rwkv6

__all__ = ["chunk_rwkv6", "chunk_rwkv6_fwd_cumsum"]


@linear_op(RWKV6, removed=HEAD_FIRST, triton="fla.ops._linear.vector_entry:chunk_rwkv6", triton_verifier=covers_rwkv6)
def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay per key channel that reads the state before each token, and a bonus.

    Per head ``o_t = scale r_t (S_{t-1} + diag(u) k_t (x) v_t)`` and ``S_t = diag(exp(w_t)) S_{t-1} + k_t (x) v_t``:
    what a token adds is not decayed by its own ``w_t``. Differentiable in every tensor, through outputs and states.

    Args:
        r, k: ``[B, T, H, K]``; float16, bfloat16, float32 or float64, one dtype for r, k and v.
        v: ``[B, T, H, V]``.
        w: log decay (natural logarithm, normally <= 0; minus infinity forgets the channel) ``[B, T, H, K]``, any float.
        u: weight of the token itself ``[H, K]``, any float.
        scale: factor of the outputs; None for ``K ** -0.5``.
        initial_state: state before the first token ``[N, H, K, V]``, any float; None for zero. N is B, or the number of
            packed sequences.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, int32 or int64, from 0 to T; B must be 1.
        cu_seqlens_cpu: their copy on the CPU, which saves waiting for the device.
        chunk_size: 16, 32, 64 or 128; accepted, results do not depend on it.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of v, and the final state (float32; float64 for float64) or None.

    Raises:
        ValueError: shapes, devices, states or `cu_seqlens` that do not fit (the error is an AssertionError too); dtypes
            that do not fit raise an error that is a TypeError too.

    Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (2024).
    """
    o, final = bonus_attention(
        r,
        k,
        v,
        w,
        u,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    return to_output(o, v.dtype), final


def chunk_rwkv6_fwd_cumsum(
    g: Tensor,
    chunk_size: int,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums of log decays over time within every chunk (no gradients): with and without the token itself.

    Args:
        g: ``[B, T, H, K]``.
        chunk_size: tokens per chunk, a power of two.
        scale: factor of the sums.
        cu_seqlens: offsets ``[N + 1]`` of packed sequences (``B = 1``); chunks start with each sequence.
        chunk_indices: accepted; the chunks follow from ``cu_seqlens``.

    Returns:
        Inclusive and exclusive sums ``[B, T, H, K]``, float32 (float64 for float64).
    """
    check_floating(g=g)
    check_shapes(g=(g, "B T H K"))
    check_chunk_cumsum(g, chunk_size, 4, cu_seqlens)
    with torch.no_grad():
        plan = plan_chunks(g.shape[0], g.shape[1], chunk_size, g.device, cu_seqlens)
        sums = plan.pack(g.to(compute_dtype(g.dtype))).cumsum(1)
        sums = sums if scale is None else sums * scale
        before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], 1)
        return plan.unpack(sums), plan.unpack(before)
