# SPDX-License-Identifier: MIT
"""Linear attention, chunked."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.ops._linear.covers import covers_linear_attn
from fla.ops._linear.op import linear_op
from fla.ops._linear.rows import LINEAR_ATTN
from fla.ops.linear_attn.utils import State, outputs, run

__all__ = ["chunk_linear_attn"]


@linear_op(
    LINEAR_ATTN,
    outputs=outputs,
    triton="fla.ops._linear.entry:chunk_linear_attn",
    triton_verifier=covers_linear_attn,
)
def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Linear attention, chunk by chunk.

    ``S_t = S_{t-1} + k_t (x) v_t``, ``z_t = z_{t-1} + k_t``, and ``o_t = scale q_t S_t``, with `normalize` divided by
    ``scale q_t . z_t + 1e-10``. No feature map is applied: the caller sees to positive denominators. The sums are
    float32 whatever the dtype of the inputs.

    Args:
        q, k: ``[B, T, H, K]``; float16, bfloat16, float32 or float64, one dtype for q, k and v.
        v: ``[B, T, H, V]``.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: state before the first token ``[N, H, K, V]``, any float; None for zero. With `normalize` also
            the pair ``(state, z)`` with ``z`` ``[N, 1, H, K]``; either may be None, a tensor alone means z = 0.
        output_final_state: whether to return the state after the last token.
        normalize: whether to divide.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, int32 or int64, from 0 to T; B must be 1.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of q and, without `normalize`, the final state or None; with `normalize` the
        pair ``(final state or None, z)``, z being there whether or not a state was asked for, as in 0.6.0. States are
        float32 (float64 for float64).

    Raises:
        ValueError: shapes, devices, states or `cu_seqlens` that do not fit, or a pair of states without `normalize`;
            dtypes that do not fit raise an error that is a TypeError too.

    Source: Katharopoulos et al., "Transformers are RNNs" (2020), section 3.
    """
    return run(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)
