# SPDX-License-Identifier: MIT
"""Simple GLA, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.covers import covers_scalar
from fla.ops._linear.op import HEAD_FIRST, STATE_LAYOUT, linear_op
from fla.ops._linear.rows import SIMPLE_GLA
from fla.ops._linear.torch_chunk import linear_attention

__all__ = ["chunk_simple_gla"]


@linear_op(
    SIMPLE_GLA,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    triton="fla.ops._linear.entry:chunk_simple_gla",
    triton_verifier=covers_scalar,
)
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a scalar decay per head, chunk by chunk.

    Per head ``S_t = exp(g_t) S_{t-1} + k_t (x) v_t`` and ``o_t = scale q_t S_t``. With ``q = C``, ``k = B``,
    ``v = x dt``, ``g = A dt`` and ``scale = 1`` this is the SSD layer of Mamba-2.

    Args:
        q, k: ``[B, T, H, K]``; float16, bfloat16, float32 or float64, one dtype for q, k and v.
        v: ``[B, T, H, V]``.
        g: log decay (natural logarithm, normally <= 0; minus infinity forgets everything) ``[B, T, H]``, any float.
        g_gamma: fixed log decay per head ``[H]``, instead of `g`; without gradient.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: state before the first token ``[N, H, K, V]``, any float; None for zero. N is B, or the number of
            packed sequences.
        output_final_state: whether to return the state after the last token.
        state_v_first: states are ``[N, H, V, K]``.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, int32 or int64, from 0 to T; B must be 1.
        cu_seqlens_cpu: their copy on the CPU, which saves waiting for the device.
        chunk_size: tokens per chunk, 16, 32, 64 or 128; None for 64. It changes no result beyond rounding.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of q, and the final state (float32; float64 for float64) or None.

    Raises:
        ValueError: shapes, devices, states or `cu_seqlens` that do not fit, or both gates; dtypes that do not fit raise
            an error that is a TypeError too.

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2023), section 4.
    """
    return linear_attention(
        q,
        k,
        v,
        scale=scale,
        g=g,
        g_gamma=g_gamma,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
