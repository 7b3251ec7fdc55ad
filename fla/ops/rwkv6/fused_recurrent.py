# SPDX-License-Identifier: MIT
"""RWKV-6, token by token: the form for decoding."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.gates import to_output
from fla.ops._linear.exclusive import bonus_attention
from fla.ops._linear.op import linear_op
from fla.ops._linear.rows import RWKV6
from fla.ops._linear.vector_covers import covers_rwkv6

__all__ = ["fused_recurrent_rwkv6"]


@linear_op(RWKV6, triton="fla.ops._linear.vector_entry:fused_recurrent_rwkv6", triton_verifier=covers_rwkv6)
def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``o_t = scale r_t (S_{t-1} + diag(u) k_t (x) v_t)`` and ``S_t = diag(exp(w_t)) S_{t-1} + k_t (x) v_t``.

    On devices without Triton one token is one step and more tokens go through the chunked engine. Gradients and errors
    as :func:`fla.ops.rwkv6.chunk_rwkv6`: also through the final state and with `reverse`, which release 0.6.0 of the
    reference package gets wrong.

    Args:
        r, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        w: log decay per key channel ``[B, T, H, K]``.
        u: weight of the token itself ``[H, K]``.
        scale: factor of the outputs; None for ``K ** -0.5``.
        initial_state: ``[N, H, K, V]``.
        output_final_state: whether to return the final state.
        reverse: run each sequence from its last token to its first; ``S_{t-1}`` is then ``S_{t+1}``.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of v and the final state or None.
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
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
    return to_output(o, v.dtype), final
