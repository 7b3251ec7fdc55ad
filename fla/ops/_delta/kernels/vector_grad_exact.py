# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""Chunk-local gradients of the vector-decay chunk form for gates of any strength; see `vector_grad`.

No factor exceeds 1: pairs of tokens are taken level by level of a tree.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at
from fla.ops._delta.kernels.common import idle
from fla.ops._delta.kernels.vector_math import (
    ex2,
    gate_sum,
    grad_sum,
    level_pairs,
    load_tile,
    log_decay,
    narrow,
    one_matrix,
    raw_decay,
    split_gates,
    write_rate,
)
from fla.ops._delta.kernels.vector_unit import gate_grad, no_gate_grad, state_products, store_unit


@triton.jit
def level_terms(
    A, F, bt, kn, qn, gh, gr, ones, lv, SD: tl.constexpr, PREC: tl.constexpr, GPREC: tl.constexpr, RAW: tl.constexpr
):
    """Pairs whose tokens part at one level of the tree: every factor is at most 1 and each token has one role.

    Returns the gradients of q, of k read, of k written and of the decay.
    """
    pairs = level_pairs(16 >> lv, 32)
    Al = tl.where(pairs, A, 0.0).to(SD)
    Fl = tl.where(pairs, F, 0.0).to(SD)
    m = one_matrix(ones, 3 + lv, 32)
    f = ex2(gate_sum(gh, gr, tl.trans(m), SD, GPREC, RAW))
    kk = kn * f
    qq = qn * f
    kb = narrow(kk, SD)
    pq = tl.dot(kb, tl.trans(Al), input_precision=PREC)
    h = qq * pq
    pr = tl.dot(kb, tl.trans(Fl), input_precision=PREC)
    h += (kk * bt) * pr
    pw = tl.dot(narrow(qq, SD), Al, input_precision=PREC)
    pw = tl.dot(narrow(kk * bt, SD), Fl, pw, input_precision=PREC)
    h += kk * pw
    return f * pq, f * pr, f * pw, grad_sum(h, m, SD, PREC, False)


