# SPDX-License-Identifier: MIT
"""Chunked linear attention with a decay per key channel, per value channel, or both.

The scores inside a chunk, ``A[i, j] = sum_d q[i, d] k[j, d] e^(gk[j+1, d] + ... + gk[i, d])``, are not a plain matrix
product. They become one when `j` and `i` lie on different sides of a boundary: the decay up to the boundary scales
``k[j]``, the decay from it on scales ``q[i]``, and neither factor exceeds one for gates <= 0. So the chunk is halved
again and again: level `s` takes the boundaries in the middle of blocks of ``2 s`` rows and multiplies the second half
of each block with its first half; after ``log2(C)`` levels only the diagonal is left, which has no decay.

The decays of level ``2 s`` follow from those of level `s` by one product per row, so each gate goes through one
exponential in all, nothing is divided or subtracted, and a gate of minus infinity is an ordinary zero. The gradient of
the log gates descends the same levels. Value gates act on ``v`` as key gates act on ``k`` and on ``o`` as on ``q``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla.ops._common.gates import without_autocast
from fla.ops._common.single import once, probes
from fla.ops._common.varlen import ChunkPlan
from fla.ops._linear.state_pass import pass_gradients, pass_states

__all__ = ["VectorChunks"]

# Elements of one [rows, C, D] operand that are worked on at once: bounds scratch memory, fits a CPU cache.
_SLAB_CPU, _SLAB_DEVICE = 1 << 17, 1 << 24


def _slabs(n: int, rows: int, width: int, device: torch.device) -> list[slice]:
    size = max(1, (_SLAB_CPU if device.type == "cpu" else _SLAB_DEVICE) // max(1, rows * width))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _halves(x: Tensor, s: int) -> Tensor:
    """``[n, C, D]`` as blocks of two halves of `s` rows: a view ``[n * C / 2s, 2, s, D]``."""
    return x.view(x.shape[0] * x.shape[1] // (2 * s), 2, s, x.shape[-1])


def _blocks(A: Tensor, s: int) -> Tensor:
    """The score blocks (second half, first half) of level `s`: a view ``[n, s, s, C / 2s]`` of ``[n, C, C]``."""
    nb = A.shape[-1] // (2 * s)
    return A.view(-1, nb, 2, s, nb, 2, s).diagonal(0, 1, 4)[:, 1, :, 0]


def _apply(a: Tensor, x: Tensor) -> Tensor:
    """Batched product of small square blocks with rows; by hand where the library is slow."""
    if a.shape[-1] == 1:
        return a * x
    if a.shape[-1] == 2:
        return torch.addcmul(a[..., :1] * x[:, :1], a[..., 1:], x[:, 1:])
    return torch.bmm(a, x)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Batched product of rows with rows."""
    return (x * y).sum(-1, keepdim=True) if x.shape[1] == 1 else torch.bmm(x, y.mT)


class _Decays:
    """Decays of one gate ``[n, C, D]`` at the current level `s`, in blocks of `s` rows.

    ``start`` goes from the block's start to a row, itself included; ``end`` from a row, itself excluded, to the block's
    end.
    """

    def __init__(self, gate: Tensor, out: Tensor | None = None) -> None:
        """`gate` are log decays; `out` is where ``start`` shall lie, or None for new memory."""
        self.start = torch.exp(gate, out=out)
        self.end = torch.ones_like(self.start)

    def halves(self, s: int) -> tuple[Tensor, Tensor]:
        """Decay of first halves to the boundary and of second halves from it, each ``[blocks, s, D]``; views."""
        return _halves(self.end, s)[:, 0], _halves(self.start, s)[:, 1]

    def double(self, s: int) -> None:
        start, end = _halves(self.start, s), _halves(self.end, s)
        end[:, 0] *= start[:, 1, -1:]
        start[:, 1] *= start[:, 0, -1:]


class _LogGradient:
    """Gradient of a log gate from what the decays of each level contribute; levels are added from the top down."""

    def __init__(self, start: Tensor, end: Tensor, total: Tensor) -> None:
        """`start`, `end` ``[n, C, D]``: of the whole chunk's decays; `total` ``[n, D]``: of its last ``start``."""
        self.start, self.end = start, end
        start[:, -1] += total

    def add(self, s: int, first: Tensor, second: Tensor) -> None:
        start, end = _halves(self.start, s), _halves(self.end, s)
        start[:, 0, -1] += start[:, 1].sum(-2)
        start[:, 1, -1] += end[:, 0].sum(-2)
        start[:, 1] += second
        end[:, 0] += first


def _start(decays: _Decays | None) -> Tensor | None:
    return None if decays is None else decays.start


def _end(decays: _Decays | None) -> Tensor | None:
    return None if decays is None else decays.end


