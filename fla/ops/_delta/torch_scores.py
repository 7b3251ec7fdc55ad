# SPDX-License-Identifier: MIT
"""Scores between the tokens of a chunk, with their gradients.

For rows ``i`` and columns ``j`` of a chunk, with ``f(i, j)`` the decay factor from ``j`` to ``i`` per key channel::

    A[i, j] = sum_c q_ic w_jc f(i, j)_c      j <= i
    L[i, j] = sum_c r_ic w_jc f(i, j)_c      j < i; for an exclusive read f(i - 1, j)

One number per token pulls the factor out of the sum: a dense product and a mask. One number per channel does not: each
level of the decay tree is a batch of small products instead, down to neighbouring tokens, exact for any decay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fla.ops._delta.torch_decay import DecayTree, blocks, shift, unshift


@dataclass(frozen=True)
class Scores:
    """``A`` and ``L`` of chunks, ``[X, C, C]``; ``L`` is defined below its diagonal only."""

    A: Tensor
    L: Tensor


@dataclass(frozen=True)
class ScoresGradient:
    """Gradients of the operands ``[X, C, K]`` and of the logarithms of the tree's level factors."""

    q: Tensor
    r: Tensor
    w: Tensor
    levels: list[tuple[Tensor, Tensor]]


def _row_factors(right: Tensor, exclusive: bool) -> Tensor:
    """Row factors of one level for q and r, ``[X, n, half, 1 or 2, D]``."""
    return torch.stack([right, shift(right, 1.0)], 3) if exclusive else right.unsqueeze(3)


def _log_row_gradient(d_rows: Tensor, exclusive: bool) -> Tensor:
    """Sum the two parts (axis 3) of a row gradient onto the factors they used."""
    return d_rows[:, :, :, 0] + unshift(d_rows[:, :, :, 1]) if exclusive else d_rows.sum(3)


def _dense_factors(tree: DecayTree | None, like: Tensor, exclusive: bool) -> tuple[Tensor, Tensor]:
    """Factors for A and for L, ``[X, C, C]``, zero where there is no score; ``like [X, C, K]`` gives C, dtype and
    device."""
    X, C, _ = like.shape
    if tree is None:
        ones = like.new_ones(C, C)
        return ones.tril(), ones.tril(-1)
    factor = torch.eye(C, dtype=like.dtype, device=like.device).expand(X, C, C).contiguous()
    for level, (right, left) in enumerate(tree.levels):
        torch.mul(right.unsqueeze(3), left[..., 0][:, :, None, None], out=blocks(factor.unsqueeze(2), 1 << level))
    return factor, shift(factor, 0.0) if exclusive else factor.tril(-1)


def _dense(q: Tensor, r: Tensor, w: Tensor, tree: DecayTree | None, exclusive: bool) -> Scores:
    C = q.shape[1]
    products = torch.bmm(torch.cat([q, r], 1), w.transpose(1, 2))
    factor, read_factor = _dense_factors(tree, q, exclusive)
    return Scores(products[:, :C].mul_(factor), products[:, C:].mul_(read_factor))


def _dense_backward(
    s: Scores, dA: Tensor, dL: Tensor, q: Tensor, r: Tensor, w: Tensor, tree: DecayTree | None, exclusive: bool
) -> ScoresGradient:
    C = q.shape[1]
    levels = []
    factor, read_factor = _dense_factors(tree, q, exclusive)
    d_products = torch.cat([dA * factor, dL * read_factor], 1)
    if tree is not None:
        pairs = dL * s.L
        pairs = torch.addcmul(unshift(pairs) if exclusive else pairs, dA, s.A).unsqueeze(2)
        for level in range(len(tree.levels)):
            part = blocks(pairs, 1 << level)
            levels.append((part.sum(-1), part.sum((2, 3)).unsqueeze(-1)))
    d_rows = torch.bmm(d_products, w)
    dw = torch.bmm(d_products.transpose(1, 2), torch.cat([q, r], 1))
    return ScoresGradient(d_rows[:, :C], d_rows[:, C:], dw, levels)


