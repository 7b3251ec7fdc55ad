# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Outputs of linear attention with one decay per head and token from the states before the chunks.

For K of more than one block, whose state a scan cannot hold: `scalar_states` first, then this, a program a chunk, head
and block of V, with b and D as in `scalar_scan`:

    o = scale (q S) e^b + (q k^T * D) v
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at
from fla.ops._common.tiles import load_rows, load_tile, narrow, store_rows
from fla.ops._linear.kernels.scalar_scan import chunk_decays, decayed_scores, row_factors


@triton.jit(do_not_specialize=["T", "NT", "H"])
def scalar_out(
    q, k, v, St, sums, gamma, inverse, o, table, T, NT, H, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
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
    tile = it * H + h
    a = tl.zeros((C, C), tl.float32)
    oo = tl.zeros((C, BV), tl.float32)
    for j in tl.range(0, NK, num_stages=STAGES):
        qt = load_rows(q, q, row, n, h, H, j * BK, K, BK, C, 0)
        kt = load_rows(k, k, row, n, h, H, j * BK, K, BK, C, 0)
        S = load_tile(St, St, tile, v0, j * BK, V, K, BV, BK, 0)
        a = tl.dot(qt, tl.trans(kt), a, input_precision=DOT)
        oo = tl.dot(qt, tl.trans(S), oo, input_precision=DOT)
    b, _last = chunk_decays(sums, gamma, tile, n, h, C, DECAY)
    if DECAY:
        oo = oo * (tl.exp2(b) * scale)[:, None]
    else:
        oo = oo * scale
    a = decayed_scores(a, b, scale, C, DECAY, 1).to(dt)
    vt = load_rows(v, v, row, n, h, H, v0, V, BV, C, 0)
    oo = tl.dot(a, vt, oo, input_precision=DOT)
    if NORM:
        oo = oo * row_factors(inverse, row, n, h, H, C)[:, None]
    store_rows(o, o, narrow(oo, dt), row, n, h, H, v0, V, BV, C, 0)
