# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""The normaliser of linear attention: running sums of keys, denominators, and what the backward needs of them.

With z_t the sum of keys up to token t, o_t = r_t / (scale q_t . z_t + eps), where r is the output without normaliser.
Everything about z is fp32, whatever the dtype of the keys.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at, sequence_at
from fla.ops._common.tiles import load_rows, store_rows


@triton.jit(do_not_specialize=["T", "NT", "H"])
def key_sums(
    x, weight, out, table, T, NT, H, scale, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, WEIGHT: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Sum of the rows of each chunk and head, `[B, T, H, K]` to `[chunks * H, K]` in fp32, with WEIGHT of rows times
    ``scale`` and their numbers in ``weight`` `[B, T, H]`."""
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    k0 = (pid % NK) * BK
    h = (pid // NK) % H
    it = pid // (NK * H)
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    t = load_rows(x, x, row, n, h, H, k0, K, BK, C, 0).to(tl.float32)
    if WEIGHT:
        rr = tl.arange(0, C)
        w = tl.load(weight + (row + rr).to(tl.int64) * H + h, mask=rr < n, other=0.0)
        t = t * (w * scale)[:, None]
    c = k0 + tl.arange(0, BK)
    tl.store(out + (it.to(tl.int64) * H + h) * K + c, tl.sum(t, 0), mask=c < K)


@triton.jit(do_not_specialize=["T", "NT", "H", "has_start"])
def running_sums(
    sums, start, end, cu, offsets, T, NT, H, has_start, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Turn sums of chunks, in place, into what comes before each chunk (REVERSE: after it); all of it to ``end``.

    ``start`` and ``end`` are `[N, H, K]`. One program a sequence, head and block of K.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    h = (pid // NK) % H
    i = pid // (NK * H)
    _bos, length, first = sequence_at(cu, offsets, i, T, NT, VARLEN)
    chunks = (length + C - 1) // C
    c = (pid % NK) * BK + tl.arange(0, BK)
    state = (i.to(tl.int64) * H + h) * K + c
    total = tl.load(start + state, mask=(c < K) & (has_start != 0), other=0.0).to(tl.float32)
    rt = tl.arange(0, BT)
    for t0 in tl.range(0, chunks, BT, num_stages=1):
        t = chunks - 1 - t0 - rt if REVERSE else t0 + rt
        at = sums + ((first + t).to(tl.int64) * H + h)[:, None] * K + c[None, :]
        m = ((t >= 0) & (t < chunks))[:, None] & (c < K)[None, :]
        x = tl.load(at, mask=m, other=0.0)
        tl.store(at, total[None, :] + tl.cumsum(x, 0) - x, mask=m)
        total += tl.sum(x, 0)
    tl.store(end + state, total.to(end.dtype.element_ty), mask=c < K)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def denominators(
    q, k, z, inverse, table, T, NT, H, scale, eps, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    VARLEN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """``1 / (scale q_t . z_t + eps)`` of each token and head; ``z`` holds the sums before the chunks."""
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    h = pid % H
    it = pid // H
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    if n <= 0:
        return
    a = tl.zeros((C, C), tl.float32)
    den = tl.zeros((C,), tl.float32)
    for j in tl.static_range(NK):
        qt = load_rows(q, q, row, n, h, H, j * BK, K, BK, C, 0)
        kt = load_rows(k, k, row, n, h, H, j * BK, K, BK, C, 0)
        c = j * BK + tl.arange(0, BK)
        zt = tl.load(z + (it.to(tl.int64) * H + h) * K + c, mask=c < K, other=0.0)
        a = tl.dot(qt, tl.trans(kt), a, input_precision=DOT)
        den += tl.sum(qt.to(tl.float32) * zt[None, :], 1)
    rr = tl.arange(0, C)
    den += tl.sum(tl.where(rr[:, None] >= rr[None, :], a, 0.0), 1)
    tl.store(inverse + (row + rr).to(tl.int64) * H + h, 1.0 / (den * scale + eps), mask=rr < n)


@triton.jit(do_not_specialize=["rows"])
def quotient_grad(do, o, inverse, dr, dden, rows, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr):
    """Gradients of numerator and denominator: ``do / den`` and ``-do . o / den``; rows are tokens times heads."""
    pid = tl.program_id(0).to(tl.int64)
    r = pid * C + tl.arange(0, C)
    inv = tl.load(inverse + r, mask=r < rows, other=0.0)
    n = tl.minimum(rows - pid * C, C)
    dot = tl.zeros((C,), tl.float32)
    for j in tl.static_range((V + BV - 1) // BV):
        g = load_rows(do, do, pid * C, n, 0, 1, j * BV, V, BV, C, 0).to(tl.float32)
        dot += tl.sum(g * load_rows(o, o, pid * C, n, 0, 1, j * BV, V, BV, C, 0).to(tl.float32), 1)
        store_rows(dr, dr, (g * inv[:, None]).to(dr.dtype.element_ty), pid * C, n, 0, 1, j * BV, V, BV, C, 0)
    tl.store(dden + r, -dot * inv, mask=r < rows)
