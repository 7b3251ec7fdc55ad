# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Linear attention token by token: decay, state update and output of a token in one launch.

One program a block of V, head and sequence; the state stays in registers in fp32. Its tile lies as the caller's layout
does, [K, BV] or [BV, K], so that the state, which is nearly all the traffic, is read and written in whole lines.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import saturate, sequence_at


@triton.jit(do_not_specialize=["T", "H", "has_h0", "has_ht", "has_z"])
def scalar_recurrent(
    q, k, v, g, gamma, h0, ht, o, cu, T, H, has_h0, has_ht, scale, z, zt, has_z, eps, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr,
    REVERSE: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """DECAY as in `scalar_scan`. NORM: divide by the normaliser. REVERSE: from the last token to the first."""
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
    else:
        so = ck[:, None] * V + cv[None, :]
    sm = tl.expand_dims(mv, KA) & tl.expand_dims(mk, VA)
    so += (n.to(tl.int64) * H + h) * (K * V)
    S = tl.load(h0 + so, mask=sm & (has_h0 != 0), other=0.0).to(tl.float32)
    if DECAY == 2:
        fixed = tl.exp(tl.load(gamma + h).to(tl.float32))
    if NORM:
        zo = (n.to(tl.int64) * H + h) * K + ck
        zz = tl.load(z + zo, mask=mk & (has_z != 0), other=0.0).to(tl.float32)
    for step in range(length):
        t = length - 1 - step if REVERSE else step
        row = (bos + t).to(tl.int64) * H + h
        kt = tl.load(k + row * K + ck, mask=mk, other=0.0).to(tl.float32)
        qt = tl.load(q + row * K + ck, mask=mk, other=0.0).to(tl.float32) * scale
        vt = tl.load(v + row * V + cv, mask=mv, other=0.0).to(tl.float32)
        if DECAY == 1:
            S *= tl.exp(tl.load(g + row).to(tl.float32))
        if DECAY == 2:
            S *= fixed
        S += tl.expand_dims(kt, VA) * tl.expand_dims(vt, KA)
        ot = tl.sum(S * tl.expand_dims(qt, VA), KA)
        if NORM:
            zz += kt
            ot = ot / (tl.sum(zz * qt, 0) + eps)
        tl.store(o + row * V + cv, saturate(ot, o.dtype.element_ty), mask=mv)
    if NORM:
        tl.store(zt + zo, zz, mask=mk & (pid % NV == 0))
    tl.store(ht + so, S, mask=sm & (has_ht != 0))
