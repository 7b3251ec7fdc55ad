# SPDX-License-Identifier: MIT
"""Chunk-local gradients of the vector-decay chunk form, 64 tokens at a time.

New values V, their gradients y and the states are facts of a token, not of a chunk: the scans make them 32 tokens at
a time and this kernel uses them 64 at a time, which halves the states to store and fills the tensor cores.

Each score gradient and each operand is rounded once, and the rounded ones also weigh the gradient of the decay, so that
what the two tokens of a pair contribute to it cancels exactly wherever it must.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at
from fla.ops._delta.kernels.vector_math import (
    SHIFT,
    UNSHIFT,
    ex2,
    gate_sum,
    grad_sum,
    level_pairs,
    load_tile,
    log_decay,
    log_decay_grad,
    one_matrix,
    split_gates,
    store_tile,
    write_rate,
)


@triton.jit
def level_terms(A, F, bt, kn, qn, f, half, PREC: tl.constexpr):
    """Pairs whose tokens part at one level of the tree; every factor ``f`` is at most 1 and each token has one role."""
    pairs = level_pairs(half, 64)
    A = tl.where(pairs, A, 0.0).to(A.dtype)
    F = tl.where(pairs, F, 0.0).to(F.dtype)
    kk = kn * f
    kb = kk.to(A.dtype)
    aq = tl.dot(A, kb, input_precision=PREC)
    ar = tl.dot(F, kb, input_precision=PREC)
    aw = tl.dot(tl.trans(A), (qn * f).to(A.dtype), input_precision=PREC)
    aw = tl.dot(tl.trans(F), (kk * bt).to(A.dtype), aw, input_precision=PREC)
    return f * aq, f * ar, f * aw, (qn * f) * aq + kk * (bt * ar + aw)


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
    ones,
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
    STAGES: tl.constexpr,
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
        if RATE:
            tl.store(da + gi, 0.0)
        if BIAS:
            for s in tl.range(0, NS):
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
    top = i < 32
    w = it * H + h
    w64 = w.to(tl.int64)
    at = (row + r).to(tl.int64) * H + h
    bv = write_rate(tl.load(beta + at, mask=r < n, other=0.0), BETA)
    if ROWS:
        bv = tl.where(r < n, bv, 0.0)
    bt = bv[:, None]
    dA = tl.zeros((64, 64), tl.float32)
    F = tl.zeros((64, 64), tl.float32)
    # Row products as diagonals of matrix products: every tile stays in shared memory, none in registers.
    YV = tl.zeros((64, 64), tl.float32)
    OD = tl.zeros((64, 64), tl.float32)
    RD: tl.constexpr = ROWS and not TMA
    for b in tl.static_range(NVB):
        vT = load_tile(news, w * VP + b * VB, VB, 0, 64, 64, VB, 64, TMA, False, False)
        dot = load_tile(do, row, n, h * V + b * VB, V - b * VB, H * V, 64, VB, TMA, RD, VC)
        dA = tl.dot(dot, vT, dA, input_precision=PREC)
        if NORM:
            ot = load_tile(o, row, n, h * V + b * VB, V - b * VB, H * V, 64, VB, TMA, RD, VC)
            OD = tl.dot(dot, tl.trans(ot), OD, input_precision=PREC)
        yT = load_tile(ys, w * VP + b * VB, VB, 0, 64, 64, VB, 64, TMA, False, False)
        F = tl.dot(tl.trans(yT), vT, F, input_precision=PREC)
        vt = load_tile(v, row, n, h * V + b * VB, V - b * VB, H * V, 64, VB, TMA, RD, VC)
        YV = tl.dot(tl.trans(yT), tl.trans(vt), YV, input_precision=PREC)
    yV = tl.sum(tl.where(i == j, F, 0.0), 1)
    keep = i >= j
    own = i == j
    if ROWS:
        keep = keep & (i < n)
        own = own & (i < n)
    yv = tl.sum(tl.where(own, YV, 0.0), 1)
    od = tl.sum(tl.where(own, OD, 0.0), 1)
    dA = tl.where(keep, dA, 0.0)
    F = tl.where(i > j, -F, 0.0)
    # In units of the largest, so that products with factors near 2^-116 stay inside fp32's range for any scale of loss.
    big = tl.max(tl.max(tl.maximum(tl.abs(dA), tl.abs(F)), 1), 0)
    unit = tl.where(big > 0.0, tl.exp2(tl.floor(tl.log2(big))), 1.0)
    A = (dA * (1.0 / unit)).to(SD)
    F = (F * (1.0 / unit)).to(SD)
    At = tl.trans(A)
    Ft = tl.trans(F)
    diag = (tl.sum(tl.where(i == j, A.to(tl.float32), 0.0), 1) * unit)[:, None]
    rq = tl.zeros((64,), tl.float32) + 1.0
    rk = rq
    if NORM:
        rq = tl.load(norms + w64 * 128 + r)
        rk = tl.load(norms + w64 * 128 + 64 + r)
    fq = rq * rq * od
    fk = rk * rk * (2.0 * yV - bv * yv)
    rq = rq * scale
    dbv = yv * tl.where(sg == 0, 1.0, 0.0)
    rate = 1.0
    if RATE:
        rate = tl.exp(tl.load(a_log + h).to(tl.float32))
    dav = 0.0
    tri = one_matrix(ones, 0)
    tru = one_matrix(ones, 1)
    swap = one_matrix(ones, 2)
    for s in tl.range(0, NS, num_stages=STAGES):
        c0 = (sg * NS + s) * KB
        x = load_tile(g, row, n, h * K + c0, K - c0, H * K, 64, KB, GTMA, ROWS, KC).to(tl.float32)
        bias = 0.0
        if BIAS:
            bias = tl.load(dt_bias + h * K + c0 + cc, mask=c0 + cc < K, other=0.0).to(tl.float32)[None, :]
        gl = log_decay(x, rate, bias, lower, GATE, EXACT)
        if ROWS:
            gl = tl.where(i < n, gl, 0.0)
        gh, gr = split_gates(gl, SD)
        ex = ex2(gate_sum(swap, gh, gr, SD, GPREC))
        es = ex2(gate_sum(tru, gh, gr, SD, GPREC))
        G = gate_sum(tri, gh, gr, SD, GPREC)
        QS = tl.zeros((64, KB), tl.float32)
        YS = tl.zeros((64, KB), tl.float32)
        VX = tl.zeros((64, KB), tl.float32)
        ss = tl.zeros((KB,), tl.float32)
        for b in tl.static_range(NVB):
            if NVB > 1:
                vT = load_tile(news, w * VP + b * VB, VB, 0, 64, 64, VB, 64, TMA, False, False)
                dot = load_tile(do, row, n, h * V + b * VB, V - b * VB, H * V, 64, VB, TMA, RD, VC)
                yT = load_tile(ys, w * VP + b * VB, VB, 0, 64, 64, VB, 64, TMA, False, False)
            St = load_tile(states, w * VP + b * VB, VB, c0, KP, KP, VB, KB, TMA, False, False)
            Xt = load_tile(exits, w * VP + b * VB, VB, c0, KP, KP, VB, KB, TMA, False, False)
            ss += tl.sum(St.to(tl.float32) * Xt.to(tl.float32), 0)
            QS = tl.dot(dot, St, QS, input_precision=PREC)
            YS = tl.dot(tl.trans(yT), St, YS, input_precision=PREC)
            VX = tl.dot(tl.trans(vT), Xt, VX, input_precision=PREC)
        if ROWS:
            QS = tl.where(i < n, QS, 0.0)
        kf = load_tile(k, row, n, hk * K + c0, K - c0, HK * K, 64, KB, TMA, ROWS, KC).to(tl.float32)
        qf = load_tile(q, row, n, hk * K + c0, K - c0, HK * K, 64, KB, TMA, ROWS, KC).to(tl.float32)
        kn = kf * rk[:, None]
        qn = qf * rq[:, None]
        # Between the chunk and the states at its ends. hp and hs: gradients of the sums up to and after a token.
        if EXACT:
            Ed = ex2(G)
        else:
            E = ex2(G + SHIFT)
            Ei = ex2((G + SHIFT) * -1.0)
            Ed = E * UNSHIFT
        pre = tl.where(top, Ed, Ed * ex)
        xq = pre * QS
        xr = -(pre * YS)
        xw = tl.where(top, es * ex, es) * VX
        hp = qn * xq + kn * (bt * xr)
        hs = kn * xw
        xg = grad_sum(swap, tl.where(top, hs, hp), SD, PREC, False)
        xg += (ex2(tl.sum(gl, 0)) * ss)[None, :]
        if EXACT:
            xq += diag * kn
            xw += diag * qn
            pq, pr, pw, pp = level_terms(A, F, bt, kn, qn, tl.where(top, es, Ed), 32, PREC)
            xq += unit * pq
            xr += unit * pr
            xw += unit * pw
            hs += tl.where(top, unit * pp, 0.0)
            hp += tl.where(top, 0.0, unit * pp)
        else:
            # Tokens are split into the two blocks by operands that are 0 in one of them or by choosing rows of a
            # result, never by masking the score matrices. Across the middle the anchor is that of the second block.
            Eo = tl.where(top, es * UNSHIFT, Ei)
            kc = (kn * Ei).to(SD)
            ko = (kn * Eo).to(SD)
            p = tl.where(top, tl.dot(A, kc, input_precision=PREC), tl.dot(A, ko, input_precision=PREC))
            qr = (qn * E).to(SD)
            hp += unit * (qr.to(tl.float32) * p)
            xq += unit * (E * p)
            p = tl.where(top, tl.dot(F, kc, input_precision=PREC), tl.dot(F, ko, input_precision=PREC))
            kr = (kn * (E * bt)).to(SD)
            hp += unit * (kr.to(tl.float32) * p)
            xr += unit * (E * p)
            p = tl.dot(At, tl.where(top, 0.0, qr).to(SD), input_precision=PREC)
            p = tl.dot(Ft, tl.where(top, 0.0, kr).to(SD), p, input_precision=PREC)
            xw += unit * (Eo * p)
            p = unit * (ko.to(tl.float32) * p)
            hs += tl.where(top, p, 0.0)
            hp -= tl.where(top, 0.0, p)
            p = tl.dot(At, tl.where(top, qr, 0.0).to(SD), input_precision=PREC)
            p = tl.dot(Ft, tl.where(top, kr, 0.0).to(SD), p, input_precision=PREC)
            xw += unit * (Ei * p)
            hp -= unit * (kc.to(tl.float32) * p)
        # the sum over the tokens before: tri less the diagonal
        xg += grad_sum(tri, hs, SD, PREC, False) - hs
        if EXACT:
            for lv in tl.range(0, 5):
                m = one_matrix(ones, 3 + lv)
                f = ex2(gate_sum(m, gh, gr, SD, GPREC))
                pq, pr, pw, pp = level_terms(A, F, bt, kn, qn, f, 16 >> lv, PREC)
                xq += unit * pq
                xr += unit * pr
                xw += unit * pw
                xg += grad_sum(tl.trans(m), unit * pp, SD, PREC, False)
        # the sum over the tokens after and the token itself: tru and the diagonal
        xg += grad_sum(tru, hp, SD, PREC, not EXACT) + hp
        dbv += tl.sum(kf * xr, 1) * rk
        xq = xq * rq[:, None]
        xk = (xr * bt + xw) * rk[:, None]
        if NORM:
            xq -= qf * fq[:, None]
            xk -= kf * fk[:, None]
        if OTMA:
            dq.store([row, h * K + c0], xq.to(DT))
            dk.store([row, h * K + c0], xk.to(DT))
        else:
            store_tile(dq, xq.to(dq.dtype.element_ty), row, n, h * K + c0, K - c0, H * K, 64, KB, False, ROWS, KC)
            store_tile(dk, xk.to(dk.dtype.element_ty), row, n, h * K + c0, K - c0, H * K, 64, KB, False, ROWS, KC)
        if GATE > 0:
            xg, xa = log_decay_grad(xg, x, rate, bias, lower, GATE)
            if RATE:
                if ROWS:
                    xa = tl.where(i < n, xa, 0.0)
                if KC:
                    xa = tl.where(c0 + cc[None, :] < K, xa, 0.0)
                dav += tl.sum(tl.sum(xa, 1), 0)
            if BIAS:
                y = xg
                if ROWS:
                    y = tl.where(i < n, xg, 0.0)
                tl.store(dbias + (w64 * K + c0 + cc), tl.sum(y, 0), mask=c0 + cc < K)
        store_tile(dg, xg.to(dg.dtype.element_ty), row, n, h * K + c0, K - c0, H * K, 64, KB, False, ROWS, KC)
    if BETA > 0:
        dbv = dbv * bv * (1.0 - bv / BETA)
    tl.store(db + (sg.to(tl.int64) * ROWSALL) * H + at, dbv, mask=r < n)
    if RATE:
        tl.store(da + gi, dav)
