# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""States of linear attention with one decay per head and token, and their gradients, chunk by chunk.

Both are held transposed, one block [BV, BK] in fp32 a program: no product crosses blocks, of K as little as of V. With
b the sums of log decays inside a chunk and L its last row:

    forward   S <- e^(b_L) S + (v^T e^(b_L - b)) k            reverse   X <- e^(b_L) X + scale (do^T e^b) q
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import sequence_at
from fla.ops._common.tiles import load_rows, state_offsets, store_tile
from fla.ops._linear.kernels.half import fit_rows, keep_factors, lift_of
from fla.ops._linear.kernels.scalar_scan import chunk_decays, row_decays, stretch_at

# What a program does with its stretch of time.
WHOLE = 0
STRETCH = 1
SUMMARY = 2
# Which of the two passes are in the grid.
STATES = 1
GRADIENTS = 2
BOTH = 3


@triton.jit
def _step(
    S, a, x, ad, xd, sums, gamma, St, Sd, Sf, tile, row, n, h, k0, v0, H, scale, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr, SAVE: tl.constexpr,
    DESC: tl.constexpr, DSTORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    dt: tl.constexpr = a.dtype.element_ty
    b, last = chunk_decays(sums, gamma, tile, n, h, C, DECAY)
    at = load_rows(a, ad, row, n, h, H, k0, K, BK, C, DESC)
    xt = load_rows(x, xd, row, n, h, H, v0, V, BV, C, DESC)
    if SAVE:
        Sb, f, _ = fit_rows(S, dt)
        store_tile(St, Sd, Sb, tile, v0, k0, V, K, BV, BK, DESC and DSTORE)
        if tl.float16 == dt:
            keep_factors(Sf, f, tile, v0, k0, K, V, BK, BV)
    xT = tl.trans(xt)
    if DECAY:
        upto, after = row_decays(sums, b, last, scale, tile, C, DECAY)
        w = upto if REVERSE else after
        if REVERSE and tl.float16 == dt:
            # All that is added here may have decayed below what float16 holds.
            lift = lift_of(b, dt)
            xT = (xT.to(tl.float32) * (w * tl.exp2(lift))[None, :]).to(dt)
            S = S * tl.exp2(last + lift)
            return tl.dot(xT, at, S, input_precision=DOT) * tl.exp2(lift * -1.0), last
        xT = (xT.to(tl.float32) * w[None, :]).to(dt)
        S = S * tl.exp2(last)
    elif REVERSE:
        xT = (xT.to(tl.float32) * scale).to(dt)
    return tl.dot(xT, at, S, input_precision=DOT), last


@triton.jit
def states_program(
    pid, a, x, ad, xd, sums, gamma, St, Sd, Sf, s0, s1, entry, total, cu, offsets, T, NT, H, has_s0, has_s1, segments,
    parts, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, SPLIT: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr,
    DESC: tl.constexpr, DSTORE: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    SAVE: tl.constexpr = SPLIT != 2
    k0 = (pid % NK) * BK
    v0 = ((pid // NK) % NV) * BV
    h = (pid // (NK * NV)) % H
    part = (pid // (NK * NV * H)) % parts
    i = pid // (NK * NV * H * parts)
    # Stretches count from the start of the sequence in both passes; a summary needs all but the last one of its way.
    seg = part + segments - parts if REVERSE else part
    begin = segments - 1 if REVERSE else 0
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    state = (i.to(tl.int64) * H + h) * (K * V)
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST, k0)
    S = tl.load(s0 + state + so, mask=sm & (seg == begin) & (has_s0 != 0), other=0.0).to(tl.float32)
    slot = ((i.to(tl.int64) * segments + seg) * H + h) * (K * V)
    if SPLIT == 1:
        eo, em = state_offsets(v0, K, V, BK, BV, True, k0)
        S += tl.load(entry + slot + eo, mask=em & (seg != begin), other=0.0)
    lo, hi, full = stretch_at(length, seg, segments, C)
    loop = tl.minimum(hi, full) if DESC else hi
    decay = 0.0
    if DESC and REVERSE:
        if (hi > full) & (lo < hi):
            S, last = _step(
                S, a, x, ad, xd, sums, gamma, St, Sd, Sf, (first + full) * H + h, bos + full * C, length - full * C, h,
                k0, v0, H, scale, K, V, BK, BV, C, DECAY, REVERSE, SAVE, False, DSTORE, DOT,
            )  # fmt: skip
            if SPLIT == 2:
                decay += last
    for j in tl.range(lo, loop, num_stages=STAGES):
        t = lo + loop - 1 - j if REVERSE else j
        S, last = _step(
            S, a, x, ad, xd, sums, gamma, St, Sd, Sf, (first + t) * H + h, bos + t * C, length - t * C, h, k0, v0, H,
            scale, K, V, BK, BV, C, DECAY, REVERSE, SAVE, DESC, DSTORE, DOT,
        )  # fmt: skip
        if SPLIT == 2:
            decay += last
    if DESC and not REVERSE:
        if (hi > full) & (lo < hi):
            S, last = _step(
                S, a, x, ad, xd, sums, gamma, St, Sd, Sf, (first + full) * H + h, bos + full * C, length - full * C, h,
                k0, v0, H, scale, K, V, BK, BV, C, DECAY, REVERSE, SAVE, False, DSTORE, DOT,
            )  # fmt: skip
            if SPLIT == 2:
                decay += last
    if SPLIT == 2:
        eo, em = state_offsets(v0, K, V, BK, BV, True, k0)
        tl.store(entry + slot + eo, S, mask=em)
        # All blocks write the same number.
        tl.store(total + (i.to(tl.int64) * segments + seg) * H + h, tl.exp2(decay))
    else:
        so, sm = state_offsets(v0, K, V, BK, BV, VFIRST, k0)
        end = 0 if REVERSE else segments - 1
        tl.store(s1 + state + so, S.to(s1.dtype.element_ty), mask=sm & (has_s1 != 0) & (seg == end))


@triton.jit(do_not_specialize=["T", "NT", "H", "has_h0", "has_ht", "has_dht", "has_dh0", "segments", "parts"])
def scalar_states(
    q, k, v, do, qd, kd, vd, dod, sums, gamma, St, Sd, Sf, Xt, Xd, Xf, h0, ht, dht, dh0, entry, total, back, cu,
    offsets, T, NT, H, has_h0, has_ht, has_dht, has_dh0, segments, parts, scale, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, SIDES: tl.constexpr, SPLIT: tl.constexpr,
    VFIRST: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr, DSTORE: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The state before each chunk to ``St`` and its gradient after each chunk to ``Xt``, `[chunks * H, V, K]` both.

    SIDES: STATES, GRADIENTS, or BOTH, the first half of the grid for the states. SPLIT: WHOLE, a sequence a program;
    STRETCH, one of ``segments`` stretches of it, which begins with what is in ``entry`` (``back`` for gradients);
    SUMMARY, write what a stretch adds to ``entry``, with the caller's state in the first one, and its decay
    to ``total``, and nothing else. There are ``parts`` stretches in the grid. DSTORE: states too are written
    through descriptors.
    """
    pid = tl.program_id(0)
    half = tl.num_programs(0) // 2 if SIDES == 3 else tl.num_programs(0)
    if SIDES == 1:
        states_program(
            pid, k, v, kd, vd, sums, gamma, St, Sd, Sf, h0, ht, entry, total, cu, offsets, T, NT, H, has_h0, has_ht,
            segments, parts, scale, K, V, BK, BV, C, DECAY, False, SPLIT, VFIRST, VARLEN, DESC, DSTORE, DOT, STAGES,
        )  # fmt: skip
    elif SIDES == 2:
        states_program(
            pid, q, do, qd, dod, sums, gamma, Xt, Xd, Xf, dht, dh0, back, total, cu, offsets, T, NT, H, has_dht,
            has_dh0, segments, parts, scale, K, V, BK, BV, C, DECAY, True, SPLIT, VFIRST, VARLEN, DESC, DSTORE, DOT,
            STAGES,
        )  # fmt: skip
    else:
        if pid < half:
            states_program(
                pid, k, v, kd, vd, sums, gamma, St, Sd, Sf, h0, ht, entry, total, cu, offsets, T, NT, H, has_h0, has_ht,
                segments, parts, scale, K, V, BK, BV, C, DECAY, False, SPLIT, VFIRST, VARLEN, DESC, DSTORE, DOT, STAGES,
            )  # fmt: skip
        else:
            states_program(
                pid - half, q, do, qd, dod, sums, gamma, Xt, Xd, Xf, dht, dh0, back, total, cu, offsets, T, NT, H,
                has_dht, has_dh0, segments, parts, scale, K, V, BK, BV, C, DECAY, True, SPLIT, VFIRST, VARLEN, DESC,
                DSTORE, DOT, STAGES,
            )  # fmt: skip