@triton.jit
def tree_grad(
    unit, units, decay, beta, q, k, g, do, news, ys, states, exits, scores, vecs, norms, ones, a_log, dt_bias, table,
    dq, dk, dg, db, da, dbias, T, NT, H, GROUP, ROWSALL, scale, lower, K: tl.constexpr, KP: tl.constexpr, KB:
    tl.constexpr, V: tl.constexpr, VP: tl.constexpr, VB: tl.constexpr, GATE: tl.constexpr, RATE: tl.constexpr, BIAS:
    tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr, IO: tl.constexpr, SD: tl.constexpr, PREC:
    tl.constexpr, GPREC: tl.constexpr, VARLEN: tl.constexpr, ROWS: tl.constexpr, OTMA: tl.constexpr, DGTMA:
    tl.constexpr, RAW: tl.constexpr, ERASE: tl.constexpr,
):  # fmt: skip
    """What `vector_grad` does for one of the `units`: KB channels of 32 tokens and a head."""
    NG: tl.constexpr = KP // KB
    NVB: tl.constexpr = VP // VB
    VC: tl.constexpr = V != VP
    KC: tl.constexpr = K != KP
    sg = unit % NG
    w2 = unit // NG
    sub = w2 % 2
    w = w2 // 2
    h = w % H
    ic = (w // H) * 2 + sub
    row, n = chunk_at(table, w // H, T, NT, 64, VARLEN)
    row += sub * 32
    n -= sub * 32
    gi = sg.to(tl.int64) * (units // NG) + ic * H + h
    gc = (ic.to(tl.int64) * H + h) * K
    cc = tl.arange(0, KB)
    c0 = sg * KB
    if n <= 0:
        no_gate_grad(da, dbias, gi, gc, units, c0, K, KB, RATE, BIAS, 1)
    else:
        hk = h // GROUP
        HK = H // GROUP
        r = tl.arange(0, 32)
        j = r[None, :]
        wn = w.to(tl.int64) * 128 + sub * 32
        at = (row + r).to(tl.int64) * H + h
        vp = vecs + w2.to(tl.int64) * 160
        big = tl.load(vp + 128)
        back = 1.0 / big
        # All loads first: nothing else is held yet, and they travel together.
        x = load_tile(g, row, n, h * K + c0, K - c0, H * K, 32, KB, False, ROWS, KC)
        kf = load_tile(k, row, n, hk * K + c0, K - c0, HK * K, 32, KB, False, ROWS, KC)
        qf = load_tile(q, row, n, hk * K + c0, K - c0, HK * K, 32, KB, False, ROWS, KC)
        A = load_tile(scores, w2 * 64, 32, 0, 32, 32, 32, 32, False, False, False)
        F = load_tile(scores, w2 * 64 + 32, 32, 0, 32, 32, 32, 32, False, False, False)
        if NVB == 1:
            vT = load_tile(news, w * VP, VB, sub * 32, 64, 64, VB, 32, False, False, False)
            yT = load_tile(ys, w * VP, VB, sub * 32, 64, 64, VB, 32, False, False, False)
            dot = load_tile(do, row, n, h * V, V, H * V, 32, VB, False, ROWS, VC).to(DT)
            St = load_tile(states, w2 * VP, VB, c0, KP, KP, VB, KB, False, False, False)
            Xt = load_tile(exits, w2 * VP, VB, c0, KP, KP, VB, KB, False, False, False)
        if ERASE:
            bt = tl.trans(load_tile(beta, row, n, h * K + c0, K - c0, H * K, 32, KB, False, ROWS, KC)).to(tl.float32)
        else:
            bv = write_rate(tl.load(beta + at, mask=r < n, other=0.0), BETA)
            if ROWS:
                bv = tl.where(r < n, bv, 0.0)
            bt = bv[None, :]
        rq = tl.zeros((32,), tl.float32) + 1.0
        rk = rq
        if NORM:
            rq = tl.load(norms + wn + r)
            rk = tl.load(norms + wn + 64 + r)
        rq = rq * scale
        if not ERASE:
            dbv = tl.load(vp + 64 + r) * tl.where(sg == 0, 1.0, 0.0)
        rate = 1.0
        if RATE:
            rate = tl.exp(tl.load(a_log + h).to(tl.float32))
        tri = one_matrix(ones, 0, 32)
        tru = one_matrix(ones, 1, 32)
        x = tl.trans(x)
        bias = 0.0
        if BIAS:
            bias = tl.load(dt_bias + h * K + c0 + cc, mask=c0 + cc < K, other=0.0).to(tl.float32)[:, None]
        if RAW:
            gl = raw_decay(x, True)
        else:
            x = x.to(tl.float32)
            gl = log_decay(x, rate, bias, lower, GATE, True)
        if ROWS:
            gl = tl.where(j < n, gl, 0.0).to(gl.dtype)
        gh, gr = split_gates(gl, SD, RAW)
        es = ex2(gate_sum(gh, gr, tl.trans(tru), SD, GPREC, RAW))
        G = gate_sum(gh, gr, tl.trans(tri), SD, GPREC, RAW)
        # Each product stands right before its use: results are the largest things held.
        if NVB == 1:
            SX = tl.dot(tl.trans(St), Xt, input_precision=PREC)
            VX = tl.dot(tl.trans(Xt), vT, input_precision=PREC)
        else:
            SX, QS, YS, VX = state_products(
                states, exits, news, ys, do, row, n, w, w2, sub, h, H, c0, KP, KB, V, VP, VB, DT, PREC, ROWS
            )
        ss = tl.sum(tl.where(cc[:, None] == cc[None, :], SX, 0.0), 1)
        ss = ss * back * tl.load(decay + w2.to(tl.int64) * KP + c0 + cc)
        kf = tl.trans(kf).to(tl.float32)
        kn = kf * rk[None, :]
        # hp and hs: gradients of the decay summed up to a token, and after it
        xw = (es * back) * VX
        xg = grad_sum(kn * xw, tru, SD, PREC, False) + ss[:, None]
        Ed = ex2(G) * back
        if NVB == 1:
            QS = tl.dot(tl.trans(St), tl.trans(dot), input_precision=PREC)
        if ROWS:
            QS = tl.where(j < n, QS, 0.0)
        qf = tl.trans(qf).to(tl.float32)
        qn = qf * rq[None, :]
        xq = Ed * QS
        hp = qn * xq
        if NVB == 1:
            YS = tl.dot(tl.trans(St), yT, input_precision=PREC)
        xr = -Ed * YS
        hp += kn * (bt * xr)
        diag = tl.load(vp + 96 + r)[None, :]
        xq += diag * kn
        xw += diag * qn
        for lv in tl.range(0, 5):
            pq, pr, pw, pg = level_terms(A, F, bt, kn, qn, gh, gr, ones, lv, SD, PREC, GPREC, RAW)
            xq += pq
            xr += pr
            xw += pw
            xg += pg
        xq = xq * (rq * big)[None, :]
        if NORM:
            xq -= qf * tl.load(vp + r)[None, :]
        if OTMA:
            dq.store([row, h * K + c0], tl.trans(xq.to(IO)))
        else:
            store_unit(dq, xq, row, n, h, H, c0, K, KP, KB, ROWS)
        if ERASE:
            store_unit(db, (kf * xr) * (rk * big)[None, :], row, n, h, H, c0, K, KP, KB, ROWS)
        else:
            dbv += tl.sum(kf * xr, 0) * (rk * big)
        xk = (xr * bt + xw) * (rk * big)[None, :]
        if NORM:
            xk -= kf * tl.load(vp + 32 + r)[None, :]
        if OTMA:
            dk.store([row, h * K + c0], tl.trans(xk.to(IO)))
        else:
            store_unit(dk, xk, row, n, h, H, c0, K, KP, KB, ROWS)
        xg = (xg + grad_sum(hp, tri, SD, PREC, False)) * big
        if GATE > 0:
            xg = gate_grad(
                xg, x, rate, bias, lower, da, dbias, gi, gc, units, c0, n, K, KP, KB, GATE, RATE, BIAS, ROWS, 1
            )
        if DGTMA:
            dg.store([row, h * K + c0], tl.trans(xg).to(IO))
        else:
            store_unit(dg, xg, row, n, h, H, c0, K, KP, KB, ROWS)
        if not ERASE:
            if BETA > 0:
                dbv = dbv * bv * (1.0 - bv / BETA)
            tl.store(db + (sg.to(tl.int64) * ROWSALL) * H + at, dbv, mask=r < n)


@triton.jit(do_not_specialize=["T", "NT", "H", "GROUP", "ROWSALL", "units"])
def vector_grad_exact(
    decay, beta, q, k, g, do, news, ys, states, exits, scores, vecs, norms, ones, a_log, dt_bias, table, dq, dk, dg,
    db, da, dbias, marks, long, T, NT, H, GROUP, ROWSALL, scale, lower, units, K: tl.constexpr, KP: tl.constexpr, KB:
    tl.constexpr, V: tl.constexpr, VP: tl.constexpr, VB: tl.constexpr, GATE: tl.constexpr, RATE: tl.constexpr, BIAS:
    tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr, IO: tl.constexpr, SD: tl.constexpr, PREC:
    tl.constexpr, GPREC: tl.constexpr, VARLEN: tl.constexpr, ROWS: tl.constexpr, OTMA: tl.constexpr, DGTMA:
    tl.constexpr, RAW: tl.constexpr, ERASE: tl.constexpr, PART: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Arguments as those of `vector_grad`. One program per unit, or (SOME) few programs, which look for units with
    strong gates: ``marks``, one for each 32 tokens and head, are 1 there and 0 elsewhere."""
    if PART:
        if idle(long, PART):
            return
    if SOME:
        at = tl.arange(0, 128)
        step = tl.num_programs(0)
        for first in tl.range(tl.program_id(0), units, step * 128):
            unit = first + at * step
            found = tl.load(marks + unit // (KP // KB), mask=unit < units, other=0)
            for _ in tl.range(0, tl.sum(found, 0)):
                i = tl.min(tl.where(found != 0, at, 128), 0)
                found = tl.where(at == i, 0, found)
                tree_grad(
                    first + i * step, units, decay, beta, q, k, g, do, news, ys, states, exits, scores, vecs, norms,
                    ones, a_log, dt_bias, table, dq, dk, dg, db, da, dbias, T, NT, H, GROUP, ROWSALL, scale, lower, K,
                    KP, KB, V, VP, VB, GATE, RATE, BIAS, BETA, NORM, DT, IO, SD, PREC, GPREC, VARLEN, ROWS, OTMA,
                    DGTMA, RAW, ERASE,
                )  # fmt: skip
    else:
        tree_grad(
            tl.program_id(0), units, decay, beta, q, k, g, do, news, ys, states, exits, scores, vecs, norms, ones,
            a_log, dt_bias, table, dq, dk, dg, db, da, dbias, T, NT, H, GROUP, ROWSALL, scale, lower, K, KP, KB, V,
            VP, VB, GATE, RATE, BIAS, BETA, NORM, DT, IO, SD, PREC, GPREC, VARLEN, ROWS, OTMA, DGTMA, RAW, ERASE,
        )  # fmt: skip
