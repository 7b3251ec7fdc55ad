# SPDX-License-Identifier: MIT
"""Linear attention, token by token: the form for decoding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.ops._linear.covers import covers_linear_attn
from fla.ops._linear.op import linear_op
from fla.ops._linear.rows import LINEAR_ATTN
from fla.ops.linear_attn.utils import State, outputs, run

__all__ = ["fused_recurrent_linear_attn"]


@linear_op(
    LINEAR_ATTN,
    outputs=outputs,
    triton="fla.ops._linear.entry:fused_recurrent_linear_attn",
    triton_verifier=covers_linear_attn,
)
def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """The recurrence of :func:`fla.ops.linear_attn.chunk_linear_attn`, whose errors are described there.

    On devices without Triton one token is one step and more tokens go through the chunked engine.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: ``[N, H, K, V]``, or with `normalize` the pair of it and ``[N, 1, H, K]``.
        output_final_state: whether to return the final state.
        reverse: run each sequence from its last token to its first.
        normalize: whether to divide by the sum of weights; note the other default.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o`` ``[B, T, H, V]`` and the final state or None; with `normalize` the pair ``(final state or None, z)``.
    """
    return run(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, reverse)
