# SPDX-License-Identifier: MIT
"""Scores between the tokens of a chunk, with their gradients.

For rows ``i`` and columns ``j`` of a chunk, with ``f(i, j)`` the decay factor from ``j`` to ``i`` per key channel::

    A[i, j] = sum_c q_ic w_jc f(i, j)_c      j <= i
    L[i, j] = sum_c r_ic w_jc f(i, j)_c      j < i; for an exclusive read f(i - 1, j)

``q`` and ``r`` lie in one tensor ``rows [X, 2, C, K]``, and so do the scores ``[X, 2, C, C]``: one product serves both.
The entries of ``L`` on and above its diagonal mean nothing.

One number per token pulls the factor out of the sum: a dense product and a mask. One number per channel does not: each
level of the decay tree is a batch of small products instead, down to neighbouring tokens, exact for any decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._delta.torch_decay import DecayTree, blocks, for_rows, from_rows, halves


def dense_factors(tree: DecayTree, exclusive: bool) -> Tensor:
    """Climb the tree of decays ``[X, C, 1]`` to the factors ``[X, 1 or 2, C, C]`` of scores, zero above the
    diagonal."""
    X, C, _ = tree.head.shape
    factor = torch.eye(C, dtype=tree.head.dtype, device=tree.head.device).repeat(X, 1, 1, 1)
    for half, right, left in tree.climb():
        torch.mul(right.unsqueeze(2), left.unsqueeze(2).mT, out=blocks(factor, half))
    return for_rows(factor.squeeze(1), exclusive, 0.0)


def dense_scores(rows: Tensor, w: Tensor, factors: Tensor) -> Tensor:
    """Scores for ``factors`` of ``dense_factors``, or a plain lower triangle of ones without decay."""
    X, _, C, K = rows.shape
    return torch.bmm(rows.view(X, 2 * C, K), w.mT).view(X, 2, C, C).mul_(factors)


def dense_backward(d_scores: Tensor, rows: Tensor, w: Tensor, factors: Tensor, d_rows: Tensor, dw: Tensor) -> None:
    """Add gradients to ``d_rows`` and ``dw``; ``d_scores`` is overwritten."""
    X, _, C, K = rows.shape
    d_scores.mul_(factors)
    d_scores[:, 1].diagonal(dim1=1, dim2=2).zero_()
    products = d_scores.view(X, 2 * C, C)
    d_rows.view(X, 2 * C, K).baddbmm_(products, w)
    dw.baddbmm_(products.mT, rows.view(X, 2 * C, K))


def dense_decay_gradient(pairs: Tensor, exclusive: bool, d_head: Tensor, d_tail: Tensor, d_total: Tensor) -> Tensor:
    """Gradient of ``g [X, C, 1]`` from gradients of the logarithms of its factors: between tokens (``pairs [X, 2, C,
    C]``, scores times their gradients), from the start and to the end of the chunk (``[X, C, 1]``) and over all of it
    (``[X, 1]``).

    ``g_t`` is in the factor from ``j`` to ``i`` where ``j < t <= i``. Only such terms are summed; none is taken back.
    """
    C = pairs.shape[-1]
    later = pairs.new_ones(C, C).triu_()
    earlier = pairs.new_ones(C, C).tril_(-1)
    dg = torch.matmul(later, from_rows(pairs, exclusive)).mul_(earlier).sum(-1, True)
    dg += torch.matmul(later, d_head)
    dg += torch.matmul(earlier, d_tail)
    return dg.add_(d_total.unsqueeze(1))


class _Level:
    """Operands of one level's products: rows of right halves ``[X * n, 2 * half, K]``, columns of left halves ``[X * n,
    half, K]``, both decayed to the boundary between the halves."""

    def __init__(self, half: int, right: Tensor, left: Tensor, rows: Tensor, w: Tensor, exclusive: bool) -> None:
        X, n, _, K = right.shape
        self.half, self.left, self.factors = half, left, for_rows(right, exclusive)
        decayed = rows.new_empty(X, n, 2, half, K)
        torch.mul(self.right_half(rows), self.factors, out=decayed)
        self.rows = decayed.view(X * n, 2 * half, K)
        self.columns = (halves(w, half)[:, :, 0] * left).view(X * n, half, K)

    def right_half(self, rows: Tensor) -> Tensor:
        """``rows [X, 2, C, K]`` of right halves, a view ``[X, n, 2, half, K]``."""
        X, _, C, K = rows.shape
        return rows.view(X, 2, C // (2 * self.half), 2, self.half, K)[:, :, :, 1].transpose(1, 2)

    def scores(self) -> Tensor:
        if self.half == 1:
            return (self.rows * self.columns).sum(-1, True)
        return torch.bmm(self.rows, self.columns.mT)

    def backward(self, d_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ``rows`` and ``columns``."""
        if self.half == 1:
            return d_scores * self.columns, (d_scores * self.rows).sum(1, True)
        return torch.bmm(d_scores, self.columns), torch.bmm(d_scores.mT, self.rows)


