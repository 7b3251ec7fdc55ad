# SPDX-License-Identifier: MIT
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""The delta rule token by token: norms, gates, state update and output of a token in one launch.

One program a block of V, value head and sequence; the state stays in registers in fp32. Its tile lies as the caller's
layout does, [K, BV] or [BV, K], so that the state, which is nearly all the traffic, is read and written in whole lines.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import NORM_EPS, saturate, softplus

# Gate kinds, for the scalar and the vector decay: absent, the log decay itself, softplus gate, gate with a lower bound.
NO_GATE = 0
LOG_DECAY = 1
SOFTPLUS = 2
BOUNDED = 3
# Where states go: nowhere, one final state a sequence, slots of the pool, one state a token.
KEEP_NONE = 0
KEEP_FINAL = 1
KEEP_SLOTS = 2
KEEP_TOKENS = 3


@triton.jit
def _gate(x, a, lower, KIND: tl.constexpr):
    """Log decay of the gate's input ``x`` (bias added) for the rate ``a = e^A_log``."""
    if KIND == 2:
        return -a * softplus(x)
    elif KIND == 3:
        return lower * tl.sigmoid(a * x)
    else:
        return x


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["T", "H", "HV", "columns", "slots", "slot_stride", "ht_stride", "index_stride"])
def delta_recurrent(
    q, k, p, v, g, gk, gv, beta, b, w, A_log, dt_bias, h0, ht, o, cu, index, accepted, T, H, HV, scale, beta_scale,
    lower, columns,
    slots, slot_stride, ht_stride, index_stride,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    VGATE: tl.constexpr, HAS_GV: tl.constexpr, BETA: tl.constexpr, SIGMOID: tl.constexpr, HAS_A: tl.constexpr,
    BIAS: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr, HAS_H0: tl.constexpr, POOL: tl.constexpr,
    ACCEPTED: tl.constexpr, KEEP: tl.constexpr, UNIT: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, HAS_P: tl.constexpr, BEFORE: tl.constexpr, HAS_B: tl.constexpr,
    HAS_W: tl.constexpr,
):  # fmt: skip
    """BETA: 0 ones, 1 a number per head, 2 one per value channel. POOL: 0 states in sequence order, 1 a slot a
    sequence,
    2 ``columns`` slots a sequence, one a token; with ACCEPTED it starts from slot ``accepted - 1``, else from slot 0.
    READ, WRITE: eviction policies of the states. HAS_P: ``p`` is the read key; BEFORE: the state is read before its
    decay; HAS_B: ``b`` multiplies the read key; HAS_W: ``w`` multiplies v.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    KA: tl.constexpr = 1 if VFIRST else 0
    VA: tl.constexpr = 1 - KA
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    h = (pid // NV) % HV
    n = pid // (NV * HV)
    hk = h // (HV // H)
    if VARLEN:
        bos = tl.load(cu + n).to(tl.int64)
        length = tl.load(cu + n + 1).to(tl.int64) - bos
        # An offset past the end must not read or write outside.
        length = tl.minimum(length, T - bos)
    else:
        bos = n.to(tl.int64) * T
        length = bos * 0 + T
    ck = tl.arange(0, BK)
    cv = v0 + tl.arange(0, BV)
    mk = ck < K
    mv = cv < V
    if VFIRST:
        so = cv[:, None] * K + ck[None, :]
    else:
        so = ck[:, None] * V + cv[None, :]
    sm = tl.expand_dims(mv, KA) & tl.expand_dims(mk, VA)
    # Strides come in units: they are not specialised on, and a state of unknown alignment moves four bytes at a time.
    slot_stride = slot_stride.to(tl.int64) * UNIT
    ht_stride = ht_stride.to(tl.int64) * UNIT
    start = n.to(tl.int64)
    if POOL:
        column = start * 0
        if POOL == 2:
            if ACCEPTED:
                column = tl.load(accepted + n).to(tl.int64) - 1
                if (column < 0) | (column >= columns):
                    return
        start = tl.load(index + n.to(tl.int64) * index_stride + column).to(tl.int64)
        if (start < 0) | (start >= slots):
            return
    if HAS_H0:
        S = tl.load(
            h0 + start * slot_stride + h.to(tl.int64) * (K * V) + so, mask=sm, other=0.0, eviction_policy=READ
        ).to(tl.float32)
    else:
        S = tl.zeros((BV, BK) if VFIRST else (BK, BV), tl.float32)
    if HAS_A:
        a = tl.exp(tl.load(A_log + h).to(tl.float32))
    else:
        a = 1.0
    for t in range(length):
        rk = ((bos + t) * H + hk) * K
        rv = (bos + t) * HV + h
        # All loads of a token come first: behind a sum over K each would wait for memory once more.
        kt = tl.load(k + rk + ck, mask=mk, other=0.0).to(tl.float32)
        qt = tl.load(q + rk + ck, mask=mk, other=0.0).to(tl.float32)
        if VGATE > 0:
            x = tl.load(gk + rv * K + ck, mask=mk, other=0.0).to(tl.float32)
            if BIAS and VGATE > 1:
                x += tl.load(dt_bias + h * K + ck, mask=mk, other=0.0).to(tl.float32)
        vt = tl.load(v + rv * V + cv, mask=mv, other=0.0).to(tl.float32)
        if HAS_P:
            pt = tl.load(p + rk + ck, mask=mk, other=0.0).to(tl.float32)
        if HAS_B:
            et = tl.load(b + rv * K + ck, mask=mk, other=0.0).to(tl.float32)
        if HAS_W:
            vt *= tl.load(w + rv * V + cv, mask=mv, other=0.0).to(tl.float32)
        if GATE > 0:
            y = tl.load(g + rv).to(tl.float32)
            if BIAS and GATE > 1:
                y += tl.load(dt_bias + h).to(tl.float32)
        if HAS_GV:
            z = tl.load(gv + rv * V + cv, mask=mv, other=0.0).to(tl.float32)
        if BETA == 1:
            bt = tl.load(beta + rv).to(tl.float32)
        if BETA == 2:
            bt = tl.load(beta + rv * V + cv, mask=mv, other=0.0).to(tl.float32)
        # Norms are numbers: they multiply results, so that no sum waits for another.
        nk = 1.0
        nq = scale
        if NORM:
            nk = tl.rsqrt(tl.sum(kt * kt, 0) + NORM_EPS)
            nq = tl.rsqrt(tl.sum(qt * qt, 0) + NORM_EPS) * scale
        rt = kt
        nr = nk
        if HAS_P:
            rt = pt
            nr = tl.rsqrt(tl.sum(pt * pt, 0) + NORM_EPS) if NORM else 1.0
        if HAS_B:
            rt *= et
        if BEFORE:
            u = tl.sum(S * tl.expand_dims(rt, VA), KA)
        if VGATE > 0:
            S *= tl.expand_dims(tl.exp(_gate(x, a, lower, VGATE)), VA)
        if GATE > 0:
            S *= tl.exp(_gate(y, a, lower, GATE))
        if HAS_GV:
            S *= tl.expand_dims(tl.exp(z), KA)
        # (S + k u^T)^T q = S^T q + (k . q) u: both sums over the state are of the same state.
        if BEFORE:
            ot = tl.sum(S * tl.expand_dims(qt, VA), KA)
        else:
            u, ot = tl.reduce((S * tl.expand_dims(rt, VA), S * tl.expand_dims(qt, VA)), KA, _add_both)
        u = vt - u * nr
        if BETA > 0:
            if SIGMOID:
                bt = tl.sigmoid(bt) * beta_scale
            u *= bt
        u *= nk
        ot = (ot + tl.sum(kt * qt, 0) * u) * nq
        S += tl.expand_dims(kt, VA) * tl.expand_dims(u, KA)
        tl.store(o + rv * V + cv, saturate(ot, o.dtype.element_ty), mask=mv)
        if KEEP == 3:
            tl.store(ht + rv * (K * V) + so, S.to(ht.dtype.element_ty), mask=sm)
        if KEEP == 2 and POOL == 2:
            if t < columns:
                slot = tl.load(index + n.to(tl.int64) * index_stride + t).to(tl.int64)
                if (slot >= 0) & (slot < slots):
                    tl.store(ht + slot * ht_stride + h.to(tl.int64) * (K * V) + so, S.to(ht.dtype.element_ty), mask=sm)
    if KEEP == 1 or (KEEP == 2 and POOL == 1):
        if KEEP == 1 or length > 0:
            at = ht + start * ht_stride + h.to(tl.int64) * (K * V) + so
            tl.store(at, S.to(ht.dtype.element_ty), mask=sm, eviction_policy=WRITE)
