# SPDX-License-Identifier: MIT
"""Retention, chunked with the state kept at hand."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.covers import covers_scalar
from fla.ops._linear.op import linear_op
from fla.ops._linear.rows import RETENTION, retention_decay
from fla.ops._linear.torch_chunk import linear_attention

__all__ = ["fused_chunk_retention"]


@linear_op(RETENTION, triton="fla.ops._linear.entry:fused_chunk_retention", triton_verifier=covers_scalar)
def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The results of :func:`fla.ops.retention.chunk_retention`, whose description of arguments and errors holds.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: ``[N, H, K, V]``.
        output_final_state: whether to return the final state.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o`` ``[B, T, H, V]`` and the final state ``[N, H, K, V]`` or None.
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
