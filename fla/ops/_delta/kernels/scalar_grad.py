# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""Last stage of the backward of the scalar-decay delta rule: everything that is local to a chunk.

With S the state before the chunk, X the gradient of the state after it, u the new values and dr = dv:

    E = tril(do u^T) rq_i rk_j beta_j e^(G_i - G_j);   F = -stril(dr u^T) rk_i rk_j beta_j e^(G_i - G_j)
    Q = cq do S^T + E k;   R = -ck dr S^T + F k;   W = cu u X^T + E^T q + F^T k
    dq = Q - norm part;    dk = R + W - norm part;   dbeta = k . W / beta
    dG = q . Q + k . R - k . W;   dG_last += e^(G_L) <S, X> + sum k . (cu u X^T);   dg = reverse cumsum of dG

An op with a read key p has p rp for the k rk of the rows of F, keeps R apart as dp, and adds F^T p to W; one that reads
before the decay has G_(i - 1) for G_i in F, and k . R in dG of the token before.

No gradient of the inverse appears: (I + L) u = r makes it the outer product that F holds. E and F are rounded once
and feed both sides, so that rows and columns cancel exactly in dG.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import softplus, whole_or_tail
from fla.ops._delta.kernels.common import SURE, doubt, idle, load_rows, load_tile, store_rows
from fla.ops._delta.kernels.scalar_prep import SC, SC_BETA, SC_CK, SC_CQ, SC_G, SC_RK, SC_RP, SC_RQ


@triton.jit
def _dot_all(a, b):
    """Sum of all products. bf16 has fp32's range, and its rounding averages out over a state: half the instructions."""
    if a.dtype == tl.bfloat16:
        return tl.sum(tl.sum((a * b).to(tl.float32), 1), 0)
    else:
        return tl.sum(tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), 0)


