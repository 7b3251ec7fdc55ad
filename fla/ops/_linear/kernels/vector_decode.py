# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Linear attention with decays per channel, token by token, in one launch; and gated slot attention likewise.

The state stays in registers in fp32. Its tile lies as the caller's layout does, so that the state, which is nearly all
the traffic, is read and written in whole lines.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import sequence_at


@triton.jit(do_not_specialize=["T", "H"])
def vector_recurrent(
    o, q, k, v, gk, gv, u, h0, ht, cu, T, H, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BONUS: tl.constexpr, INIT: tl.constexpr,
    FINAL: tl.constexpr, REVERSE: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One program a block of V, head and sequence. KEYS, VALUES: there are gates ``gk``, ``gv``. BONUS: read the state
    before the token, and the token with weight ``u``."""
    NV: tl.constexpr = (V + BV - 1) // BV
    KA: tl.constexpr = 1 if VFIRST else 0
    VA: tl.constexpr = 1 - KA
    pid = tl.program_id(0)
    h = (pid // NV) % H
    n = pid // (NV * H)
    # No chunk table here: the offsets that come back are of the boundaries themselves and not used.
    bos, length, _ = sequence_at(cu, cu, n, T, 0, VARLEN)
    ck = tl.arange(0, BK)
    cv = (pid % NV) * BV + tl.arange(0, BV)
    mk = ck < K
    mv = cv < V
    if VFIRST:
        so = cv[:, None] * K + ck[None, :]
        S = tl.zeros((BV, BK), tl.float32)
    else:
        so = ck[:, None] * V + cv[None, :]
        S = tl.zeros((BK, BV), tl.float32)
    sm = tl.expand_dims(mv, KA) & tl.expand_dims(mk, VA)
    so += (n.to(tl.int64) * H + h) * (K * V)
    if INIT:
        S += tl.load(h0 + so, mask=sm, other=0.0).to(tl.float32)
    if BONUS:
        ut = tl.load(u + h * K + ck, mask=mk, other=0.0).to(tl.float32)
    for step in range(length):
        t = length - 1 - step if REVERSE else step
        row = (bos + t).to(tl.int64) * H + h
        kt = tl.load(k + row * K + ck, mask=mk, other=0.0).to(tl.float32)
        qt = tl.load(q + row * K + ck, mask=mk, other=0.0).to(tl.float32) * scale
        vt = tl.load(v + row * V + cv, mask=mv, other=0.0).to(tl.float32)
        if BONUS:
            ot = tl.sum(S * tl.expand_dims(qt, VA), KA) + tl.sum(qt * kt * ut, 0) * vt
        if KEYS:
            S *= tl.expand_dims(tl.exp(tl.load(gk + row * K + ck, mask=mk, other=0.0).to(tl.float32)), VA)
        if VALUES:
            S *= tl.expand_dims(tl.exp(tl.load(gv + row * V + cv, mask=mv, other=0.0).to(tl.float32)), KA)
        S += tl.expand_dims(kt, VA) * tl.expand_dims(vt, KA)
        if not BONUS:
            ot = tl.sum(S * tl.expand_dims(qt, VA), KA)
        tl.store(o + row * V + cv, ot.to(o.dtype.element_ty), mask=mv)
    if FINAL:
        tl.store(ht + so, S, mask=sm)


@triton.jit(do_not_specialize=["T", "H"])
def slot_recurrent(
    o, q, k, v, s, g, hk0, hv0, hkt, hvt, cu, T, H, scale, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, INITK: tl.constexpr, INITV: tl.constexpr,
    FINAL: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Gated slot attention: one program a head of keys and sequence; its GROUP query heads read the same slots."""
    pid = tl.program_id(0)
    h = pid % H
    n = pid // H
    bos, length, _ = sequence_at(cu, cu, n, T, 0, VARLEN)
    ck = tl.arange(0, BK)
    cv = tl.arange(0, BV)
    cm = tl.arange(0, BM)
    mk = ck < K
    mv = cv < V
    mm = cm < M
    head = n.to(tl.int64) * H + h
    ko = head * (K * M) + ck[:, None] * M + cm[None, :]
    vo = head * (M * V) + cm[:, None] * V + cv[None, :]
    km = mk[:, None] & mm[None, :]
    vm = mm[:, None] & mv[None, :]
    A = tl.zeros((BK, BM), tl.float32)
    B = tl.zeros((BM, BV), tl.float32)
    if INITK:
        A += tl.load(hk0 + ko, mask=km, other=0.0).to(tl.float32)
    if INITV:
        B += tl.load(hv0 + vo, mask=vm, other=0.0).to(tl.float32)
    for step in range(length):
        t = length - 1 - step if REVERSE else step
        row = (bos + t).to(tl.int64) * H + h
        kt = tl.load(k + row * K + ck, mask=mk, other=0.0).to(tl.float32)
        vt = tl.load(v + row * V + cv, mask=mv, other=0.0).to(tl.float32)
        st = tl.load(s + row * M + cm, mask=mm, other=0.0).to(tl.float32)
        e = tl.exp(tl.load(g + row * M + cm, mask=mm, other=0.0).to(tl.float32))
        A = A * e[None, :] + kt[:, None] * st[None, :]
        B = B * e[:, None] + st[:, None] * vt[None, :]
        for i in tl.static_range(GROUP):
            at = row * GROUP + i
            qt = tl.load(q + at * K + ck, mask=mk, other=0.0).to(tl.float32) * scale
            y = tl.where(mm, tl.sum(A * qt[:, None], 0), float("-inf"))
            p = tl.exp(y - tl.max(y, 0))
            p = p / tl.sum(p, 0)
            tl.store(o + at * V + cv, tl.sum(B * p[:, None], 0).to(o.dtype.element_ty), mask=mv)
    if FINAL:
        tl.store(hkt + ko, A, mask=km)
        tl.store(hvt + vo, B, mask=vm)
