# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""Chunk gradients of the scalar-decay delta rule where K does not fit in one program; formulas as in `scalar_grad`.

`scalar_scores` makes E and F once for all blocks of K, and what the norms need of all of K from values alone:

    q . dq = o . do;   k . W = u . dv;   k . R = u . dv - v . dv

because q, the read key and the written one enter linearly. `scalar_wide_grad` then goes over V in a pipelined loop with
one block of K: no product in it feeds another, so no tile but the three results stays in registers.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at, softplus, whole_or_tail
from fla.ops._delta.kernels.common import SURE, doubt, idle, load_rows, load_tile, store_rows, store_tile
from fla.ops._delta.kernels.scalar_grad import _dot_all
from fla.ops._delta.kernels.scalar_prep import SC, SC_BETA, SC_CK, SC_CQ, SC_G, SC_RK, SC_RP, SC_RQ


@triton.jit
def _strength(sp, C: tl.constexpr, DT: tl.constexpr):
    # A factor of all that W holds, divided out for dbeta. Where it is 0 or nearly so, a floor far under rounding stands
    # in; fp16 has less room below 1 than the other dtypes.
    FLOOR: tl.constexpr = 2.0**-12 if tl.float16 == DT else 1e-20
    bt = tl.load(sp + SC_BETA * C)
    return tl.where(tl.abs(bt) < FLOOR, FLOOR, bt)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def scalar_scores(
    v, o, do, dr, Ut, sc, EF, part, long, table, T, NT, H, HV, unscale,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr,
    VARLEN: tl.constexpr, DOT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program a chunk and value head: E and F to ``EF`` `[2 * tile, C, C]`; with NORM what is taken away along q, k
    and p to ``part`` `[tile, 3, C]`, and in a fourth row of PART 1 ``k . W`` from values."""
    if PART:
        if idle(long, PART):
            return
    pid = tl.program_id(0)
    h = pid % HV
    it = pid // HV
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    if n <= 0:
        return
    NV: tl.constexpr = (V + BV - 1) // BV
    dt: tl.constexpr = EF.dtype.element_ty
    tile = it * HV + h
    rr = tl.arange(0, C)
    E = tl.zeros((C, C), tl.float32)
    M = tl.zeros((C, C), tl.float32)
    aQ = tl.zeros((C,), tl.float32)
    aV = tl.zeros((C,), tl.float32)
    for j in tl.range(0, NV, num_stages=1):
        ut = load_tile(Ut, Ut, tile, j * BV, 0, V, C, BV, C, 0)
        dot = load_rows(do, do, row, n, h, HV, j * BV, V, BV, C, 0).to(dt)
        drt = load_rows(dr, dr, row, n, h, HV, j * BV, V, BV, C, 0)
        if NORM:
            ot = load_rows(o, o, row, n, h, HV, j * BV, V, BV, C, 0)
            vt = load_rows(v, v, row, n, h, HV, j * BV, V, BV, C, 0)
        E = tl.dot(dot, ut, E, input_precision=DOT)
        M = tl.dot(drt, ut, M, input_precision=DOT)
        if NORM:
            aQ += tl.sum(dot.to(tl.float32) * ot.to(tl.float32), 1)
            aV += tl.sum(drt.to(tl.float32) * vt.to(tl.float32), 1)
    sp = sc + tile.to(tl.int64) * (SC * C) + rr
    G = tl.load(sp + SC_G * C)
    rq = tl.load(sp + SC_RQ * C)
    rk = tl.load(sp + SC_RK * C)
    bt = _strength(sp, C, dt)
    low = rr[:, None] > rr[None, :]
    eye = rr[:, None] == rr[None, :]
    dec = tl.exp2(tl.where(low, G[:, None] - G[None, :], -float("inf"))) * (rk * bt)[None, :]
    rp = rk
    if READ:
        rp = tl.load(sp + SC_RP * C)
    E = E * tl.where(eye, (rk * bt)[None, :], dec) * rq[:, None]
    if BEFORE:
        before = tl.load(sp + SC_G * C - 1, mask=rr > 0, other=0.0)
        dec = tl.exp2(tl.where(low, before[:, None] - G[None, :], -float("inf"))) * (rk * bt)[None, :]
    F = M * dec * (-rp)[:, None]
    store_tile(EF, EF, E.to(dt), tile * 2, 0, 0, C, C, C, C, 0)
    store_tile(EF, EF, F.to(dt), tile * 2 + 1, 0, 0, C, C, C, C, 0)
    PARTS: tl.constexpr = 4 if PART == 1 else 3
    if NORM or PART == 1:
        aM = tl.sum(tl.where(eye, M, 0.0), 1)
        pp = part + tile.to(tl.int64) * (PARTS * C) + rr
    if PART == 1:
        tl.store(pp + 3 * C, aM)
    if NORM:
        tl.store(pp, rq * rq * unscale * aQ)
        if READ:
            tl.store(pp + C, rk * rk * aM)
            tl.store(pp + 2 * C, rp * rp * (aM - aV))
        else:
            tl.store(pp + C, rk * rk * (2.0 * aM - aV))


@triton.jit
def _wide_chunk(
    q, k, p, do, dr, qd, kd, pd, dod, drd, Ut, Ud, St, Sd, Xt, Xd, EF, Ed, sc, g, A_log, dt_bias, dq, dqd, dk, dkd, dp,
    dpd, dg, db, dy, part, long, row, n, tile, h, hk, kb0, H, HV, rows, beta_inv,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    DECAY: tl.constexpr, BIAS: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr, DESC: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    dt: tl.constexpr = EF.dtype.element_ty
    rr = tl.arange(0, C)
    ok = rr < n
    k0 = kb0 * BK
    Q = tl.zeros((C, BK), tl.float32)
    R = tl.zeros((C, BK), tl.float32)
    W = tl.zeros((C, BK), tl.float32)
    ss = tl.zeros((), tl.float32)
    # Through pointers the pipelined loop gave another dq in each run (triton 3.6, sm90), so it is not pipelined there.
    for j in tl.range(0, NV, num_stages=STAGES if DESC else 1):
        Sj = load_tile(St, Sd, tile, j * BV, k0, V, K, BV, BK, DESC)
        Xj = load_tile(Xt, Xd, tile, j * BV, k0, V, K, BV, BK, DESC)
        uj = load_tile(Ut, Ud, tile, j * BV, 0, V, C, BV, C, DESC)
        dj = load_rows(do, dod, row, n, h, HV, j * BV, V, BV, C, DESC).to(dt)
        rj = load_rows(dr, drd, row, n, h, HV, j * BV, V, BV, C, DESC)
        if DECAY >= 1:
            ss += _dot_all(Sj, Xj)
        W = tl.dot(tl.trans(uj), Xj, W, input_precision=DOT)
        R = tl.dot(rj, Sj, R, input_precision=DOT)
        Q = tl.dot(dj, Sj, Q, input_precision=DOT)
    Eb = load_tile(EF, Ed, tile * 2, 0, 0, C, C, C, C, DESC)
    Fb = load_tile(EF, Ed, tile * 2 + 1, 0, 0, C, C, C, C, DESC)
    kt = load_rows(k, kd, row, n, hk, H, k0, K, BK, C, DESC).to(dt)
    qt = load_rows(q, qd, row, n, hk, H, k0, K, BK, C, DESC).to(dt)
    pt = kt
    if READ:
        pt = load_rows(p, pd, row, n, hk, H, k0, K, BK, C, DESC).to(dt)
    sp = sc + tile.to(tl.int64) * (SC * C) + rr
    pp = part + tile.to(tl.int64) * ((4 if PART == 1 else 3) * C) + rr
    G = tl.load(sp + SC_G * C)
    bt = _strength(sp, C, dt)
    GL = tl.sum(tl.where(rr == C - 1, G, 0.0), 0)
    kf = kt.to(tl.float32)
    W = W * (tl.load(sp + SC_RK * C) * bt * tl.exp2(GL - G))[:, None]
    if DECAY >= 1:
        last = tl.sum(tl.sum(W * kf, 1), 0) + tl.exp2(GL) * ss
    W = tl.dot(tl.trans(Fb), pt, W, input_precision=DOT)
    W = tl.dot(tl.trans(Eb), qt, W, input_precision=DOT)
    aW = tl.sum(W * kf, 1)
    R = tl.dot(Fb, kt, R * -tl.load(sp + SC_CK * C)[:, None], input_precision=DOT)
    pf = pt.to(tl.float32)
    aR = tl.sum(R * pf, 1)
    if READ:
        if NORM:
            R -= pf * tl.load(pp + 2 * C)[:, None]
        store_rows(dp, dpd, R.to(dp.dtype.element_ty), row, n, h, HV, k0, K, BK, C, DESC)
    else:
        W += R
    if NORM:
        W -= kf * tl.load(pp + C)[:, None]
    store_rows(dk, dkd, W.to(dk.dtype.element_ty), row, n, h, HV, k0, K, BK, C, DESC)
    Q = tl.dot(Eb, kt, Q * tl.load(sp + SC_CQ * C)[:, None], input_precision=DOT)
    qf = qt.to(tl.float32)
    aQ = tl.sum(Q * qf, 1)
    if NORM:
        Q -= qf * tl.load(pp)[:, None]
    store_rows(dq, dqd, Q.to(dq.dtype.element_ty), row, n, h, HV, k0, K, BK, C, DESC)
    aB = aW
    if PART == 1:
        doubt(long, aQ + aR + aW)
        # See `scalar_grad`; one block of K has it for all.
        aB = tl.where(tl.abs(bt) > SURE, tl.where(kb0 == 0, tl.load(pp + 3 * C), 0.0), aW)
    at = (row + rr).to(tl.int64) * HV + h + kb0.to(tl.int64) * rows * HV
    # beta = beta_scale sigmoid(b): d beta / d b = beta (1 - beta / beta_scale).
    tl.store(db + at, tl.where(beta_inv > 0, aB * (1.0 - bt * beta_inv), aB / bt), mask=ok)
    if DECAY >= 1:
        dgt = tl.cumsum(aQ + aR - aW, 0, reverse=True) + last
        if BEFORE:
            dgt -= aR
        if DECAY == 2:
            graw = tl.load(g + (row + rr).to(tl.int64) * HV + h, mask=ok, other=0.0).to(tl.float32)
            if BIAS:
                graw += tl.load(dt_bias + h).to(tl.float32)
            dgt = dgt * -tl.exp(tl.load(A_log + h).to(tl.float32))
            tl.store(dy + at, dgt * softplus(graw), mask=ok)
            dgt = dgt * tl.sigmoid(graw)
        tl.store(dg + at, dgt, mask=ok)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV", "rows"])
def scalar_wide_grad(
    q, k, p, do, dr, qd, kd, pd, dod, drd, Ut, Ud, St, Sd, Xt, Xd, EF, Ed, sc, g, A_log, dt_bias, dq, dqd, dk, dkd, dp,
    dpd, dg, db, dy, part, long, table, cu, offsets, T, NT, H, HV, rows, beta_inv,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    DECAY: tl.constexpr, BIAS: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr, VARLEN: tl.constexpr,
    DESC: tl.constexpr, TAILS: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """One program a block of K, chunk (TAILS: the ragged last chunk of a sequence) and value head. Parameters as in
    `scalar_grad`; dg, db and dy are shares `[blocks, rows, HV]` of each block of K."""
    if PART:
        if idle(long, PART):
            return
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    kb0 = pid % NK
    h = (pid // NK) % HV
    it = pid // (NK * HV)
    it, row, n = whole_or_tail(table, cu, offsets, it, T, NT, C, VARLEN, DESC, TAILS)
    if n == 0:
        return
    _wide_chunk(
        q, k, p, do, dr, qd, kd, pd, dod, drd, Ut, Ud, St, Sd, Xt, Xd, EF, Ed, sc, g, A_log, dt_bias, dq, dqd, dk, dkd,
        dp, dpd, dg, db, dy, part, long, row, n, it * HV + h, h, h // (HV // H), kb0, H, HV, rows, beta_inv, K, V, BK,
        BV, C, NORM, DECAY, BIAS, READ, BEFORE, DESC, DOT, STAGES, PART,
    )  # fmt: skip
