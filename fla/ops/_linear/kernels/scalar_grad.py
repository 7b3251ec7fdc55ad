# SPDX-License-Identifier: MIT
# mypy: ignore-errors

"""What is local to a chunk in the backward of linear attention with one decay per head and token.

With S the state before the chunk, X the gradient of the state after it, b and D as in `scalar_scan`:

    E = (v do^T) * D;   dk = E q + e^(b_L - b) (v X^T);   dq = scale e^b (do S^T) + E^T k

dg_t is the sum of what token t decays: pairs of a key before it and a query from it on, keys before it with X, queries
from it on with S, and S with X. The diagonal of E decays nothing, so it stays out of the sums and is added to dq and
dk afterwards: where gates are strong it is many orders of magnitude above the rest. E is rounded once and feeds both
sides, so that what does not decay cancels:

    dg_t = sum_{r>=t} (q_r . dq_r - k_r . (E q)_r) + sum_{r<t} k_r . (v X^T)_r e^(b_L - b_r) + e^(b_L) <S, X>
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, whole_or_tail
from fla.ops._common.tiles import load_rows, load_tile, store_rows
from fla.ops._linear.kernels.half import even_rows, fit_tile
from fla.ops._linear.kernels.scalar_scan import FLOOR, chunk_decays, decayed_scores, row_factors


@triton.jit
def load_state(
    p, d, factors, tile, v0, k0, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    SK: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    return even_rows(load_tile(p, d, tile, v0, k0, V, K, BV, BK, DESC), factors, tile, v0, k0, K, V, SK, BV)


@triton.jit
def _chunk_grad(
    q, k, v, do, qd, kd, St, Sd, Sf, Xt, Xd, Xf, sums, gamma, g, dden, z, x, dq, dqd, dk, dkd, dg, row, n, tile, h,
    kb0, H, rows, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SK: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, DESC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # Outside loops a descriptor load is waited for at once. Loads that come together go through registers instead,
    # all in flight.
    D1: tl.constexpr = 2 if DESC else 0
    NV: tl.constexpr = (V + BV - 1) // BV
    dt: tl.constexpr = q.dtype.element_ty
    HALF: tl.constexpr = tl.float16 == dt
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
    c = k0 + tl.arange(0, BK)
    if NORM:
        # The denominators are outputs too, for a value of one in every row.
        dd = row_factors(dden, row, n, h, H, C)
        E = E + dd[None, :]
    E = decayed_scores(E, b, scale, C, DECAY, 0)
    if DECAY == 1:
        same = rr[:, None] == rr[None, :]
        own = tl.sum(tl.where(same, E, 0.0), 1)
        E = tl.where(same, 0.0, E)
    Eb, fe, _ = fit_tile(E, dt)
    if DECAY == 1:
        # This order keeps what X adds apart from what the chunk adds; the other one holds fewer tiles at a time.
        kt = load_rows(k, kd, row, n, h, H, k0, K, BK, C, DESC)
        qt = load_rows(q, qd, row, n, h, H, k0, K, BK, C, DESC)
        S, fs = load_state(St, Sd, Sf, tile, 0, k0, V, K, BV, BK, SK, DESC)
        X, fx = load_state(Xt, Xd, Xf, tile, 0, k0, V, K, BV, BK, SK, DESC)
        ss = tl.sum(tl.sum(S.to(tl.float32) * X.to(tl.float32), 1), 0)
        W = tl.dot(Eb, qt, input_precision=DOT)
        if HALF:
            ss = ss * fs * fx
            W = W * fe
        aE = tl.sum(W * kt.to(tl.float32), 1)
        vj = (vt.to(tl.float32) * tl.exp2(last - b)[:, None]).to(dt)
        if HALF:
            W += tl.dot(vj, X, input_precision=DOT) * fx
        else:
            W = tl.dot(vj, X, W, input_precision=DOT)
    else:
        X, fx = load_state(Xt, Xd, Xf, tile, 0, k0, V, K, BV, BK, SK, DESC)
        W = tl.dot(vt, X, input_precision=DOT)
        if HALF:
            W = W * fx
    for j in tl.range(1, NV, num_stages=1):
        Xj, fj = load_state(Xt, Xd, Xf, tile, j * BV, k0, V, K, BV, BK, SK, DESC)
        vj = load_rows(v, v, row, n, h, H, j * BV, V, BV, C, D1)
        if DECAY == 1:
            Sj, fo = load_state(St, Sd, Sf, tile, j * BV, k0, V, K, BV, BK, SK, DESC)
            part = tl.sum(tl.sum(Sj.to(tl.float32) * Xj.to(tl.float32), 1), 0)
            if HALF:
                part = part * fo * fj
            ss += part
            vj = (vj.to(tl.float32) * tl.exp2(last - b)[:, None]).to(dt)
        if HALF:
            W += tl.dot(vj, Xj, input_precision=DOT) * fj
        else:
            W = tl.dot(vj, Xj, W, input_precision=DOT)
    if DECAY == 2:
        W = W * tl.exp2(last - b)[:, None]
    if DECAY != 1:
        S, fs = load_state(St, Sd, Sf, tile, 0, k0, V, K, BV, BK, SK, DESC)
        kt = load_rows(k, kd, row, n, h, H, k0, K, BK, C, DESC)
        qt = load_rows(q, qd, row, n, h, H, k0, K, BK, C, DESC)
        if HALF:
            W += tl.dot(Eb, qt, input_precision=DOT) * fe
        else:
            W = tl.dot(Eb, qt, W, input_precision=DOT)
    if DECAY == 1:
        aX = tl.sum(W * kt.to(tl.float32), 1) - aE
        W += own[:, None] * qt.to(tl.float32)
    if NORM:
        W += tl.load(x + (tile.to(tl.int64) * K + c), mask=c < K, other=0.0)[None, :]
    store_rows(dk, dkd, W.to(dt), row, n, h, H, k0, K, BK, C, DESC)
    Q = tl.dot(dot, S, input_precision=DOT)
    if HALF:
        Q = Q * fs
    for j in tl.range(1, NV, num_stages=1):
        Sj, fj = load_state(St, Sd, Sf, tile, j * BV, k0, V, K, BV, BK, SK, DESC)
        dj = load_rows(do, do, row, n, h, H, j * BV, V, BV, C, D1)
        if HALF:
            Q += tl.dot(dj, Sj, input_precision=DOT) * fj
        else:
            Q = tl.dot(dj, Sj, Q, input_precision=DOT)
    if DECAY:
        Q = Q * (tl.exp2(b) * scale)[:, None]
    else:
        Q = Q * scale
    if NORM:
        Q += (dd * scale)[:, None] * tl.load(z + (tile.to(tl.int64) * K + c), mask=c < K, other=0.0)[None, :]
    if HALF:
        Q += tl.dot(tl.trans(Eb), kt, input_precision=DOT) * fe
    else:
        Q = tl.dot(tl.trans(Eb), kt, Q, input_precision=DOT)
    if DECAY == 1:
        aQ = tl.sum(Q * qt.to(tl.float32), 1)
        Q += own[:, None] * kt.to(tl.float32)
    store_rows(dq, dqd, Q.to(dt), row, n, h, H, k0, K, BK, C, DESC)
    if DECAY == 1:
        share = tl.where(rr[:, None] < rr[None, :], aX[:, None], (aQ - aE)[:, None])
        dgt = tl.sum(share, 0) + tl.exp2(last) * ss
        at = (row + rr).to(tl.int64) * H + h
        # A step that forgets everything has no gradient; what is left of it in the sums is rounding.
        gt = tl.load(g + at, mask=rr < n, other=0.0).to(tl.float32)
        dgt = tl.where(gt * LOG2E > FLOOR, dgt, 0.0)
        tl.store(dg + at + kb0.to(tl.int64) * rows * H, dgt.to(dg.dtype.element_ty), mask=rr < n)


@triton.jit(do_not_specialize=["T", "NT", "H", "rows"])
def scalar_grad(
    q, k, v, do, qd, kd, St, Sd, Sf, Xt, Xd, Xf, sums, gamma, g, dden, z, x, dq, dqd, dk, dkd, dg, table, cu, offsets,
    T, NT, H, rows, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SK: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr,
    TAILS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program a chunk (TAILS: the ragged last chunk of a sequence), head and block of K. With DESC only full chunks
    are taken: tails have a launch of their own, because a second path in one kernel costs the first one registers.
    Each block of K writes its share of dg. NORM: with the gradient of the denominators in ``dden``, see `normalizer`.
    SK: columns of K of a program of the passes that kept the states.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    kb0 = pid % NK
    h = (pid // NK) % H
    it = pid // (NK * H)
    it, row, n = whole_or_tail(table, cu, offsets, it, T, NT, C, VARLEN, DESC, TAILS)
    if n == 0:
        return
    _chunk_grad(
        q, k, v, do, qd, kd, St, Sd, Sf, Xt, Xd, Xf, sums, gamma, g, dden, z, x, dq, dqd, dk, dkd, dg, row, n,
        it * H + h, h, kb0, H, rows, scale, K, V, BK, BV, C, SK, DECAY, NORM, DESC, DOT,
    )  # fmt: skip
