# SPDX-License-Identifier: MIT
"""Simple GLA, token by token: the form for decoding."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.covers import covers_scalar
from fla.ops._linear.op import HEAD_FIRST, STATE_LAYOUT, linear_op
from fla.ops._linear.rows import SIMPLE_GLA
from fla.ops._linear.torch_chunk import linear_attention

__all__ = ["fused_recurrent_simple_gla"]


@linear_op(
    SIMPLE_GLA,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    triton="fla.ops._linear.entry:fused_recurrent_simple_gla",
    triton_verifier=covers_scalar,
)
def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence of :func:`fla.ops.simple_gla.chunk_simple_gla`, whose description of arguments and errors holds.

    On devices without Triton one token is one step and more tokens go through the chunked engine.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        g: log decay ``[B, T, H]``.
        g_gamma: fixed log decay per head ``[H]``, instead of `g`.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: ``[N, H, K, V]``.
        output_final_state: whether to return the final state.
        reverse: run each sequence from its last token to its first.
        state_v_first: states are ``[N, H, V, K]``.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o`` ``[B, T, H, V]`` and the final state or None.
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
        reverse=reverse,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
