# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""First kernel of the vector-decay chunk form: gates, norms, scores and the triangular inverse of each chunk of 32."""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, NORM_EPS, chunk_at, tri_inv
from fla.ops._delta.kernels.common import idle, long_keys
from fla.ops._delta.kernels.vector_math import (
    SHIFT,
    UNSHIFT,
    diag32,
    ex2,
    level_pairs,
    load_tile,
    log_decay,
    one_matrix,
    raw_decay,
    store_tile,
    token_sum,
    write_rate,
)


@triton.jit(do_not_specialize=["T", "NT", "H", "GROUP"])
def vector_prep(
    decay,
    beta,
    q,
    k,
    g,
    a_log,
    dt_bias,
    table,
    ones,
    tiles,
    mats,
    norms,
    long,
    T,
    NT,
    H,
    GROUP,
    scale,
    lower,
    K: tl.constexpr,
    KP: tl.constexpr,
    KB: tl.constexpr,
    GATE: tl.constexpr,
    RATE: tl.constexpr,
    BIAS: tl.constexpr,
    BETA: tl.constexpr,
    NORM: tl.constexpr,
    EXACT: tl.constexpr,
    TRAIN: tl.constexpr,
    DT: tl.constexpr,
    SD: tl.constexpr,
    PREC: tl.constexpr,
    GPREC: tl.constexpr,
    IPREC: tl.constexpr,
    VARLEN: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
    GTMA: tl.constexpr,
    ERASE: tl.constexpr,
    BTMA: tl.constexpr,
    PART: tl.constexpr,
):
    """One program per (64 tokens, value head): two chunks of 32, so that every product has 64 rows.

    Writes, for tile ``w = chunk64 * H + h``:
        tiles [w, 3, 64, KP]: ``k e^G``, ``k e^(G_L - G)``, ``scale q e^G`` (normed; G counts from the chunk of 32)
        mats [w, 2 or 3, 64, 32]: ``T diag(beta)``, ``A_qk`` and, for training, ``T = (I + L)^-1``
        decay [w, 2, KP]: ``e^(G_L)``;  norms [w, 2, 64] (training): 1 / |q|, 1 / |k|
    Rows past the sequence are written as 0. ERASE: ``beta`` is [rows, H, K] and multiplies the read key alone.
    PART: see `kernels.common`; with 1 this kernel runs in any case and marks in ``long`` which tiles have long keys.
    """
    if PART == 2:
        if idle(long, PART):
            return
    h = tl.program_id(0) % H
    it = tl.program_id(0) // H
    row, n = chunk_at(table, it, T, NT, 64, VARLEN)
    if n <= 0:
        if PART == 1:
            tl.store(long + it * H + h, 0)
        return
    NK: tl.constexpr = KP // KB
    COLS: tl.constexpr = K != KP
    NM: tl.constexpr = 3 if TRAIN else 2
    hk = h // GROUP
    HK = H // GROUP
    r = tl.arange(0, 64)
    i = r[:, None]
    j = r[None, :]
    cc = tl.arange(0, KB)
    w = it * H + h
    same = (i // 32) == (j // 32)
    tri = (i >= j) & same
    rate = 1.0
    if RATE:
        rate = tl.exp(tl.load(a_log + h).to(tl.float32))
    if NORM and NK > 1:
        kk = tl.zeros((64,), tl.float32)
        qq = tl.zeros((64,), tl.float32)
        for b in tl.static_range(NK):
            x = load_tile(k, row, n, hk * K + b * KB, K - b * KB, HK * K, 64, KB, TMA, ROWS, COLS).to(tl.float32)
            kk += tl.sum(x * x, 1)
            x = load_tile(q, row, n, hk * K + b * KB, K - b * KB, HK * K, 64, KB, TMA, ROWS, COLS).to(tl.float32)
            qq += tl.sum(x * x, 1)
        rk = tl.rsqrt(kk + NORM_EPS)
        rq = tl.rsqrt(qq + NORM_EPS)
    Pk = tl.zeros((64, 64), tl.float32)
    Pq = tl.zeros((64, 64), tl.float32)
    diag = tl.zeros((64,), tl.float32)
    if PART == 1:
        norm2 = tl.zeros((64,), tl.float32)
        erase2 = tl.zeros((64,), tl.float32)
    for b in tl.static_range(NK):
        c0 = b * KB
        x = load_tile(g, row, n, h * K + c0, K - c0, H * K, 64, KB, GTMA, ROWS, COLS)
        bias = 0.0
        if BIAS:
            bias = tl.load(dt_bias + h * K + c0 + cc, mask=c0 + cc < K, other=0.0).to(tl.float32)[None, :]
        if GPREC == "raw":
            gl = raw_decay(x, EXACT)
        else:
            gl = log_decay(x.to(tl.float32), rate, bias, lower, GATE, EXACT)
        if ROWS:
            gl = tl.where(i < n, gl, 0.0).to(gl.dtype)
        gs = gl
        if GPREC == "fp16":
            gs = gl.to(tl.float16)
        gl = gs.to(tl.float32)
        if GPREC == "raw":
            gl = gl * LOG2E
        total = tl.sum(tl.reshape(gl, (2, 32, KB)), 1)
        tl.store(decay + (w.to(tl.int64) * 2 + tl.arange(0, 2)[:, None]) * KP + c0 + cc[None, :], ex2(total))
        kn = load_tile(k, row, n, hk * K + c0, K - c0, HK * K, 64, KB, TMA, ROWS, COLS).to(tl.float32)
        if NORM and NK == 1:
            rk = tl.rsqrt(tl.sum(kn * kn, 1) + NORM_EPS)
        if NORM:
            kn = kn * rk[:, None]
        kb = kn
        if ERASE:
            be = load_tile(beta, row, n, h * K + c0, K - c0, H * K, 64, KB, BTMA, ROWS, COLS)
            kb = kn * be.to(tl.float32)
        if PART == 1:
            norm2 += tl.sum(kn * kn, 1)
            if ERASE:
                erase2 += tl.sum(kb * kb, 1)
        ku = kn * ex2(token_sum(one_matrix(ones, 1, 64), gs, GPREC))
        store_tile(tiles, ku.to(DT), w * 192 + 64, 64, c0, KP, KP, 64, KB, TMA, False, False)
        G = token_sum(one_matrix(ones, 0, 64), gs, GPREC)
        if EXACT:
            E = ex2(G)
            kd = kb * E
        else:
            E = ex2(G + SHIFT)
            kr = kb * E
            kc = (kn * ex2((G + SHIFT) * -1.0)).to(SD)
            Pk = tl.dot(kr.to(SD), tl.trans(kc), Pk, input_precision=PREC)
            kd = kr * UNSHIFT
        store_tile(tiles, kd.to(DT), w * 192, 64, c0, KP, KP, 64, KB, TMA, False, False)
        qn = load_tile(q, row, n, hk * K + c0, K - c0, HK * K, 64, KB, TMA, ROWS, COLS).to(tl.float32)
        if NORM and NK == 1:
            rq = tl.rsqrt(tl.sum(qn * qn, 1) + NORM_EPS)
        if NORM:
            qn = qn * (rq * scale)[:, None]
        else:
            qn = qn * scale
        qr = qn * E
        if EXACT:
            store_tile(tiles, qr.to(DT), w * 192 + 128, 64, c0, KP, KP, 64, KB, TMA, False, False)
            diag += tl.sum(qn * kn, 1)
            for lv in tl.range(0, 5):
                half = 16 >> lv
                f = ex2(token_sum(one_matrix(ones, 3 + lv, 64), gs, GPREC))
                kk_ = (kn * f).to(SD)
                pairs = level_pairs(half, 64)
                if ERASE:
                    ke = (kb * f).to(SD)
                else:
                    ke = kk_
                Pk += tl.where(pairs, tl.dot(ke, tl.trans(kk_), input_precision=PREC), 0.0)
                Pq += tl.where(pairs, tl.dot((qn * f).to(SD), tl.trans(kk_), input_precision=PREC), 0.0)
        else:
            Pq = tl.dot(qr.to(SD), tl.trans(kc), Pq, input_precision=PREC)
            store_tile(tiles, (qr * UNSHIFT).to(DT), w * 192 + 128, 64, c0, KP, KP, 64, KB, TMA, False, False)
    if EXACT:
        Pq = tl.where(i == j, diag[:, None], Pq)
    m0 = w * (64 * NM)
    store_tile(mats, diag32(tl.where(tri, Pq, 0.0)).to(DT), m0 + 64, 64, 0, 32, 32, 64, 32, TMA, False, False)
    if ERASE:
        L = tl.where((i > j) & same, Pk, 0.0)
    else:
        at = (row + r).to(tl.int64) * H + h
        bt = write_rate(tl.load(beta + at, mask=r < n, other=0.0), BETA)
        if ROWS:
            bt = tl.where(r < n, bt, 0.0)
        L = tl.where((i > j) & same, Pk * bt[:, None], 0.0)
    if PART == 1:
        if ERASE:
            is_long = long_keys(tl.maximum(norm2, erase2), norm2 * 0.0, r < n)
        else:
            is_long = long_keys(norm2, bt, r < n)
        tl.store(long + w, is_long)
    X = tri_inv(L, 64, IPREC, 32)
    if TRAIN:
        store_tile(mats, diag32(X).to(DT), m0 + 128, 64, 0, 32, 32, 64, 32, TMA, False, False)
        np = norms + w.to(tl.int64) * 128 + r
        if NORM:
            tl.store(np, rq)
            tl.store(np + 64, rk)
    if ERASE:
        Xb = X
    else:
        Xb = X * bt[None, :]
    store_tile(mats, diag32(Xb).to(DT), m0, 64, 0, 32, 32, 64, 32, TMA, False, False)
