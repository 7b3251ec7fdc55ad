# SPDX-License-Identifier: MIT
"""What the two gradient kernels of the vector-decay form share: their units, KB channels of 32 tokens and a head."""

import triton
import triton.language as tl

from fla.ops._delta.kernels.vector_math import load_tile, log_decay_grad, store_tile


@triton.jit
def state_products(
    states, exits, news, ys, do, row, n, w, w2, sub, h, H, c0, KP: tl.constexpr, KB: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, VB: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Products with the state S before the chunk and the gradient X of the one after it, where V takes several blocks:
    S^T X, S^T dO^T, S^T y^T and X^T v^T."""
    VC: tl.constexpr = V != VP
    QS = tl.zeros((KB, 32), tl.float32)
    YS = tl.zeros((KB, 32), tl.float32)
    VX = tl.zeros((KB, 32), tl.float32)
    SX = tl.zeros((KB, KB), tl.float32)
    for b in tl.static_range(VP // VB):
        vT = load_tile(news, w * VP + b * VB, VB, sub * 32, 64, 64, VB, 32, False, False, False)
        dot = load_tile(do, row, n, h * V + b * VB, V - b * VB, H * V, 32, VB, False, ROWS, VC).to(DT)
        yT = load_tile(ys, w * VP + b * VB, VB, sub * 32, 64, 64, VB, 32, False, False, False)
        St = load_tile(states, w2 * VP + b * VB, VB, c0, KP, KP, VB, KB, False, False, False)
        Xt = load_tile(exits, w2 * VP + b * VB, VB, c0, KP, KP, VB, KB, False, False, False)
        SX = tl.dot(tl.trans(St), Xt, SX, input_precision=PREC)
        QS = tl.dot(tl.trans(St), tl.trans(dot), QS, input_precision=PREC)
        YS = tl.dot(tl.trans(St), yT, YS, input_precision=PREC)
        VX = tl.dot(tl.trans(Xt), vT, VX, input_precision=PREC)
    return SX, QS, YS, VX


@triton.jit
def gate_grad(
    xg, x, rate, bias, lower, da, dbias, gi, gc, units, c0, n, K: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr,
    GATE: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Gradient of the gate's input from that of the decay; stores the unit's parts of those of its parameters, with
    zeros for the R - 1 blocks of channels that have no unit."""
    cc = tl.arange(0, KB)
    j = tl.arange(0, 32)[None, :]
    xg, xa = log_decay_grad(xg, x.to(tl.float32), rate, bias, lower, GATE)
    if RATE:
        if ROWS:
            xa = tl.where(j < n, xa, 0.0)
        if K != KP:
            xa = tl.where(c0 + cc[:, None] < K, xa, 0.0)
        tl.store(da + gi, tl.sum(tl.sum(xa, 1), 0))
        for i in tl.static_range(1, R):
            tl.store(da + gi + i * units, 0.0)
    if BIAS:
        y = xg
        if ROWS:
            y = tl.where(j < n, xg, 0.0)
        tl.store(dbias + gc + c0 + cc, tl.sum(y, 1), mask=c0 + cc < K)
    return xg


@triton.jit
def no_gate_grad(
    da, dbias, gi, gc, units, c0, K: tl.constexpr, KB: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Where a half of a tile has no tokens, its parts of the sums over chunks count as 0."""
    cc = tl.arange(0, KB)
    if RATE:
        for i in tl.static_range(R):
            tl.store(da + gi + i * units, 0.0)
    if BIAS:
        tl.store(dbias + gc + c0 + cc, tl.zeros((KB,), tl.float32), mask=c0 + cc < K)


@triton.jit
def store_unit(out, x, row, n, h, H, c0, K: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, ROWS: tl.constexpr):
    """``x`` [KB, 32] to the unit's place in ``out`` [rows, H, K]."""
    y = tl.trans(x).to(out.dtype.element_ty)
    store_tile(out, y, row, n, h * K + c0, K - c0, H * K, 32, KB, False, ROWS, K != KP)
