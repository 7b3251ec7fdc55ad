# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""Reverse pass of linear attention with one decay per head and token, for K up to one block: gradients of states and v.

The gradient X of the state is held transposed, as the state in `scalar_scan`, whose b, L and D these are:

    dv^T = (X k^T) e^(b_L - b) + do^T (k q^T * D)^T;   X <- e^(b_L) X + scale (do^T e^b) q
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import sequence_at
from fla.ops._common.tiles import load_rows, state_offsets, store_rows, store_tile
from fla.ops._linear.kernels.half import fit_columns, fit_rows, keep_factors, lift_of
from fla.ops._linear.kernels.scalar_scan import chunk_decays, decayed_scores, stretch_at


@triton.jit
def _reverse_step(
    X, q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, Xf, tile, row, n, h, v0, H, scale, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    DESC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    dt: tl.constexpr = k.dtype.element_ty
    # Descriptors load full chunks only: a decay per head is then the same in all of them.
    b, last = chunk_decays(sums, gamma, tile, C if DESC else n, h, C, DECAY)
    dot = load_rows(do, dod, row, n, h, H, v0, V, BV, C, DESC)
    qt = load_rows(q, qd, row, n, h, H, 0, K, BK, C, DESC)
    kt = load_rows(k, kd, row, n, h, H, 0, K, BK, C, DESC)
    if tl.float16 == dt:
        Xb, fx, _ = fit_rows(X, dt)
        store_tile(Xt, Xd, Xb, tile, v0, 0, V, K, BV, BK, DESC)
        keep_factors(Xf, fx, tile, v0, 0, K, V, BK, BV)
    else:
        store_tile(Xt, Xd, X.to(dt), tile, v0, 0, V, K, BV, BK, DESC)
        Xb = X.to(dt)
    a = decayed_scores(tl.dot(qt, tl.trans(kt), input_precision=DOT), b, scale, C, DECAY, 1)
    a, fa, ia = fit_columns(a, dt)
    dvT = tl.dot(Xb, tl.trans(kt), input_precision=DOT)
    if DECAY:
        dvT = dvT * tl.exp2(last - b)[None, :]
    if tl.float16 == dt:
        dvT = dvT * fx[:, None] * ia[None, :]
    dvT = tl.dot(tl.trans(dot), a, dvT, input_precision=DOT)
    if tl.float16 == dt:
        dvT = dvT * fa[None, :]
    if DECAY and tl.float16 == dt:
        # All that is added here may have decayed below what float16 holds.
        lift = lift_of(b, dt)
        X = X * tl.exp2(last + lift)
        dT = (tl.trans(dot).to(tl.float32) * (tl.exp2(b + lift) * scale)[None, :]).to(dt)
        X = tl.dot(dT, qt, X, input_precision=DOT) * tl.exp2(lift * -1.0)
    else:
        if DECAY:
            X = X * tl.exp2(last)
            dT = (tl.trans(dot).to(tl.float32) * (tl.exp2(b) * scale)[None, :]).to(dt)
        else:
            dT = (tl.trans(dot).to(tl.float32) * scale).to(dt)
        X = tl.dot(dT, qt, X, input_precision=DOT)
    store_rows(dv, dvd, tl.trans(dvT).to(dt), row, n, h, H, v0, V, BV, C, DESC)
    return X


@triton.jit
def reverse_program(
    pid, q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, Xf, dht, dh0, entry, cu, offsets, T, NT, H, has_dht,
    has_dh0, segments, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, SPLIT: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    v0 = (pid % NV) * BV
    h = (pid // NV) % H
    seg = (pid // (NV * H)) % segments
    i = pid // (NV * H * segments)
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    state = (i.to(tl.int64) * H + h) * (K * V)
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    X = tl.load(dht + state + so, mask=sm & (seg == segments - 1) & (has_dht != 0), other=0.0).to(tl.float32)
    if SPLIT:
        slot = (i.to(tl.int64) * segments + seg) * H + h
        eo, em = state_offsets(v0, K, V, BK, BV, True)
        X += tl.load(entry + slot * (K * V) + eo, mask=em & (seg < segments - 1), other=0.0)
    lo, hi, full = stretch_at(length, seg, segments, C)
    loop = tl.minimum(hi, full) if DESC else hi
    if DESC:
        if (hi > full) & (lo < hi):
            X = _reverse_step(
                X, q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, Xf, (first + full) * H + h, bos + full * C,
                length - full * C, h, v0, H, scale, K, V, BK, BV, C, DECAY, False, DOT,
            )  # fmt: skip
    for j in tl.range(lo, loop, num_stages=STAGES):
        t = lo + loop - 1 - j
        X = _reverse_step(
            X, q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, Xf, (first + t) * H + h, bos + t * C,
            length - t * C, h, v0, H, scale, K, V, BK, BV, C, DECAY, DESC, DOT,
        )  # fmt: skip
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    tl.store(dh0 + state + so, X.to(dh0.dtype.element_ty), mask=sm & (has_dh0 != 0) & (seg == 0))


@triton.jit(do_not_specialize=["T", "NT", "H", "has_dht", "has_dh0", "segments"])
def scalar_reverse(
    q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, Xf, dht, dh0, entry, cu, offsets, T, NT, H, has_dht, has_dh0,
    segments, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, SPLIT: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes X^T [V, K] after each chunk and all of dv. SPLIT as in `scalar_scan`."""
    reverse_program(
        tl.program_id(0), q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, Xf, dht, dh0, entry, cu, offsets, T, NT,
        H, has_dht, has_dh0, segments, scale, K, V, BK, BV, C, DECAY, SPLIT, VFIRST, VARLEN, DESC, DOT, STAGES,
    )  # fmt: skip
