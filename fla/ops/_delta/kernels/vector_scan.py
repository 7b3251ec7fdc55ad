# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""State passes of the vector-decay chunk form over chunks of 32 tokens, forward and reverse.

The state is held transposed, `[V block, K]` in fp32 registers: it and everything on the chain of dependent products are
then register operands, while the tiles go from memory to the tensor cores without a stop. Norms, scale, decay and beta
are baked into the tiles by `vector_prep`, so no per-token scalar is read here.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import saturate, sequence_at
from fla.ops._delta.kernels.common import idle, judge, watch
from fla.ops._delta.kernels.vector_math import load_tile, store_tile


@triton.jit
def state_ptrs(
    p, n, h, H, v0, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, VFIRST: tl.constexpr
):
    """Pointers [BV, KP] into a state [N, H, K, V] (or [N, H, V, K]) and their mask."""
    cv = v0 + tl.arange(0, BV)[:, None]
    ck = tl.arange(0, KP)[None, :]
    base = p + (n.to(tl.int64) * H + h) * (K * V)
    if VFIRST:
        at = base + cv * K + ck
    else:
        at = base + ck * V + cv
    return at, (cv < V) & (ck < K)


@triton.jit
def first_state(
    p, n, seg, h, H, NSEG, v0, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    VFIRST: tl.constexpr, SPLIT: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """What a pass starts from: the identity for the map of a segment, the state of that, of the sequence, or 0."""
    ck = tl.arange(0, KP)
    if SPLIT == 2:
        S = tl.where((v0 - VP + tl.arange(0, BV))[:, None] == ck[None, :], 1.0, 0.0)
    elif SPLIT == 1:
        cv = v0 + tl.arange(0, BV)
        at = p + (((n.to(tl.int64) * NSEG + seg) * H + h) * VP + cv[:, None]) * KP + ck[None, :]
        S = tl.load(at)
    elif GIVEN:
        at, ok = state_ptrs(p, n, h, H, v0, K, V, KP, BV, VFIRST)
        S = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BV, KP), tl.float32)
    return S


