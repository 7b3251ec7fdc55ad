# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Device code shared by the engines: helpers inlined into kernels; chunk tables and sums of parts."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def softplus(x):
    """``ln(1 + e^x)``; the identity above 20, where it is exact in fp32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def saturate(x, DT: tl.constexpr):
    """fp32 to the dtype of a result. fp16 ends at 65504: what fp32 still holds does not become infinite."""
    if tl.float16 == DT:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DT)


@triton.jit
def chunk_at(table, it, T, NT, C: tl.constexpr, VARLEN: tl.constexpr):
    """First row (over all batches) and number of valid rows of chunk ``it``; 0 rows for a table row that is not used.

    Dense: ``NT`` chunks a batch, ``it = b * NT + t``. Varlen: ``table`` as `chunk_table` builds it. Rows are int32:
    widen before multiplying by a row's size.
    """
    if VARLEN:
        row = tl.load(table + it * 4)
        n = tl.load(table + it * 4 + 1)
    else:
        t0 = (it % NT) * C
        row = (it // NT) * T + t0
        n = tl.minimum(T - t0, C)
    return row, n


@triton.jit
def sequence_at(cu, offsets, n, T, NT, VARLEN: tl.constexpr):
    """First row, length and first chunk of sequence ``n``. Ends past ``T`` are cut: nothing outside is ever read."""
    if VARLEN:
        bos = tl.minimum(tl.maximum(tl.load(cu + n).to(tl.int32), 0), T)
        eos = tl.minimum(tl.maximum(tl.load(cu + n + 1).to(tl.int32), 0), T)
        first = tl.load(offsets + n)
        length = tl.maximum(eos - bos, 0)
    else:
        bos = n * T
        length = T
        first = n * NT
    return bos, length, first


@triton.jit
def whole_or_tail(
    table, cu, offsets, it, T, NT, C: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr, TAILS: tl.constexpr
):  # fmt: skip
    """Number, first row and valid rows of the chunk of program ``it``; 0 rows where there is nothing to do.

    TAILS: programs are sequences, and the chunk is the ragged last one. Else programs are chunks, with FULL the whole
    ones only.
    """
    if TAILS:
        row, length, first = sequence_at(cu, offsets, it, T, NT, VARLEN)
        full = length // C
        row += full * C
        n = length - full * C
        it = first + full
    else:
        row, n = chunk_at(table, it, T, NT, C, VARLEN)
        if FULL:
            n = tl.where(n < C, 0, C)
    return it, row, n


@triton.jit
def mdot(a, b, PREC: tl.constexpr):
    """A product inside the triangular inverse: ``PREC`` is "fp16" (operands cast) or an ``input_precision``."""
    if PREC == "fp16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        return tl.dot(a, b, input_precision=PREC)


@triton.jit
def tri_inv(L, C: tl.constexpr, PREC: tl.constexpr, BLOCK: tl.constexpr = 64):
    """Inverse of ``I + L`` for strictly lower ``L`` [C, C] in fp32 (C = 16, 32 or 64; blocks of ``BLOCK``).

    The 8x8 diagonal blocks are inverted by forward substitution in fp32, exact for near-identical keys, where powers
    of ``L`` grow binomially. Blocks merge 8 -> 16 -> 32 -> 64 by ``X - X L X`` with ``L`` cut to the new blocks, as
    dense masked products, because those keep the accumulator layout. Summing blocks out of [C, C] is a register move.
    """
    N8: tl.constexpr = C // 8
    r = tl.arange(0, C)[:, None]
    c = tl.arange(0, C)[None, :]
    b8 = tl.arange(0, N8)
    i8 = tl.arange(0, 8)
    m8 = b8[:, None, None, None] == b8[None, None, :, None]
    D = tl.sum(tl.where(m8, tl.reshape(L, (N8, 8, N8, 8)), 0.0), axis=2)
    X = tl.where(i8[None, :, None] == i8[None, None, :], 1.0, 0.0) + tl.zeros((N8, 8, 8), tl.float32)
    for s in tl.static_range(7):
        col = tl.sum(tl.where(i8[None, None, :] == s, D, 0.0), axis=2)
        row = tl.sum(tl.where(i8[None, :, None] == s, X, 0.0), axis=1)
        X = X - col[:, :, None] * row[:, None, :]
    Y = tl.reshape(tl.where(m8, X[:, :, None, :], 0.0), (C, C))
    Lb = tl.where(((r // 16) == (c // 16)) & ((r // 8) > (c // 8)), L, 0.0)
    Y = Y - mdot(mdot(Y, Lb, PREC), Y, PREC)
    if C >= 32:
        Lb = tl.where(((r // 32) == (c // 32)) & ((r // 16) > (c // 16)), L, 0.0)
        Y = Y - mdot(mdot(Y, Lb, PREC), Y, PREC)
    if C >= 64 and BLOCK >= 64:
        Lb = tl.where((r // 32) > (c // 32), L, 0.0)
        Y = Y - mdot(mdot(Y, Lb, PREC), Y, PREC)
    return Y


@triton.jit(do_not_specialize=["n", "m"])
def sum_parts_kernel(x, out, n, m, BLOCK: tl.constexpr):
    """``x`` `[n, m]` fp32 summed over ``n``, rounded once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = x + i
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(n):
        total += tl.load(p, mask=i < m, other=0.0)
        p += m
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < m)


@triton.jit(do_not_specialize=["N", "T", "NT"])
def chunk_table_kernel(cu, table, offsets, N, T, NT, C: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):
    pid = tl.program_id(0)
    c = pid * BC + tl.arange(0, BC)
    seq = tl.zeros((BC,), tl.int32)
    base = tl.zeros((BC,), tl.int32)
    total = tl.zeros((), tl.int32)
    # Every program counts all sequences afresh: cheaper than a second launch for the prefix sums.
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        m = n < N
        bos = tl.minimum(tl.maximum(tl.load(cu + n, mask=m, other=0).to(tl.int32), 0), T)
        eos = tl.minimum(tl.maximum(tl.load(cu + n + 1, mask=m, other=0).to(tl.int32), 0), T)
        count = tl.where(m, (tl.maximum(eos - bos, 0) + C - 1) // C, 0)
        end = total + tl.cumsum(count, 0)
        tl.store(offsets + n + 1, end, mask=m & (pid == 0))
        done = (end[None, :] <= c[:, None]) & m[None, :]
        seq += tl.sum(done.to(tl.int32), 1)
        base = tl.maximum(base, tl.max(tl.where(done, end[None, :], 0), 1))
        total += tl.sum(count, 0)
    if pid == 0:
        tl.store(offsets, 0)
    used = c < total
    i = tl.minimum(seq, N - 1)
    bos = tl.minimum(tl.maximum(tl.load(cu + i).to(tl.int32), 0), T)
    eos = tl.minimum(tl.maximum(tl.load(cu + i + 1).to(tl.int32), 0), T)
    at = (c - base) * C
    ok = c < NT
    tl.store(table + c * 4, tl.where(used, bos + at, 0), mask=ok)
    tl.store(table + c * 4 + 1, tl.where(used, tl.minimum(eos - bos - at, C), 0), mask=ok)
    tl.store(table + c * 4 + 2, tl.where(used, seq, -1), mask=ok)
    tl.store(table + c * 4 + 3, tl.where(used, c - base, 0), mask=ok)
