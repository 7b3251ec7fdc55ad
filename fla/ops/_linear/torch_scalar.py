# SPDX-License-Identifier: MIT
"""Chunked linear attention with one decay per head and token, or none.

Per chunk of `C` tokens with starting state ``S``, ``b`` the sums of log decays from the chunk's start and
``d[j, i] = g[j+1] + ... + g[i]``::

    o[i]  = scale * (e^b[i] q[i] S + sum_{j<=i} (q[i] . k[j]) e^d[j, i] v[j])
    S_end = e^b[C-1] S + sum_j e^d[j, C-1] k[j] (x) v[j]

The sums ``d`` are formed one by one and never as a difference of two long sums: so decays of minus infinity need no
special case, nothing cancels, and no exponential of a positive number appears unless a gate is positive. The gradient
of the log decays is summed the same way, over the pairs ``j < t <= i`` that token `t` decays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fla.ops._common.gates import without_autocast
from fla.ops._common.single import once, probes
from fla.ops._common.varlen import ChunkPlan
from fla.ops._linear.state_pass import pass_gradients, pass_states

__all__ = ["ScalarChunks"]


_B = 8  # Rows per block of the decay tile; divides every chunk size.


def _segments(g: Tensor) -> Tensor:
    """``exp(g[j+1] + ... + g[i])`` as ``[..., n (j), n (i)]`` from ``[..., n]``; zero for i < j."""
    return g.unsqueeze(-2).expand(*g.shape, g.shape[-1]).triu(1).cumsum(-1).exp_().triu_()


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """From log decays ``[M, H, C]``: ``e^d`` as ``[M, H, C (j), C (i)]``, zero for i < j, and ``e^b`` ``[M, H, C]``.

    Sums are formed for pairs of rows in one block and for pairs of blocks; a pair of rows in different blocks is the
    product of the way to its block's end, the blocks between, and the way from its block's start.
    """
    blocks = g.unflatten(-1, (-1, _B))
    inner = _segments(blocks)  # [M, H, blocks, B, B]
    between = pad(_segments(blocks.sum(-1))[..., :-1], (1, 0))  # [M, H, blocks, blocks], both ends excluded
    start = inner[..., 0, :] * blocks[..., :1].exp()
    left = inner[..., -1].unsqueeze(-1) * between.unsqueeze(-2)
    tile = left.unsqueeze(-1) * start[..., None, None, :, :]  # [M, H, block of j, j, block of i, i]
    _diagonal(tile).copy_(inner)
    tile = tile.flatten(4, 5).flatten(2, 3)
    return tile, tile[..., 0, :] * g[..., :1].exp()


def _diagonal(tile: Tensor) -> Tensor:
    """Blocks on the diagonal of ``[M, H, n, B, n, B]``, a view ``[M, H, n, B, B]``."""
    return tile.diagonal(0, 2, 4).permute(0, 1, 4, 2, 3)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product over the leading two axes."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


class ScalarChunks(torch.autograd.Function):
    """``(plan, scale, q, k, v, g, initial) -> (o, final)`` in chunk layout; `g` ``[M, H, C]`` or None."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        plan: ChunkPlan,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        scores = _mm(k, q.mT)  # rows j, columns i
        if g is None:
            scores.triu_()
            tile = from_start = decay = None
            k_end, q_start = k, q
        else:
            tile, from_start = _decays(g)
            scores.mul_(tile)
            decay = from_start[..., -1:, None]
            k_end, q_start = k * tile[..., -1:], q * from_start.unsqueeze(-1)
        states, final = pass_states(plan, _mm(k_end.mT, v), decay, initial)
        o = _mm(scores.mT, v)
        o.flatten(0, 1).baddbmm_(q_start.flatten(0, 1), states.flatten(0, 1)).mul_(scale)
        ctx.plan, ctx.scale, ctx.has_initial = plan, scale, initial is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, scores, states, tile, from_start)
        ctx.probes = probes(g, initial)
        return o, final

    @staticmethod
    @once
    @without_autocast
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, scores, states, tile, from_start = ctx.saved_tensors
        do = v.new_zeros(v.shape) if do is None else do * ctx.scale
        if tile is None:
            q_start, k_end, decay = q, k, None
        else:
            to_end = tile[..., -1:]
            q_start, k_end, decay = q * from_start.unsqueeze(-1), k * to_end, from_start[..., -1:, None]
        ends, dinitial = pass_gradients(ctx.plan, _mm(q_start.mT, do), decay, dfinal)
        dscores = _mm(v, do.mT)
        dv = _mm(scores, do)
        dv.flatten(0, 1).baddbmm_(k_end.flatten(0, 1), ends.flatten(0, 1))
        dq_start, dk_end = _mm(do, states.mT), _mm(v, ends.mT)
        dg = None
        if tile is None:
            dscores.triu_()
        else:
            if ctx.needs_input_grad[5]:
                pairs = scores * dscores
                of_state = (states * ends).sum((-2, -1)) * from_start[..., -1]
                reads, writes = (q_start * dq_start).sum(-1), (k_end * dk_end).sum(-1)
                dg = _gate_gradient(pairs, reads, writes, of_state)
            dscores.mul_(tile)
            dq_start.mul_(from_start.unsqueeze(-1))
            dk_end.mul_(to_end)
        dq = dq_start
        dq.flatten(0, 1).baddbmm_(dscores.mT.flatten(0, 1), k.flatten(0, 1))
        dk = dk_end
        dk.flatten(0, 1).baddbmm_(dscores.flatten(0, 1), q.flatten(0, 1))
        return None, None, dq, dk, dv, dg, dinitial if ctx.has_initial else None


def _suffix_sums(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def _covered(pairs: Tensor) -> Tensor:
    """For each t the sum of ``pairs[j, i]`` over ``j < t <= i``: ``[..., n]`` from ``[..., n, n]``."""
    return _suffix_sums(pairs).triu_(1).sum(-2)


def _gate_gradient(pairs: Tensor, reads: Tensor, writes: Tensor, of_state: Tensor) -> Tensor:
    """Gradient of the log decays ``[M, H, C]`` from what each exponential contributes.

    Args:
        pairs: contribution of ``e^d[j, i]``, ``[M, H, C (j), C (i)]``, zero for i < j; overwritten.
        reads: of ``e^b[i]``, ``[M, H, C]``: gates up to i.
        writes: of ``e^d[j, C-1]``, ``[M, H, C]``: gates after j.
        of_state: of ``e^b[C-1]`` in the state pass, ``[M, H]``: every gate.
    """
    pairs = pairs.unflatten(3, (-1, _B)).unflatten(2, (-1, _B))  # [M, H, block of j, j, block of i, i]
    inner = _diagonal(pairs)
    dg = _covered(inner)  # [M, H, blocks, B]
    inner.zero_()
    to_block = pairs.sum(-1)  # [M, H, block of j, j, block of i]
    dg[..., 1:] += to_block.sum(-1)[..., :-1].cumsum(-1)
    dg += _suffix_sums(pairs.sum((2, 3)))
    dg += _covered(pad(to_block.sum(3)[..., 1:], (0, 1))).unsqueeze(-1)
    dg = dg.flatten(2)
    dg += _suffix_sums(reads)
    dg[..., 1:] += writes[..., :-1].cumsum(-1)
    return dg.add_(of_state.unsqueeze(-1))
