# SPDX-License-Identifier: MIT
"""Lightning attention, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.covers import covers_scalar
from fla.ops._linear.op import HEAD_FIRST, linear_op
from fla.ops._linear.rows import LIGHTNING_ATTN, lightning_decay
from fla.ops._linear.torch_chunk import linear_attention
from fla.ops.lightning_attn.checks import check_layer

__all__ = ["chunk_lightning_attn"]


@linear_op(
    LIGHTNING_ATTN,
    check=check_layer,
    removed=HEAD_FIRST,
    triton="fla.ops._linear.entry:chunk_lightning_attn",
    triton_verifier=covers_scalar,
)
def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention whose log decay in head h is ``-(8 / H) (1 - layer_idx / num_layers) h``, chunk by chunk.

    Head 0 never decays, and nothing decays at ``layer_idx == num_layers``. As in retention, the number of heads given
    fixes the decays.

    Args:
        q, k: ``[B, T, H, K]``; float16, bfloat16, float32 or float64, one dtype for q, k and v.
        v: ``[B, T, H, V]``.
        layer_idx: index of the layer, 0 to `num_layers`.
        num_layers: number of layers, at least 1.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: state before the first token ``[N, H, K, V]``, any float; None for zero. N is B, or the number of
            packed sequences.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, int32 or int64, from 0 to T; B must be 1.
        chunk_size: tokens per chunk, 16, 32, 64 or 128; None for 64. It changes no result beyond rounding.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of q, and the final state (float32; float64 for float64) or None.

    Raises:
        ValueError: shapes, devices, states, `cu_seqlens` or layer numbers that do not fit; dtypes that do not fit raise
            an error that is a TypeError too.

    Source: Qin et al., "Lightning Attention-2" (2024).
    """
    return linear_attention(
        q,
        k,
        v,
        scale=scale,
        g_gamma=lightning_decay(q, layer_idx, num_layers),
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