def _decays(gate: Tensor | None, part: slice, out: Tensor | None = None) -> _Decays | None:
    """Decays of the chunks `part` of a gate ``[M, H, C, D]``, with ``start`` in the same rows of `out`."""
    return None if gate is None else _Decays(gate.flatten(0, 1)[part], None if out is None else out[part])


def _levels(C: int) -> list[int]:
    return [1 << i for i in range(C.bit_length() - 1)]


def _scaled(x: Tensor, decay: Tensor | None) -> Tensor:
    return x.contiguous() if decay is None else x * decay


def _accumulate(total: Tensor, x: Tensor, decay: Tensor | None) -> None:
    if decay is None:
        total += x
    else:
        total.addcmul_(x, decay)


def _half(gate: _Decays | None, s: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if gate is None else gate.halves(s)


def _inside(
    q: Tensor, k: Tensor, v: Tensor, gk: _Decays | None, gv: _Decays | None, o: Tensor, A: Tensor | None
) -> None:
    """Outputs inside chunks into `o`, unscaled, and scores into `A` (None with a value gate); doubles the decays."""
    diagonal = (q * k).sum(-1)
    if A is None:
        torch.mul(diagonal.unsqueeze(-1), v, out=o)
    for s in _levels(q.shape[1]):
        to_k, to_q = _half(gk, s)
        scores = _products(_scaled(_halves(q, s)[:, 1], to_q), _scaled(_halves(k, s)[:, 0], to_k))
        if A is not None:
            _blocks(A, s).copy_(scores.view(q.shape[0], -1, s, s).permute(0, 2, 3, 1))
        else:
            to_v, to_o = _half(gv, s)
            _accumulate(_halves(o, s)[:, 1], _apply(scores, _scaled(_halves(v, s)[:, 0], to_v)), to_o)
        for gate in (gk, gv):
            if gate is not None:
                gate.double(s)
    if A is not None:
        A.diagonal(0, 1, 2).copy_(diagonal)
        torch.bmm(A, v, out=o)


class _Grads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    gk: Tensor | None
    gv: Tensor | None

    def rows(self, part: slice) -> _Grads:
        gk, gv = (None if x is None else x[part] for x in (self.gk, self.gv))
        return _Grads(self.q[part], self.k[part], self.v[part], gk, gv)


class _Level(NamedTuple):
    """What one level contributes to the log gates: (first halves, second halves) of the key and of the value gate."""

    s: int
    key: tuple[Tensor, Tensor] | None
    value: tuple[Tensor, Tensor] | None


def _inside_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    gk: _Decays | None,
    gv: _Decays | None,
    A: Tensor | None,
    out: _Grads,
) -> list[_Level]:
    """The part inside chunks: dq, dk and dv into `out`, levels' shares of the gates returned; doubles the decays."""
    dA = None
    ddiagonal = (do * v).sum(-1, keepdim=True)
    dq, dk = torch.mul(ddiagonal, k, out=out.q), torch.mul(ddiagonal, q, out=out.k)
    if A is not None:
        dv, dA = torch.bmm(A.mT, do, out=out.v), torch.bmm(do, v.mT)
    else:
        dv = torch.mul((q * k).sum(-1, keepdim=True), do, out=out.v)
    levels = []
    for s in _levels(q.shape[1]):
        (to_k, to_q), (to_v, to_o) = _half(gk, s), _half(gv, s)
        q2, k1 = _scaled(_halves(q, s)[:, 1], to_q), _scaled(_halves(k, s)[:, 0], to_k)
        value = None
        if dA is not None:
            dscores = _blocks(dA, s).permute(0, 3, 1, 2).reshape(-1, s, s)
        else:
            scores = _products(q2, k1)
            v1, do2 = _scaled(_halves(v, s)[:, 0], to_v), _scaled(_halves(do, s)[:, 1], to_o)
            dscores, dv1 = _products(do2, v1), _apply(scores.mT, do2)
            _accumulate(_halves(dv, s)[:, 0], dv1, to_v)
            if gv is not None:
                value = (dv1.mul_(v1), _apply(scores, v1).mul_(do2))
        dq2, dk1 = _apply(dscores, k1), _apply(dscores.mT, q2)
        _accumulate(_halves(dq, s)[:, 1], dq2, to_q)
        _accumulate(_halves(dk, s)[:, 0], dk1, to_k)
        levels.append(_Level(s, None if gk is None else (dk1.mul_(k1), dq2.mul_(q2)), value))
        for gate in (gk, gv):
            if gate is not None:
                gate.double(s)
    return levels


def _chunk_decay(key: Tensor | None, value: Tensor | None) -> Tensor:
    """What a chunk leaves of its starting state, broadcastable to ``[n, K, V]``, from the decays ``[n, C, D]``."""
    rows = None if key is None else key[:, -1].unsqueeze(-1)
    columns = None if value is None else value[:, -1].unsqueeze(-2)
    if rows is None or columns is None:
        only = columns if rows is None else rows
        assert only is not None
        return only
    return rows * columns


