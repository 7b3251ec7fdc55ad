# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""State passes of linear attention with one decay per head and token, forward and reverse.

One program a block of V, head and sequence (or stretch of it). The state is held transposed, [BV, BK] in fp32. With b
the sums of log decays inside a chunk, L its last row and D[j, i] = scale e^(b_i - b_j) for j <= i, 0 else:

    forward   o^T = scale (S q^T) e^b + v^T (k q^T * D);      S <- e^(b_L) S + (v^T e^(b_L - b)) k
    reverse   dv^T = (X k^T) e^(b_L - b) + do^T (k q^T * D)^T;   X <- e^(b_L) X + scale (do^T e^b) q

Full chunks run in a pipelined loop over descriptor tiles; a ragged last chunk is one more step through pointers.
Without descriptors the loop takes all chunks through pointers.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, chunk_at, sequence_at
from fla.ops._common.tiles import load_rows, state_offsets, store_rows, store_tile

# Where log decays (base 2) come from.
NO_DECAY = 0
TOKEN_DECAY = 1
HEAD_DECAY = 2
# 2 to this power is 0 in fp32: cutting a step here changes no decay, bounds the sums and keeps infinity out of them.
FLOOR = tl.constexpr(-160.0)
# What a program does with its stretch of time.
WHOLE = 0
STRETCH = 1
SUMMARY = 2


@triton.jit(do_not_specialize=["T", "NT", "H"])
def scalar_sums(g, sums, table, T, NT, H, C: tl.constexpr, BH: tl.constexpr, VARLEN: tl.constexpr):
    """Sums of log decays (base 2) from the start of each chunk: `[B, T, H]` to `[chunks * H, C]`, heads coalesced."""
    NH = (H + BH - 1) // BH
    pid = tl.program_id(0)
    it = pid // NH
    c = (pid % NH) * BH + tl.arange(0, BH)
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    rr = tl.arange(0, C)
    at = (row + rr).to(tl.int64)[:, None] * H + c[None, :]
    x = tl.load(g + at, mask=(rr < n)[:, None] & (c < H)[None, :], other=0.0).to(tl.float32)
    x = tl.cumsum(tl.maximum(x * LOG2E, FLOOR), 0)
    out = (it.to(tl.int64) * H + c)[None, :] * C + rr[:, None]
    tl.store(sums + out, x, mask=(c < H)[None, :] & (rr >= 0)[:, None])


@triton.jit
def chunk_decays(sums, gamma, tile, n, h, C: tl.constexpr, DECAY: tl.constexpr):
    """Sums ``b`` [C] of one chunk and head, and their last value; rows from ``n`` on repeat row ``n - 1``."""
    rr = tl.arange(0, C)
    if DECAY == 1:
        base = sums + tile.to(tl.int64) * C
        return tl.load(base + rr), tl.load(base + (C - 1))
    elif DECAY == 2:
        x = tl.maximum(tl.load(gamma + h).to(tl.float32) * LOG2E, FLOOR)
        return x * tl.minimum(rr + 1, n).to(tl.float32), x * tl.minimum(n, C).to(tl.float32)
    else:
        return tl.zeros((C,), tl.float32), 0.0


@triton.jit
def decayed_scores(x, b, scale, C: tl.constexpr, DECAY: tl.constexpr, KEYS: tl.constexpr):
    """Products ``x`` times D; the axis ``KEYS`` of both counts the keys j, the other the queries i."""
    QUERIES: tl.constexpr = 1 - KEYS
    r = tl.arange(0, C)
    seen = tl.expand_dims(r, QUERIES) <= tl.expand_dims(r, KEYS)
    if DECAY:
        # Masked before the exponential, which may overflow where a query is before the key.
        d = tl.where(seen, tl.expand_dims(b, KEYS) - tl.expand_dims(b, QUERIES), -float("inf"))
        return x * (tl.exp2(d) * scale)
    else:
        return tl.where(seen, x * scale, 0.0)


