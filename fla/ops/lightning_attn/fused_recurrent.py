# SPDX-License-Identifier: MIT
"""Lightning attention, token by token: the form for decoding."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.covers import covers_scalar
from fla.ops._linear.op import linear_op
from fla.ops._linear.rows import LIGHTNING_ATTN, lightning_decay
from fla.ops._linear.torch_chunk import linear_attention
from fla.ops.lightning_attn.checks import check_layer

__all__ = ["fused_recurrent_lightning_attn"]


@linear_op(
    LIGHTNING_ATTN,
    check=check_layer,
    triton="fla.ops._linear.entry:fused_recurrent_lightning_attn",
    triton_verifier=covers_scalar,
)
def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence of :func:`fla.ops.lightning_attn.chunk_lightning_attn`, whose description of errors holds.

    On devices without Triton one token is one step and more tokens go through the chunked engine.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        layer_idx: index of the layer, 0 to `num_layers`.
        num_layers: number of layers, at least 1.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: ``[N, H, K, V]``.
        output_final_state: whether to return the final state.
        reverse: run each sequence from its last token to its first.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o`` ``[B, T, H, V]`` and the final state ``[N, H, K, V]`` or None.
    """
    return linear_attention(
        q,
        k,
        v,
        scale=scale,
        g_gamma=lightning_decay(q, layer_idx, num_layers),
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
