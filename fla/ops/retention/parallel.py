# SPDX-License-Identifier: MIT
"""Retention as attention with decayed scores."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.covers import covers_parallel
from fla.ops._linear.op import linear_op
from fla.ops._linear.parallel import attention_outputs, check_attentions
from fla.ops._linear.rows import RETENTION, retention_decay
from fla.ops._linear.torch_chunk import linear_attention
from fla.ops._linear.torch_parallel import with_attentions

__all__ = ["parallel_retention"]


@linear_op(
    RETENTION,
    check=check_attentions,
    outputs=attention_outputs,
    triton="fla.ops._linear.entry:parallel_retention",
    triton_verifier=covers_parallel,
)
def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``o_i = scale sum_{j<=i} (q_i . k_j) (1 - 2 ** (-5 - h)) ** (i - j) v_j``; errors as :func:`chunk_retention`.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        scale: factor of the scores; None for ``K ** -0.5``.
        output_attentions: whether to return the scores; not with packed sequences.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o`` ``[B, T, H, V]``, and the scaled, decayed, causal scores ``[B, H, T, T]`` (differentiable, in the dtype of
        q, zero above the diagonal) or None.
    """
    decay = retention_decay(q)
    if output_attentions:
        return with_attentions(q, k, v, decay.expand(q.shape[:3]), scale)
    return linear_attention(q, k, v, scale=scale, g_gamma=decay, cu_seqlens=cu_seqlens)
