# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""Chunk-local gradients of the vector-decay chunk form, 32 tokens at a time.

All wide tiles are `[channels, tokens]`: they come out of one product and go into the next as register operands, and the
small `[32, 32]` matrices (score gradients, 0/1 sums over tokens) are the operands in shared memory.

Each score gradient and each operand is rounded once, and the rounded ones also weigh the gradient of the decay, so that
what the two tokens of a pair contribute to it cancels exactly wherever it must.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at
from fla.ops._delta.kernels.common import doubt, idle
from fla.ops._delta.kernels.vector_math import (
    SHIFT,
    UNSHIFT,
    ex2,
    fetch,
    gate_sum,
    grad_sum,
    load_tile,
    log_decay,
    narrow,
    one_matrix,
    raw_decay,
    rcp,
    split_gates,
    store_tile,
    write_rate,
)
from fla.ops._delta.kernels.vector_unit import gate_grad, no_gate_grad, state_products, store_unit


@triton.jit(do_not_specialize=["T", "NT", "H"])
def vector_scores(
    beta,
    v,
    o,
    do,
    news,
    ys,
    norms,
    table,
    scores,
    vecs,
    long,
    T,
    NT,
    H,
    V: tl.constexpr,
    VP: tl.constexpr,
    VB: tl.constexpr,
    BETA: tl.constexpr,
    NORM: tl.constexpr,
    DT: tl.constexpr,
    SD: tl.constexpr,
    PREC: tl.constexpr,
    VARLEN: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
    ERASE: tl.constexpr,
    PART: tl.constexpr,
):
    """Gradients of the score matrices, one program per (head, 32 tokens).

    With ``dA = tril(dO V^T)`` and ``F = -stril(y V^T)`` (beta enters F's write side only) no inverse and no gradient of
    it is needed. Writes, for ``w = 2 tile + half``:
        scores [w, 2, 32, 32]: dA and F in units of the power of two below their largest element, so that products with
            factors near 2^-116 stay inside fp32's range whatever the scale of the loss
        vecs [w, 5, 32]: ``o . dO / |q|^2`` and ``k . dk / |k|^2`` (what the L2-norm backward subtracts), ``y . v``, the
            diagonal of dA in units, the unit. ``q . dq = o . dO`` and ``k . dk = 2 y . V - beta y . v`` hold because
            both appear linearly. With ERASE the write strength is 1, and ``v`` what is written.
    """
    if PART:
        if idle(long, PART):
            return
    h = tl.program_id(0) % H
    ic = tl.program_id(0) // H
    sub = ic % 2
    row, n = chunk_at(table, ic // 2, T, NT, 64, VARLEN)
    row += sub * 32
    n -= sub * 32
    if n <= 0:
        return
    NVB: tl.constexpr = VP // VB
    VC: tl.constexpr = V != VP
    RD: tl.constexpr = ROWS and not TMA
    r = tl.arange(0, 32)
    i = r[:, None]
    j = r[None, :]
    w = (ic // 2) * H + h
    w2 = w * 2 + sub
    keep = i >= j
    own = i == j
    if ROWS:
        keep = keep & (i < n)
        own = own & (i < n)
    dA = tl.zeros((32, 32), tl.float32)
    F = tl.zeros((32, 32), tl.float32)
    # row products as diagonals of matrix products: no tile has to pass through registers
    YV = tl.zeros((32, 32), tl.float32)
    OD = tl.zeros((32, 32), tl.float32)
    for b in tl.static_range(NVB):
        vT = load_tile(news, w * VP + b * VB, VB, sub * 32, 64, 64, VB, 32, TMA, False, False)
        dot = load_tile(do, row, n, h * V + b * VB, V - b * VB, H * V, 32, VB, TMA, RD, VC).to(DT)
        yT = load_tile(ys, w * VP + b * VB, VB, sub * 32, 64, 64, VB, 32, TMA, False, False)
        vt = load_tile(v, row, n, h * V + b * VB, V - b * VB, H * V, 32, VB, TMA, RD, VC).to(DT)
        if NORM:
            ot = load_tile(o, row, n, h * V + b * VB, V - b * VB, H * V, 32, VB, TMA, RD, VC).to(DT)
            OD = tl.dot(dot, tl.trans(ot), OD, input_precision=PREC)
        dA = tl.dot(dot, vT, dA, input_precision=PREC)
        F = tl.dot(tl.trans(yT), vT, F, input_precision=PREC)
        YV = tl.dot(tl.trans(yT), tl.trans(vt), YV, input_precision=PREC)
    if ERASE:
        bv = tl.zeros((32,), tl.float32) + 1.0
    else:
        at = (row + r).to(tl.int64) * H + h
        bv = write_rate(tl.load(beta + at, mask=r < n, other=0.0), BETA)
    if ROWS:
        bv = tl.where(r < n, bv, 0.0)
    yV = tl.sum(tl.where(i == j, F, 0.0), 1)
    if PART == 1:
        doubt(long, yV)
    yv = tl.sum(tl.where(own, YV, 0.0), 1)
    dA = tl.where(keep, dA, 0.0)
    F = tl.where(i > j, -F, 0.0)
    big = tl.max(tl.max(tl.maximum(tl.abs(dA), tl.abs(F)), 1), 0)
    unit = tl.where(big > 0.0, tl.exp2(tl.floor(tl.log2(big))), 1.0)
    dA = dA * (1.0 / unit)
    F = F * (1.0 / unit)
    store_tile(scores, dA.to(SD), w2 * 64, 32, 0, 32, 32, 32, 32, TMA, False, False)
    store_tile(scores, F.to(SD), w2 * 64 + 32, 32, 0, 32, 32, 32, 32, TMA, False, False)
    vp = vecs + w2.to(tl.int64) * 160 + r
    if NORM:
        np = norms + w.to(tl.int64) * 128 + sub * 32 + r
        rq = tl.load(np)
        rk = tl.load(np + 64)
        tl.store(vp, rq * rq * tl.sum(tl.where(own, OD, 0.0), 1))
        tl.store(vp + 32, rk * rk * (2.0 * yV - bv * yv))
    tl.store(vp + 64, yv)
    tl.store(vp + 96, tl.sum(tl.where(i == j, dA, 0.0), 1))
    tl.store(vp + 128, tl.zeros((32,), tl.float32) + unit)


@triton.jit
def mild_grad(
    row, n, w, w2, sub, sg, h, units, gi, gc, r, j, cc, c0, at, vp, wn, hk, HK, beta, q, k, g, do, news, ys, states,
    exits, scores, norms, ones, a_log, dt_bias, dq, dk, dg, db, da, dbias, H, ROWSALL, scale, lower, K: tl.constexpr,
    KP: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, VB: tl.constexpr, GATE: tl.constexpr,
    RATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr, IO: tl.constexpr,
    SD: tl.constexpr, PREC: tl.constexpr, GPREC: tl.constexpr, ROWS: tl.constexpr, OTMA: tl.constexpr,
    DGTMA: tl.constexpr, RAW: tl.constexpr, ERASE: tl.constexpr, FREE: tl.constexpr, PARTS: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """What `vector_grad` does where there are tokens. TURN: products turn around the gate's input, of 16 bits."""
    R: tl.constexpr = PARTS // (KP // KB)
    NVB: tl.constexpr = VP // VB
    VC: tl.constexpr = V != VP
    KC: tl.constexpr = K != KP
    # All loads first: nothing else is held yet, and they travel together.
    x = load_tile(g, row, n, h * K + c0, K - c0, H * K, 32, KB, False, ROWS, KC)
    kf = load_tile(k, row, n, hk * K + c0, K - c0, HK * K, 32, KB, False, ROWS, KC)
    qf = load_tile(q, row, n, hk * K + c0, K - c0, HK * K, 32, KB, False, ROWS, KC)
    if ERASE:
        bt = load_tile(beta, row, n, h * K + c0, K - c0, H * K, 32, KB, False, ROWS, KC)
    if NVB == 1:
        St = load_tile(states, w2 * VP, VB, c0, KP, KP, VB, KB, False, False, False)
        Xt = load_tile(exits, w2 * VP, VB, c0, KP, KP, VB, KB, False, False, False)
        vT = load_tile(news, w * VP, VB, sub * 32, 64, 64, VB, 32, False, False, False)
        yT = load_tile(ys, w * VP, VB, sub * 32, 64, 64, VB, 32, False, False, False)
        dot = load_tile(do, row, n, h * V, V, H * V, 32, VB, False, ROWS, VC).to(DT)
    A = load_tile(scores, w2 * 64, 32, 0, 32, 32, 32, 32, False, False, False)
    F = load_tile(scores, w2 * 64 + 32, 32, 0, 32, 32, 32, 32, False, False, False)
    tri = one_matrix(ones, 0, 32)
    unit = tl.load(vp + 128)
    rate = 1.0
    if RATE:
        rate = tl.exp(tl.load(a_log + h).to(tl.float32))
    bias = 0.0
    if BIAS:
        bias = tl.load(dt_bias + h * K + c0 + cc, mask=c0 + cc < K, other=0.0).to(tl.float32)[:, None]
    rq = tl.zeros((32,), tl.float32) + 1.0
    rk = rq
    if NORM:
        rq = tl.load(norms + wn + r)
        rk = tl.load(norms + wn + 64 + r)
    rq = rq * scale
    # Another layout follows, through shared memory. Held back by a mask, that does not come between the loads.
    here = (r[:, None] < n) & (cc[None, :] >= 0)
    if not TURN:
        x = tl.trans(tl.where(here, x, 0.0))
    kf = tl.trans(tl.where(here, kf, 0.0))
    qf = tl.trans(tl.where(here, qf, 0.0))
    if ERASE:
        bt = tl.trans(tl.where(here, bt, 0.0)).to(tl.float32)
    else:
        bv = write_rate(tl.load(beta + at, mask=r < n, other=0.0), BETA)
        if ROWS:
            bv = tl.where(r < n, bv, 0.0)
        bt = bv[None, :]
    back = 1.0 / unit
    if RAW:
        gl = raw_decay(x, FREE)
    else:
        if TURN:
            # By a product, exactly: what comes of it stays in the layout of products.
            x = narrow(tl.dot(tl.trans(x), (r[:, None] == r[None, :]).to(x.dtype)), x.dtype)
        gl = log_decay(x.to(tl.float32), rate, bias, lower, GATE, FREE)
    if ROWS and GATE > 0:
        gl = tl.where(j < n, gl, 0.0).to(gl.dtype)
    gh, gr = split_gates(gl, SD, RAW)
    G = gate_sum(gh, gr, tl.trans(tri), SD, GPREC, RAW)
    if NVB == 1:
        SX = tl.dot(tl.trans(St), Xt, input_precision=PREC)
    else:
        SX, QS, YS, VX = state_products(
            states, exits, news, ys, do, row, n, w, w2, sub, h, H, c0, KP, KB, V, VP, VB, DT, PREC, ROWS
        )
    # The sum of a chunk's gates; all other decays of it are that of the scores times a factor per channel.
    last = tl.sum(tl.where(j == 31, G, 0.0), 1)
    ss = tl.sum(tl.where(cc[:, None] == cc[None, :], SX, 0.0), 1) * (back * ex2(last))
    E = ex2(G + SHIFT)
    kn = kf.to(tl.float32) * rk[None, :]
    kc = narrow(kn * ex2((G + SHIFT) * -1.0), SD)
    kr = narrow(kn * (E * bt), SD)
    qr = narrow(qf.to(tl.float32) * (E * rq[None, :]), SD)
    # What a token reads for the output. hp: gradient of the decay summed up to a token.
    if NVB == 1:
        p = tl.dot(tl.trans(St), tl.trans(dot), input_precision=PREC)
    else:
        p = QS
    p = p * back * UNSHIFT
    p = tl.dot(kc, tl.trans(A), p, input_precision=PREC)
    hp = qr.to(tl.float32) * p
    p = p * (E * (rq * unit)[None, :])
    if NORM:
        p -= qf.to(tl.float32) * tl.load(vp + r)[None, :]
    if OTMA:
        dq.store([row, h * K + c0], tl.trans(p.to(IO)))
    else:
        store_unit(dq, p, row, n, h, H, c0, K, KP, KB, ROWS)
    # and for its new value
    if NVB == 1:
        p = tl.dot(tl.trans(St), yT, input_precision=PREC)
    else:
        p = YS
    p = p * -back * UNSHIFT
    p = tl.dot(kc, tl.trans(F), p, input_precision=PREC)
    hp += kr.to(tl.float32) * p
    xk = E * p
    if ERASE:
        xb = (kf.to(tl.float32) * xk) * (rk * unit)[None, :]
        store_unit(db, xb, row, n, h, H, c0, K, KP, KB, ROWS)
    else:
        dbv = tl.load(vp + 64 + r) * tl.where(sg == 0, 1.0, 0.0)
        dbv += tl.sum(kf.to(tl.float32) * xk, 0) * (rk * unit)
        if BETA > 0:
            dbv = dbv * bv * (1.0 - bv / BETA)
        dp = db + ((sg * R).to(tl.int64) * ROWSALL) * H + at
        tl.store(dp, dbv, mask=r < n)
        for i in tl.static_range(1, R):
            tl.store(dp + (ROWSALL * H).to(tl.int64) * i, tl.zeros((32,), tl.float32), mask=r < n)
    xk = xk * bt
    # What it writes, into the state and to later tokens: what ends after a token is the whole less what ends up
    # to it.
    Ei = rcp(E)
    if NVB == 1:
        VX = tl.dot(tl.trans(Xt), vT, input_precision=PREC)
    VX = (VX * back) * (Ei * ex2(last + SHIFT)[:, None])
    xk += VX
    VX = VX * (kf.to(tl.float32) * rk[None, :])
    ss += tl.sum(VX, 1)
    hp -= VX
    p = tl.dot(qr, A, input_precision=PREC)
    p = tl.dot(kr, F, p, input_precision=PREC)
    hp -= kc.to(tl.float32) * p
    xk = (xk + Ei * p) * (rk * unit)[None, :]
    if NORM:
        xk -= kf.to(tl.float32) * tl.load(vp + 32 + r)[None, :]
    if OTMA:
        dk.store([row, h * K + c0], tl.trans(xk.to(IO)))
    else:
        store_unit(dk, xk, row, n, h, H, c0, K, KP, KB, ROWS)
    xg = (ss[:, None] + grad_sum(hp, tri, SD, PREC, True)) * unit
    if GATE > 0:
        if TURN:
            # Kept from above, it would cost more than to bring it in again.
            x = load_tile(g, row, n, h * K + c0, K - c0, H * K, 32, KB, False, ROWS, KC)
            x = narrow(tl.dot(tl.trans(x), (r[:, None] == r[None, :]).to(x.dtype)), x.dtype)
        xg = gate_grad(xg, x, rate, bias, lower, da, dbias, gi, gc, units, c0, n, K, KP, KB, GATE, RATE, BIAS, ROWS, R)
    if DGTMA:
        dg.store([row, h * K + c0], tl.trans(xg).to(IO))
    else:
        store_unit(dg, xg, row, n, h, H, c0, K, KP, KB, ROWS)


@triton.jit(do_not_specialize=["T", "NT", "H", "GROUP", "ROWSALL"])
def vector_grad(
    decay, beta, q, k, g, do, news, ys, states, exits, scores, vecs, norms, ones, a_log, dt_bias, table, dq, dk, dg, db,
    da, dbias, long, T, NT, H, GROUP, ROWSALL, scale, lower, K: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, VB: tl.constexpr, GATE: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr,
    BETA: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr, IO: tl.constexpr, SD: tl.constexpr, PREC: tl.constexpr,
    GPREC: tl.constexpr, VARLEN: tl.constexpr, ROWS: tl.constexpr, OTMA: tl.constexpr, DGTMA: tl.constexpr,
    RAW: tl.constexpr, ERASE: tl.constexpr, PART: tl.constexpr, FREE: tl.constexpr, PARTS: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """One program per (KB channels, head, 32 tokens), after `vector_scores`, for decays of at most 231 bits a chunk.

    dq, dk: [rows, H, K] (per value head); dg: gradient of ``g``; db: [PARTS, rows, H] fp32 parts of ``dbeta``;
    (ERASE: [rows, H, K] in the dtype of ``beta``, which is of that shape and multiplies the read key alone);
    da: [PARTS, 2 NT, H] and dbias: [2 NT, H, K] fp32 parts of the gate's parameter gradients.
    FREE: gates are not promised to be weak; where they are not, `vector_grad_exact` writes everything again.
    TURN: see `mild_grad`.
    """
    if PART:
        if idle(long, PART):
            return
    NG: tl.constexpr = KP // KB
    sg = tl.program_id(0) % NG
    w2 = tl.program_id(0) // NG
    sub = w2 % 2
    w = w2 // 2
    h = w % H
    ic = (w // H) * 2 + sub
    row, n = chunk_at(table, w // H, T, NT, 64, VARLEN)
    row += sub * 32
    n -= sub * 32
    R: tl.constexpr = PARTS // NG
    units = tl.num_programs(0) // NG
    gi = (sg * R).to(tl.int64) * units + ic * H + h
    gc = (ic.to(tl.int64) * H + h) * K
    cc = tl.arange(0, KB)
    c0 = sg * KB
    if n <= 0:
        no_gate_grad(da, dbias, gi, gc, units, c0, K, KB, RATE, BIAS, R)
        return
    hk = h // GROUP
    HK = H // GROUP
    r = tl.arange(0, 32)
    j = r[None, :]
    wn = w.to(tl.int64) * 128 + sub * 32
    at = (row + r).to(tl.int64) * H + h
    vp = vecs + w2.to(tl.int64) * 160
    # Needed late, when it would be waited for
    fetch(vp + tl.arange(0, 128))
    if TURN:
        # Beside the gate there are no registers for a loop, nor for the gate in two layouts.
        mild_grad(
            row, n, w, w2, sub, sg, h, units, gi, gc, r, j, cc, c0, at, vp, wn, hk, HK, beta, q, k, g, do, news, ys,
            states, exits, scores, norms, ones, a_log, dt_bias, dq, dk, dg, db, da, dbias, H, ROWSALL, scale, lower, K,
            KP, KB, V, VP, VB, GATE, RATE, BIAS, BETA, NORM, DT, IO, SD, PREC, GPREC, ROWS, OTMA, DGTMA, RAW, ERASE,
            FREE, PARTS, TURN,
        )  # fmt: skip
    else:
        # A loop of one turn and a condition that always holds: in a loop the compiler lets copies to memory finish
        # behind what follows, and behind a condition it does not make room for two turns.
        for turn in tl.range(0, tl.minimum(n, 1), num_stages=2):
            if turn < n:
                mild_grad(
                    row, n, w, w2, sub, sg, h, units, gi, gc, r, j, cc, c0, at, vp, wn, hk, HK, beta, q, k, g, do,
                    news, ys, states, exits, scores, norms, ones, a_log, dt_bias, dq, dk, dg, db, da, dbias, H,
                    ROWSALL, scale, lower, K, KP, KB, V, VP, VB, GATE, RATE, BIAS, BETA, NORM, DT, IO, SD, PREC, GPREC,
                    ROWS, OTMA, DGTMA, RAW, ERASE, FREE, PARTS, TURN,
                )  # fmt: skip