def _channelwise(q: Tensor, r: Tensor, w: Tensor, tree: DecayTree, exclusive: bool) -> Scores:
    X, C, K = q.shape
    rows = torch.stack([q, r], 2)
    scores = q.new_zeros(X, C, 2, C)
    torch.sum(q * w, -1, out=scores[:, :, 0].diagonal(dim1=1, dim2=2))
    for level, (right, left) in enumerate(tree.levels):
        half = 1 << level
        n = C // (2 * half)
        part = rows.view(X, n, 2, half, 2, K)[:, :, 1] * _row_factors(right, exclusive)
        columns = w.view(X, n, 2, half, K)[:, :, 0] * left
        if half == 1:
            product = (part * columns.unsqueeze(2)).sum(-1)
        else:
            product = torch.bmm(part.reshape(X * n, 2 * half, K), columns.reshape(X * n, half, K).mT)
        blocks(scores, half).copy_(product.view(X, n, half, 2, half))
    return Scores(scores[:, :, 0], scores[:, :, 1])


def _channelwise_backward(
    dA: Tensor, dL: Tensor, q: Tensor, r: Tensor, w: Tensor, tree: DecayTree, exclusive: bool
) -> ScoresGradient:
    X, C, K = q.shape
    rows = torch.stack([q, r], 2)
    d_scores = torch.stack([dA, dL], 2)
    d_rows = torch.zeros_like(rows)
    dw = torch.zeros_like(w)
    diagonal = dA.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    torch.mul(diagonal, w, out=d_rows[:, :, 0])
    torch.mul(diagonal, q, out=dw)
    levels = []
    for level, (right, left) in enumerate(tree.levels):
        half = 1 << level
        n = C // (2 * half)
        factors = _row_factors(right, exclusive)
        part = rows.view(X, n, 2, half, 2, K)[:, :, 1] * factors
        columns = w.view(X, n, 2, half, K)[:, :, 0] * left
        d_block = blocks(d_scores, half)
        if half == 1:
            d_part = d_block * columns.unsqueeze(2)
            d_columns = (d_block * part).sum(3)
        else:
            d_block = d_block.reshape(X * n, 2 * half, half)
            d_part = torch.bmm(d_block, columns.reshape(X * n, half, K)).view_as(part)
            d_columns = torch.bmm(d_block.mT, part.reshape(X * n, 2 * half, K)).view_as(columns)
        d_rows.view(X, n, 2, half, 2, K)[:, :, 1].addcmul_(d_part, factors)
        dw.view(X, n, 2, half, K)[:, :, 0].addcmul_(d_columns, left)
        levels.append((_log_row_gradient(d_part.mul_(part), exclusive), d_columns.mul_(columns)))
    return ScoresGradient(d_rows[:, :, 0], d_rows[:, :, 1], dw, levels)


def unit_lower_inverse(L: Tensor) -> Tensor:
    """``(I + L)^-1`` for the part of ``L [X, C, C]`` below the diagonal, block by block: ``[[P, 0], [B, Q]]`` has the
    inverse ``[[P', 0], [-Q' B P', Q']]``."""
    X, C, _ = L.shape
    inverse = torch.eye(C, dtype=L.dtype, device=L.device).expand(X, C, C).contiguous()
    L, square = L.unsqueeze(2), inverse.unsqueeze(2)
    half = 1
    while half < C:
        n = C // (2 * half)
        below = blocks(L, half)
        if half > 1:
            halves = inverse.view(X, n, 2, half, n, 2, half)
            P, Q = (halves[:, :, i, :, :, i].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2) for i in (0, 1))
            P, Q, below = (t.reshape(X * n, half, half) for t in (P, Q, below))
            below = torch.bmm(Q, torch.bmm(below, P)).view(X, n, half, 1, half)
        torch.neg(below, out=blocks(square, half))
        half *= 2
    return inverse


def scores(q: Tensor, r: Tensor, w: Tensor, tree: DecayTree | None, exclusive: bool) -> Scores:
    """Scores of chunks; ``q, r, w [X, C, K]`` contiguous, ``tree`` of decays ``[X, C, 1]`` or ``[X, C, K]``."""
    if tree is None or tree.head.shape[-1] != q.shape[-1]:
        return _dense(q, r, w, tree, exclusive)
    return _channelwise(q, r, w, tree, exclusive)


def scores_backward(
    s: Scores, dA: Tensor, dL: Tensor, q: Tensor, r: Tensor, w: Tensor, tree: DecayTree | None, exclusive: bool
) -> ScoresGradient:
    """Gradients of ``scores``; entries of ``dA`` and ``dL`` outside the defined scores are not used."""
    if tree is None or tree.head.shape[-1] != q.shape[-1]:
        return _dense_backward(s, dA, dL, q, r, w, tree, exclusive)
    return _channelwise_backward(dA, dL, q, r, w, tree, exclusive)
