# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""First kernel of the vector-decay chunk form: gates, norms, scores and the triangular inverse of each chunk of 32."""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, NORM_EPS, chunk_at, mdot
from fla.ops._delta.kernels.common import idle, large, long_keys, parallel
from fla.ops._delta.kernels.vector_math import (
    BOUND_NAT,
    FLOOR_NAT,
    MILD_SIZE,
    SHIFT,
    bounded_decay,
    diag32,
    ex2,
    level_pairs,
    load_tile,
    log_decay,
    one_matrix,
    raw_decay,
    store_tile,
    strong_gates,
    token_sum,
    too_large,
    unshift,
    write_rate,
)


@triton.jit
def inverse_norm(x, MMA: tl.constexpr):
    """1 / |row|. MMA: by the diagonal of ``x x^T``. Where norms are stored, a sum along the rows would pull the tile
    into the layout of that store, and from there through shared memory into the products' one."""
    if MMA:
        i = tl.arange(0, 64)
        d = tl.where(i[:, None] == i[None, :], tl.dot(x, tl.trans(x)), 0.0)
    else:
        d = x.to(tl.float32) * x.to(tl.float32)
    return tl.rsqrt(tl.sum(d, 1) + NORM_EPS)


@triton.jit
def tri_inv32(L, PREC: tl.constexpr):
    """`fla.ops._common.kernels.tri_inv` for two blocks of 32; of ``L`` only what lies strictly below the diagonal of
    its two blocks is looked at."""
    r = tl.arange(0, 64)[:, None]
    c = tl.arange(0, 64)[None, :]
    b8 = tl.arange(0, 8)
    low = b8[None, :, None] > b8[None, None, :]
    m8 = b8[:, None, None, None] == b8[None, None, :, None]
    D = tl.where(low, tl.sum(tl.where(m8, tl.reshape(L, (8, 8, 8, 8)), 0.0), axis=2), 0.0)
    X = tl.where(b8[None, :, None] == b8[None, None, :], 1.0, 0.0) + tl.zeros((8, 8, 8), tl.float32)
    for s in tl.static_range(7):
        col = tl.sum(tl.where(b8[None, None, :] == s, D, 0.0), axis=2)
        row = tl.sum(tl.where(b8[None, :, None] == s, X, 0.0), axis=1)
        X = X - col[:, :, None] * row[:, None, :]
    Y = tl.reshape(tl.where(m8, X[:, :, None, :], 0.0), (64, 64))
    Lb = tl.where(((r // 16) == (c // 16)) & ((r // 8) > (c // 8)), L, 0.0)
    Y = Y - mdot(mdot(Y, Lb, PREC), Y, PREC)
    Lb = tl.where(((r // 32) == (c // 32)) & ((r // 16) > (c // 16)), L, 0.0)
    return Y - mdot(mdot(Y, Lb, PREC), Y, PREC)


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
    marks,
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
    MMA: tl.constexpr,
    VARLEN: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
    GTMA: tl.constexpr,
    ERASE: tl.constexpr,
    BTMA: tl.constexpr,
    PART: tl.constexpr,
    LOOP: tl.constexpr,
    FREE: tl.constexpr,
    SOME: tl.constexpr,
):
    """One program per (64 tokens, value head): two chunks of 32, so that every product has 64 rows.

    Writes, for tile ``w = chunk64 * H + h``:
        tiles [w, 3, 64, KP]: ``k e^G``, ``k e^(G_L - G)``, ``scale q e^G`` (normed; G counts from the chunk of 32)
        mats [w, 2 or 3, 64, 32]: ``T diag(beta)``, ``A_qk`` and, for training, ``T = (I + L)^-1``
        decay [w, 2, KP]: ``e^(G_L)``;  norms [w, 2, 64] (training): 1 / |q|, 1 / |k|
    Rows past the sequence are written as 0. ERASE: ``beta`` is [rows, H, K] and multiplies the read key alone.
    PART: see `kernels.common`; with 1 this kernel runs in any case and marks in ``long`` which tiles have long keys
    or a large inverse. MMA: see `inverse_norm`.
    LOOP: bounded gates, KB = KP and no ERASE; what it changes is said where it begins.
    FREE: gates are not promised to be weak; ``marks`` [w, 2] says in which chunks they are not, 1 or 0. With EXACT and
    SOME this kernel then does the tiles of these chunks again.
    """
    if PART == 2:
        if idle(long, PART):
            return
    h = tl.program_id(0) % H
    it = tl.program_id(0) // H
    two = tl.arange(0, 2)
    if SOME:
        if tl.max(tl.load(marks + tl.program_id(0) * 2 + two), 0) == 0:
            return
    row, n = chunk_at(table, it, T, NT, 64, VARLEN)
    if PART == 1:
        # Rows speak for themselves later, behind barriers of the products.
        tl.store(long + it * H + h, 0)
    if n <= 0:
        if FREE:
            tl.store(marks + (it * H + h) * 2 + two, tl.zeros((2,), tl.int32))
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
        # Squared lengths of the keys that write and of those that read; normed ones have none above 1.
        norm2 = tl.zeros((64,), tl.float32)
        erase2 = tl.zeros((64,), tl.float32)
        if NORM:
            norm2 += 1.0
    if FREE:
        strong = tl.zeros((2,), tl.int32)
    if LOOP:
        # One turn, bounded gates: in a loop the compiler starts all loads at once and lets stores finish behind what
        # follows. The gates come before it: with room for them too, three programs would not fit a multiprocessor.
        x = load_tile(g, row, n, h * K, K, H * K, 64, KB, GTMA, ROWS, COLS)
        bias = 0.0
        if BIAS:
            bias = tl.load(dt_bias + h * K + cc, mask=cc < K, other=0.0).to(tl.float32)[None, :]
        upto = one_matrix(ones, 0, 64)
        # Tiles of products come as they are, without a copy that is masked; the rows past the end are masked later.
        LATE: tl.constexpr = ROWS and NORM and MMA
        for turn in tl.range(0, tl.minimum(n, 1), num_stages=2):
            # 1. What is multiplied by it stays in the loop; moved out, it would hold shared memory to the end.
            one = (n * 0 + turn + 1).to(tl.float32)
            if GPREC == "raw":
                floor = ((FLOOR_NAT if FREE else BOUND_NAT) * one).to(tl.bfloat16)
                gl = tl.where(x < floor, floor, x)
            else:
                gl = bounded_decay(x.to(tl.float32), rate, bias, lower, LOG2E * one, GATE, FREE)
            if ROWS:
                gl = tl.where(i < n, gl, 0.0).to(gl.dtype)
            gs = gl
            if GPREC == "fp16":
                gs = gl.to(tl.float16)
            gl = gs.to(tl.float32)
            if GPREC == "raw":
                gl = gl * LOG2E
            total = tl.sum(tl.reshape(gl, (2, 32, KB)), 1)
            tl.store(decay + (w.to(tl.int64) * 2 + two[:, None]) * KP + cc[None, :], ex2(total))
            if FREE:
                strong = strong_gates(total)
            kx = load_tile(k, row, n, hk * K, K, HK * K, 64, KB, TMA, ROWS and not LATE, COLS)
            G = token_sum(upto * one.to(upto.dtype), gs, GPREC)
            kn = kx.to(tl.float32)
            if NORM:
                rk = inverse_norm(kx, MMA)
                kn = kn * rk[:, None]
            if LATE:
                rk = tl.where(r < n, rk, 0.0)
                kn = tl.where(i < n, kn, 0.0)
            if PART == 1 and not NORM:
                norm2 += tl.sum(kn * kn, 1)
            kf = kn * ex2((G + SHIFT) * -1.0)
            kc = kf.to(SD)
            # e^(G_L - G) from the factor of the scores: no second sum, no second exponential.
            ku = tl.reshape(tl.reshape(kf, (2, 32, KB)) * ex2(total + SHIFT)[:, None, :], (64, KB))
            store_tile(tiles, ku.to(DT), w * 192 + 64, 64, 0, KP, KP, 64, KB, TMA, False, False)
            E = ex2(G + SHIFT)
            kd, kr = unshift(kn * E, DT, SD)
            store_tile(tiles, kd, w * 192, 64, 0, KP, KP, 64, KB, TMA, False, False)
            Pk = tl.dot(kr, tl.trans(kc), input_precision=PREC)
            qx = load_tile(q, row, n, hk * K, K, HK * K, 64, KB, TMA, ROWS and not LATE, COLS)
            qn = qx.to(tl.float32)
            if NORM:
                rq = inverse_norm(qx, MMA)
                qn = qn * (rq * scale)[:, None]
            else:
                qn = qn * scale
            if LATE:
                rq = tl.where(r < n, rq, 0.0)
                qn = tl.where(i < n, qn, 0.0)
            if FREE and not NORM:
                strong = tl.maximum(strong, tl.maximum(too_large(kn), too_large(qn)))
            qd, qr = unshift(qn * E, DT, SD)
            store_tile(tiles, qd, w * 192 + 128, 64, 0, KP, KP, 64, KB, TMA, False, False)
            Pq = tl.dot(qr, tl.trans(kc), input_precision=PREC)
            if TRAIN and NORM:
                tl.store(norms + w.to(tl.int64) * 128 + r, rq)
                tl.store(norms + w.to(tl.int64) * 128 + 64 + r, rk)
    else:
        for b in tl.static_range(NK):
            c0 = b * KB
            x = load_tile(g, row, n, h * K + c0, K - c0, H * K, 64, KB, GTMA, ROWS, COLS)
            bias = 0.0
            if BIAS:
                bias = tl.load(dt_bias + h * K + c0 + cc, mask=c0 + cc < K, other=0.0).to(tl.float32)[None, :]
            if GPREC == "raw":
                gl = raw_decay(x, EXACT or FREE)
            else:
                gl = log_decay(x.to(tl.float32), rate, bias, lower, GATE, EXACT or FREE)
            if ROWS:
                gl = tl.where(i < n, gl, 0.0).to(gl.dtype)
            gs = gl
            if GPREC == "fp16":
                gs = gl.to(tl.float16)
            gl = gs.to(tl.float32)
            if GPREC == "raw":
                gl = gl * LOG2E
            total = tl.sum(tl.reshape(gl, (2, 32, KB)), 1)
            tl.store(decay + (w.to(tl.int64) * 2 + two[:, None]) * KP + c0 + cc[None, :], ex2(total))
            if FREE:
                strong = tl.maximum(strong, strong_gates(total))
            kx = load_tile(k, row, n, hk * K + c0, K - c0, HK * K, 64, KB, TMA, ROWS, COLS)
            kn = kx.to(tl.float32)
            if NORM and NK == 1:
                rk = inverse_norm(kx, MMA)
            if NORM:
                kn = kn * rk[:, None]
            kb = kn
            if ERASE:
                be = load_tile(beta, row, n, h * K + c0, K - c0, H * K, 64, KB, BTMA, ROWS, COLS)
                kb = kn * be.to(tl.float32)
            if PART == 1:
                if not NORM:
                    norm2 += tl.sum(kn * kn, 1)
                if ERASE:
                    erase2 += tl.sum(kb * kb, 1)
            ku = kn * ex2(token_sum(one_matrix(ones, 1, 64), gs, GPREC))
            store_tile(tiles, ku.to(DT), w * 192 + 64, 64, c0, KP, KP, 64, KB, TMA, False, False)
            G = token_sum(one_matrix(ones, 0, 64), gs, GPREC)
            if EXACT:
                E = ex2(G)
                kd = (kb * E).to(DT)
            else:
                E = ex2(G + SHIFT)
                kc = (kn * ex2((G + SHIFT) * -1.0)).to(SD)
                kd, kr = unshift(kb * E, DT, SD)
            store_tile(tiles, kd, w * 192, 64, c0, KP, KP, 64, KB, TMA, False, False)
            if not EXACT:
                Pk = tl.dot(kr, tl.trans(kc), Pk, input_precision=PREC)
            qx = load_tile(q, row, n, hk * K + c0, K - c0, HK * K, 64, KB, TMA, ROWS, COLS)
            qn = qx.to(tl.float32)
            if NORM and NK == 1:
                rq = inverse_norm(qx, MMA)
            if NORM:
                qn = qn * (rq * scale)[:, None]
            else:
                qn = qn * scale
            if FREE and (ERASE or not NORM):
                strong = tl.maximum(strong, tl.maximum(too_large(kn), tl.maximum(too_large(kb), too_large(qn))))
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
                qd, qs = unshift(qr, DT, SD)
                store_tile(tiles, qd, w * 192 + 128, 64, c0, KP, KP, 64, KB, TMA, False, False)
                Pq = tl.dot(qs, tl.trans(kc), Pq, input_precision=PREC)
    if EXACT:
        Pq = tl.where(i == j, diag[:, None], Pq)
    m0 = w * (64 * NM)
    A = tl.where(i % 32 >= tl.arange(0, 32)[None, :], diag32(Pq), 0.0)
    store_tile(mats, A.to(DT), m0 + 64, 64, 0, 32, 32, 64, 32, TMA, False, False)
    if ERASE:
        L = Pk
    else:
        at = (row + r).to(tl.int64) * H + h
        bt = write_rate(tl.load(beta + at, mask=r < n, other=0.0), BETA)
        if ROWS:
            bt = tl.where(r < n, bt, 0.0)
        L = Pk * bt[:, None]
        if FREE:
            strong = tl.maximum(strong, tl.max((tl.abs(bt) > MILD_SIZE).to(tl.int32), 0))
    if FREE:
        tl.store(marks + w * 2 + two, strong)
    X = tri_inv32(L, IPREC)
    if PART == 1:
        if ERASE:
            bad = long_keys(tl.maximum(norm2, erase2), norm2 * 0.0, r < n)
        else:
            bad = long_keys(norm2, bt, r < n)
        L = tl.where((i // 32 == j // 32) & (i > j), L, 0.0)
        bad |= parallel(L, 32) | large(X)
        if FREE:
            # What the exact form does again is judged there.
            bad &= tl.max(strong, 0) == 0
        tl.store(long + w + tl.zeros((64,), tl.int32), 1, mask=bad)
    if TRAIN:
        store_tile(mats, diag32(X).to(DT), m0 + 128, 64, 0, 32, 32, 64, 32, TMA, False, False)
        if NORM and not LOOP:
            tl.store(norms + w.to(tl.int64) * 128 + r, rq)
            tl.store(norms + w.to(tl.int64) * 128 + 64 + r, rk)
    if ERASE:
        Xb = X
    else:
        Xb = X * bt[None, :]
    store_tile(mats, diag32(Xb).to(DT), m0, 64, 0, 32, 32, 64, 32, TMA, False, False)
