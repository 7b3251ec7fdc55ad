# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""Linear attention with one decay per head and token in one scan, for K up to one block: outputs, or gradients.

One program a block of V, head and sequence (or stretch of it). The state is held transposed, [BV, BK] in fp32. With b
the sums of log decays inside a chunk, L its last row and D[j, i] = scale e^(b_i - b_j) for j <= i, 0 else:

    o^T = scale (S q^T) e^b + v^T (k q^T * D);      S <- e^(b_L) S + (v^T e^(b_L - b)) k

REVERSE runs from the last token to the first, each reading what comes after it: e^(b_L - b) and e^b change places and D
is transposed. All gradients but that of the decays are such scans: with G[j, i] = do_i . v_j,

    dq: the outputs of (q: do, k: v, v: k);   in reverse dk: those of (q: v, k: do, v: q), dv: of (q: k, k: q, v: do)

Full chunks run in a pipelined loop over descriptor tiles; a ragged last chunk is one more step through pointers.
Without descriptors the loop takes all chunks through pointers.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, chunk_at, saturate, sequence_at
from fla.ops._common.tiles import load_rows, state_offsets, store_rows
from fla.ops._linear.kernels.half import fit_columns, fit_rows

# Where log decays (base 2) come from.
NO_DECAY = 0
TOKEN_DECAY = 1
HEAD_DECAY = 2
# 2 to this power is 0 in fp32: cutting a step here changes no decay, bounds the sums and keeps infinity out of them.
FLOOR = tl.constexpr(-160.0)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def scalar_sums(g, sums, table, T, NT, H, scale, C: tl.constexpr, BH: tl.constexpr, VARLEN: tl.constexpr):
    """From log decays `[B, T, H]`, as `[chunks * H, 3, C]`: their sums b (base 2) from the start of each chunk and,
    because the passes have little time for exponentials, ``scale e^b`` and ``e^(b_L - b)``. Heads are coalesced."""
    NH = (H + BH - 1) // BH
    pid = tl.program_id(0)
    it = pid // NH
    c = (pid % NH) * BH + tl.arange(0, BH)
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    rr = tl.arange(0, C)
    at = (row + rr).to(tl.int64)[:, None] * H + c[None, :]
    x = tl.load(g + at, mask=(rr < n)[:, None] & (c < H)[None, :], other=0.0).to(tl.float32)
    x = tl.cumsum(tl.maximum(x * LOG2E, FLOOR), 0)
    last = tl.sum(tl.where(rr[:, None] == C - 1, x, 0.0), 0)
    out = sums + (it.to(tl.int64) * H + c)[None, :] * (3 * C) + rr[:, None]
    m = (c < H)[None, :] & (rr >= 0)[:, None]
    tl.store(out, x, mask=m)
    tl.store(out + C, tl.exp2(x) * scale, mask=m)
    tl.store(out + 2 * C, tl.exp2(last[None, :] - x), mask=m)


@triton.jit
def chunk_decays(sums, gamma, tile, n, h, C: tl.constexpr, DECAY: tl.constexpr):
    """Sums ``b`` [C] of one chunk and head, and their last value; rows from ``n`` on repeat row ``n - 1``."""
    rr = tl.arange(0, C)
    if DECAY == 1:
        base = sums + tile.to(tl.int64) * (3 * C)
        return tl.load(base + rr), tl.load(base + (C - 1))
    elif DECAY == 2:
        x = tl.maximum(tl.load(gamma + h).to(tl.float32) * LOG2E, FLOOR)
        return x * tl.minimum(rr + 1, n).to(tl.float32), x * tl.minimum(n, C).to(tl.float32)
    else:
        return tl.zeros((C,), tl.float32), 0.0


