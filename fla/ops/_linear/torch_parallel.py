# SPDX-License-Identifier: MIT
"""The whole score matrix, for callers who want to see it: memory grows with the square of T."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype, without_autocast

__all__ = ["decay_matrix", "with_attentions"]


def decay_matrix(g: Tensor) -> Tensor:
    """``exp(g[j+1] + ... + g[i])`` as ``[..., T (i), T (j)]`` from ``[..., T]``, zero for j > i. Differentiable."""
    T = g.shape[-1]
    after = torch.ones(T, T, dtype=torch.bool, device=g.device).tril(-1)
    # Summed pair by pair: the difference of two running sums loses digits, and all of them at minus infinity.
    sums = g.unsqueeze(-1).expand(*g.shape, T).masked_fill(~after, 0).cumsum(-2)
    return sums.exp().tril()


@without_autocast
def with_attentions(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """``o`` ``[B, T, H, V]`` and its scores ``[B, H, T, T]`` in the dtype of q; gradients flow through both.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        g: log decay ``[B, T, H]`` or None.
        scale: factor of the scores; None for ``K ** -0.5``.
    """
    dtype = compute_dtype(q.dtype)
    heads = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    qh, kh, vh = heads
    scores = qh @ kh.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.tril() if g is None else scores * decay_matrix(g.to(dtype).transpose(1, 2))
    return (scores @ vh).transpose(1, 2).to(q.dtype).contiguous(), scores.to(q.dtype)
