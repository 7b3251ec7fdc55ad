# SPDX-License-Identifier: MIT
"""Decay factors between the tokens of a chunk, as products only.

The factor from token ``j`` to token ``i > j`` is ``prod_{j < l <= i} exp(g_l)``. Split the chunk in halves again and
again: the pair falls apart at one split, with ``i`` in the right half and ``j`` in the left, and its factor is (product
from the start of the right half to ``i``) times (product from after ``j`` to the end of the left half). Both are at
most one, so nothing overflows; no cumulative sum is ever subtracted, so -1000 or -inf beside -0.01 costs no precision;
and the gradient of ``g_l`` collects only pairs that cross ``l``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class DecayTree:
    """Decay factors of natural-log decays ``g [X, C, D]``, climbed level by level; ``C`` is a power of two.

    Once climbed, ``head`` holds the factor from the state at the chunk's start to each token and ``tail`` that from
    each token to the chunk's end, ``[X, C, D]``.
    """

    def __init__(self, g: Tensor) -> None:
        self.head = g.exp()
        self.tail = torch.ones_like(self.head)

    def climb(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For half sizes 1, 2, ... C/2 the half size, the row factors of right halves and the column factors of left
        halves, ``[X, C / (2 * half), half, D]``: views, good until the next step."""
        half = 1
        while half < self.head.shape[1]:
            head, tail = halves(self.head, half), halves(self.tail, half)
            yield half, head[:, :, 1], tail[:, :, 0]
            tail[:, :, 0].mul_(head[:, :, 1, -1:])
            head[:, :, 1].mul_(head[:, :, 0, -1:])
            half *= 2


class DecayGradient:
    """Gradient of ``g`` from gradients of the *logarithms* of its factors, collected from the top level down."""

    def __init__(self, d_head: Tensor, d_tail: Tensor, d_total: Tensor) -> None:
        """``d_head, d_tail [X, C, D]`` are used up; ``d_total [X, D]`` belongs to the factor of the whole chunk."""
        self.head, self.tail = d_head, d_tail
        d_head[:, -1] += d_total

    def descend(self, half: int, d_right: Tensor, d_left: Tensor) -> None:
        """Add what the factors of one level contribute; after the level of half size 1 ``head`` is the gradient."""
        head, tail = halves(self.head, half), halves(self.tail, half)
        # Every factor of the right half held the left half's total, and the other way round for tails.
        head[:, :, 0, -1] += head[:, :, 1].sum(2)
        head[:, :, 1, -1] += tail[:, :, 0].sum(2)
        head[:, :, 1] += d_right
        tail[:, :, 0] += d_left


def halves(x: Tensor, half: int) -> Tensor:
    """``[X, C, D]`` as ``[X, C / (2 * half), 2, half, D]``."""
    X, C, D = x.shape
    return x.view(X, C // (2 * half), 2, half, D)


def blocks(scores: Tensor, half: int) -> Tensor:
    """The blocks (right half, left half) of square ``scores [X, R, C, C]`` at one level: a view ``[X, C/(2 half), R,
    half, half]``."""
    X, R, C, _ = scores.shape
    n = C // (2 * half)
    parts = scores.view(X, R, n, 2, half, n, 2, half)[:, :, :, 1, :, :, 0, :]
    return parts.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)


def shift(x: Tensor, first: float) -> Tensor:
    """Move factors one token later along axis -2; the first becomes ``first``."""
    return torch.cat([torch.full_like(x[..., :1, :], first), x[..., :-1, :]], dim=-2)


def unshift(dx: Tensor) -> Tensor:
    """Gradient of ``shift``."""
    return torch.cat([dx[..., 1:, :], torch.zeros_like(dx[..., :1, :])], dim=-2)


def for_rows(factors: Tensor, exclusive: bool, first: float = 1.0) -> Tensor:
    """Factors ``[..., C, D]`` for the query and the read row, ``[..., 1 or 2, C, D]``: the read row of an exclusive
    read has those of the token before."""
    return torch.stack([factors, shift(factors, first)], -3) if exclusive else factors.unsqueeze(-3)


def from_rows(d_rows: Tensor, exclusive: bool) -> Tensor:
    """Gradient of ``for_rows``: ``[..., 2, C, D]`` summed onto ``[..., C, D]``."""
    query, read = d_rows.unbind(-3)
    return query + (unshift(read) if exclusive else read)