@triton.jit
def _read_side(
    S, St, Sd, dr, drt, Fb, kt, sp, tile, row, n, h, k0, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, DESC: tl.constexpr, D1: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """R, the gradient of the read key. ``S`` and ``drt``: the first blocks of V."""
    NV: tl.constexpr = (V + BV - 1) // BV
    R = tl.dot(drt, S, input_precision=DOT)
    for j in tl.range(1, NV, num_stages=1):
        Sj = load_tile(St, Sd, tile, j * BV, k0, V, K, BV, BK, DESC)
        R = tl.dot(load_rows(dr, dr, row, n, h, HV, j * BV, V, BV, C, D1), Sj, R, input_precision=DOT)
    return tl.dot(Fb, kt, R * -tl.load(sp + SC_CK * C)[:, None], input_precision=DOT)


@triton.jit
def _chunk_grad(
    q, k, p, do, dr, qd, kd, pd, Ut, St, Sd, Xt, Xd, sc, g, A_log, dt_bias, dq, dqd, dk, dkd, dp, dpd, dg, db, dy,
    long, row, n, tile, h, hk, H, HV, unscale, beta_inv,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    DECAY: tl.constexpr, BIAS: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr,
    DESC: tl.constexpr, DOT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    # Outside loops a descriptor load is waited for at once. What comes first comes through registers instead, all in
    # flight.
    D1: tl.constexpr = 2 if DESC else 0
    NV: tl.constexpr = (V + BV - 1) // BV
    dt: tl.constexpr = Ut.dtype.element_ty
    # The write strength is a factor of all that W holds and is divided out for dbeta. Where it is 0 or nearly so, a
    # floor far under rounding stands in; fp16 has less room below 1 than the other dtypes.
    FLOOR: tl.constexpr = 2.0**-12 if dt == tl.float16 else 1e-20
    rr = tl.arange(0, C)
    ok = rr < n
    sp = sc + tile.to(tl.int64) * (SC * C) + rr
    G = tl.load(sp + SC_G * C)
    rq = tl.load(sp + SC_RQ * C)
    rk = tl.load(sp + SC_RK * C)
    bt = tl.load(sp + SC_BETA * C)
    k0 = 0
    ut = load_tile(Ut, Ut, tile, 0, 0, V, C, BV, C, D1)
    dot = load_rows(do, do, row, n, h, HV, 0, V, BV, C, D1).to(dt)
    drt = load_rows(dr, dr, row, n, h, HV, 0, V, BV, C, D1)
    if not READ:
        # S and X meet in registers where they are loaded, before any accumulator lives.
        S = load_tile(St, St, tile, 0, k0, V, K, BV, BK, D1)
        X = load_tile(Xt, Xt, tile, 0, k0, V, K, BV, BK, D1)
        if DECAY >= 1:
            ss = _dot_all(S, X)
    E = tl.dot(dot, ut, input_precision=DOT)
    M = tl.dot(drt, ut, input_precision=DOT)
    for j in tl.range(1, NV, num_stages=1):
        uj = load_tile(Ut, Ut, tile, j * BV, 0, V, C, BV, C, D1)
        E = tl.dot(load_rows(do, do, row, n, h, HV, j * BV, V, BV, C, D1).to(dt), uj, E, input_precision=DOT)
        M = tl.dot(load_rows(dr, dr, row, n, h, HV, j * BV, V, BV, C, D1), uj, M, input_precision=DOT)
    bt = tl.where(tl.abs(bt) < FLOOR, FLOOR, bt)
    if PART == 1:
        aM = tl.sum(tl.where(rr[:, None] == rr[None, :], M, 0.0), 1)
    GL = tl.sum(tl.where(rr == C - 1, G, 0.0), 0)
    low = rr[:, None] > rr[None, :]
    eye = rr[:, None] == rr[None, :]
    dec = tl.exp2(tl.where(low, G[:, None] - G[None, :], -float("inf"))) * (rk * bt)[None, :]
    rp = rk
    if READ:
        rp = tl.load(sp + SC_RP * C)
    if BEFORE:
        before = tl.load(sp + SC_G * C - 1, mask=rr > 0, other=0.0)
        read = tl.exp2(tl.where(low, before[:, None] - G[None, :], -float("inf"))) * (rk * bt)[None, :]
        Fb = (M * read * (-rp)[:, None]).to(dt)
    else:
        Fb = (M * dec * (-rp)[:, None]).to(dt)
    Eb = (E * tl.where(eye, (rk * bt)[None, :], dec) * rq[:, None]).to(dt)
    if READ:
        S = load_tile(St, Sd, tile, 0, k0, V, K, BV, BK, DESC)
        # dp is finished before dk begins: both at once do not fit in registers.
        kt = load_rows(k, kd, row, n, hk, H, k0, K, BK, C, DESC).to(dt)
        R = _read_side(S, St, Sd, dr, drt, Fb, kt, sp, tile, row, n, h, k0, HV, K, V, BK, BV, C, DESC, D1, DOT)
        pt = load_rows(p, pd, row, n, hk, H, k0, K, BK, C, DESC).to(dt)
        pf = pt.to(tl.float32)
        aR = tl.sum(R * pf, 1)
        fp = rp * rp * aR
        if NORM:
            R = R - pf * fp[:, None]
        store_rows(dp, dpd, R.to(dp.dtype.element_ty), row, n, h, HV, k0, K, BK, C, DESC)
        # Loaded again, not kept: two programs have to fit in shared memory.
        ut = load_tile(Ut, Ut, tile, 0, 0, V, C, BV, C, D1)
        X = load_tile(Xt, Xd, tile, 0, k0, V, K, BV, BK, DESC)
        if DECAY >= 1:
            ss = _dot_all(S, X)
    W = tl.dot(tl.trans(ut), X, input_precision=DOT)
    for j in tl.range(1, NV, num_stages=1):
        Sj = load_tile(St, Sd, tile, j * BV, k0, V, K, BV, BK, DESC)
        Xj = load_tile(Xt, Xd, tile, j * BV, k0, V, K, BV, BK, DESC)
        if DECAY >= 1:
            ss += _dot_all(Sj, Xj)
        uj = load_tile(Ut, Ut, tile, j * BV, 0, V, C, BV, C, D1)
        W = tl.dot(tl.trans(uj), Xj, W, input_precision=DOT)
    if not READ:
        kt = load_rows(k, kd, row, n, hk, H, k0, K, BK, C, DESC).to(dt)
    qt = load_rows(q, qd, row, n, hk, H, k0, K, BK, C, DESC).to(dt)
    kf = kt.to(tl.float32)
    W = W * (rk * bt * tl.exp2(GL - G))[:, None]
    if DECAY >= 1:
        last = tl.sum(tl.sum(W * kf, 1), 0) + tl.exp2(GL) * ss
    if READ:
        pt = load_rows(p, pd, row, n, hk, H, k0, K, BK, C, DESC).to(dt)
    else:
        pt = kt
    W = tl.dot(tl.trans(Fb), pt, W, input_precision=DOT)
    W = tl.dot(tl.trans(Eb), qt, W, input_precision=DOT)
    aW = tl.sum(W * kf, 1)
    if READ:
        fk = rk * rk * aW
    else:
        R = _read_side(S, St, Sd, dr, drt, Fb, kt, sp, tile, row, n, h, k0, HV, K, V, BK, BV, C, DESC, D1, DOT)
        aR = tl.sum(R * kf, 1)
        W += R
        fk = rk * rk * (aR + aW)
    if NORM:
        W = W - kf * fk[:, None]
    else:
        # Nothing, for ``unscale`` is never negative; but so the sums are made where W and R are, not at the end with
        # both kept (544 bytes spilled instead of 240, 1.01 ms instead of 0.84 at B1 T8192 H96 D128).
        W = W - tl.where(unscale < 0.0, fk, 0.0)[:, None]
    store_rows(dk, dkd, W.to(dk.dtype.element_ty), row, n, h, HV, k0, K, BK, C, DESC)
    if READ:
        dot = load_rows(do, do, row, n, h, HV, 0, V, BV, C, D1).to(dt)
    Q = tl.dot(dot, S, input_precision=DOT)
    for j in tl.range(1, NV, num_stages=1):
        Sj = load_tile(St, Sd, tile, j * BV, k0, V, K, BV, BK, DESC)
        Q = tl.dot(load_rows(do, do, row, n, h, HV, j * BV, V, BV, C, D1).to(dt), Sj, Q, input_precision=DOT)
    Q = tl.dot(Eb, kt, Q * tl.load(sp + SC_CQ * C)[:, None], input_precision=DOT)
    qf = qt.to(tl.float32)
    aQ = tl.sum(Q * qf, 1)
    fq = rq * rq * aQ * unscale
    if NORM:
        Q = Q - qf * fq[:, None]
    else:
        Q = Q - tl.where(unscale < 0.0, fq, 0.0)[:, None]
    store_rows(dq, dqd, Q.to(dq.dtype.element_ty), row, n, h, HV, k0, K, BK, C, DESC)
    aB = aW
    if PART == 1:
        doubt(long, aQ + aR + aW)
        # The same from values alone: between keys that are nearly parallel, what W sums up cancels.
        aB = tl.where(tl.abs(bt) > SURE, aM, aW)
    at = (row + rr).to(tl.int64) * HV + h
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


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def scalar_grad(
    q, k, p, do, dr, qd, kd, pd, Ut, St, Sd, Xt, Xd, sc, g, A_log, dt_bias, dq, dqd, dk, dkd, dp, dpd, dg, db, dy,
    long, table, cu, offsets, T, NT, H, HV, unscale, beta_inv,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    DECAY: tl.constexpr, BIAS: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr,
    VARLEN: tl.constexpr, DESC: tl.constexpr, TAILS: tl.constexpr, DOT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program a chunk (TAILS: the ragged last chunk of a sequence) and value head, with all of K; wider ones are
    for `scalar_wide_grad`. dq and dk are those of the value head. With DESC only full chunks are taken: tails have a
    launch of their own, because a second path in one kernel costs the first one registers.

    DECAY as GATE of `scalar_prep`; 2 writes the gradient of the gate's input and, to ``dy``, that times the decay (the
    share of A_log). ``unscale`` is scale ** -2. ``beta_inv`` is 1 / beta_scale, or 0 where beta is given as it is.
    """
    if PART:
        if idle(long, PART):
            return
    pid = tl.program_id(0)
    h = pid % HV
    it = pid // HV
    it, row, n = whole_or_tail(table, cu, offsets, it, T, NT, C, VARLEN, DESC, TAILS)
    if n == 0:
        return
    _chunk_grad(
        q, k, p, do, dr, qd, kd, pd, Ut, St, Sd, Xt, Xd, sc, g, A_log, dt_bias, dq, dqd, dk, dkd, dp, dpd, dg, db, dy,
        long, row, n, it * HV + h, h, h // (HV // H), H, HV, unscale, beta_inv, K, V, BK, BV, C, NORM, DECAY,
        BIAS, READ, BEFORE, DESC, DOT, PART,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "H", "HV"])
def scalar_fold(
    dqh, dkh, dph, dq, dk, dp, rows, H, HV, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Sum dq, dk and dp (READ) over the value heads of each key head."""
    NB: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    c = (pid % NB) * BK + tl.arange(0, BK)
    h = (pid // NB) % H
    r = (pid // (NB * H)) * BR + tl.arange(0, BR)
    r64 = r.to(tl.int64)
    m = (r < rows)[:, None] & (c < K)[None, :]
    out = (r64 * H + h)[:, None] * K + c[None, :]
    aq = tl.zeros((BR, BK), tl.float32)
    ak = tl.zeros((BR, BK), tl.float32)
    if READ:
        ap = tl.zeros((BR, BK), tl.float32)
    group = HV // H
    for j in range(group):
        at = r64 * HV + h * group + j
        aq += tl.load(dqh + at[:, None] * K + c[None, :], mask=m, other=0.0).to(tl.float32)
        ak += tl.load(dkh + at[:, None] * K + c[None, :], mask=m, other=0.0).to(tl.float32)
        if READ:
            ap += tl.load(dph + at[:, None] * K + c[None, :], mask=m, other=0.0).to(tl.float32)
    tl.store(dq + out, aq.to(dq.dtype.element_ty), mask=m)
    tl.store(dk + out, ak.to(dk.dtype.element_ty), mask=m)
    if READ:
        tl.store(dp + out, ap.to(dp.dtype.element_ty), mask=m)
