# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""Forward pass of linear attention with one decay per head and token, in one scan for K up to one block.

One program a block of V, head and sequence (or stretch of it). The state is held transposed, [BV, BK] in fp32. With b
the sums of log decays inside a chunk, L its last row and D[j, i] = scale e^(b_i - b_j) for j <= i, 0 else:

    o^T = scale (S q^T) e^b + v^T (k q^T * D);      S <- e^(b_L) S + (v^T e^(b_L - b)) k

Full chunks run in a pipelined loop over descriptor tiles; a ragged last chunk is one more step through pointers.
Without descriptors the loop takes all chunks through pointers.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, chunk_at, saturate, sequence_at
from fla.ops._common.tiles import load_rows, state_offsets, store_rows

# Where log decays (base 2) come from.
NO_DECAY = 0
TOKEN_DECAY = 1
HEAD_DECAY = 2
# 2 to this power is 0 in fp32: cutting a step here changes no decay, bounds the sums and keeps infinity out of them.
FLOOR = tl.constexpr(-160.0)


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
def row_factors(x, row, n, h, H, C: tl.constexpr):
    """One number a row and head, from `[B, T, H]`; 0 from row ``n`` on."""
    rr = tl.arange(0, C)
    return tl.load(x + (row + rr).to(tl.int64) * H + h, mask=rr < n, other=0.0)


@triton.jit
def stretch_at(length, seg, segments, C: tl.constexpr):
    """First and last chunk of stretch ``seg`` of a sequence, and how many of the sequence's chunks are full."""
    full = length // C
    chunks = (length + C - 1) // C
    per = (chunks + segments - 1) // segments
    lo = tl.minimum(seg * per, chunks)
    return lo, tl.minimum(lo + per, chunks), full


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
    S, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, tile, row, n, h, v0, H, scale, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr,
    DESC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    dt: tl.constexpr = k.dtype.element_ty
    b, last = chunk_decays(sums, gamma, tile, n, h, C, DECAY)
    kt = load_rows(k, kd, row, n, h, H, 0, K, BK, C, DESC)
    vt = load_rows(v, vd, row, n, h, H, v0, V, BV, C, DESC)
    qt = load_rows(q, qd, row, n, h, H, 0, K, BK, C, DESC)
    a = decayed_scores(tl.dot(kt, tl.trans(qt), input_precision=DOT), b, scale, C, DECAY, 0).to(dt)
    oo = tl.dot(saturate(S, dt), tl.trans(qt), input_precision=DOT)
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
    if NORM:
        oo = oo * row_factors(inverse, row, n, h, H, C)[None, :]
    store_rows(o, od, saturate(tl.trans(oo), dt), row, n, h, H, v0, V, BV, C, DESC)
    return S


@triton.jit(do_not_specialize=["T", "NT", "H", "has_h0", "has_ht", "segments"])
def scalar_scan(
    q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, h0, ht, entry, cu, offsets, T, NT, H, has_h0, has_ht, segments,
    scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, SPLIT: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """SPLIT: one of ``segments`` stretches of a sequence a program, from the state in ``entry``; else all of it.

    NORM: multiply o by ``inverse`` `[B, T, H]`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    h = (pid // NV) % H
    seg = (pid // (NV * H)) % segments
    i = pid // (NV * H * segments)
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    state = (i.to(tl.int64) * H + h) * (K * V)
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    S = tl.load(h0 + state + so, mask=sm & (seg == 0) & (has_h0 != 0), other=0.0).to(tl.float32)
    if SPLIT:
        slot = (i.to(tl.int64) * segments + seg) * H + h
        eo, em = state_offsets(v0, K, V, BK, BV, True)
        S += tl.load(entry + slot * (K * V) + eo, mask=em & (seg > 0), other=0.0)
    lo, hi, full = stretch_at(length, seg, segments, C)
    loop = tl.minimum(hi, full) if DESC else hi
    for t in tl.range(lo, loop, num_stages=STAGES):
        S = _forward_step(
            S, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, (first + t) * H + h, bos + t * C, length - t * C, h,
            v0, H, scale, K, V, BK, BV, C, DECAY, NORM, DESC, DOT,
        )  # fmt: skip
    if DESC:
        if (hi > full) & (lo < hi):
            S = _forward_step(
                S, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, (first + full) * H + h, bos + full * C,
                length - full * C, h, v0, H, scale, K, V, BK, BV, C, DECAY, NORM, False, DOT,
            )  # fmt: skip
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    tl.store(ht + state + so, S, mask=sm & (has_ht != 0) & (seg == segments - 1))
