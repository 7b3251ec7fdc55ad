# SPDX-License-Identifier: MIT
"""Chunk-local gradients of the vector-decay chunk form, 64 tokens at a time.

New values V, their gradients y and the states are facts of a token, not of a chunk: the scans make them 32 tokens at
a time and this kernel uses them 64 at a time, which halves the states to store and fills the tensor cores.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at
from fla.ops._delta.kernels.vector_math import (
    SHIFT,
    UNSHIFT,
    ex2,
    grad_sum,
    level_pairs,
    level_sums,
    load_tile,
    log_decay,
    log_decay_grad,
    store_tile,
    token_sum,
    write_rate,
)


@triton.jit
def bounded_pairs(
    dA, F, unit, bt, kn, qn, gs, QS, YS, VX, ss, SD: tl.constexpr, PREC: tl.constexpr, GPREC: tl.constexpr
):
    """All terms of one channel slice under a bounded gate: two diagonal blocks of 32 with a fixed anchor and the block
    below them. Returns (dq, read side of dk without beta, write side of dk, gradient of the log decay).

    Each score matrix is rounded once and the rounded operands also weigh the gradients of the decay, so that what the
    two tokens of a pair contribute cancels exactly wherever it must. ``dA`` and ``F`` come in units of ``unit``, so that
    their products with factors near 2^-116 stay inside fp32's range whatever the scale of the loss.
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    same = (i // 32) == (j // 32)
    top = i < 32
    tri = tl.where((i >= j) & same, 1.0, 0.0)
    tru = tl.where((i < j) & same, 1.0, 0.0)
    swap = tl.where(same, 0.0, 1.0)
    eg = ex2(tl.sum(gs.to(tl.float32), 0))
    ex = ex2(token_sum(swap, gs, GPREC))
    es = ex2(token_sum(tru, gs, GPREC))
    G = token_sum(tri, gs, GPREC)
    E = ex2(G + SHIFT)
    Ei = ex2((G + SHIFT) * -1.0)
    # between the chunk and the states at its ends
    pre = E * UNSHIFT
    pre = tl.where(top, pre, pre * ex)
    suf = tl.where(top, es * ex, es)
    dq = pre * QS
    dr = -(pre * YS)
    dw = suf * VX
    hp = qn * dq + bt * (kn * dr)
    hs = kn * dw
    dg = grad_sum(swap, tl.where(top, hs, hp), SD, PREC, False)
    # the block below the diagonal: factors of at most 1 from the middle of the chunk
    off = ~same
    Eo = E * UNSHIFT
    ko = (kn * es).to(SD)
    A = tl.where(off, dA, 0.0).to(SD)
    Fo = tl.where(off, F, 0.0)
    xq = Eo * tl.dot(A, ko, input_precision=PREC)
    xr = Eo * tl.dot(Fo.to(SD), ko, input_precision=PREC)
    ac = tl.dot(tl.trans(A), (qn * Eo).to(SD), input_precision=PREC)
    ac = tl.dot(tl.trans((Fo * bt).to(SD)), (kn * Eo).to(SD), ac, input_precision=PREC)
    xw = es * ac
    hs += unit * (kn * xw)
    dg += grad_sum(tl.where((j < i) & same, 1.0, 0.0), hs, SD, PREC, False)
    # the diagonal blocks
    hx = qn * xq + bt * (kn * xr)
    A = tl.where(same, dA, 0.0).to(SD)
    Fd = tl.where(same, F, 0.0)
    Fb = (Fd * bt).to(SD)
    kc = (kn * Ei).to(SD)
    qr = (qn * E).to(SD)
    kr = (kn * E).to(SD)
    aq = tl.dot(A, kc, input_precision=PREC)
    xq += E * aq
    ab = tl.dot(Fb, kc, input_precision=PREC)
    ac = tl.dot(tl.trans(A), qr, input_precision=PREC)
    ac = tl.dot(tl.trans(Fb), kr, ac, input_precision=PREC)
    xw += Ei * ac
    hx += qr.to(tl.float32) * aq + kr.to(tl.float32) * ab - kc.to(tl.float32) * ac
    xr += E * tl.dot(Fd.to(SD), kc, input_precision=PREC)
    dg += grad_sum(tl.where((j >= i) & same, 1.0, 0.0), hp + unit * hx, SD, PREC, True)
    dg += (eg * ss)[None, :]
    return dq + unit * xq, dr + unit * xr, dw + unit * xw, dg


@triton.jit
def exact_pairs(dA, F, bt, kn, qn, gs, QS, YS, VX, ss, SD: tl.constexpr, PREC: tl.constexpr, GPREC: tl.constexpr):
    """As `bounded_pairs` for any gate: pairs by the level of the binary tree at which their tokens part, so that every
    factor is at most 1 and every sum that the decay's gradient needs has the right sign to start with."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    eg = ex2(tl.sum(gs.to(tl.float32), 0))
    pre = ex2(token_sum(tl.where(i >= j, 1.0, 0.0), gs, GPREC))
    dq = pre * QS
    dr = -(pre * YS)
    dg = grad_sum(tl.where(j >= i, 1.0, 0.0), qn * dq + bt * (kn * dr), SD, PREC, False)
    dw = ex2(token_sum(tl.where(i < j, 1.0, 0.0), gs, GPREC)) * VX
    dg += grad_sum(tl.where(j < i, 1.0, 0.0), kn * dw, SD, PREC, False)
    dg += (eg * ss)[None, :]
    diag = tl.sum(tl.where(i == j, dA, 0.0), 1)[:, None]
    dq += diag * kn
    dw += diag * qn
    for lv in tl.range(0, 6):
        half = 32 >> lv
        f = ex2(token_sum(level_sums(half, 64, False), gs, GPREC))
        pairs = level_pairs(half, 64)
        kk = (kn * f).to(SD)
        qq = (qn * f).to(SD)
        A = tl.where(pairs, dA, 0.0).to(SD)
        Fm = tl.where(pairs, F, 0.0)
        aq = tl.dot(A, kk, input_precision=PREC)
        ar = tl.dot(Fm.to(SD), kk, input_precision=PREC)
        ac = tl.dot(tl.trans(A), qq, input_precision=PREC)
        ac = tl.dot(tl.trans((Fm * bt).to(SD)), kk, ac, input_precision=PREC)
        dq += f * aq
        dr += f * ar
        dw += f * ac
        x = (qn * f) * aq + (kn * f) * (bt * ar + ac)
        dg += grad_sum(level_sums(half, 64, True), x, SD, PREC, False)
    return dq, dr, dw, dg


@triton.jit(do_not_specialize=["T", "NT", "H", "GROUP", "ROWSALL"])
def vector_grad(
    q,
    k,
    g,
    v,
    beta,
    o,
    do,
    news,
    ys,
    states,
    exits,
    norms,
    a_log,
    dt_bias,
    table,
    dq,
    dk,
    dg,
    db,
    da,
    dbias,
    T,
    NT,
    H,
    GROUP,
    ROWSALL,
    scale,
    lower,
    K: tl.constexpr,
    KP: tl.constexpr,
    KB: tl.constexpr,
    NS: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    VB: tl.constexpr,
    GATE: tl.constexpr,
    RATE: tl.constexpr,
    BIAS: tl.constexpr,
    BETA: tl.constexpr,
    NORM: tl.constexpr,
    EXACT: tl.constexpr,
    DT: tl.constexpr,
    SD: tl.constexpr,
    PREC: tl.constexpr,
    GPREC: tl.constexpr,
    VARLEN: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
    GTMA: tl.constexpr,
    OTMA: tl.constexpr,
):
    """One program per (channel group of NS slices of KB, head, 64 tokens).

    With ``dA = tril(dO V^T)`` and ``F = -stril(y V^T)`` (gradients of the scores; beta enters F's write side only) no
    inverse and no gradient of it is needed. The L2-norm backward needs ``q . dq = o . dO`` and
    ``k . dk = 2 y . V - beta y . v``, which hold because both appear linearly: slices of channels stay independent.

    dq, dk: [rows, H, K] (per value head); dg: gradient of ``g``; db: [groups, rows, H] fp32 parts of ``dbeta``;
    da: [groups, NT, H] and dbias: [NT, H, K] fp32 parts of the gate's parameter gradients.
    """
    NG: tl.constexpr = KP // (KB * NS)
    sg = tl.program_id(0) % NG
    h = tl.program_id(0) // NG
    it = tl.program_id(1)
    row, n = chunk_at(table, it, T, NT, 64, VARLEN)
    gi = (sg * tl.num_programs(1) + it).to(tl.int64) * H + h
    cc = tl.arange(0, KB)
    if n <= 0:
        # an unused row of the chunk table: its parts of the sums over chunks count as 0
        if GATE > 0:
            if RATE:
                tl.store(da + gi, 0.0)
            if BIAS:
                for s in tl.static_range(NS):
                    c = (sg * NS + s) * KB + cc
                    tl.store(dbias + (it.to(tl.int64) * H + h) * K + c, tl.zeros((KB,), tl.float32), mask=c < K)
        return
    NVB: tl.constexpr = VP // VB
    VC: tl.constexpr = V % VB != 0
    KC: tl.constexpr = K % KB != 0
    hk = h // GROUP
    HK = H // GROUP
    r = tl.arange(0, 64)
    i = r[:, None]
    j = r[None, :]
    w = it * H + h
    w64 = w.to(tl.int64)
    at = (row + r).to(tl.int64) * H + h
    braw = tl.load(beta + at, mask=r < n, other=0.0)
    bv = write_rate(braw, BETA)
    if ROWS:
        bv = tl.where(r < n, bv, 0.0)
    bt = bv[:, None]
    dA = tl.zeros((64, 64), tl.float32)
    F = tl.zeros((64, 64), tl.float32)
    yv = tl.zeros((64,), tl.float32)
    od = tl.zeros((64,), tl.float32)
    for b in tl.static_range(NVB):
        vT = load_tile(news, w * VP + b * VB, VB, 0, 64, 64, VB, 64, TMA, False, False)
        dot = load_tile(do, row, n, h * V + b * VB, V - b * VB, H * V, 64, VB, TMA, ROWS, VC)
        dA = tl.dot(dot, vT, dA, input_precision=PREC)
        if NORM:
            ot = load_tile(o, row, n, h * V + b * VB, V - b * VB, H * V, 64, VB, TMA, ROWS, VC)
            od += tl.sum(ot.to(tl.float32) * dot.to(tl.float32), 1)
        yT = load_tile(ys, w * VP + b * VB, VB, 0, 64, 64, VB, 64, TMA, False, False)
        yt = tl.trans(yT)
        F = tl.dot(yt, vT, F, input_precision=PREC)
        vt = load_tile(v, row, n, h * V + b * VB, V - b * VB, H * V, 64, VB, TMA, ROWS, VC)
        yv += tl.sum(yt.to(tl.float32) * vt.to(tl.float32), 1)
    yV = tl.sum(tl.where(i == j, F, 0.0), 1)
    dA = tl.where(i >= j, dA, 0.0)
    F = tl.where(i > j, -F, 0.0)
    unit = 1.0
    if not EXACT:
        top = tl.max(tl.max(tl.maximum(tl.abs(dA), tl.abs(F)), 1), 0)
        unit = tl.where(top > 0.0, tl.exp2(tl.floor(tl.log2(top))), 1.0)
        dA = dA * (1.0 / unit)
        F = F * (1.0 / unit)
    rq = tl.zeros((64,), tl.float32) + 1.0
    rk = rq
    if NORM:
        rq = tl.load(norms + w64 * 128 + r)
        rk = tl.load(norms + w64 * 128 + 64 + r)
    fq = rq * rq * od
    fk = rk * rk * (2.0 * yV - bv * yv)
    rq = rq * scale
    dbv = tl.zeros((64,), tl.float32)
    if sg == 0:
        dbv = yv
    rate = 1.0
    if RATE:
        rate = tl.exp(tl.load(a_log + h).to(tl.float32))
    dav = 0.0
    for s in tl.static_range(NS):
        c0 = (sg * NS + s) * KB
        QS = tl.zeros((64, KB), tl.float32)
        YS = tl.zeros((64, KB), tl.float32)
        VX = tl.zeros((64, KB), tl.float32)
        ss = tl.zeros((KB,), tl.float32)
        for b in tl.static_range(NVB):
            if NVB > 1:
                vT = load_tile(news, w * VP + b * VB, VB, 0, 64, 64, VB, 64, TMA, False, False)
                dot = load_tile(do, row, n, h * V + b * VB, V - b * VB, H * V, 64, VB, TMA, ROWS, VC)
                yT = load_tile(ys, w * VP + b * VB, VB, 0, 64, 64, VB, 64, TMA, False, False)
                yt = tl.trans(yT)
            St = load_tile(states, w * VP + b * VB, VB, c0, KP, KP, VB, KB, TMA, False, False)
            Xt = load_tile(exits, w * VP + b * VB, VB, c0, KP, KP, VB, KB, TMA, False, False)
            ss += tl.sum(St.to(tl.float32) * Xt.to(tl.float32), 0)
            QS = tl.dot(dot, St, QS, input_precision=PREC)
            YS = tl.dot(yt, St, YS, input_precision=PREC)
            VX = tl.dot(tl.trans(vT), Xt, VX, input_precision=PREC)
        x = load_tile(g, row, n, h * K + c0, K - c0, H * K, 64, KB, GTMA, ROWS, KC).to(tl.float32)
        bias = 0.0
        if BIAS:
            bias = tl.load(dt_bias + h * K + c0 + cc, mask=c0 + cc < K, other=0.0).to(tl.float32)[None, :]
        gl = log_decay(x, rate, bias, lower, GATE, EXACT)
        if ROWS:
            gl = tl.where(i < n, gl, 0.0)
        gs = gl
        if GPREC == "fp16":
            gs = gl.to(tl.float16)
        kf = load_tile(k, row, n, hk * K + c0, K - c0, HK * K, 64, KB, TMA, ROWS, KC).to(tl.float32)
        qf = load_tile(q, row, n, hk * K + c0, K - c0, HK * K, 64, KB, TMA, ROWS, KC).to(tl.float32)
        if EXACT:
            xq, xr, xw, xg = exact_pairs(
                dA, F, bt, kf * rk[:, None], qf * rq[:, None], gs, QS, YS, VX, ss, SD, PREC, GPREC
            )
        else:
            xq, xr, xw, xg = bounded_pairs(
                dA, F, unit, bt, kf * rk[:, None], qf * rq[:, None], gs, QS, YS, VX, ss, SD, PREC, GPREC
            )
        dbv += tl.sum(kf * xr, 1) * rk
        xq = xq * rq[:, None]
        xk = (xr * bt + xw) * rk[:, None]
        if NORM:
            xq -= qf * fq[:, None]
            xk -= kf * fk[:, None]
        ot_: tl.constexpr = OTMA and not KC
        store_tile(
            dq, xq.to(dq.dtype.element_ty if not ot_ else DT), row, n, h * K + c0, K - c0, H * K, 64, KB, ot_, ROWS, KC
        )
        store_tile(
            dk, xk.to(dk.dtype.element_ty if not ot_ else DT), row, n, h * K + c0, K - c0, H * K, 64, KB, ot_, ROWS, KC
        )
        x, xa = log_decay_grad(xg, x, rate, bias, lower, GATE)
        if ROWS:
            x = tl.where(i < n, x, 0.0)
            xa = tl.where(i < n, xa, 0.0)
        if GATE > 0 and RATE:
            if KC:
                xa = tl.where(c0 + cc[None, :] < K, xa, 0.0)
            dav += tl.sum(tl.sum(xa, 1), 0)
        if GATE > 0 and BIAS:
            tl.store(dbias + (w64 * K + c0 + cc), tl.sum(x, 0), mask=c0 + cc < K)
        store_tile(dg, x.to(dg.dtype.element_ty), row, n, h * K + c0, K - c0, H * K, 64, KB, False, ROWS, KC)
    if BETA > 0:
        dbv = dbv * bv * (1.0 - bv / BETA)
    tl.store(db + (sg.to(tl.int64) * ROWSALL) * H + at, dbv, mask=r < n)
    if GATE > 0 and RATE:
        tl.store(da + gi, dav)
