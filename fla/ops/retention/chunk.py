# SPDX-License-Identifier: MIT
"""Retention, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.covers import covers_scalar
from fla.ops._linear.op import HEAD_FIRST, linear_op
from fla.ops._linear.rows import RETENTION, retention_decay
from fla.ops._linear.torch_chunk import linear_attention

__all__ = ["chunk_retention"]


@linear_op(RETENTION, removed=HEAD_FIRST, triton="fla.ops._linear.entry:chunk_retention", triton_verifier=covers_scalar)
def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention whose head h decays by ``1 - 2 ** (-5 - h)`` per token, chunk by chunk.

    ``S_t = (1 - 2 ** (-5 - h)) S_{t-1} + k_t (x) v_t`` and ``o_t = scale q_t S_t``. The number of heads given fixes the
    decays: a caller who splits heads over devices must use :func:`fla.ops.simple_gla.chunk_simple_gla` with the
    ``g_gamma`` of its share.

    Args:
        q, k: ``[B, T, H, K]``; float16, bfloat16, float32 or float64, one dtype for q, k and v.
        v: ``[B, T, H, V]``.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: state before the first token ``[N, H, K, V]``, any float; None for zero. N is B, or the number of
            packed sequences.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, int32 or int64, from 0 to T; B must be 1.
        chunk_size: tokens per chunk, 16, 32, 64 or 128; None for 64. It changes no result beyond rounding.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of q, and the final state (float32; float64 for float64) or None.

    Raises:
        ValueError: shapes, devices, states or `cu_seqlens` that do not fit; dtypes that do not fit raise an error that
            is a TypeError too.

    Source: Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models" (2023), section 2.
    """
    return linear_attention(
        q,
        k,
        v,
        scale=scale,
        g_gamma=retention_decay(q),
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
