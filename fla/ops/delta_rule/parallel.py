# SPDX-License-Identifier: MIT
"""The delta rule as an attention matrix: a diagnostic, quadratic in ``T``."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype, without_autocast
from fla.ops._delta.op import delta_op
from fla.ops._delta.rows import DELTA_RULE
from fla.ops.delta_rule.naive import attention_matrix
from fla.ops.delta_rule.naive import delta_rule_parallel as naive_delta_rule_parallel


def _outputs(q: Tensor, v: Tensor, output_attentions: bool) -> tuple[Tensor, Tensor | None]:
    B, T, H, _ = q.shape
    attention = q.new_empty((B, H, T, T), dtype=compute_dtype(q.dtype)) if output_attentions else None
    return torch.empty_like(v, memory_format=torch.contiguous_format), attention


@delta_op(DELTA_RULE, {"beta": "B T H"}, grouped=False, outputs=_outputs)
def parallel_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule through its ``T x T`` attention matrix. Differentiable.

    Args:
        q: queries ``[B, T, H, K]``; q, k, v share one floating dtype.
        k: keys ``[B, T, H, K]``.
        v: values ``[B, T, H, V]``.
        beta: write strength ``[B, T, H]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        output_attentions: return the matrix.

    Returns:
        ``o [B, T, H, V]`` in the dtype of q, and the attention ``[B, H, T, T]`` (float32, float64 for float64 inputs),
        with ``o[b, :, h] = attention[b, h] @ v[b, :, h]``, or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes or devices.
        DtypeError: (also TypeError) wrong or mixed dtypes.
    """
    o, attention = _with_attention(q, k, v, beta, scale)
    return o, attention if output_attentions else None


@without_autocast
def _with_attention(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q.dtype)
    query, key, value, strength = (x.to(dtype).transpose(1, 2) for x in (q, k, v, beta))
    query = query * (q.shape[-1] ** -0.5 if scale is None else scale)
    attention = attention_matrix(query, key, strength.unsqueeze(-1))
    return (attention @ value).transpose(1, 2).to(q.dtype), attention


__all__ = ["naive_delta_rule_parallel", "parallel_delta_rule"]
