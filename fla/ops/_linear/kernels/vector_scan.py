# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""State pass of linear attention with a decay per key channel, forward and reverse in one kernel.

With the tiles of `vector_prep` (``qd = scale q e^b``, ``ku = k e^(b_L - b)``, A) both directions are the same work:

    forward   o^T  = S qd^T + v^T A^T;    S <- S e^(b_L) + v^T ku
    reverse   dv^T = X ku^T + do^T A;     X <- X e^(b_L) + do^T qd

The state is held transposed, `[V block, K]` in fp32 registers: it is then a register operand, the tiles go from memory
to the tensor cores without a stop, and the chain from chunk to chunk is one product long.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import saturate, sequence_at
from fla.ops._common.tiles import state_offsets
from fla.ops._common.vector_math import load_tile, store_tile
from fla.ops._linear.kernels.half import fit_rows, keep_factors

# What a program does with its stretch of time.
WHOLE = 0
STRETCH = 1
SUMMARY = 2


@triton.jit(do_not_specialize=["T", "NT", "H", "segments", "parts"])
def vector_scan(
    decay, tiles, mats, weights, x, o, states, factors, h0, ht, entry, total, cu, offsets, T, NT, H, segments, parts,
    C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    OUT: tl.constexpr, SAVE: tl.constexpr, INIT: tl.constexpr, FINAL: tl.constexpr, SPLIT: tl.constexpr,
    REVERSE: tl.constexpr, VFIRST: tl.constexpr, DT: tl.constexpr, OT: tl.constexpr, PREC: tl.constexpr,
    VARLEN: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr, OTMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (V block, head, stretch, sequence). REVERSE: from the last chunk to the first, with the tiles of
    read and write swapped; ``x`` is v or do, ``o`` is o or dv, ``h0`` what the first chunk in this order starts from.

    SAVE: write the state before each chunk (in this order), transposed, to states [w, VP, KP]; of float16 with the
    factors of its rows [w, VP].
    SPLIT 0: a whole sequence; 1: one of ``segments`` stretches, starting from entry [(i segments + seg) H + h, VP, KP];
    2: what a stretch adds to a state of zeros (the first one: makes of ``h0``), written to ``entry``, and its decay,
    written to total [.., KP]; the grid leaves out the stretch that comes last.
    """
    NV: tl.constexpr = VP // BV
    COLS: tl.constexpr = V != VP
    RD: tl.constexpr = C if REVERSE else 0
    WR: tl.constexpr = 0 if REVERSE else C
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    h = (pid // NV) % H
    seg = (pid // (NV * H)) % parts
    if REVERSE:
        seg += segments - parts
    i = pid // (NV * H * parts)
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    cv = v0 + tl.arange(0, BV)
    ck = tl.arange(0, KP)
    slot = (i.to(tl.int64) * segments + seg) * H + h
    eo = (slot * VP + cv[:, None]) * KP + ck[None, :]
    head = (i.to(tl.int64) * H + h) * (K * V)
    so, sm = state_offsets(v0, K, V, KP, BV, VFIRST)
    come = segments - 1 - seg if REVERSE else seg
    S = tl.zeros((BV, KP), tl.float32)
    if INIT:
        S += tl.load(h0 + head + so, mask=sm & (come == 0), other=0.0).to(tl.float32)
    if SPLIT == 1:
        S += tl.load(entry + eo, mask=(eo >= 0) & (come > 0), other=0.0)
    chunks = (length + C - 1) // C
    per = (chunks + segments - 1) // segments
    lo = tl.minimum(seg * per, chunks)
    hi = tl.minimum(lo + per, chunks)
    left = tl.zeros((KP,), tl.float32) + 1.0
    for j in tl.range(lo, hi, num_stages=STAGES):
        t = j
        if REVERSE:
            t = lo + hi - 1 - j
        w = (first + t) * H + h
        r0 = bos + t * C
        n = length - t * C
        eg = tl.load(decay + w.to(tl.int64) * KP + ck)
        xt = load_tile(x, r0, n, h * V + v0, V - v0, H * V, C, BV, TMA, ROWS, COLS)
        wt = load_tile(tiles, w * (2 * C) + WR, C, 0, KP, KP, C, KP, TMA, False, False)
        if OUT:
            rt = load_tile(tiles, w * (2 * C) + RD, C, 0, KP, KP, C, KP, TMA, False, False)
            am = load_tile(mats, w * C, C, 0, C, C, C, C, TMA, False, False)
        if OUT or SAVE:
            Sb, fs, _ = fit_rows(S, DT)
        if SAVE:
            store_tile(states, Sb, w * VP + v0, BV, 0, KP, KP, BV, KP, TMA, False, False)
            if tl.float16 == DT:
                keep_factors(factors, fs, w, v0, 0, KP, VP, KP, BV)
        if OUT:
            oo = tl.dot(Sb, tl.trans(rt), input_precision=PREC)
            if tl.float16 == DT:
                weight = tl.load(weights + w)
                oo = oo * (fs * (1.0 / weight))[:, None]
            if REVERSE:
                oo = tl.dot(tl.trans(xt), am, oo, input_precision=PREC)
            else:
                oo = tl.dot(tl.trans(xt), tl.trans(am), oo, input_precision=PREC)
            if tl.float16 == DT:
                oo = oo * weight
        S = S * eg[None, :]
        S = tl.dot(tl.trans(xt), wt, S, input_precision=PREC)
        if SPLIT == 2:
            left = left * eg
        if OUT:
            # A gradient that float16 cannot hold shows as infinity: whoever scales losses looks for it.
            y = tl.trans(oo).to(OT) if REVERSE else saturate(tl.trans(oo), OT)
            store_tile(o, y, r0, n, h * V + v0, V - v0, H * V, C, BV, OTMA, ROWS, COLS)
    if SPLIT == 2:
        tl.store(entry + eo, S)
        # All blocks of V write the same numbers.
        tl.store(total + slot * KP + ck, left)
    elif FINAL:
        tl.store(ht + head + so, S.to(ht.dtype.element_ty), mask=sm & (come == segments - 1))
