# SPDX-License-Identifier: MIT
"""Simple GLA as attention with decayed scores."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.covers import covers_parallel
from fla.ops._linear.op import linear_op
from fla.ops._linear.parallel import attention_outputs, check_attentions
from fla.ops._linear.rows import SIMPLE_GLA
from fla.ops._linear.torch_chunk import linear_attention
from fla.ops._linear.torch_parallel import with_attentions

__all__ = ["parallel_simple_gla"]


@linear_op(
    SIMPLE_GLA,
    check=check_attentions,
    outputs=attention_outputs,
    triton="fla.ops._linear.entry:parallel_simple_gla",
    triton_verifier=covers_parallel,
)
def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``o_i = scale sum_{j<=i} (q_i . k_j) exp(g_{j+1} + ... + g_i) v_j``; errors as :func:`chunk_simple_gla`.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        g: log decay ``[B, T, H]``.
        scale: factor of the scores; None for ``K ** -0.5``.
        output_attentions: whether to return the scores; not with packed sequences.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.
        cu_seqlens_cpu: their copy on the CPU.

    Returns:
        ``o`` ``[B, T, H, V]``, and the scaled, decayed, causal scores ``[B, H, T, T]`` (differentiable, in the dtype of
        q, zero above the diagonal) or None.
    """
    if output_attentions:
        return with_attentions(q, k, v, g, scale)
    return linear_attention(q, k, v, scale=scale, g=g, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
