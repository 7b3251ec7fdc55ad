# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102, SIM114  (a compile-time and a run-time condition are two statements)
"""State passes of the scalar-decay delta rule, forward and reverse.

One program a block of V, value head and sequence. The state is held transposed, [BV, BK] in fp32, so that it and all
that follows from it are left operands in registers. Forward, for each chunk:

    u^T = (v^T - ck (S k^T)) T^T;   o^T = cq (S q^T) + u^T A^T;   S <- e^(G_L) S + (cu u^T) k

With READ the k of the first product is the read key p. A step takes CS tokens: a chunk or, where its tiles would leave
no room for others on their way, a part of it, for the diagonal blocks of T and A are those of the parts.

Full chunks run in a pipelined loop over descriptor tiles; a ragged last chunk is one more step through pointers.
Without descriptors the loop takes all chunks through pointers. TAIL: there may be ragged last chunks; a kernel without
them has a third fewer instructions and registers to spare.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import saturate, sequence_at
from fla.ops._delta.kernels.common import (
    idle,
    judge,
    load_rows,
    load_tile,
    state_offsets,
    store_rows,
    store_tile,
    watch,
)
from fla.ops._delta.kernels.scalar_prep import SC, SC_BETA, SC_CK, SC_CQ, SC_CU, SC_G, SC_RK, SC_RP, SC_RQ


@triton.jit
def _factors(sc, tile, sub, C: tl.constexpr, CS: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr):
    """What multiplies q S, k S and the state update of the tokens of a step, and the decay of the state over it."""
    sp = sc + tile.to(tl.int64) * (SC * C) + sub * CS
    rr = tl.arange(0, CS)
    if CS == C:
        cq = tl.load(sp + SC_CQ * C + rr)
        ck = tl.load(sp + SC_CK * C + rr)
        cu = tl.load(sp + SC_CU * C + rr)
        eg = tl.exp2(tl.load(sp + (SC_G * C + C - 1)))
    else:
        # A part of a chunk counts decays from its own begin and to its own end.
        G = tl.load(sp + SC_G * C + rr)
        start = tl.load(sp + (SC_G * C - 1), mask=sub > 0, other=0.0)
        end = tl.load(sp + (SC_G * C + CS - 1))
        rk = tl.load(sp + SC_RK * C + rr)
        cq = tl.load(sp + SC_RQ * C + rr) * tl.exp2(G - start)
        rp = rk
        if READ:
            rp = tl.load(sp + SC_RP * C + rr)
        if BEFORE:
            ck = rp * tl.exp2(tl.load(sp + SC_G * C - 1 + rr, mask=(rr > 0) | (sub > 0), other=0.0) - start)
        else:
            ck = rp * tl.exp2(G - start)
        cu = rk * tl.load(sp + SC_BETA * C + rr) * tl.exp2(end - G)
        eg = tl.exp2(end - start)
    return cq, ck, cu, eg


@triton.jit
def _row(sc, tile, i: tl.constexpr, C: tl.constexpr):
    """Pointers to the row ``i`` of the scalars of a chunk."""
    return sc + tile.to(tl.int64) * (SC * C) + i * C + tl.arange(0, C)


@triton.jit
def _forward_step(
    S, top, ahead, fac, q, k, p, v, qd, kd, pd, vd, Tm, Td, Aqk, Ad, sc, o, od, St, Sd, Ut, Ud, tile, sub, row, n, h,
    hk, v0, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CS: tl.constexpr,
    OUT: tl.constexpr, SAVE: tl.constexpr, SPLIT: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr,
    AHEAD: tl.constexpr, DESC: tl.constexpr, DOT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    dt: tl.constexpr = Tm.dtype.element_ty
    cq, ck, cu, eg = _factors(sc, tile, sub, C, CS, READ, BEFORE)
    if AHEAD:
        cu = ahead
    kt = load_rows(k, kd, row, n, hk, H, 0, K, BK, CS, DESC).to(dt)
    rt = kt
    if READ:
        rt = load_rows(p, pd, row, n, hk, H, 0, K, BK, CS, DESC).to(dt)
    vt = load_rows(v, vd, row, n, h, HV, v0, V, BV, CS, DESC).to(dt)
    tt = load_tile(Tm, Td, tile, sub * CS, sub * CS, C, C, CS, CS, DESC)
    if OUT:
        qt = load_rows(q, qd, row, n, hk, H, 0, K, BK, CS, DESC).to(dt)
        at = load_tile(Aqk, Ad, tile, sub * CS, sub * CS, C, C, CS, CS, DESC)
    Sb = S.to(dt)
    if SAVE:
        if CS == C:
            store_tile(St, Sd, Sb, tile, v0, 0, V, K, BV, BK, DESC)
        elif sub == 0:
            store_tile(St, Sd, Sb, tile, v0, 0, V, K, BV, BK, DESC)
    ks = tl.dot(Sb, tl.trans(rt), input_precision=DOT)
    if READ or (SAVE and not OUT):
        # v goes through registers: one product less, and one copy less of v on its way.
        r = tl.trans(vt).to(tl.float32)
        if SPLIT == 2:
            r = r * fac
        u = tl.dot((r - ks * ck[None, :]).to(dt), tl.trans(tt), input_precision=DOT)
    else:
        # v stays in shared memory and off the chain of dependent products: one product more, but fewer registers.
        u = tl.dot(tl.trans(vt), tl.trans(tt), input_precision=DOT)
        if SPLIT == 2:
            u = u * fac
        u = tl.dot((ks * (-ck)[None, :]).to(dt), tl.trans(tt), u, input_precision=DOT)
    if SAVE:
        store_tile(Ut, Ud, u.to(dt), tile, v0, sub * CS, V, C, BV, CS, DESC)
    if OUT:
        oo = tl.dot(Sb, tl.trans(qt), input_precision=DOT) * cq[None, :]
        oo = tl.dot(u.to(dt), tl.trans(at), oo, input_precision=DOT)
        if PART == 1:
            top = watch(top, oo)
    S = S * eg
    S = tl.dot((u * cu[None, :]).to(dt), kt, S, input_precision=DOT)
    if OUT:
        store_rows(o, od, saturate(tl.trans(oo), o.dtype.element_ty), row, n, h, HV, v0, V, BV, CS, DESC)
    return S, top


@triton.jit(do_not_specialize=["T", "NT", "H", "HV", "has_h0", "has_ht", "segments", "parts"])
def scalar_scan(
    q, k, p, v, qd, kd, pd, vd, Tm, Td, Aqk, Ad, sc, o, od, St, Sd, Ut, Ud, h0, ht, entry, long, cu, offsets, T, NT,
    H, HV, has_h0, has_ht, segments, parts,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CS: tl.constexpr,
    OUT: tl.constexpr, SAVE: tl.constexpr, SPLIT: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr,
    VFIRST: tl.constexpr, VARLEN: tl.constexpr, TAIL: tl.constexpr,
    DESC: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """OUT: write o. SAVE: write each chunk's entry state ``S^T`` [V, K] and ``u^T`` [V, C] for the backward.

    SPLIT: 0 a sequence a program; 1 one of ``segments`` stretches of it, from the state in ``entry``; 2 summarise a
    stretch as the map S^T -> E + S^T M: ``entry`` takes E [V, K] (from h0 in the first stretch), then M [K, K]. There
    are ``parts`` stretches in the grid.
    """
    if PART:
        if idle(long, PART):
            return
    NV: tl.constexpr = (V + BV - 1) // BV
    NB: tl.constexpr = NV + ((K + BV - 1) // BV if SPLIT == 2 else 0)
    pid = tl.program_id(0)
    block = pid % NB
    h = (pid // NB) % HV
    seg = (pid // (NB * HV)) % parts
    i = pid // (NB * HV * parts)
    hk = h // (HV // H)
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    v0 = block * BV
    fac = 1.0
    top = tl.zeros((BV,), tl.float32)
    slot = ((i.to(tl.int64) * segments + seg) * HV + h) * (NB * BV if SPLIT == 2 else NV * BV) * BK
    eo = (v0 + tl.arange(0, BV))[:, None] * BK + tl.arange(0, BK)[None, :]
    state = (i.to(tl.int64) * HV + h) * (K * V)
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    begin = (seg == 0) & (has_h0 != 0)
    S = tl.load(h0 + state + so, mask=sm & begin, other=0.0).to(tl.float32)
    if SPLIT == 1:
        S += tl.load(entry + slot + eo, mask=(seg > 0) & (eo >= 0), other=0.0)
    if SPLIT == 2:
        if block >= NV:
            fac = 0.0
            v0 = (block - NV) * BV
            S = tl.where((v0 + tl.arange(0, BV))[:, None] == tl.arange(0, BK)[None, :], 1.0, 0.0)
            v0 = 0
    full = length // C
    chunks = (length + C - 1) // C
    if SPLIT:
        per = (chunks + segments - 1) // segments
        lo = tl.minimum(seg * per, chunks)
        hi = tl.minimum(lo + per, chunks)
    else:
        lo = 0
        hi = chunks
    loop = tl.minimum(hi, full) if DESC else hi
    R: tl.constexpr = C // CS
    # What comes a step ahead by hand takes registers, not shared memory: without this row there, two programs of a
    # narrow block of V fit a multiprocessor.
    AHEAD: tl.constexpr = SAVE and not OUT and CS == C and DESC
    ahead = 0.0
    if AHEAD:
        ahead = tl.load(_row(sc, (first + lo) * HV + h, SC_CU, C), mask=(tl.arange(0, C) >= 0) & (lo < loop), other=0.0)
    for t in tl.range(lo * R, loop * R, num_stages=STAGES):
        tile = (first + t // R) * HV + h
        after = 0.0
        if AHEAD:
            after = tl.load(_row(sc, (first + tl.minimum(t + 1, loop - 1)) * HV + h, SC_CU, C))
        S, top = _forward_step(
            S, top, ahead, fac, q, k, p, v, qd, kd, pd, vd, Tm, Td, Aqk, Ad, sc, o, od, St, Sd, Ut, Ud, tile, t % R,
            bos + t * CS, length - t * CS, h, hk, v0, H, HV, K, V, BK, BV, C, CS, OUT, SAVE, SPLIT, READ, BEFORE, AHEAD,
            DESC, DOT, PART,
        )  # fmt: skip
        ahead = after
    if DESC and TAIL:
        if (hi > full) & (lo < hi):
            tile = (first + full) * HV + h
            for sub in tl.range(0, R, num_stages=1):
                S, top = _forward_step(
                    S, top, ahead, fac, q, k, p, v, qd, kd, pd, vd, Tm, Td, Aqk, Ad, sc, o, od, St, Sd, Ut, Ud, tile,
                    sub, bos + full * C + sub * CS, length - full * C - sub * CS, h, hk, v0, H, HV, K, V, BK, BV, C, CS,
                    OUT, SAVE, SPLIT, READ, BEFORE, False, False, DOT, PART,
                )  # fmt: skip
    if SPLIT == 2:
        eo = (block * BV + tl.arange(0, BV))[:, None] * BK + tl.arange(0, BK)[None, :]
        tl.store(entry + slot + eo, S)
    else:
        so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
        tl.store(ht + state + so, S, mask=sm & (has_ht != 0) & (seg == parts - 1))
        if PART == 1 and OUT:
            judge(long, top, S, 1)


@triton.jit(do_not_specialize=["segments", "HV"])
def scalar_merge(
    summary, entry, segments, HV, RV: tl.constexpr, RK: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Entry states of all stretches but the first from their summaries. RV, RK: padded rows of E and M."""
    pid = tl.program_id(0)
    NM: tl.constexpr = RV // BM
    r = (pid % NM) * BM + tl.arange(0, BM)
    h = (pid // NM) % HV
    i = (pid // (NM * HV)).to(tl.int64)
    c = tl.arange(0, BK)
    rk = tl.arange(0, BK)
    S = tl.load(summary + (i * segments * HV + h) * ((RV + RK) * BK) + r[:, None] * BK + c[None, :])
    for p in tl.range(1, segments, num_stages=1):
        at = (i * segments + p) * HV + h
        tl.store(entry + at * (RV * BK) + r[:, None] * BK + c[None, :], S)
        if p < segments - 1:
            base = summary + at * ((RV + RK) * BK)
            E = tl.load(base + r[:, None] * BK + c[None, :])
            M = tl.load(base + (RV + rk)[:, None] * BK + c[None, :], mask=(rk < RK)[:, None], other=0.0)
            S = E + tl.dot(S, M, input_precision=DOT)


@triton.jit
def _reverse_step(
    S, top, fac, q, k, p, do, qd, kd, pd, dod, Tm, Td, Aqk, Ad, sc, dv, dvd, Xt, Xd, tile, sub, row, n, h, hk, v0, H,
    HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CS: tl.constexpr,
    SPLIT: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr, DESC: tl.constexpr,
    DOT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    dt: tl.constexpr = Tm.dtype.element_ty
    cq, ck, cu, eg = _factors(sc, tile, sub, C, CS, READ, BEFORE)
    dot = load_rows(do, dod, row, n, h, HV, v0, V, BV, CS, DESC).to(dt)
    at = load_tile(Aqk, Ad, tile, sub * CS, sub * CS, C, C, CS, CS, DESC)
    tt = load_tile(Tm, Td, tile, sub * CS, sub * CS, C, C, CS, CS, DESC)
    kt = load_rows(k, kd, row, n, hk, H, 0, K, BK, CS, DESC).to(dt)
    qt = load_rows(q, qd, row, n, hk, H, 0, K, BK, CS, DESC).to(dt)
    rt = kt
    if READ:
        rt = load_rows(p, pd, row, n, hk, H, 0, K, BK, CS, DESC).to(dt)
    Sb = S.to(dt)
    if SPLIT != 2:
        if CS == C:
            store_tile(Xt, Xd, Sb, tile, v0, 0, V, K, BV, BK, DESC)
        elif sub == C // CS - 1:
            store_tile(Xt, Xd, Sb, tile, v0, 0, V, K, BV, BK, DESC)
    ks = tl.dot(Sb, tl.trans(kt), input_precision=DOT)
    dT = tl.trans(dot)
    if SPLIT == 2:
        dT = (dT.to(tl.float32) * fac).to(dt)
    du = tl.dot(dT, at, input_precision=DOT)
    dr = tl.dot((du + ks * cu[None, :]).to(dt), tt, input_precision=DOT)
    dq = (dT.to(tl.float32) * cq[None, :]).to(dt)
    if PART == 1 and SPLIT != 2:
        top = watch(top, dr)
    S = S * eg
    S = tl.dot(dq, qt, S, input_precision=DOT)
    S = tl.dot((dr * (-ck)[None, :]).to(dt), rt, S, input_precision=DOT)
    if SPLIT != 2:
        store_rows(dv, dvd, tl.trans(dr).to(dt), row, n, h, HV, v0, V, BV, CS, DESC)
        if PART == 2:
            # ``dv`` keeps the range of fp32 for the gradients of the chunk; this is what the caller gets.
            store_rows(dvd, dvd, tl.trans(dr).to(dvd.dtype.element_ty), row, n, h, HV, v0, V, BV, CS, DESC)
    return S, top


@triton.jit(do_not_specialize=["T", "NT", "H", "HV", "has_dht", "has_dh0", "segments", "parts"])
def scalar_reverse(
    q, k, p, do, qd, kd, pd, dod, Tm, Td, Aqk, Ad, sc, dv, dvd, Xt, Xd, dht, dh0, entry, long, cu, offsets, T, NT,
    H, HV, has_dht, has_dh0, segments, parts,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CS: tl.constexpr,
    SPLIT: tl.constexpr, READ: tl.constexpr, BEFORE: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr,
    TAIL: tl.constexpr, DESC: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Reverse pass over the gradient X of the state after each chunk; writes X^T [V, K] of each chunk and all of dv:

        dv = T^T (A^T do + cu (k X));   X <- e^(G_L) X + q^T (cq do) - k^T (ck dv)

    With READ the last k is the read key p. SPLIT, ``entry``, ``segments`` and ``parts`` as in `scalar_scan`, with dht
    for h0 and the stretches counted from the end of the sequence.
    """  # fmt: skip
    if PART:
        if idle(long, PART):
            return
    NV: tl.constexpr = (V + BV - 1) // BV
    NB: tl.constexpr = NV + ((K + BV - 1) // BV if SPLIT == 2 else 0)
    pid = tl.program_id(0)
    block = pid % NB
    h = (pid // NB) % HV
    if SPLIT:
        seg = (pid // (NB * HV)) % parts
        i = pid // (NB * HV * parts)
    else:
        seg = 0
        i = pid // (NB * HV)
    v0 = block * BV
    hk = h // (HV // H)
    bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    state = (i.to(tl.int64) * HV + h) * (K * V)
    so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
    S = tl.load(dht + state + so, mask=sm & (has_dht != 0) & (seg == 0), other=0.0).to(tl.float32)
    fac = 1.0
    top = tl.zeros((BV,), tl.float32)
    R: tl.constexpr = C // CS
    full = length // C
    chunks = (length + C - 1) // C
    lo = 0
    hi = chunks
    if SPLIT:
        slot = ((i.to(tl.int64) * segments + seg) * HV + h) * (NB * BV) * BK
        eo = (v0 + tl.arange(0, BV))[:, None] * BK + tl.arange(0, BK)[None, :]
        per = (chunks + segments - 1) // segments
        lo = tl.minimum((segments - 1 - seg) * per, chunks)
        hi = tl.minimum(lo + per, chunks)
    if SPLIT == 1:
        S += tl.load(entry + slot + eo, mask=(seg > 0) & (eo >= 0), other=0.0)
    if SPLIT == 2:
        if block >= NV:
            fac = 0.0
            S = tl.where((v0 - NV * BV + tl.arange(0, BV))[:, None] == tl.arange(0, BK)[None, :], 1.0, 0.0)
            v0 = 0
    loop = tl.minimum(hi, full) if DESC else hi
    if DESC and TAIL:
        if (hi > full) & (lo < hi):
            tile = (first + full) * HV + h
            for j in tl.range(0, R, num_stages=1):
                sub = R - 1 - j
                S, top = _reverse_step(
                    S, top, fac, q, k, p, do, qd, kd, pd, dod, Tm, Td, Aqk, Ad, sc, dv, dvd, Xt, Xd, tile, sub,
                    bos + full * C + sub * CS, length - full * C - sub * CS, h, hk, v0, H, HV, K, V, BK, BV, C, CS,
                    SPLIT, READ, BEFORE, False, DOT, PART,
                )  # fmt: skip
    for j in tl.range(lo * R, loop * R, num_stages=STAGES):
        t = (lo + loop) * R - 1 - j
        tile = (first + t // R) * HV + h
        S, top = _reverse_step(
            S, top, fac, q, k, p, do, qd, kd, pd, dod, Tm, Td, Aqk, Ad, sc, dv, dvd, Xt, Xd, tile, t % R, bos + t * CS,
            length - t * CS, h, hk, v0, H, HV, K, V, BK, BV, C, CS, SPLIT, READ, BEFORE, DESC, DOT, PART,
        )  # fmt: skip
    if SPLIT == 2:
        tl.store(entry + slot + eo, S)
    else:
        so, sm = state_offsets(v0, K, V, BK, BV, VFIRST)
        tl.store(dh0 + state + so, S, mask=sm & (has_dh0 != 0) & (seg == parts - 1))
        if PART == 1:
            judge(long, top, S, 3)