@triton.jit
def row_decays(sums, b, last, scale, tile, C: tl.constexpr, DECAY: tl.constexpr):
    """``scale e^b`` and ``e^(b_L - b)`` of one chunk and head."""
    if DECAY == 1:
        base = sums + tile.to(tl.int64) * (3 * C) + tl.arange(0, C)
        return tl.load(base + C), tl.load(base + 2 * C)
    else:
        return tl.exp2(b) * scale, tl.exp2(last - b)


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
def _scan_step(
    S, D, upto, after, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, tile, row, n, h, v0, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, REVERSE: tl.constexpr, DESC: tl.constexpr, DSTORE: tl.constexpr, DOT: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    dt: tl.constexpr = k.dtype.element_ty
    # Descriptors load full chunks only: a decay per head is then the same in all of them, and leaves the loop.
    b, last = chunk_decays(sums, gamma, tile, C if DESC else n, h, C, DECAY)
    if DECAY and not FIXED:
        upto, after = row_decays(sums, b, last, scale, tile, C, DECAY)
    kt = load_rows(k, kd, row, n, h, H, 0, K, BK, C, DESC)
    vt = load_rows(v, vd, row, n, h, H, v0, V, BV, C, DESC)
    qt = load_rows(q, qd, row, n, h, H, 0, K, BK, C, DESC)
    a = tl.dot(kt, tl.trans(qt), input_precision=DOT)
    if FIXED:
        a = a * D
    else:
        a = decayed_scores(a, b, scale, C, DECAY, 1 if REVERSE else 0)
    a, fa, ia = fit_columns(a, dt)
    Sb, fs, _ = fit_rows(S, dt)
    oo = tl.dot(Sb, tl.trans(qt), input_precision=DOT)
    if DECAY:
        oo = oo * (after if REVERSE else upto)[None, :]
    else:
        oo = oo * scale
    if tl.float16 == dt:
        oo = oo * fs[:, None] * ia[None, :]
    oo = tl.dot(tl.trans(vt), a, oo, input_precision=DOT)
    if tl.float16 == dt:
        oo = oo * fa[None, :]
    vT = tl.trans(vt)
    if DECAY:
        S = S * tl.exp2(last)
        w = upto if REVERSE else after
        vT = (vT.to(tl.float32) * w[None, :]).to(dt)
    S = tl.dot(vT, kt, S, input_precision=DOT)
    if NORM:
        oo = oo * row_factors(inverse, row, n, h, H, C)[None, :]
    y = tl.trans(oo)
    # A gradient that float16 cannot hold shows as infinity: whoever scales losses looks for it.
    store_rows(o, od, y.to(dt) if REVERSE else saturate(y, dt), row, n, h, H, v0, V, BV, C, DESC and DSTORE)
    return S


@triton.jit
def _chunks(
    S, lo, hi, D, upto, after, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, first, bos, length, h, v0, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, REVERSE: tl.constexpr, DESC: tl.constexpr, DOT: tl.constexpr, FIXED: tl.constexpr,
    DSTORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for j in tl.range(lo, hi, num_stages=STAGES):
        t = lo + hi - 1 - j if REVERSE else j
        S = _scan_step(
            S, D, upto, after, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, (first + t) * H + h, bos + t * C,
            length - t * C, h, v0, H, scale, K, V, BK, BV, C, DECAY, NORM, REVERSE, DESC, DSTORE, DOT, FIXED,
        )  # fmt: skip
    return S


@triton.jit
def scan_program(
    pid, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, h0, ht, entry, cu, offsets, T, NT, H, has_h0, has_ht,
    segments, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr, REVERSE: tl.constexpr, VFIRST: tl.constexpr,
    EFIRST: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr, DOT: tl.constexpr, DSTORE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """See `scalar_scan`. EFIRST: ``entry`` is [V, K] as seen from here, else [K, V]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    v0 = (pid % NV) * BV
    h = (pid // NV) % H
    parts = segments if SPLIT == 1 else 1
    seg = (pid // (NV * H)) % parts
    i = pid // (NV * H * parts)
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    state = (i.to(tl.int64) * H + h) * (K * V)
    begin = parts - 1 if REVERSE else 0
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    S = tl.load(h0 + state + so, mask=sm & (seg == begin) & (has_h0 != 0), other=0.0).to(tl.float32)
    if SPLIT == 1:
        slot = (i.to(tl.int64) * segments + seg) * H + h
        eo, em = state_offsets(v0, K, V, BK, BV, EFIRST)
        S += tl.load(entry + slot * (K * V) + eo, mask=em & (seg != begin), other=0.0)
    if REVERSE and DECAY == 0:
        # Without decays nothing scales what is written, so the scale is left to what is read.
        S = S / scale
    lo, hi, full = stretch_at(length, seg, parts, C)
    loop = tl.minimum(hi, full) if DESC else hi
    # Descriptors load full chunks only, and a decay per head is the same in all of them.
    FIXED: tl.constexpr = DESC and DECAY == 2
    b, last = chunk_decays(sums, gamma, first * H + h, C, h, C, 2 if FIXED else 0)
    D = decayed_scores(tl.zeros((C, C), tl.float32) + 1.0, b, scale, C, 2 if FIXED else 0, 1 if REVERSE else 0)
    upto, after = row_decays(sums, b, last, scale, first, C, 2)
    if DESC and REVERSE:
        if (hi > full) & (lo < hi):
            S = _scan_step(
                S, D, upto, after, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, (first + full) * H + h, bos + full
                * C, length - full * C, h, v0, H, scale, K, V, BK, BV, C, DECAY, NORM, REVERSE, False, DSTORE, DOT,
                False,
            )  # fmt: skip
    if SPLIT == 2:
        for s in tl.range(0, segments, num_stages=1):
            lo, hi, full = stretch_at(length, s, segments, C)
            slot = (i.to(tl.int64) * segments + s) * H + h
            eo, em = state_offsets(v0, K, V, BK, BV, EFIRST)
            tl.store(entry + slot * (K * V) + eo, S, mask=em)
            end = tl.minimum(hi, full) if DESC else hi
            S = _chunks(
                S, lo, end, D, upto, after, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, first, bos,
                length, h, v0, H, scale, K, V, BK, BV, C, DECAY, NORM, REVERSE, DESC, DOT, FIXED, DSTORE, STAGES,
            )  # fmt: skip
        lo, hi, full = stretch_at(length, 0, 1, C)
    else:
        S = _chunks(
            S, lo, loop, D, upto, after, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, first, bos,
            length, h, v0, H, scale, K, V, BK, BV, C, DECAY, NORM, REVERSE, DESC, DOT, FIXED, DSTORE, STAGES,
        )  # fmt: skip
    if DESC and not REVERSE:
        if (hi > full) & (lo < hi):
            S = _scan_step(
                S, D, upto, after, q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, (first + full) * H + h, bos + full
                * C, length - full * C, h, v0, H, scale, K, V, BK, BV, C, DECAY, NORM, REVERSE, False, DSTORE, DOT,
                False,
            )  # fmt: skip
    if REVERSE and DECAY == 0:
        S = S * scale
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    end = 0 if REVERSE else parts - 1
    tl.store(ht + state + so, S.to(ht.dtype.element_ty), mask=sm & (has_ht != 0) & (seg == end))


@triton.jit(do_not_specialize=["T", "NT", "H", "has_h0", "has_ht", "segments"])
def scalar_scan(
    q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, h0, ht, entry, cu, offsets, T, NT, H, has_h0, has_ht, segments,
    scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, SPLIT: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr,
    DOT: tl.constexpr, DSTORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """SPLIT 0: all of a sequence a program; 1: one of ``segments`` stretches of it, from the state in ``entry``; 2: all
    of it, and the state before each stretch is written there for those that come back to them.

    NORM: multiply o by ``inverse`` `[B, T, H]`. DSTORE: o too is written through descriptors.
    """
    scan_program(
        tl.program_id(0), q, k, v, qd, kd, vd, sums, gamma, inverse, o, od, h0, ht, entry, cu, offsets, T, NT, H,
        has_h0, has_ht, segments, scale, K, V, BK, BV, C, DECAY, NORM, SPLIT, False, VFIRST, True, VARLEN, DESC, DOT,
        DSTORE, STAGES,
    )  # fmt: skip