def _carried(S: Tensor, dS: Tensor, key: _Decays | None, value: _Decays | None) -> tuple[Tensor, Tensor]:
    """What the decay of whole chunks contributes to the gates: ``[n, K]`` and ``[n, V]``."""
    products = S * dS
    if value is None:
        rows = products.sum(-1)
        return rows if key is None else rows.mul_(key.start[:, -1]), rows
    products.mul_(value.start[:, -1:])
    if key is not None:
        products.mul_(key.start[:, -1].unsqueeze(-1))
    return products.sum(-1), products.sum(-2)


class VectorChunks(torch.autograd.Function):
    """``(plan, scale, q, k, v, gk, gv, initial) -> (o, final)`` in chunk layout; at least one of the gates is given."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        plan: ChunkPlan,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gk: Tensor | None,
        gv: Tensor | None,
        initial: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        heads = q.shape[:2]
        ctx.probes = probes(q, k, v, initial)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        n, C, K = q.shape
        o = torch.empty_like(v)
        A = q.new_zeros(n, C, C) if gv is None else None
        increments = q.new_empty(n, K, v.shape[-1])
        key_start = None if gk is None else torch.empty_like(q)
        value_start = None if gv is None else torch.empty_like(v)
        for part in _slabs(n, C, max(K, v.shape[-1]), q.device):
            key, value = _decays(gk, part, key_start), _decays(gv, part, value_start)
            _inside(q[part], k[part], v[part], key, value, o[part], None if A is None else A[part])
            k_end, v_end = _scaled(k[part], _end(key)), _scaled(v[part], _end(value))
            torch.bmm(k_end.mT, v_end, out=increments[part])
        decay = _chunk_decay(key_start, value_start)
        states, final = pass_states(plan, increments.unflatten(0, heads), decay.unflatten(0, heads), initial)
        q_start = q if key_start is None else q * key_start
        if value_start is None:
            o.baddbmm_(q_start, states.flatten(0, 1))
        else:
            o.addcmul_(torch.bmm(q_start, states.flatten(0, 1)), value_start)
        ctx.plan, ctx.scale, ctx.has_initial = plan, scale, initial is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, gk, gv, A, states, key_start, value_start)
        return o.mul_(scale).unflatten(0, heads), final

    @staticmethod
    @once
    @without_autocast
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, gk, gv, A, states, key_start, value_start = ctx.saved_tensors
        heads = states.shape[:2]
        do = torch.zeros_like(v) if do is None else do.flatten(0, 1) * ctx.scale
        q_start = q if key_start is None else q * key_start
        do_start = do if value_start is None else do * value_start
        decay = _chunk_decay(key_start, value_start)
        ends, dinitial = pass_gradients(
            ctx.plan,
            torch.bmm(q_start.mT, do_start).unflatten(0, heads),
            decay.unflatten(0, heads),
            dfinal,
        )
        states, ends = states.flatten(0, 1), ends.flatten(0, 1)
        grads = _Grads(
            torch.empty_like(q),
            torch.empty_like(k),
            torch.empty_like(v),
            torch.empty_like(q) if ctx.needs_input_grad[5] else None,
            torch.empty_like(v) if ctx.needs_input_grad[6] else None,
        )
        for part in _slabs(q.shape[0], q.shape[1], max(q.shape[-1], v.shape[-1]), q.device):
            key, value = _decays(gk, part), _decays(gv, part)
            out = grads.rows(part)
            levels = _inside_backward(
                q[part], k[part], v[part], do[part], key, value, None if A is None else A[part], out
            )
            S, dS = states[part], ends[part]
            k_end, v_end = _scaled(k[part], _end(key)), _scaled(v[part], _end(value))
            # Gate gradients are summed up in place, so what starts them is computed where they shall lie.
            dq_start, dk_end = torch.bmm(do_start[part], S.mT, out=out.gk), torch.bmm(v_end, dS.mT)
            dv_end = torch.bmm(k_end, dS)
            _accumulate(out.q, dq_start, _start(key))
            _accumulate(out.k, dk_end, _end(key))
            _accumulate(out.v, dv_end, _end(value))
            of_rows, of_columns = _carried(S, dS, key, value)
            if out.gk is not None:
                dgate = _LogGradient(dq_start.mul_(q_start[part]), dk_end.mul_(k_end), of_rows)
                for level in reversed(levels):
                    assert level.key is not None
                    dgate.add(level.s, *level.key)
            if out.gv is not None:
                read = torch.bmm(q_start[part], S, out=out.gv).mul_(do_start[part])
                dgate = _LogGradient(read, dv_end.mul_(v_end), of_columns)
                for level in reversed(levels):
                    assert level.value is not None
                    dgate.add(level.s, *level.value)
        shaped = (None if x is None else x.unflatten(0, heads) for x in grads)
        return None, None, *shaped, dinitial if ctx.has_initial else None
