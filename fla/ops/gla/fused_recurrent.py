# SPDX-License-Identifier: MIT
"""Gated linear attention, token by token: the form for decoding."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.op import HEAD_FIRST, STATE_LAYOUT, linear_op
from fla.ops._linear.rows import RECURRENT_GLA
from fla.ops._linear.torch_chunk import linear_attention
from fla.ops._linear.vector_covers import covers_recurrent_gla

__all__ = ["fused_recurrent_gla"]


@linear_op(
    RECURRENT_GLA,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    triton="fla.ops._linear.vector_entry:fused_recurrent_gla",
    triton_verifier=covers_recurrent_gla,
)
def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``S_t = diag(exp(gk_t)) S_{t-1} diag(exp(gv_t)) + k_t (x) v_t`` and ``o_t = scale q_t S_t``.

    On devices without Triton one token is one step and more tokens go through the chunked engine. Errors as
    :func:`fla.ops.gla.chunk_gla`.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        gk: log decay per key channel ``[B, T, H, K]``, or None.
        gv: log decay per value channel ``[B, T, H, V]``, or None.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: ``[N, H, K, V]``.
        output_final_state: whether to return the final state.
        reverse: run each sequence from its last token to its first.
        state_v_first: states are ``[N, H, V, K]``.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of q and the final state or None.
    """
    return linear_attention(
        q,
        k,
        v,
        scale=scale,
        gk=gk,
        gv=gv,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
