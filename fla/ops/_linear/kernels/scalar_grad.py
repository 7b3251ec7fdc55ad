# SPDX-License-Identifier: MIT
# mypy: ignore-errors

"""What is local to a chunk in the backward of linear attention with one decay per head and token.

With S the state before the chunk, X the gradient of the state after it, b and D as in `scalar_scan`:

    E = (v do^T) * D;   dq = scale e^b (do S^T) + E^T k;   W = e^(b_L - b) (v X^T);   dk = W + E q
    db_t = q_t . dq_t - k_t . dk_t;   db_L += e^(b_L) <S, X> + sum k . W;   dg = sums of db from the chunk's end

E is rounded once and feeds both sides, so that its rows and columns cancel in dg.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, chunk_at, sequence_at
from fla.ops._common.tiles import load_rows, load_tile, store_rows
from fla.ops._linear.kernels.scalar_scan import FLOOR, chunk_decays, decayed_scores


@triton.jit
def _chunk_grad(
    q, k, v, do, qd, kd, vd, dod, St, Sd, Xt, Xd, sums, gamma, g, dq, dqd, dk, dkd, dg, row, n, tile, h, kb0, H, rows,
    scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    DESC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # Outside loops a descriptor load is waited for at once. Loads that come together go through registers instead,
    # all in flight.
    D1: tl.constexpr = 2 if DESC else 0
    NV: tl.constexpr = (V + BV - 1) // BV
    dt: tl.constexpr = q.dtype.element_ty
    rr = tl.arange(0, C)
    k0 = kb0 * BK
    vt = load_rows(v, v, row, n, h, H, 0, V, BV, C, D1)
    dot = load_rows(do, do, row, n, h, H, 0, V, BV, C, D1)
    E = tl.dot(vt, tl.trans(dot), input_precision=DOT)
    for j in tl.range(1, NV, num_stages=1):
        vj = load_rows(v, v, row, n, h, H, j * BV, V, BV, C, D1)
        dj = load_rows(do, do, row, n, h, H, j * BV, V, BV, C, D1)
        E = tl.dot(vj, tl.trans(dj), E, input_precision=DOT)
    b, last = chunk_decays(sums, gamma, tile, n, h, C, DECAY)
    Eb = decayed_scores(E, b, scale, C, DECAY, 0).to(dt)
    S = load_tile(St, Sd, tile, 0, k0, V, K, BV, BK, DESC)
    X = load_tile(Xt, Xd, tile, 0, k0, V, K, BV, BK, DESC)
    if DECAY == 1:
        ss = tl.sum(tl.sum(S.to(tl.float32) * X.to(tl.float32), 1), 0)
    W = tl.dot(vt, X, input_precision=DOT)
    for j in tl.range(1, NV, num_stages=1):
        Xj = load_tile(Xt, Xd, tile, j * BV, k0, V, K, BV, BK, DESC)
        if DECAY == 1:
            Sj = load_tile(St, Sd, tile, j * BV, k0, V, K, BV, BK, DESC)
            ss += tl.sum(tl.sum(Sj.to(tl.float32) * Xj.to(tl.float32), 1), 0)
        W = tl.dot(load_rows(v, v, row, n, h, H, j * BV, V, BV, C, D1), Xj, W, input_precision=DOT)
    kt = load_rows(k, kd, row, n, h, H, k0, K, BK, C, DESC)
    qt = load_rows(q, qd, row, n, h, H, k0, K, BK, C, DESC)
    if DECAY:
        W = W * tl.exp2(last - b)[:, None]
    if DECAY == 1:
        kf = kt.to(tl.float32)
        end = tl.sum(tl.sum(W * kf, 1), 0) + tl.exp2(last) * ss
    W = tl.dot(Eb, qt, W, input_precision=DOT)
    if DECAY == 1:
        aW = tl.sum(W * kf, 1)
    store_rows(dk, dkd, W.to(dt), row, n, h, H, k0, K, BK, C, DESC)
    Q = tl.dot(dot, S, input_precision=DOT)
    for j in tl.range(1, NV, num_stages=1):
        Sj = load_tile(St, Sd, tile, j * BV, k0, V, K, BV, BK, DESC)
        Q = tl.dot(load_rows(do, do, row, n, h, H, j * BV, V, BV, C, D1), Sj, Q, input_precision=DOT)
    if DECAY:
        Q = Q * (tl.exp2(b) * scale)[:, None]
    else:
        Q = Q * scale
    Q = tl.dot(tl.trans(Eb), kt, Q, input_precision=DOT)
    store_rows(dq, dqd, Q.to(dt), row, n, h, H, k0, K, BK, C, DESC)
    if DECAY == 1:
        aQ = tl.sum(Q * qt.to(tl.float32), 1)
        dgt = tl.cumsum(aQ - aW, 0, reverse=True) + end
        at = (row + rr).to(tl.int64) * H + h
        # A step that forgets everything has no gradient; what is left of it in the sums is rounding.
        x = tl.load(g + at, mask=rr < n, other=0.0).to(tl.float32)
        dgt = tl.where(x * LOG2E > FLOOR, dgt, 0.0)
        tl.store(dg + at + kb0.to(tl.int64) * rows * H, dgt.to(dg.dtype.element_ty), mask=rr < n)


@triton.jit(do_not_specialize=["T", "NT", "H", "rows"])
def scalar_grad(
    q, k, v, do, qd, kd, vd, dod, St, Sd, Xt, Xd, sums, gamma, g, dq, dqd, dk, dkd, dg, table, cu, offsets, T, NT, H,
    rows, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr, TAILS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program a chunk (TAILS: the ragged last chunk of a sequence), head and block of K. With DESC only full chunks
    are taken: tails have a launch of their own, because a second path in one kernel costs the first one registers.
    Each block of K writes its share of dg.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    kb0 = pid % NK
    h = (pid // NK) % H
    it = pid // (NK * H)
    if TAILS:
        row, length, first = sequence_at(cu, offsets, it, T, NT, VARLEN)
        full = length // C
        row += full * C
        n = length - full * C
        it = first + full
        if n == 0:
            return
    else:
        row, n = chunk_at(table, it, T, NT, C, VARLEN)
        if DESC:
            if n < C:
                return
        elif n <= 0:
            return
    _chunk_grad(
        q, k, v, do, qd, kd, vd, dod, St, Sd, Xt, Xd, sums, gamma, g, dq, dqd, dk, dkd, dg, row, n, it * H + h, h, kb0,
        H, rows, scale, K, V, BK, BV, C, DECAY, DESC, DOT,
    )  # fmt: skip