def channelwise_scores(rows: Tensor, w: Tensor, tree: DecayTree, exclusive: bool) -> Tensor:
    """Scores for decays ``[X, C, K]``; climbs the tree."""
    X, _, C, _ = rows.shape
    scores = rows.new_zeros(X, 2, C, C)
    torch.sum(rows[:, 0] * w, -1, out=scores[:, 0].diagonal(dim1=1, dim2=2))
    for half, right, left in tree.climb():
        level = _Level(half, right, left, rows, w, exclusive)
        blocks(scores, half).copy_(level.scores().view(X, -1, 2, half, half))
    return scores


def channelwise_backward(
    d_scores: Tensor, rows: Tensor, w: Tensor, tree: DecayTree, exclusive: bool
) -> tuple[Tensor, Tensor, list[tuple[int, Tensor, Tensor]]]:
    """Gradients of ``rows`` and ``w``, and what every level hands to ``DecayGradient.descend``; climbs the tree."""
    d_rows, dw = torch.zeros_like(rows), torch.empty_like(w)
    diagonal = d_scores[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
    torch.mul(diagonal, w, out=d_rows[:, 0])
    torch.mul(diagonal, rows[:, 0], out=dw)
    levels = []
    for half, right, left in tree.climb():
        level = _Level(half, right, left, rows, w, exclusive)
        d_level_rows, d_columns = level.backward(blocks(d_scores, half).reshape(-1, 2 * half, half))
        shaped_rows, shaped_columns = d_level_rows.view_as(level.right_half(rows)), d_columns.view_as(left)
        level.right_half(d_rows).addcmul_(shaped_rows, level.factors)
        halves(dw, half)[:, :, 0].addcmul_(shaped_columns, left)
        d_level_rows.mul_(level.rows)
        d_columns.mul_(level.columns)
        levels.append((half, from_rows(shaped_rows, exclusive), shaped_columns))
    return d_rows, dw, levels


def unit_lower_inverse(L: Tensor) -> Tensor:
    """``(I + L)^-1`` for the part of ``L [X, C, C]`` below the diagonal, block by block: ``[[P, 0], [B, Q]]`` has the
    inverse ``[[P', 0], [-Q' B P', Q']]``."""
    X, C, _ = L.shape
    L = L.unsqueeze(1)
    inverse = L.new_ones(X * C, 1, 1)
    half = 1
    while half < C:
        P, Q = inverse.view(-1, 2, half, half).unbind(1)
        B = blocks(L, half).reshape(-1, half, half)
        inverse = L.new_zeros(P.shape[0], 2 * half, 2 * half)
        inverse[:, :half, :half], inverse[:, half:, half:] = P, Q
        # Products go into memory of their own: PyTorch takes a strided output matrix by matrix.
        torch.neg(B if half == 1 else torch.bmm(Q, torch.bmm(B, P)), out=inverse[:, half:, :half])
        half *= 2
    return inverse
