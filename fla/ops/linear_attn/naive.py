# SPDX-License-Identifier: MIT
"""Linear attention written plainly: the reference of the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.ops.linear_attn.utils import EPS

__all__ = ["naive_chunk_linear_attn", "naive_recurrent_linear_attn"]


def naive_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = False,
) -> tuple[Tensor, Any]:
    """``S_t = S_{t-1} + k_t (x) v_t``, ``o_t = scale q_t S_t``, token by token.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        scale: None for ``K ** -0.5``.
        initial_state: ``[B, H, K, V]``, or the pair of it and the sum of keys ``[B, 1, H, K]``.
        output_final_state: whether to return the state: a tensor, or with `normalize` the pair.
        normalize: divide by ``scale q_t . z_t + 1e-10``.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of q, and the state or None.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, T, H, K = q.shape
    queries, keys, values = q.to(wide) * (K**-0.5 if scale is None else scale), k.to(wide), v.to(wide)
    kv, z0 = initial_state if isinstance(initial_state, (tuple, list)) else (initial_state, None)
    S = queries.new_zeros(B, H, K, v.shape[-1]) if kv is None else kv.to(wide)
    z = queries.new_zeros(B, H, K) if z0 is None else z0.to(wide)[:, 0]
    rows = []
    for t in range(T):
        S = S + keys[:, t].unsqueeze(-1) * values[:, t].unsqueeze(-2)
        z = z + keys[:, t]
        row = torch.einsum("bhk,bhkv->bhv", queries[:, t], S)
        rows.append(row / ((queries[:, t] * z).sum(-1, keepdim=True) + EPS) if normalize else row)
    o = torch.stack(rows, 1) if rows else torch.zeros_like(values)
    state = (S, z.unsqueeze(1)) if normalize else S
    return o.to(q.dtype), state if output_final_state else None


def naive_chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, normalize: bool = False
) -> Tensor:
    """The same by chunks of 64 tokens, of which T must be a multiple. Shapes as above; returns ``o`` only."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    T, K = q.shape[1], q.shape[-1]
    if T % 64:
        raise ValueError(f"`q` must have a multiple of 64 tokens, got {T}.")
    scale = K**-0.5 if scale is None else scale
    qc, kc, vc = (x.to(wide).transpose(1, 2).unflatten(2, (-1, 64)) for x in (q, k, v))  # [B, H, chunks, 64, D]
    kv = kc.mT @ vc
    before = kv.cumsum(2) - kv
    o = scale * (qc @ before + (qc @ kc.mT).tril() @ vc)
    if normalize:
        z = k.to(wide).transpose(1, 2).cumsum(2).unflatten(2, (-1, 64))
        o = o / (scale * (qc * z).sum(-1, keepdim=True) + EPS)
    return o.flatten(2, 3).transpose(1, 2).to(q.dtype)
