# SPDX-License-Identifier: MIT
"""Decay factors between the tokens of a chunk, as products only.

The factor from token ``j`` to token ``i > j`` is ``prod_{j < l <= i} exp(g_l)``. Split the chunk in halves again and
again: the pair falls apart at one split, with ``i`` in the right half and ``j`` in the left, and its factor is (product
from the start of the right half to ``i``) times (product from after ``j`` to the end of the left half). Both are at
most one, so nothing overflows; no cumulative sum is ever subtracted, so -1000 or -inf beside -0.01 costs no precision;
and the gradient of ``g_l`` collects only pairs that cross ``l``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecayTree:
    """Decay factors of chunks ``[X, C, D]``.

    Attributes:
        levels: for half sizes 1, 2, ... C/2 the row factors of right halves and the column factors of left halves, both
            ``[X, C / (2 * half), half, D]``.
        head: factor from the state at the chunk's start to each token, ``[X, C, D]``.
        tail: factor from each token to the chunk's end, ``[X, C, D]``.
    """

    levels: list[tuple[Tensor, Tensor]]
    head: Tensor
    tail: Tensor

    @property
    def total(self) -> Tensor:
        """Factor of the whole chunk, ``[X, D]``."""
        return self.head[:, -1]


def grow(g: Tensor) -> DecayTree:
    """Decay factors of natural-log decays ``g [X, C, D]``; ``C`` is a power of two."""
    X, C, D = g.shape
    head = g.exp()
    tail = torch.ones_like(head)
    levels = []
    half = 1
    while half < C:
        h = head.view(X, -1, 2, half, D)
        t = tail.view(X, -1, 2, half, D)
        right, left = h[:, :, 1].clone(), t[:, :, 0].clone()
        levels.append((right, left))
        left_total, right_total = h[:, :, 0, -1:], right[:, :, -1:]
        torch.mul(right, left_total, out=h[:, :, 1])
        torch.mul(left, right_total, out=t[:, :, 0])
        half *= 2
    return DecayTree(levels, head, tail)


def decay_gradient(d_levels: list[tuple[Tensor, Tensor]], d_head: Tensor, d_tail: Tensor) -> Tensor:
    """Gradient of ``g`` from the gradients of the *logarithms* of all factors (same shapes as in ``DecayTree``).

    ``d_head`` and ``d_tail`` are overwritten.
    """
    X, C, D = d_head.shape
    half = C // 2
    for d_right, d_left in reversed(d_levels):
        h = d_head.view(X, -1, 2, half, D)
        t = d_tail.view(X, -1, 2, half, D)
        # Every factor of the right half held the left half's total, and the other way round for tails.
        h[:, :, 0, -1] += h[:, :, 1].sum(2)
        h[:, :, 1, -1] += t[:, :, 0].sum(2)
        h[:, :, 1] += d_right
        t[:, :, 0] += d_left
        half //= 2
    return d_head


def blocks(scores: Tensor, half: int) -> Tensor:
    """The blocks (right half, left half) of square ``scores [X, C, R, C]`` at one level: ``[X, C/(2 half), half, R,
    half]``."""
    X, C, R, _ = scores.shape
    n = C // (2 * half)
    parts = scores.view(X, n, 2, half, R, n, 2, half)[:, :, 1, :, :, :, 0, :]
    return parts.diagonal(dim1=1, dim2=4).permute(0, 4, 1, 2, 3)


def shift(x: Tensor, first: float) -> Tensor:
    """Move factors one token later along axis -2; the first becomes ``first``."""
    return torch.cat([torch.full_like(x[..., :1, :], first), x[..., :-1, :]], dim=-2)


def unshift(dx: Tensor) -> Tensor:
    """Gradient of ``shift``."""
    return torch.cat([dx[..., 1:, :], torch.zeros_like(dx[..., :1, :])], dim=-2)
