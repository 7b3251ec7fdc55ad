# SPDX-License-Identifier: MIT
"""Gated linear attention written plainly: the reference of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ceildiv", "naive_recurrent_gla"]


def ceildiv(a: int, b: int) -> int:
    """The quotient of two integers, rounded up."""
    return -(-a // b)


def naive_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``S_t = diag(exp(gk_t)) S_{t-1} + k_t (x) v_t``, ``o_t = K ** -0.5 q_t S_t``, token by token.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        gk: natural log decay ``[B, T, H, K]``.
        initial_state: ``[B, H, K, V]``.
        output_final_state: whether to return the state.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of q, and the state (float32; float64 for float64) or None.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, T, H, K = q.shape
    queries, keys, values = q.to(wide) * K**-0.5, k.to(wide), v.to(wide)
    h = queries.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(wide)
    out = torch.zeros_like(values)
    rows = []
    for t in range(T):
        h = h * gk[:, t].to(wide).exp().unsqueeze(-1) + keys[:, t].unsqueeze(-1) * values[:, t].unsqueeze(-2)
        rows.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], h))
    out = torch.stack(rows, 1) if rows else out
    return out.to(q.dtype), h if output_final_state else None