@triton.jit
def _forward_step(
    S, q, k, v, qd, kd, vd, sums, gamma, o, od, St, Sd, tile, row, n, h, v0, H, scale, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr,
    DESC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    dt: tl.constexpr = k.dtype.element_ty
    b, last = chunk_decays(sums, gamma, tile, n, h, C, DECAY)
    kt = load_rows(k, kd, row, n, h, H, 0, K, BK, C, DESC)
    vt = load_rows(v, vd, row, n, h, H, v0, V, BV, C, DESC)
    if SAVE:
        # A descriptor stages what it stores: with K above 128 that would not fit.
        store_tile(St, Sd, S.to(dt), tile, v0, 0, V, K, BV, BK, DESC and BK <= 128)
    if OUT:
        qt = load_rows(q, qd, row, n, h, H, 0, K, BK, C, DESC)
        a = decayed_scores(tl.dot(kt, tl.trans(qt), input_precision=DOT), b, scale, C, DECAY, 0).to(dt)
        oo = tl.dot(S.to(dt), tl.trans(qt), input_precision=DOT)
        if DECAY:
            oo = oo * (tl.exp2(b) * scale)[None, :]
        else:
            oo = oo * scale
        oo = tl.dot(tl.trans(vt), a, oo, input_precision=DOT)
    vT = tl.trans(vt)
    if DECAY:
        S = S * tl.exp2(last)
        vT = (vT.to(tl.float32) * tl.exp2(last - b)[None, :]).to(dt)
    S = tl.dot(vT, kt, S, input_precision=DOT)
    if OUT:
        store_rows(o, od, tl.trans(oo).to(dt), row, n, h, H, v0, V, BV, C, DESC)
    return S, last


@triton.jit(do_not_specialize=["T", "NT", "H", "has_h0", "has_ht", "segments", "parts"])
def scalar_scan(
    q, k, v, qd, kd, vd, sums, gamma, o, od, St, Sd, h0, ht, entry, total, cu, offsets, T, NT, H, has_h0, has_ht,
    segments, parts, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, SPLIT: tl.constexpr, VFIRST: tl.constexpr,
    VARLEN: tl.constexpr, DESC: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUT: write o. SAVE: write each chunk's entry state ``S^T`` [V, K] for the backward.

    SPLIT: WHOLE, a sequence a program; STRETCH, one of ``segments`` stretches of it from the state in ``entry``;
    SUMMARY, write what a stretch adds to the state to ``entry`` (with h0 in the first one) and the sum of its log
    decays to ``total``. There are ``parts`` stretches in the grid.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % NV
    h = (pid // NV) % H
    seg = (pid // (NV * H)) % parts
    i = pid // (NV * H * parts)
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    v0 = block * BV
    slot = (i.to(tl.int64) * segments + seg) * H + h
    eo = slot * (NV * BV * BK) + (v0 + tl.arange(0, BV))[:, None] * BK + tl.arange(0, BK)[None, :]
    state = (i.to(tl.int64) * H + h) * (K * V)
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    S = tl.load(h0 + state + so, mask=sm & (seg == 0) & (has_h0 != 0), other=0.0).to(tl.float32)
    if SPLIT == 1:
        S += tl.load(entry + eo, mask=(seg > 0) & (eo >= 0), other=0.0)
    full = length // C
    chunks = (length + C - 1) // C
    per = (chunks + segments - 1) // segments
    lo = tl.minimum(seg * per, chunks)
    hi = tl.minimum(lo + per, chunks)
    loop = tl.minimum(hi, full) if DESC else hi
    decay = 0.0
    for t in tl.range(lo, loop, num_stages=STAGES):
        S, last = _forward_step(
            S, q, k, v, qd, kd, vd, sums, gamma, o, od, St, Sd, (first + t) * H + h, bos + t * C, length - t * C, h, v0,
            H, scale, K, V, BK, BV, C, DECAY, OUT, SAVE, DESC, DOT,
        )  # fmt: skip
        if SPLIT == 2:
            decay += last
    if DESC:
        if (hi > full) & (lo < hi):
            S, last = _forward_step(
                S, q, k, v, qd, kd, vd, sums, gamma, o, od, St, Sd, (first + full) * H + h, bos + full * C,
                length - full * C, h, v0, H, scale, K, V, BK, BV, C, DECAY, OUT, SAVE, False, DOT,
            )  # fmt: skip
            if SPLIT == 2:
                decay += last
    if SPLIT == 2:
        tl.store(entry + eo, S)
        # All blocks of V write the same number.
        tl.store(total + slot, decay)
    else:
        so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
        tl.store(ht + state + so, S, mask=sm & (has_ht != 0) & (seg == parts - 1))


@triton.jit
def _reverse_step(
    X, q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, tile, row, n, h, v0, H, scale, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, OUT: tl.constexpr,
    DESC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    dt: tl.constexpr = k.dtype.element_ty
    b, last = chunk_decays(sums, gamma, tile, n, h, C, DECAY)
    dot = load_rows(do, dod, row, n, h, H, v0, V, BV, C, DESC)
    qt = load_rows(q, qd, row, n, h, H, 0, K, BK, C, DESC)
    if OUT:
        kt = load_rows(k, kd, row, n, h, H, 0, K, BK, C, DESC)
        store_tile(Xt, Xd, X.to(dt), tile, v0, 0, V, K, BV, BK, DESC and BK <= 128)
        a = decayed_scores(tl.dot(qt, tl.trans(kt), input_precision=DOT), b, scale, C, DECAY, 1).to(dt)
        dvT = tl.dot(X.to(dt), tl.trans(kt), input_precision=DOT)
        if DECAY:
            dvT = dvT * tl.exp2(last - b)[None, :]
        dvT = tl.dot(tl.trans(dot), a, dvT, input_precision=DOT)
    if DECAY:
        X = X * tl.exp2(last)
        dT = (tl.trans(dot).to(tl.float32) * (tl.exp2(b) * scale)[None, :]).to(dt)
    else:
        dT = (tl.trans(dot).to(tl.float32) * scale).to(dt)
    X = tl.dot(dT, qt, X, input_precision=DOT)
    if OUT:
        store_rows(dv, dvd, tl.trans(dvT).to(dt), row, n, h, H, v0, V, BV, C, DESC)
    return X, last


@triton.jit(do_not_specialize=["T", "NT", "H", "has_dht", "has_dh0", "segments", "parts"])
def scalar_reverse(
    q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, dht, dh0, entry, total, cu, offsets, T, NT, H, has_dht,
    has_dh0, segments, parts, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, SPLIT: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr,
    DESC: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Reverse pass over the gradient X of the state after each chunk; writes X^T [V, K] of each chunk and all of dv.

    SPLIT as in `scalar_scan`; stretches count from the start of the sequence here too, and the grid of a SUMMARY leaves
    the first one out.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    OUT: tl.constexpr = SPLIT != 2
    pid = tl.program_id(0)
    block = pid % NV
    h = (pid // NV) % H
    seg = (pid // (NV * H)) % parts + segments - parts
    i = pid // (NV * H * parts)
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    v0 = block * BV
    slot = (i.to(tl.int64) * segments + seg) * H + h
    eo = slot * (NV * BV * BK) + (v0 + tl.arange(0, BV))[:, None] * BK + tl.arange(0, BK)[None, :]
    state = (i.to(tl.int64) * H + h) * (K * V)
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    X = tl.load(dht + state + so, mask=sm & (seg == segments - 1) & (has_dht != 0), other=0.0).to(tl.float32)
    if SPLIT == 1:
        X += tl.load(entry + eo, mask=(seg < segments - 1) & (eo >= 0), other=0.0)
    full = length // C
    chunks = (length + C - 1) // C
    per = (chunks + segments - 1) // segments
    lo = tl.minimum(seg * per, chunks)
    hi = tl.minimum(lo + per, chunks)
    loop = tl.minimum(hi, full) if DESC else hi
    decay = 0.0
    if DESC:
        if (hi > full) & (lo < hi):
            X, last = _reverse_step(
                X, q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, (first + full) * H + h, bos + full * C,
                length - full * C, h, v0, H, scale, K, V, BK, BV, C, DECAY, OUT, False, DOT,
            )  # fmt: skip
            if SPLIT == 2:
                decay += last
    for j in tl.range(lo, loop, num_stages=STAGES):
        t = lo + loop - 1 - j
        X, last = _reverse_step(
            X, q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, (first + t) * H + h, bos + t * C, length - t * C, h,
            v0, H, scale, K, V, BK, BV, C, DECAY, OUT, DESC, DOT,
        )  # fmt: skip
        if SPLIT == 2:
            decay += last
    if SPLIT == 2:
        tl.store(entry + eo, X)
        tl.store(total + slot, decay)
    else:
        so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
        tl.store(dh0 + state + so, X.to(dh0.dtype.element_ty), mask=sm & (has_dh0 != 0) & (seg == 0))


@triton.jit(do_not_specialize=["segments", "H", "size"])
def scalar_merge(entry, total, segments, H, size, BS: tl.constexpr, REVERSE: tl.constexpr):
    """Turn what each stretch adds, in place, into the states in which the stretches begin (REVERSE: end).

    The state before the next stretch is e^total of this one times the state before it plus what it adds. The first
    (last) stretch begins with the caller's state, which its summary already holds: its own entry is not read.
    """
    blocks = (size + BS - 1) // BS
    pid = tl.program_id(0)
    c = (pid % blocks) * BS + tl.arange(0, BS)
    h = (pid // blocks) % H
    i = (pid // (blocks * H)).to(tl.int64)
    m = c < size
    S = tl.zeros((BS,), tl.float32)
    for p in tl.range(0, segments - 1, num_stages=1):
        seg = segments - 1 - p if REVERSE else p
        at = (i * segments + seg) * H + h
        E = tl.load(entry + at * size + c, mask=m, other=0.0)
        tl.store(entry + at * size + c, S, mask=m)
        S = S * tl.exp2(tl.load(total + at)) + E
    seg = segments - 1 - (segments - 1) if REVERSE else segments - 1
    tl.store(entry + ((i * segments + seg) * H + h) * size + c, S, mask=m)
