# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""What is local to a chunk in the outputs of linear attention and in the gradient of v, from states or theirs.

After `scalar_states`, a program a chunk, head and block of V, with b, L and D as in `scalar_scan`:

    o = scale e^b (q S) + (q k^T * D) v;     REVERSE: dv = e^(b_L - b) (k X) + (k q^T * D^T) do, which is the same with
    q and k, v and do, states and their gradients exchanged
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at, saturate
from fla.ops._common.tiles import load_rows, load_tile, store_rows
from fla.ops._linear.kernels.half import fit_rows, kept_factors
from fla.ops._linear.kernels.scalar_scan import chunk_decays, decayed_scores, row_factors


@triton.jit(do_not_specialize=["T", "NT", "H"])
def scalar_out(
    q, k, v, St, Sf, sums, gamma, inverse, o, table, T, NT, H, scale, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, REVERSE: tl.constexpr,
    VARLEN: tl.constexpr, FULL: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    dt: tl.constexpr = q.dtype.element_ty
    pid = tl.program_id(0)
    v0 = (pid % NV) * BV
    h = (pid // NV) % H
    it = pid // (NV * H)
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    if n <= 0:
        return
    # Whole chunks need no masks.
    F: tl.constexpr = 2 if FULL else 0
    tile = it * H + h
    a = tl.zeros((C, C), tl.float32)
    oo = tl.zeros((C, BV), tl.float32)
    for j in tl.range(0, NK, num_stages=STAGES):
        qt = load_rows(q, q, row, n, h, H, j * BK, K, BK, C, F)
        kt = load_rows(k, k, row, n, h, H, j * BK, K, BK, C, F)
        S = load_tile(St, St, tile, v0, j * BK, V, K, BV, BK, F)
        a = tl.dot(qt, tl.trans(kt), a, input_precision=DOT)
        if tl.float16 == dt:
            f = kept_factors(Sf, tile, v0, j * BK, K, V, BK, BV)
            oo += tl.dot(qt, tl.trans(S), input_precision=DOT) * f[None, :]
        else:
            oo = tl.dot(qt, tl.trans(S), oo, input_precision=DOT)
    b, last = chunk_decays(sums, gamma, tile, n, h, C, DECAY)
    if REVERSE:
        if DECAY:
            oo = oo * tl.exp2(last - b)[:, None]
        a = decayed_scores(a, b, scale, C, DECAY, 0)
    else:
        if DECAY:
            oo = oo * (tl.exp2(b) * scale)[:, None]
        else:
            oo = oo * scale
        a = decayed_scores(a, b, scale, C, DECAY, 1)
    a, fa, ia = fit_rows(a, dt)
    if tl.float16 == dt:
        oo = oo * ia[:, None]
    vt = load_rows(v, v, row, n, h, H, v0, V, BV, C, F)
    oo = tl.dot(a, vt, oo, input_precision=DOT)
    if tl.float16 == dt:
        oo = oo * fa[:, None]
    if NORM:
        oo = oo * row_factors(inverse, row, n, h, H, C)[:, None]
    # A gradient that float16 cannot hold shows as infinity: whoever scales losses looks for it.
    store_rows(o, o, oo.to(dt) if REVERSE else saturate(oo, dt), row, n, h, H, v0, V, BV, C, 0)
