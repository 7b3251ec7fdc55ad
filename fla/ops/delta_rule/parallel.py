# SPDX-License-Identifier: MIT
"""The delta rule as an attention matrix: a diagnostic, quadratic in ``T``."""

from __future__ import annotations

from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.ops._common.gates import compute_dtype
from fla.ops._delta.validate import check_call, check_required
from fla.ops.delta_rule.naive import attention_matrix
from fla.ops.delta_rule.naive import delta_rule_parallel as naive_delta_rule_parallel


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None) -> None:
    check_required(beta=beta)
    check_call(q, k, v, {"beta": (beta, "B T H")}, scale=scale, grouped=False)


@dispatch("delta_rule", validate=_check, facts=CallFacts())
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
    dtype = compute_dtype(q.dtype)
    query, key, value, strength = (x.to(dtype).transpose(1, 2) for x in (q, k, v, beta))
    query = query * (q.shape[-1] ** -0.5 if scale is None else scale)
    attention = attention_matrix(query, key, strength.unsqueeze(-1))
    o = (attention @ value).transpose(1, 2).to(q.dtype)
    return o, attention if output_attentions else None


__all__ = ["naive_delta_rule_parallel", "parallel_delta_rule"]
