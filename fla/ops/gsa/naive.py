# SPDX-License-Identifier: MIT
"""Gated slot attention written plainly: the reference of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype

__all__ = ["naive_recurrent_gsa"]


def naive_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, list[Tensor] | None]:
    """Token by token, the ground truth of ``chunk_gsa``.

    Args:
        q: ``[B, T, HQ, K]``; HQ a multiple of H.
        k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        s: write weight of each slot ``[B, T, H, M]``; without `g` its logarithm, not normalised.
        g: log decay of each slot ``[B, T, H, M]``, or None.
        scale: factor of the scores; ``K ** -0.5`` if None.
        initial_state: ``(hk [B, H, K, M], hv [B, H, M, V])``.
        output_final_state: whether to return the states.

    Returns:
        ``o`` ``[B, T, HQ, V]`` in the dtype of q, and ``[hk, hv]`` (float32; float64 for float64) or None.
    """
    wide = compute_dtype(q.dtype)
    (B, T, HQ, K), (H, M), V = q.shape, s.shape[2:], v.shape[-1]
    scale = K**-0.5 if scale is None else scale
    queries, keys, values, weights = (x.to(wide) for x in (q, k, v, s))
    if g is None:
        z = weights.logcumsumexp(1)
        gates = torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1] - z[:, 1:]], 1)
        weights = (weights - z).exp()
    else:
        gates = g.to(wide)
    hk, hv = queries.new_zeros(B, H, K, M), queries.new_zeros(B, H, M, V)
    if initial_state is not None:
        hk, hv = (x.to(wide) for x in initial_state)
    rows = []
    for t in range(T):
        decay = gates[:, t].exp()
        hk = hk * decay.unsqueeze(-2) + keys[:, t].unsqueeze(-1) * weights[:, t].unsqueeze(-2)
        hv = hv * decay.unsqueeze(-1) + weights[:, t].unsqueeze(-1) * values[:, t].unsqueeze(-2)
        slots, read = (x.repeat_interleave(HQ // H, 1) for x in (hk, hv))
        p = (scale * torch.einsum("bhk,bhkm->bhm", queries[:, t], slots)).softmax(-1)
        rows.append(torch.einsum("bhm,bhmv->bhv", p, read))
    o = torch.stack(rows, 1) if rows else queries.new_zeros(B, T, HQ, V)
    return o.to(q.dtype), [hk, hv] if output_final_state else None
