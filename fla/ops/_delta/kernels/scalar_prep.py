# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""First stage of the scalar-decay delta rule: what a chunk needs besides the caller's q, k and v.

One program a chunk and value head writes, in the dtype of k,

    T[i, j]  = (I + stril(k_i . k_j rk_i rk_j beta_j e^(G_i - G_j)))^-1
    A[i, j]  = tril(q_i . k_j rq_i rk_j beta_j e^(G_i - G_j)),  rq with the scale

and the scalars of each token in fp32 (rows of ``sc``, see `SC`). ``beta`` scales columns, so that ``u = T (v - k S)``
is right where beta is 0. Norms come off the diagonals of k k^T and q q^T: q and k are never touched in registers.

An op with a read key p of its own has p_i rp_i for the k_i rk_i of T, and one that reads before the decay G_(i - 1) for
its G_i.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, NORM_EPS, chunk_at, softplus, tri_inv
from fla.ops._delta.kernels.common import idle, large, load_rows, long_keys, parallel, store_tile

# Rows of the scalar table of a chunk: what multiplies q S, k S and the state update of a token; the cumulative log2
# decay; the factors of q (with scale), k, the write strength and the factor of p.
SC = tl.constexpr(8)
SC_CQ = tl.constexpr(0)
SC_CK = tl.constexpr(1)
SC_CU = tl.constexpr(2)
SC_G = tl.constexpr(3)
SC_RQ = tl.constexpr(4)
SC_RK = tl.constexpr(5)
SC_BETA = tl.constexpr(6)
SC_RP = tl.constexpr(7)
# e^-104 is 0 in fp32. Cutting the log decay here changes nothing and keeps sums of decays precise and finite.
MIN_LOG_DECAY = tl.constexpr(-104.0)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV", "save"])
def scalar_prep(
    q, k, p, qd, kd, pd, g, beta, A_log, dt_bias, Tm, Td, Aqk, Ad, sc, long, table, T, NT, H, HV, scale, beta_scale,
    save,
    K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr,
    DOT: tl.constexpr, INV: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """GATE: 0 no decay, 1 ``g`` is the log decay, 2 ``g`` goes through the gate. ``save``: keep what backward needs.
    READ: ``p`` is the read key, else k. BEFORE: the state is read before its decay. The products run over blocks of KB.
    PART: see `kernels.common`; with 1 this kernel runs in any case and marks in ``long`` which chunks have long keys or
    a large inverse.
    """
    if PART == 2:
        if idle(long, PART):
            return
    pid = tl.program_id(0)
    h = pid % HV
    it = pid // HV
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    if PART == 1:
        # Rows speak for themselves later, behind barriers of the products.
        tl.store(long + it * HV + h, 0)
        mark = long + it * HV + h + tl.zeros((C,), tl.int32)
    if n <= 0:
        return
    hk = h // (HV // H)
    dt: tl.constexpr = Tm.dtype.element_ty
    rr = tl.arange(0, C)
    ok = rr < n
    at = (row + rr).to(tl.int64) * HV + h
    bt = tl.load(beta + at, mask=ok, other=0.0).to(tl.float32)
    gt = bt
    if GATE >= 1:
        gt = tl.load(g + at, mask=ok, other=0.0).to(tl.float32)
    # Outside loops a descriptor load is waited for at once. Two tiles that registers have room for come through them,
    # all in flight.
    EARLY: tl.constexpr = KB <= 128
    D1: tl.constexpr = 0 if EARLY else DESC
    kt = load_rows(k, kd, row, n, hk, H, 0, K, KB, C, D1).to(dt)
    if EARLY:
        if READ:
            pt = load_rows(p, pd, row, n, hk, H, 0, K, KB, C, D1).to(dt)
        else:
            qt = load_rows(q, qd, row, n, hk, H, 0, K, KB, C, D1).to(dt)
    if SIGMOID:
        bt = tl.where(ok, tl.sigmoid(bt) * beta_scale, 0.0)
    if GATE == 0:
        G = tl.zeros((C,), tl.float32)
        Gr = G
    else:
        if GATE == 2:
            a = tl.load(A_log + h).to(tl.float32)
            if BIAS:
                gt += tl.load(dt_bias + h).to(tl.float32)
            gt = -tl.exp(a) * softplus(gt)
        gt = tl.where(ok, tl.maximum(gt, MIN_LOG_DECAY), 0.0)
        G = tl.cumsum(gt, 0) * LOG2E
        Gr = G
        if BEFORE:
            Gr = G - gt * LOG2E
    # The last entry of G: rows past the end add nothing.
    GL = tl.sum(tl.where(rr == C - 1, G, 0.0), 0)
    low = rr[:, None] > rr[None, :]
    eye = rr[:, None] == rr[None, :]
    # With BEFORE the decay from token j to the state that token i reads; e^(g_i) takes it on to token i.
    dec = tl.exp2(tl.where(low, Gr[:, None] - G[None, :], -float("inf")))
    KK = tl.dot(kt, tl.trans(kt), input_precision=DOT)
    for k0 in tl.range(KB, K, KB, num_stages=1):
        kj = load_rows(k, kd, row, n, hk, H, k0, K, KB, C, DESC).to(dt)
        KK = tl.dot(kj, tl.trans(kj), KK, input_precision=DOT)
    if NORM or PART == 1:
        kk = tl.sum(tl.where(eye, KK, 0.0), 1)
    if NORM:
        rk = tl.where(ok, tl.rsqrt(kk + NORM_EPS), 0.0)
    elif PART == 1:
        # Always 1. Said like this, what is multiplied with it lies where ``kk`` does and is not loaded over and over.
        rk = tl.where(ok & ~(kk < 0.0), 1.0, 0.0)
    else:
        rk = tl.where(ok, 1.0, 0.0)
    col = rk * bt
    rp = rk
    if READ:
        if not EARLY:
            pt = load_rows(p, pd, row, n, hk, H, 0, K, KB, C, DESC).to(dt)
        KK = tl.dot(pt, tl.trans(kt), input_precision=DOT)
        if NORM or PART == 1:
            PP = tl.dot(pt, tl.trans(pt), input_precision=DOT)
        for k0 in tl.range(KB, K, KB, num_stages=1):
            pj = load_rows(p, pd, row, n, hk, H, k0, K, KB, C, DESC).to(dt)
            kj = load_rows(k, kd, row, n, hk, H, k0, K, KB, C, DESC).to(dt)
            KK = tl.dot(pj, tl.trans(kj), KK, input_precision=DOT)
            if NORM or PART == 1:
                PP = tl.dot(pj, tl.trans(pj), PP, input_precision=DOT)
        if NORM:
            rp = tl.where(ok, tl.rsqrt(tl.sum(tl.where(eye, PP, 0.0), 1) + NORM_EPS), 0.0)
        elif PART == 1:
            tl.store(mark, 1, mask=long_keys(tl.sum(tl.where(eye, PP, 0.0), 1), bt, ok))
    # Selected, not multiplied away: rows past the end may hold anything.
    L = tl.where(low & ok[:, None], KK * dec * rp[:, None] * col[None, :], 0.0)
    if READ or not EARLY:
        qt = load_rows(q, qd, row, n, hk, H, 0, K, KB, C, DESC).to(dt)
    if NORM:
        QQ = tl.dot(qt, tl.trans(qt), input_precision=DOT)
        for k0 in tl.range(KB, K, KB, num_stages=1):
            qj = load_rows(q, qd, row, n, hk, H, k0, K, KB, C, DESC).to(dt)
            QQ = tl.dot(qj, tl.trans(qj), QQ, input_precision=DOT)
        rq = tl.where(ok, tl.rsqrt(tl.sum(tl.where(eye, QQ, 0.0), 1) + NORM_EPS) * scale, 0.0)
    else:
        rq = tl.where(ok, scale, 0.0)
    A = tl.dot(qt, tl.trans(kt), input_precision=DOT)
    for k0 in tl.range(KB, K, KB, num_stages=1):
        qj = load_rows(q, qd, row, n, hk, H, k0, K, KB, C, DESC).to(dt)
        kj = load_rows(k, kd, row, n, hk, H, k0, K, KB, C, DESC).to(dt)
        A = tl.dot(qj, tl.trans(kj), A, input_precision=DOT)
    if BEFORE:
        dec *= tl.exp2(G - Gr)[:, None]
    A = tl.where((low | eye) & ok[:, None], A * tl.where(eye, 1.0, dec) * rq[:, None] * col[None, :], 0.0)
    tile = it * HV + h
    store_tile(Aqk, Ad, A.to(dt), tile, 0, 0, C, C, C, C, DESC)
    eG = tl.exp2(G)
    ck = rp * eG
    if BEFORE:
        ck = rp * tl.exp2(Gr)
    # Four rows a store, because each store of a vector would take it to another layout by itself.
    four = tl.arange(0, 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    sp = sc + tile.to(tl.int64) * (SC * C) + four * C + rr[:, None, None]
    tl.store(sp, tl.join(tl.join(rq * eG, col * tl.exp2(GL - G)), tl.join(ck, G)))
    tl.store(sp + SC_RQ * C, tl.join(tl.join(rq, bt), tl.join(rk, rp)), mask=rr[:, None, None] < save * C)
    if PART == 1:
        tl.store(mark, 1, mask=long_keys(kk * rk * rk, bt, ok) | parallel(L, C))
    X = tri_inv(L, C, INV)
    if PART == 1:
        tl.store(mark, 1, mask=large(X))
    store_tile(Tm, Td, X.to(dt), tile, 0, 0, C, C, C, C, DESC)