@triton.jit
def last_state(
    p, S, n, seg, h, H, NSEG, iv, v0, last, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BV: tl.constexpr, VFIRST: tl.constexpr, SPLIT: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Store what a pass ends with: the map of a segment, or the state after the sequence's ``last`` one."""
    if SPLIT == 2:
        ck = tl.arange(0, KP)
        cv = iv * BV + tl.arange(0, BV)
        at = p + (((n.to(tl.int64) * NSEG + seg) * H + h) * (VP + KP) + cv[:, None]) * KP + ck[None, :]
        tl.store(at, S)
    elif WANTED:
        at, ok = state_ptrs(p, n, h, H, v0, K, V, KP, BV, VFIRST)
        tl.store(at, S, mask=ok & last)


@triton.jit(do_not_specialize=["T", "NT", "H", "STEPS", "NSEG"])
def vector_scan(
    decay,
    tiles,
    mats,
    v,
    o,
    states,
    news,
    h0,
    ht,
    long,
    cu,
    offsets,
    T,
    NT,
    H,
    STEPS,
    NSEG,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    NM: tl.constexpr,
    OUT: tl.constexpr,
    SAVE: tl.constexpr,
    NEWS: tl.constexpr,
    INIT: tl.constexpr,
    FINAL: tl.constexpr,
    SPLIT: tl.constexpr,
    VFIRST: tl.constexpr,
    DT: tl.constexpr,
    IO: tl.constexpr,
    PREC: tl.constexpr,
    VARLEN: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    PART: tl.constexpr,
):
    """One program per (V block, head, sequence, time segment).

    OUT: write ``o``. SAVE 1 or 2: write the state before each 64 or 32 tokens, transposed, to
    states [chunk64 * H + h, SAVE, VP, KP]. NEWS: write the new values, transposed, to news [chunk64 * H + h, VP, 64].
    SPLIT 0: a whole sequence; 1: one of NSEG segments of STEPS chunks, starting from h0 [n * NSEG + seg, H, V, K];
    2: as 1, but write the affine map of the segment, [n * NSEG + seg, H, V + K, K]: the state that a zero one becomes
    and, below it, the matrix that a state is multiplied with.
    """
    if PART:
        if idle(long, PART):
            return
    NV: tl.constexpr = (VP + KP) // BV if SPLIT == 2 else VP // BV
    pid = tl.program_id(0)
    iv = pid % NV
    h = (pid // NV) % H
    n = pid // (NV * H)
    seg = 0
    if SPLIT:
        seg = n % NSEG
        n = n // NSEG
    bos, length, first = sequence_at(cu, offsets, n, T, NT, VARLEN)
    COLS: tl.constexpr = V != VP
    v0 = iv * BV
    ck = tl.arange(0, KP)
    steps = tl.cdiv(length, 32)
    if NEWS:
        steps = tl.cdiv(length, 64) * 2
    begin = 0
    end = steps
    last = True
    if SPLIT:
        begin = seg * STEPS
        end = tl.minimum(begin + STEPS, steps)
        last = end == steps
    value = 1.0
    top = tl.zeros((BV,), tl.float32)
    if SPLIT == 2:
        value = tl.where(v0 >= VP, 0.0, 1.0)
    S = first_state(h0, n, seg, h, H, NSEG, v0, K, V, KP, VP, BV, VFIRST, SPLIT, INIT)
    if SPLIT == 2:
        v0 = v0 % VP
    for t in tl.range(begin, end, num_stages=STAGES):
        w = (first + t // 2) * H + h
        sub = t % 2
        tr = w * 192 + sub * 32
        mr = w * (64 * NM) + sub * 32
        r0 = bos + t * 32
        if KP <= 128:
            eg = tl.load(decay + (w.to(tl.int64) * 2 + sub) * KP + ck)
        vt = load_tile(v, r0, length - t * 32, h * V + v0, V - v0, H * V, 32, BV, TMA, ROWS, COLS)
        kd = load_tile(tiles, tr, 32, 0, KP, KP, 32, KP, TMA, False, False)
        tm = load_tile(mats, mr, 32, 0, 32, 32, 32, 32, TMA, False, False)
        ku = load_tile(tiles, tr + 64, 32, 0, KP, KP, 32, KP, TMA, False, False)
        if OUT:
            qd = load_tile(tiles, tr + 128, 32, 0, KP, KP, 32, KP, TMA, False, False)
            am = load_tile(mats, mr + 64, 32, 0, 32, 32, 32, 32, TMA, False, False)
        Sb = S.to(DT)
        kept = Sb
        if PART == 2 and SAVE > 0:
            kept = saturate(S, states.dtype.element_ty)
        if SAVE == 2:
            store_tile(states, kept, (w * 2 + sub) * VP + v0, BV, 0, KP, KP, BV, KP, TMA, False, False)
        elif SAVE == 1 and sub == 0:
            store_tile(states, kept, w * VP + v0, BV, 0, KP, KP, BV, KP, TMA, False, False)
        x = tl.trans(vt).to(tl.float32)
        if SPLIT == 2:
            x = tl.where(value > 0.0, x, 0.0)
        x = x - tl.dot(Sb, tl.trans(kd), input_precision=PREC)
        nv = tl.dot(x.to(DT), tl.trans(tm), input_precision=PREC).to(DT)
        if NEWS:
            store_tile(news, nv, w * VP + v0, BV, sub * 32, 64, 64, BV, 32, TMA, False, False)
        if OUT:
            oo = tl.dot(Sb, tl.trans(qd), input_precision=PREC)
            oo = tl.dot(nv, tl.trans(am), oo, input_precision=PREC)
            if PART == 1:
                top = watch(top, oo)
        if KP > 128:
            # Late, because nothing else fits beside it.
            eg = tl.load(decay + (w.to(tl.int64) * 2 + sub) * KP + ck)
        S = S * eg[None, :]
        S = tl.dot(nv, ku, S, input_precision=PREC)
        if OUT:
            store_tile(
                o,
                saturate(tl.trans(oo), IO),
                r0,
                length - t * 32,
                h * V + v0,
                V - v0,
                H * V,
                32,
                BV,
                TMA and not (ROWS or COLS),
                ROWS,
                COLS,
            )
    last_state(ht, S, n, seg, h, H, NSEG, iv, v0, last, K, V, KP, VP, BV, VFIRST, SPLIT, FINAL)
    if PART == 1 and OUT:
        judge(long, top, S, 1)


@triton.jit(do_not_specialize=["H", "NSEG"])
def vector_merge(
    maps,
    entries,
    h0,
    H,
    NSEG,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    INIT: tl.constexpr,
    VFIRST: tl.constexpr,
    PREC: tl.constexpr,
):
    """Entry states of the time segments, transposed: apply the segments' affine maps one after another."""
    pid = tl.program_id(0)
    v0 = (pid % (VP // BV)) * BV
    h = (pid // (VP // BV)) % H
    n = pid // (VP // BV * H)
    cv = v0 + tl.arange(0, BV)
    ck = tl.arange(0, KP)
    if INIT:
        at, ok = state_ptrs(h0, n, h, H, v0, K, V, KP, BV, VFIRST)
        S = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BV, KP), tl.float32)
    for seg in tl.range(0, NSEG, num_stages=2):
        e = (n.to(tl.int64) * NSEG + seg) * H + h
        tl.store(entries + (e * VP + cv[:, None]) * KP + ck[None, :], S)
        m = maps + e * ((VP + KP) * KP)
        shift = tl.load(m + cv[:, None] * KP + ck[None, :])
        mat = tl.load(m + (VP + ck[:, None]) * KP + ck[None, :])
        S = shift + tl.dot(S, mat, input_precision=PREC)


@triton.jit(do_not_specialize=["T", "NT", "H", "STEPS", "NSEG"])
def vector_scan_bwd(
    decay,
    tiles,
    mats,
    do,
    dv,
    exits,
    ys,
    dht,
    dh0,
    long,
    cu,
    offsets,
    T,
    NT,
    H,
    STEPS,
    NSEG,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    INIT: tl.constexpr,
    FINAL: tl.constexpr,
    SPLIT: tl.constexpr,
    VFIRST: tl.constexpr,
    DT: tl.constexpr,
    IO: tl.constexpr,
    PREC: tl.constexpr,
    VARLEN: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    PART: tl.constexpr,
):
    """Reverse scan of the state's gradient, one program per (V block, head, sequence).

    With ``X`` the gradient of the state after a chunk: ``dV = A^T dO + ku X``, ``y = T^T dV`` (gradient of the new
    values), ``dv = beta y`` (final) and ``X <- e^(G_L) X + qd^T dO - kd^T dv``. Writes ``dv``, ``y`` transposed to
    ys [chunk64 * H + h, VP, 64] and X after each 32 tokens to exits [chunk64 * H + h, 2, VP, KP].
    INIT: write ``dh0``; FINAL: start from ``dht``. SPLIT as in `vector_scan`, with ``dht`` for h0, ``dh0`` for the
    maps, and the segments counted from the end of the sequence.
    """
    if PART:
        if idle(long, PART):
            return
    NV: tl.constexpr = (VP + KP) // BV if SPLIT == 2 else VP // BV
    pid = tl.program_id(0)
    iv = pid % NV
    h = (pid // NV) % H
    n = pid // (NV * H)
    seg = 0
    if SPLIT:
        seg = n % NSEG
        n = n // NSEG
    bos, length, first = sequence_at(cu, offsets, n, T, NT, VARLEN)
    COLS: tl.constexpr = V != VP
    v0 = iv * BV
    ck = tl.arange(0, KP)
    steps = tl.cdiv(length, 64) * 2
    begin = 0
    end = steps
    if SPLIT:
        begin = tl.minimum((NSEG - 1 - seg) * STEPS, steps)
        end = tl.minimum(begin + STEPS, steps)
    value = 1.0
    top = tl.zeros((BV,), tl.float32)
    if SPLIT == 2:
        value = tl.where(v0 >= VP, 0.0, 1.0)
    X = first_state(dht, n, seg, h, H, NSEG, v0, K, V, KP, VP, BV, VFIRST, SPLIT, FINAL)
    if SPLIT == 2:
        v0 = v0 % VP
    for s in tl.range(0, end - begin, num_stages=STAGES):
        t = end - 1 - s
        w = (first + t // 2) * H + h
        sub = t % 2
        tr = w * 192 + sub * 32
        mr = w * 192 + sub * 32
        r0 = bos + t * 32
        if KP <= 128:
            eg = tl.load(decay + (w.to(tl.int64) * 2 + sub) * KP + ck)
        dot = load_tile(do, r0, length - t * 32, h * V + v0, V - v0, H * V, 32, BV, TMA, ROWS, COLS)
        ku = load_tile(tiles, tr + 64, 32, 0, KP, KP, 32, KP, TMA, False, False)
        am = load_tile(mats, mr + 64, 32, 0, 32, 32, 32, 32, TMA, False, False)
        tb = load_tile(mats, mr, 32, 0, 32, 32, 32, 32, TMA, False, False)
        qd = load_tile(tiles, tr + 128, 32, 0, KP, KP, 32, KP, TMA, False, False)
        kd = load_tile(tiles, tr, 32, 0, KP, KP, 32, KP, TMA, False, False)
        tm = load_tile(mats, mr + 128, 32, 0, 32, 32, 32, 32, TMA, False, False)
        Xb = X.to(DT)
        if SPLIT != 2:
            store_tile(exits, Xb, (w * 2 + sub) * VP + v0, BV, 0, KP, KP, BV, KP, TMA, False, False)
        dT = tl.trans(dot.to(DT))
        if SPLIT == 2:
            dT = tl.where(value > 0.0, dT.to(tl.float32), 0.0).to(DT)
        dn = tl.dot(Xb, tl.trans(ku), input_precision=PREC)
        dn = tl.dot(dT, am, dn, input_precision=PREC).to(DT)
        dr = tl.dot(dn, tb, input_precision=PREC)
        if PART == 1 and SPLIT != 2:
            top = watch(top, dr)
        if KP > 128:
            eg = tl.load(decay + (w.to(tl.int64) * 2 + sub) * KP + ck)
        X = X * eg[None, :]
        X = tl.dot(dT, qd, X, input_precision=PREC)
        X = tl.dot((-dr).to(DT), kd, X, input_precision=PREC)
        if SPLIT != 2:
            y = tl.dot(dn, tm, input_precision=PREC).to(DT)
            store_tile(ys, y, w * VP + v0, BV, sub * 32, 64, 64, BV, 32, TMA, False, False)
            store_tile(
                dv,
                tl.trans(dr).to(IO),
                r0,
                length - t * 32,
                h * V + v0,
                V - v0,
                H * V,
                32,
                BV,
                TMA and not (ROWS or COLS),
                ROWS,
                COLS,
            )
    last_state(dh0, X, n, seg, h, H, NSEG, iv, v0, (begin == 0), K, V, KP, VP, BV, VFIRST, SPLIT, INIT)
    if PART == 1 and SPLIT != 2:
        judge(long, top, X, 3)
